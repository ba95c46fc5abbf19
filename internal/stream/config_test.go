package stream

import (
	"bytes"
	"encoding/json"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/waystamp/waystamp/internal/stream/function"
)

func TestReadConfigFillsInWhatIsLeftOut(t *testing.T) {
	c, err := ReadConfig(strings.NewReader(`{"name": "zip", "port": 80, "run": ["count", {"xor": {"passes": 2}}]}`))
	must(t, err)
	if c.Loops != min(runtime.NumCPU(), loopsMost) || c.Connections != 100_000 || c.Buffer != 1<<20 || c.Idle != 2*time.Hour || c.HalfClosed != 10*time.Minute {
		t.Errorf("got %+v", c)
	}
	if len(c.Back) != 2 || c.Back[0].Name != "xor" || c.Back[1].Name != "count" {
		t.Errorf("back is %v, want run in reverse", c.Back)
	}
}

func TestReadConfigNamesEachMistake(t *testing.T) {
	for text, says := range map[string][]string{
		``:                                      {"read the worker's configuration: EOF"},
		`{"nam": "x"}`:                          {`unknown field "nam"`},
		`{"name": "a", "port": 1} {}`:           {"something behind its object"},
		`{}`:                                    {"name is missing", "port is missing"},
		`{"name": "a", "port": 1, "loops": 65}`: {"loops is 65; expect 1 to 64"},
		`{"name": "a", "port": 1, "run": ["gzp", {"a": 1, "b": 2}, {"xor": {"passes": -1}}, {"xor": {"pass": 1}}]}`: {
			`run[0]: "gzp" is not a function; expect one of`, "run[1]: expect the name of a function", "run[2]: xor: passes is -1", `run[3]: xor: settings: json: unknown field "pass"`},
		`{"name": "a", "port": 1, "limits": {"idle": "2"}}`:                                                       {`"2" is not a duration`},
		`{"name": "a", "port": 1, "limits": {"idle": "1ms", "half-closed": "0s", "buffer": 1, "connections": 0}}`: {"limits.idle", "limits.half-closed", "limits.buffer", "limits.connections"},
		`{"name": "a", "port": 1, "keys": {"7": "c2hvcnQ="}}`:                                                     {"a key is 32 bytes in base64"},
	} {
		_, err := ReadConfig(strings.NewReader(text))
		for _, part := range says {
			if err == nil || !strings.Contains(err.Error(), part) {
				t.Errorf("%s: got %v, want …%s…", text, err, part)
			}
		}
	}
	long, err := json.Marshal(strings.Repeat("x", configMax))
	must(t, err)
	if _, err := ReadConfig(strings.NewReader(`{"name": ` + string(long) + `}`)); err == nil || !strings.Contains(err.Error(), "longer than") {
		t.Errorf("got %v, want a refusal for its length", err)
	}
}

// A worker gets its keys with its configuration, and the rest of that is as it was.
func TestWithKeysIsReadBack(t *testing.T) {
	k := function.Key{1, 2, 31: 9}
	text, err := Text("lock", port, 1, []string{`{"seal": {"key": 7, "file": "/etc/waystamp/7.key"}}`}, nil, nil, false, Limits{Connections: 5, Buffer: 1 << 20, Idle: time.Hour, HalfClosed: time.Minute})
	must(t, err)
	if _, err := ReadConfig(bytes.NewReader(text)); err == nil || !strings.Contains(err.Error(), "no key with number 7") {
		t.Errorf("without the key: %v", err)
	}
	text, err = WithKeys(text, function.Keys{7: k})
	must(t, err)
	c, err := ReadConfig(bytes.NewReader(text))
	must(t, err)
	if c.Keys[7] != k || len(c.Keys) != 1 || c.Name != "lock" || c.Connections != 5 || c.Back[0].Name != "open" {
		t.Errorf("%+v", c)
	}
}
