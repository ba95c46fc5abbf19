package function

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestOperationsTakeTheParametersOfAVisit(t *testing.T) {
	const keys = `{"seal":{"keys":{"7":"/k7","8":"/k8"}}}`
	for _, c := range []struct {
		run, back         []string
		forward, reverse  uint64
		wantRun, wantBack []string
	}{
		{[]string{`"xor"`}, nil, 0x2a, 0x2a, []string{`{"xor":{"key":42,"passes":1}}`}, nil},
		{[]string{`"xor"`}, nil, 0x32a, 0x32a, []string{`{"xor":{"key":42,"passes":3}}`}, nil},
		{[]string{`"xor"`}, nil, 0, 0, []string{`"xor"`}, nil},
		{[]string{`"xor"`, `"xor"`}, nil, 0, 0, []string{`"xor"`, `"xor"`}, nil},
		{[]string{`"xor"`}, nil, 0x2a, 0, []string{`{"xor":{"key":42,"passes":1}}`}, []string{`"xor"`}},
		{[]string{`"count"`, `"limit"`}, nil, 1000, 2000, []string{`"count"`, `{"limit":{"connection":1000}}`}, []string{`{"limit":{"connection":2000}}`, `"count"`}},
		{[]string{`"limit"`}, []string{`"identity"`}, 1000, 1000, []string{`{"limit":{"connection":1000}}`}, []string{`"identity"`}},
		{[]string{`"limit"`}, []string{`"identity"`}, 1000, 0, []string{`{"limit":{"connection":1000}}`}, []string{`"identity"`}},
		{[]string{keys}, nil, 7, 7, []string{`{"seal":{"file":"/k7","key":7}}`}, nil},
		{[]string{keys}, nil, 7, 8, []string{`{"seal":{"file":"/k7","key":7}}`}, []string{`{"open":{"file":"/k8","key":8}}`}},
		{[]string{`{"gzip":{"level":9}}`, keys}, nil, 8, 7, []string{`{"gzip":{"level":9}}`, `{"seal":{"file":"/k8","key":8}}`}, []string{`{"open":{"file":"/k7","key":7}}`, `"gunzip"`}},
		{[]string{`"gunzip"`, `"limit"`}, nil, 5, 6, []string{`"gunzip"`, `{"limit":{"connection":5}}`}, []string{`{"limit":{"connection":6}}`, `"gzip"`}},
	} {
		run, back, err := WithParameters(c.run, c.back, c.forward, c.reverse)
		if err != nil {
			t.Errorf("%v, %v with %#x, %#x: %v", c.run, c.back, c.forward, c.reverse, err)
			continue
		}
		if diff := cmp.Diff([][]string{c.wantRun, c.wantBack}, [][]string{run, back}); diff != "" {
			t.Errorf("%v, %v with %#x, %#x (-want +got):\n%s", c.run, c.back, c.forward, c.reverse, diff)
		}
		// A worker can make them.
		for side, list := range [][]string{run, back} {
			entries, err := ParseList(Side(side).String(), messages(list))
			if err != nil {
				t.Fatal(err)
			}
			for _, e := range entries {
				if _, err := e.Make(Surroundings{Keys: Keys{7: {}, 8: {}}}); err != nil {
					t.Errorf("%v: %v", list, err)
				}
			}
		}
	}
}

func messages(texts []string) (out []json.RawMessage) {
	for _, t := range texts {
		out = append(out, json.RawMessage(t))
	}
	return out
}

// The inverse that is written down is the one that workers use.
func TestTheWrittenInverseIsThatOfWorkers(t *testing.T) {
	for name := range kinds() {
		text := `"` + name + `"`
		switch name {
		case "seal", "open":
			text = `{"` + name + `":{"key":7,"file":"/k"}}`
		case "match":
			text = `{"match":{"literals":["x"]}}`
		}
		run := []string{text, `{"limit":{"connection":1}}`, `"limit"`}
		if name == "limit" || name == "xor" {
			run = run[:1]
		}
		_, back, err := WithParameters(run, nil, 5, 6)
		if err != nil {
			t.Fatal(err)
		}
		parsed, err := ParseList("run", messages(run))
		if err != nil {
			t.Fatal(err)
		}
		var want, got []string
		for _, e := range Reverse(parsed) {
			want = append(want, e.Name)
		}
		written, err := ParseList("back", messages(back))
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range written {
			got = append(got, e.Name)
		}
		if !slices.Equal(want, got) {
			t.Errorf("%v: back is %v; want %v", run, got, want)
		}
	}
}

func TestParametersThatNobodyTakesAreRefused(t *testing.T) {
	for _, c := range []struct {
		run, back        []string
		forward, reverse uint64
		want             string
	}{
		{[]string{`"gzip"`, `"count"`}, nil, 1, 1, "none of its operations takes parameters (gzip, count)"},
		{[]string{`{"xor":{"key":1}}`}, nil, 1, 1, "none of its operations takes parameters (xor)"},
		{[]string{`{"limit":{"all":1}}`}, nil, 1, 1, "none of its operations takes parameters (limit)"},
		{[]string{`"limit"`}, []string{`"identity"`}, 1, 2, "none of its operations towards the client takes parameters (identity)"},
		{[]string{`"identity"`}, []string{`"limit"`}, 2, 1, "none of its operations towards the server takes parameters (identity)"},
		{[]string{`"limit"`, `"xor"`}, nil, 1, 1, "limit and xor both take the parameters of a visit"},
		{[]string{`"limit"`}, nil, 0, 0, "limit: its rate is the parameters of a visit, and the visit has none"},
		{[]string{`"limit"`}, nil, 1, 0, "back: limit: its rate is the parameters of a visit, and the visit has none"},
		{[]string{`"limit"`}, nil, 1 << 41, 1 << 41, "bytes per second; give 1 to 1099511627776"},
		{[]string{`"xor"`}, nil, 1025 << 8, 1025 << 8, "are 1025 passes"},
		{[]string{`{"open":{"keys":{"7":"/k"}}}`}, nil, 9, 9, "there is no key 9 (0x9) among its keys; expect one of 7"},
		{[]string{`{"open":{"keys":{"7":"/k"}}}`}, nil, 0, 0, "the number of its key is the parameters of a visit, and the visit has none"},
	} {
		if _, _, err := WithParameters(c.run, c.back, c.forward, c.reverse); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v, %v with %#x, %#x: %v; want …%s…", c.run, c.back, c.forward, c.reverse, err, c.want)
		}
	}
}

// A worker refuses a list that a visit's parameters have to make whole.
func TestAnOperationWithoutItsParametersIsNotMade(t *testing.T) {
	for text, want := range map[string]string{`"limit"`: "its rate is the parameters", `{"seal":{"keys":{"7":"/k"}}}`: "the number of its key", `{"open":{"keys":{"7":"/k"}}}`: "the number of its key"} {
		list, err := ParseList("run", messages([]string{text}))
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range append(list, Reverse(list)...) {
			if _, err := e.Make(Surroundings{Keys: Keys{7: {}}}); err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %v; want …%s…", text, err, want)
			}
		}
	}
	files, err := KeyFiles([]string{`{"seal":{"keys":{"7":"/k7","8":"/k8"}}}`})
	if err != nil || len(files) != 2 || files[7] != "/k7" || files[8] != "/k8" {
		t.Errorf("files %v, %v; want those of both keys", files, err)
	}
}
