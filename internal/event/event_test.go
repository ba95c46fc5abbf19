package event

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

var sample = Event{
	Time: time.Date(2026, 1, 2, 3, 4, 5, 678, time.UTC), Node: "r6", Interface: "r6-r5", Hook: "tc",
	Reason: "wrong-chain", Text: "the inner packet belongs to another chain than its proof",
	Reported: true, Suppressed: 7, Missed: 9, Len: 1514, Errno: -22, Packet: Hex{0x00, 0xab},
}

func TestEventSurvivesItsLine(t *testing.T) {
	line, err := Append(nil, sample)
	if err != nil {
		t.Fatal(err)
	}
	want := `{"time":"2026-01-02T03:04:05.000000678Z","node":"r6","interface":"r6-r5","hook":"tc",` +
		`"reason":"wrong-chain","text":"the inner packet belongs to another chain than its proof",` +
		`"reported":true,"suppressed":7,"missed":9,"len":1514,"errno":-22,"packet":"00ab"}` + "\n"
	if diff := cmp.Diff(want, string(line)); diff != "" {
		t.Errorf("line (-want +got):\n%s", diff)
	}
	got, err := Parse(line)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(sample, got); diff != "" {
		t.Errorf("event (-want +got):\n%s", diff)
	}
}

func TestParseRefuses(t *testing.T) {
	for name, c := range map[string]struct{ line, want string }{
		"what is not JSON":  {"proof r6", "not an event"},
		"an unknown field":  {`{"reason":"proof","color":1}`, `unknown field "color"`},
		"digits out of hex": {`{"reason":"proof","packet":"0g"}`, `"0g" is not hexadecimal`},
		"half a byte":       {`{"reason":"proof","packet":"000"}`, `"000" is not hexadecimal`},
		"no reason":         {`{}`, "no reason"},
		"two on one line":   {`{"reason":"proof"} {"reason":"proof"}`, "one event per line"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Parse([]byte(c.line))
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("Parse(%s) says %v, want %q in it", c.line, err, c.want)
			}
		})
	}
}

func TestReadNamesTheLineAndStops(t *testing.T) {
	in := "\n{\"reason\":\"proof\"}\n\nnonsense\n{\"reason\":\"range\"}\n"
	var got []string
	for e, err := range Read(strings.NewReader(in)) {
		if err != nil {
			got = append(got, err.Error())
			continue
		}
		got = append(got, e.Reason)
	}
	want := []string{"proof", `line 4: "nonsense" is not an event: invalid character 'o' in literal null (expecting 'u')`}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("read (-want +got):\n%s", diff)
	}
}

func TestReadRefusesAnEndlessLine(t *testing.T) {
	for _, err := range Read(strings.NewReader(strings.Repeat("x", LineMax+1))) {
		if err == nil {
			t.Error("a line beyond LineMax was taken")
		}
		return
	}
	t.Error("nothing was said")
}

func TestReadGivesTheReadersError(t *testing.T) {
	broken := errors.New("cable cut")
	for _, err := range Read(errReader{broken}) {
		if !errors.Is(err, broken) {
			t.Errorf("got %v, want it to wrap %v", err, broken)
		}
	}
}

type errReader struct{ err error }

func (r errReader) Read([]byte) (int, error) { return 0, r.err }

func TestReasonName(t *testing.T) {
	for in, want := range map[string]string{"WRONG_CHAIN": "wrong-chain", "PROOF": "proof", "wrong-chain": "wrong-chain"} {
		if got := ReasonName(in); got != want {
			t.Errorf("ReasonName(%q) = %q, want %q", in, got, want)
		}
	}
}
