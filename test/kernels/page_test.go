package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestPageIsReadAsWritten(t *testing.T) {
	file := filepath.Join(t.TempDir(), "kernels.md")
	if p, err := readPage(file); err != nil || len(p) != 0 {
		t.Fatalf("a page that does not exist: %v, %v", p, err)
	}
	want := page{
		{"6.1", "host"}:  {passed: 3, seconds: 12, inRow: 2, date: "2026-11-01", version: "6.1.1-1"},
		{"6.12", "host"}: {passed: 2, failed: 1, skipped: 2, seconds: 7, date: "2026-11-02", version: "6.12.1-1", reasons: []string{"TestX: wants Linux 6.13", "TestY: wants: that"}},
		{"6.1", "e2e"}:   {passed: 1, seconds: 600, date: "2026-11-01", version: "6.1.1-1"},
	}
	if err := want.write(file); err != nil {
		t.Fatal(err)
	}
	got, err := readPage(file)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(want, got, cmp.AllowUnexported(pageRow{}, pageKey{})); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var at []int
	for _, row := range []string{"| 6.1 | 6.1.1-1 | host |", "| 6.1 | 6.1.1-1 | e2e |", "| 6.12 | 6.12.1-1 | host |", "- 6.12 host: TestX"} {
		at = append(at, strings.Index(string(text), row))
	}
	for i, a := range at {
		if a < 0 || i > 0 && a < at[i-1] {
			t.Errorf("rows are at %v in\n%s", at, text)
		}
	}
	for what, text := range map[string]string{
		"is no page":      "# Mine\n",
		"expect a row of": pageHead + "| 6.1 | 6.1.1-1 | host | many | 0 | 0 | 1 | 2026-11-01 | 1 |\n",
		"of nine columns": pageHead + "| 6.1 | 6.1.1-1 | host | 1 | 0 | 0 | 1 | 2026-11-01 |\n",
		"is in no row":    pageHead + "\n- 6.1 host: TestX: y\n",
	} {
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		if _, err := readPage(file); err == nil || !strings.Contains(err.Error(), what) {
			t.Errorf("%q: %v", what, err)
		}
	}
}

func TestPageShowsWhatStepsCameTo(t *testing.T) {
	said := "@step a\n--- PASS: TestX (0.10s)\n--- FAIL: TestZ (0.10s)\n@end 1 1.5\n@step b\nhello\n@end 0 2\n"
	_, _, r := judge(t, said, "6.1 internal/a TestY wants Linux 6.6\n6.1 internal/a TestV of another step")
	before := page{{"6.1", "a"}: {passed: 9, inRow: 9}, {"6.1", "b"}: {passed: 9, inRow: 9}, {"6.12", "a"}: {passed: 9}, {"6.1", machineRow}: {failed: 1}}
	began := time.Date(2026, 11, 27, 1, 2, 3, 0, time.UTC)
	got := before.add("6.1", "6.1.9-1", began, r).add("6.1", "6.1.9-1", began, r)
	want := page{
		{"6.1", "a"}:  {passed: 1, failed: 1, skipped: 1, seconds: 1.5, date: "2026-11-27", version: "6.1.9-1", reasons: []string{"TestY: wants Linux 6.6"}, run: began},
		{"6.1", "b"}:  {passed: 1, seconds: 2, date: "2026-11-27", version: "6.1.9-1", inRow: 10, run: began},
		{"6.12", "a"}: {passed: 9},
	}
	if d := cmp.Diff(want, got, cmp.AllowUnexported(pageRow{}, pageKey{})); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	r.console("BUG: x")
	if row := got.add("6.1", "6.1.9-1", time.Now(), r)[pageKey{"6.1", machineRow}]; row.failed != 1 {
		t.Errorf("a fault of the kernel is shown as %+v", row)
	}
}
