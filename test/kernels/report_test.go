package main

import (
	"slices"
	"strings"
	"testing"
)

// judge gives what a machine of two steps says to a report.
func judge(t *testing.T, said, skips string) (ok bool, out string, r *report) {
	t.Helper()
	l, err := parseSkips("skips", skips)
	if err != nil {
		t.Fatal(err)
	}
	var w strings.Builder
	r = newReport(&w, "6.1", []step{{name: "a", pkg: "internal/a", run: []string{"TestX", "TestY", "TestZ"}}, {name: "b"}}, l, false)
	if err := r.read(strings.NewReader(strings.ReplaceAll(said, "@", mark))); err != nil {
		t.Fatal(err)
	}
	ok = r.finish()
	return ok, w.String(), r
}

func TestReportTellsWhatRan(t *testing.T) {
	good := "@step a\n=== RUN   TestX\n--- PASS: TestX (0.10s)\nPASS\n@end 0 1.5\n@step b\nhello\n@end 0 2\n"
	for name, c := range map[string]struct {
		said, skips string
		ok          bool
		want        string
	}{
		"all pass":                           {good, "", true, "6.1    pass internal/a TestX (0.10s)"},
		"a skip with its reason":             {good, "6.1 internal/a TestY wants Linux 6.6", true, "6.1    skip internal/a TestY: wants Linux 6.6"},
		"a skip of another kernel":           {good, "6.12 internal/a TestY wants Linux 6.13", true, "pass"},
		"a test fails":                       {strings.Replace(good, "--- PASS", "    x_test.go:1: why\n--- FAIL", 1), "", false, "x_test.go:1: why"},
		"a test is skipped":                  {strings.Replace(good, "PASS", "SKIP", 1), "", false, "skips.golden does not say why"},
		"a step without a test":              {strings.Replace(good, "--- PASS: TestX (0.10s)\n", "", 1), "", false, "not one test has run"},
		"a command fails":                    {strings.Replace(good, "@end 0 2", "@end 1 2", 1), "", false, "hello"},
		"tests end and their step is killed": {strings.Replace(good, "@end 0 1.5", "@end 137 1.5", 1), "", false, "ended with code 137"},
		"the machine cannot begin":           {"@failed mount: no\n", "", false, "mount: no"},
	} {
		ok, out, _ := judge(t, c.said, c.skips)
		if ok != c.ok || !strings.Contains(out, c.want) {
			t.Errorf("%s: %v; want %v and %q in\n%s", name, ok, c.ok, c.want, out)
		}
	}
	if _, _, r := judge(t, good[:strings.Index(good, "@end 0 1.5")], ""); r.endedSince(report{}) {
		t.Error("a machine that stops in a step has come to its end")
	}
}

// What a test says comes with its verdict, also where another one beside it passes in between.
func TestTestsBesideEachOtherSayTheirOwn(t *testing.T) {
	_, out, _ := judge(t, strings.Join([]string{
		"@step a", "=== RUN   TestX", "=== PAUSE TestX", "=== RUN   TestY", "=== CONT  TestX", "=== RUN   TestX/part",
		"    x_test.go:1: why", "=== NAME  TestY", "    y_test.go:1: nothing", "--- PASS: TestY (0.10s)", "    --- PASS: TestY/part (0.10s)",
		"=== NAME  TestX/part", "    x_test.go:2: and why", "--- FAIL: TestX (0.20s)", "    --- FAIL: TestX/part (0.20s)", "        x_test.go:3: in the end",
		"=== RUN   TestZ", "    z_test.go:1: something", "--- PASS: TestZ (0.10s)", "FAIL", "@end 1 1", "@step b", "@end 0 1", "",
	}, "\n"), "")
	want := "6.1    pass internal/a TestY (0.10s)\n" +
		"6.1    FAIL internal/a TestX (0.20s)\n    x_test.go:1: why\n    x_test.go:2: and why\n    --- FAIL: TestX/part (0.20s)\n        x_test.go:3: in the end\n\n" +
		"6.1    pass internal/a TestZ (0.10s)\n"
	if !strings.Contains(out, want) {
		t.Errorf("got\n%s\nwant\n%s", out, want)
	}
}

func TestSkipsNeedReasons(t *testing.T) {
	if _, err := parseSkips("file", "# what\n\n6.1 internal/a TestX"); err == nil || !strings.HasPrefix(err.Error(), "file:3: ") {
		t.Errorf("got %v", err)
	}
}

// A step that is killed counts, also where an earlier one has failed.
func TestEachStepThatIsKilledCounts(t *testing.T) {
	var w strings.Builder
	r := newReport(&w, "6.1", []step{{name: "a", pkg: "internal/a"}, {name: "c", pkg: "internal/c"}}, nil, false)
	said := strings.ReplaceAll("@step a\n--- FAIL: TestX (0.10s)\n@end 1 1\n@step c\n--- PASS: TestY (0.10s)\npanic: killed\n@end 137 2\n", "@", mark)
	if err := r.read(strings.NewReader(said)); err != nil {
		t.Fatal(err)
	}
	if r.finish() || r.failed != 2 || !strings.Contains(w.String(), "panic: killed") {
		t.Errorf("%d have failed, want 2:\n%s", r.failed, w.String())
	}
}

// A step whose figures somebody reads is shown when it has passed, and no other.
func TestOutputOfAStepIsShownWhereItIsAskedFor(t *testing.T) {
	var w strings.Builder
	r := newReport(&w, "6.1", []step{{name: "a"}, {name: "b", shows: true}}, nil, false)
	if err := r.read(strings.NewReader(strings.ReplaceAll("@step a\nnobody asks\n@end 0 1\n@step b\n0.98 x\n@end 0 2\n", "@", mark))); err != nil {
		t.Fatal(err)
	}
	if out := w.String(); !r.finish() || !strings.Contains(out, "0.98 x") || strings.Contains(out, "nobody asks") {
		t.Errorf("the report is\n%s", out)
	}
}

// What a kernel cannot is said of the step that has the test, and of no other of the same package.
func TestSkipIsOfTheStepThatHasTheTest(t *testing.T) {
	l, err := parseSkips("skips", "6.1 internal/a TestX/v4 wants Linux 6.6\n6.1 internal/a TestY wants Linux 6.7")
	if err != nil {
		t.Fatal(err)
	}
	var w strings.Builder
	r := newReport(&w, "6.1", []step{{name: "a", pkg: "internal/a", run: []string{"TestX$"}}, {name: "b", pkg: "internal/a", run: []string{"TestY"}}, {name: "c", pkg: "internal/a", run: []string{"TestYY", "TestX2$"}}}, l, false)
	said := "@step a\n--- PASS: TestX (0.10s)\n@end 0 1\n@step b\n--- PASS: TestY2 (0.10s)\n@end 0 2\n@step c\n--- PASS: TestX2 (0.10s)\n@end 0 3\n"
	if err := r.read(strings.NewReader(strings.ReplaceAll(said, "@", mark))); err != nil {
		t.Fatal(err)
	}
	var skipped []int
	for _, s := range r.came {
		skipped = append(skipped, s.skipped)
	}
	if !r.finish() || !slices.Equal(skipped, []int{1, 1, 0}) {
		t.Errorf("the steps have skipped %v, want 1, 1 and 0:\n%s", skipped, w.String())
	}
}
