package dataplane

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/waystamp/waystamp/internal/abi"
)

func reserveOne(t interface {
	Helper()
	Fatal(...any)
}, dir string, k counterKey, floor uint64) span {
	t.Helper()
	s, err := openNumbers(dir).reserve([]counterKey{k}, map[counterKey]uint64{k: floor})
	if err != nil {
		t.Fatal(err)
	}
	return s[k]
}

// Whatever is reserved, given back and lost with a process, no number is had
// twice.
func TestNoNumberIsHadTwice(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		dir := t.TempDir()
		used := map[counterKey]uint64{} // the highest that may be in use
		last := map[counterKey]span{}
		key := rapid.Custom(func(t *rapid.T) counterKey {
			return counterKey{be32(rapid.Uint32Range(1, 3).Draw(t, "path")), rapid.Uint8Range(0, 1).Draw(t, "epoch")}
		})
		for range rapid.IntRange(1, 100).Draw(rt, "steps") {
			k := key.Draw(rt, "key")
			if s, ok := last[k]; ok && rapid.Bool().Draw(rt, "give back") {
				stopped := span{rapid.Uint64Range(s.start, s.ceiling).Draw(rt, "stopped at"), s.ceiling}
				if err := openNumbers(dir).giveBack(map[counterKey]span{k: stopped}); err != nil {
					rt.Fatal(err)
				}
				used[k] = stopped.start
				delete(last, k) // nobody counts in it any more
				continue
			}
			s := reserveOne(rt, dir, k, 0)
			if s.start < used[k] {
				rt.Fatalf("numbers after %d, though those up to %d are in use", s.start, used[k])
			}
			if s.ceiling > abi.RNDCounterMax {
				rt.Fatalf("numbers up to %d, which do not fit", s.ceiling)
			}
			used[k], last[k] = s.ceiling, s
		}
	})
}

func TestNumbersEndAfter64Steps(t *testing.T) {
	dir, k := t.TempDir(), counterKey{be32(7), 1}
	for i := range 64 {
		s := reserveOne(t, dir, k, 0)
		want := span{uint64(i) << 36, min(uint64(i+1)<<36, 1<<42-1)}
		if s != want {
			t.Fatalf("step %d: %+v, want %+v", i, s, want)
		}
	}
	if s := reserveOne(t, dir, k, 0); s.start < s.ceiling {
		t.Errorf("after the last: %+v; want none", s)
	}
	if s := reserveOne(t, dir, counterKey{be32(7), 2}, 0); s.start != 0 {
		t.Errorf("another epoch starts at %d, want 0", s.start)
	}
}

func TestNumbersInTheKernelAreNotReservedAgainThoughTheFileIsLost(t *testing.T) {
	if s := reserveOne(t, t.TempDir(), counterKey{be32(7), 1}, 5<<36); s != (span{5 << 36, 6 << 36}) {
		t.Errorf("%+v; want to start where the kernel's end", s)
	}
}

// A range that is not the last one reserved says nothing of where the last one
// stopped.
func TestOldNumbersAreNotGivenBack(t *testing.T) {
	dir, k := t.TempDir(), counterKey{be32(7), 1}
	old := reserveOne(t, dir, k, 0)
	newer := reserveOne(t, dir, k, 0)
	if err := openNumbers(dir).giveBack(map[counterKey]span{k: {100, old.ceiling}}); err != nil {
		t.Fatal(err)
	}
	if s := reserveOne(t, dir, k, 0); s.start != newer.ceiling {
		t.Errorf("starts after %d, want after %d", s.start, newer.ceiling)
	}
}

func TestDamagedRecordGivesNoNumbers(t *testing.T) {
	good := `{"version":1,"counters":[{"path":"0x00000007","epoch":1,"ceiling":5}]}`
	for name, content := range map[string]string{
		"empty":                "",
		"cut off":              good[:len(good)-3],
		"another version":      strings.Replace(good, `"version":1`, `"version":2`, 1),
		"unknown field":        strings.Replace(good, `"epoch"`, `"epoche"`, 1),
		"something behind it":  good + "{}",
		"not a path":           strings.Replace(good, "0x00000007", "7", 1),
		"twice":                strings.Replace(good, "[{", `[{"path":"0x00000007","epoch":1,"ceiling":4},{`, 1),
		"beyond the last":      strings.Replace(good, "5}", "4398046511104}", 1),
		"negative":             strings.Replace(good, "5}", "-5}", 1),
		"a directory, no file": "DIR",
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			path := filepath.Join(dir, "counters.json")
			if content == "DIR" {
				if err := os.Mkdir(path, 0o700); err != nil {
					t.Fatal(err)
				}
			} else if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
			_, err := openNumbers(dir).reserve([]counterKey{{1, 1}}, nil)
			if _, ok := errors.AsType[*NumbersError](err); !ok || !strings.Contains(err.Error(), path) {
				t.Errorf("got %v; want a NumbersError that names the file", err)
			}
			if content != "DIR" {
				if b, err := os.ReadFile(path); err != nil || string(b) != content {
					t.Errorf("the file was changed to %q, %v", b, err)
				}
			}
		})
	}
	if _, err := openNumbers("").reserve(nil, nil); err == nil {
		t.Error("without a directory there are numbers")
	}
}
