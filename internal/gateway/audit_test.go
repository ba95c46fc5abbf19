package gateway

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func writeLog(t *testing.T, lines int) []byte {
	t.Helper()
	name := filepath.Join(t.TempDir(), "audit.log")
	for range 2 { // it goes on where it was
		a, err := OpenAudit(name, time.Now)
		if err != nil {
			t.Fatal(err)
		}
		for range lines / 2 {
			if err := a.Write(Record{Event: EventDecided, Identity: "spiffe://staff.example/x", Path: "/a\n\x00<b>", Chain: "deep"}); err != nil {
				t.Fatal(err)
			}
		}
		if err := a.Close(); err != nil {
			t.Fatal(err)
		}
	}
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

func TestAnAuditLogThatIsWholeVerifies(t *testing.T) {
	v, err := VerifyAudit(bytes.NewReader(writeLog(t, 20)))
	if err != nil || v.Lines != 20 {
		t.Errorf("%d lines, %v; want 20", v.Lines, err)
	}
}

func TestAChangedAuditLogIsFound(t *testing.T) {
	text := writeLog(t, 20)
	lines := strings.SplitAfter(strings.TrimSuffix(string(text), "\n"), "\n")
	lines[19] += "\n"
	join := func(l []string) string { return strings.Join(l, "") }
	for name, test := range map[string]struct{ text, says string }{
		"a word":             {strings.Replace(string(text), `"n":7,`, `"n":7,"identity":"x",`, 1), "line 8 does not follow from line 7"},
		"a chain":            {join(lines[:4]) + strings.Replace(lines[4], "deep", "light", 1) + join(lines[5:]), "line 6 does not follow from line 5"},
		"a line less":        {join(lines[:4]) + join(lines[5:]), "line 5 has number 6"},
		"two exchanged":      {join(lines[:4]) + lines[5] + lines[4] + join(lines[6:]), "line 5 has number 6"},
		"no beginning":       {join(lines[4:]), "line 1 has number 5"},
		"an end that is cut": {string(text[:len(text)-9]), "line 20 is not whole"},
		"not JSON":           {join(lines[:4]) + "hello\n" + join(lines[5:]), "line 5 is not a record"},
		"an empty line":      {join(lines[:4]) + "\n" + join(lines[4:]), "line 5 is not a record"},
		"a line of 1 MB":     {join(lines[:4]) + strings.Repeat("x", 1<<20) + "\n", "line 5 has more than"},
		"an unknown field":   {join(lines[:4]) + strings.Replace(lines[4], `"chain"`, `"chian"`, 1), "line 5 is not a record"},
	} {
		if _, err := VerifyAudit(strings.NewReader(test.text)); err == nil || !strings.Contains(err.Error(), test.says) {
			t.Errorf("%s: %v; want %q", name, err, test.says)
		}
	}
	// Every byte of it counts, but for those of the last line, whose hash is the result.
	whole, _ := VerifyAudit(bytes.NewReader(text))
	for i := range text {
		changed := bytes.Clone(text)
		changed[i] ^= 1
		if v, err := VerifyAudit(bytes.NewReader(changed)); err == nil && v == whole {
			t.Fatalf("byte %d may be changed", i)
		}
	}
}

func TestAnAuditLogThatIsNotWholeIsNotGoneOnWith(t *testing.T) {
	name := filepath.Join(t.TempDir(), "audit.log")
	text := writeLog(t, 4)
	if err := os.WriteFile(name, text[:len(text)-3], 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := OpenAudit(name, time.Now); err == nil || !strings.Contains(err.Error(), "line 4 is not whole") {
		t.Errorf("%v; want that line 4 is not whole", err)
	}
}
