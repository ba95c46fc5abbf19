package main

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestNames(t *testing.T) {
	for c, want := range map[string][2]string{
		"SRH_LAST_ENTRY": {"SRHLastEntry", "srh-last-entry"},
		"OPOT":           {"OPoT", "opot"},
		"TLVS_LEN_MAX":   {"TLVsLenMax", "tlvs-len-max"},
		"END_DT46":       {"EndDT46", "end-dt46"},
	} {
		if got := [2]string{camel(c), hyphen(c)}; got != want {
			t.Errorf("%s: got %q, want %q", c, got, want)
		}
	}
}

func TestEnumeratorsKeepTheirComments(t *testing.T) {
	got := enumerators(`
	WS_A = 0, /* first, with a comma = 3 */
	WS_B,
	WS_C = 2 /* WS_D, not one
		  * itself */
`)
	want := []enumerator{
		{C: "WS_A", Comment: "first, with a comma = 3"}, {C: "WS_B"}, {C: "WS_C", Comment: "WS_D, not one itself"},
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("enumerators (-want +got):\n%s", d)
	}
}

func TestCommentAboveADefine(t *testing.T) {
	for src, want := range map[string]string{
		"/* What it\n * is.\n */\n":  "What it is.",
		"/* other */\n#define X 1\n": "",
		"int x;\n\n":                 "",
		"/* apart */\n\n":            "",
		"":                           "",
	} {
		if got := commentAbove([]byte(src)); got != want {
			t.Errorf("%q: got %q, want %q", src, got, want)
		}
	}
}

// reasons is a contract with two reasons, that renders.
func reasons() contract {
	return contract{
		Constants: []constant{{C: "WS_SEGS_MAX", Value: 16, Comment: "Segments."}},
		Enums: []enum{{C: "ws_reason", Values: []enumerator{
			{C: "WS_REASON_NONE"}, {C: "WS_REASON_NO_SRH", Value: 1}, {C: reasonCount, Value: 2},
		}}},
		ReasonText: map[string]string{"WS_REASON_NONE": "not refused", "WS_REASON_NO_SRH": "no header"},
	}
}

func TestRender(t *testing.T) {
	enums, err := renderEnums(reasons())
	if err != nil {
		t.Fatal(err)
	}
	consts, err := renderConstants(reasons())
	if err != nil {
		t.Fatal(err)
	}
	several := reasons()
	several.ReasonMarks = map[string][]string{"WS_REASON_NO_SRH": {"SEVERAL", "SPENT"}}
	several.Enums = append(several.Enums, enum{C: "ws_file", Values: []enumerator{
		{C: "WS_FILE_NONE"}, {C: "WS_FILE_WIRE_SRH", Value: 1}, {C: fileCount, Value: 2},
	}})
	several.FilePath = map[string]string{"WS_FILE_WIRE_SRH": "wire/srh.h"}
	if text, err := renderEnums(several); err != nil || !strings.Contains(string(text), "\t\"wire/srh.h\",\n") || !strings.Contains(string(text), "SpentReasons = []Reason{\n\tReasonNoSRH,\n}") || strings.Contains(string(text), "FileCount") {
		t.Errorf("files are not named by their paths (%v):\n%s", err, text)
	}
	if page := string(renderPage(several)); !strings.Contains(page, "| 1 | `no-srh` | no header | *several*, *spent* |") {
		t.Errorf("the page does not show a reason's marks:\n%s", page)
	}
	text := string(enums) + string(consts) + string(renderPage(reasons()))
	for _, want := range []string{
		"ReasonNoSRH Reason = 1 // no header\n", "\t\"no-srh\",\n", "const ReasonCount = 2\n",
		"// Segments.\n\tSegsMax = 16\n", "| 1 | `no-srh` | no header |",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("the generated text lacks %q:\n%s", want, text)
		}
	}
	if strings.Contains(text, "`none`") || strings.Contains(text, "ReasonReasonCount") {
		t.Errorf("the generated text has what is no reason:\n%s", text)
	}
}

func TestRenderRefusesWhatHasNoName(t *testing.T) {
	for name, tt := range map[string]struct {
		change func(*contract)
		want   string
	}{
		"an enum":          {func(c *contract) { c.Enums[0].C = "ws_colour" }, "ws_colour has no Go name"},
		"a reason's text":  {func(c *contract) { delete(c.ReasonText, "WS_REASON_NO_SRH") }, "WS_REASON_NO_SRH has no text"},
		"a gap in numbers": {func(c *contract) { c.Enums[0].Values[1].Value = 7 }, "WS_REASON_NO_SRH is 7"},
	} {
		t.Run(name, func(t *testing.T) {
			c := reasons()
			tt.change(&c)
			if _, err := renderEnums(c); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v; want an error with %q", err, tt.want)
			}
		})
	}
}
