package dataplane

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/tables"
)

// reserveOne gives numbers to a headend that has none.
func reserveOne(t interface {
	Helper()
	Fatal(...any)
}, dir string, k tables.CounterKey) span {
	t.Helper()
	s, err := openNumbers(dir).reserve(map[tables.CounterKey]ration{k: {}})
	if err != nil {
		t.Fatal(err)
	}
	return s[k]
}

// A machine's headends start, count, are given more, stop and are lost in a
// reboot, in any order: no number is had twice, and none above the disk's ceiling.
func TestNoNumberIsHadTwice(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		dir, err := os.MkdirTemp("", "numbers")
		if err != nil {
			t.Fatal(err)
		}
		defer os.RemoveAll(dir)
		used := map[tables.CounterKey]uint64{}    // the highest number that was given out
		counting := map[tables.CounterKey]*span{} // what is pinned
		check := func(k tables.CounterKey) {
			disk, err := openNumbers(dir).read()
			if err != nil {
				t.Fatal(err)
			}
			c := counting[k]
			if c.start > c.ceiling || c.ceiling > disk[k] || disk[k] > abi.RNDCounterMax {
				t.Fatalf("numbers %+v, and %d on the disk", c, disk[k])
			}
		}
		keys := []tables.CounterKey{{Path: abi.BE32(1), Epoch: 0}, {Path: abi.BE32(1), Epoch: 1}, {Path: abi.BE32(2), Epoch: 0}}
		pace := rapid.SampledFrom([]uint64{0, 1, 1000, 1 << 20, 1 << 30, 1 << 62})
		for range rapid.IntRange(1, 100).Draw(t, "steps") {
			k := rapid.SampledFrom(keys).Draw(t, "key")
			c := counting[k]
			switch rapid.SampledFrom([]string{"start", "count", "count", "renew", "stop", "reboot"}).Draw(t, "what") {
			case "start":
				if c != nil {
					continue
				}
				s := reserveOne(t, dir, k)
				if s.start < used[k] {
					t.Fatalf("numbers after %d, though those up to %d were given out", s.start, used[k])
				}
				counting[k] = &s
				check(k)
			case "count":
				if c == nil {
					continue
				}
				c.start += min(rapid.SampledFrom([]uint64{1, 1 << 29, 1 << 30, 1 << 35, 1 << 42}).Draw(t, "packets"), c.ceiling-c.start)
				used[k] = max(used[k], c.start)
			case "renew":
				if c == nil {
					continue
				}
				s, err := openNumbers(dir).reserve(map[tables.CounterKey]ration{k: {*c, pace.Draw(t, "pace"), rapid.Bool().Draw(t, "more")}})
				if err != nil {
					t.Fatal(err)
				}
				if s[k].start != c.start || s[k].ceiling < c.ceiling {
					t.Fatalf("numbers %+v are now %+v", c, s[k])
				}
				c.ceiling = s[k].ceiling
				check(k)
			case "stop":
				if c == nil {
					continue
				}
				if err := openNumbers(dir).giveBack(map[tables.CounterKey]span{k: *c}); err != nil {
					t.Fatal(err)
				}
				delete(counting, k)
			case "reboot":
				clear(counting)
			}
		}
	})
}

// Reboots use up an epoch no faster than its packets do.
func TestEpochOutlastsReboots(t *testing.T) {
	for _, c := range []struct {
		pace    uint64
		reboots int
	}{{0, 10_000}, {100_000, 10_000}, {1_000_000, 8_000}, {10_000_000, 8_000}} {
		last := uint64(0)
		for range c.reboots {
			n := ahead(last, c.pace)
			if most := max(uint64(abi.RNDCounterMax)-last, 1<<30) / 512; n > most {
				t.Fatalf("at %d packets a second %d numbers after %d", c.pace, n, last)
			}
			last += n
		}
		if left := uint64(abi.RNDCounterMax) - last; left < 1<<28 {
			t.Errorf("at %d packets a second %d reboots leave %d numbers", c.pace, c.reboots, left)
		}
	}
	if n := ahead(0, 200_000); n != 1<<30 {
		t.Errorf("%d numbers at a low pace, want 2^30", n)
	}
	if n := ahead(0, 1_000_000); n != 3_600_000_000 {
		t.Errorf("%d numbers at a million a second, want those of an hour", n)
	}
	if n := ahead(abi.RNDCounterMax, 0); n != 0 {
		t.Errorf("%d numbers after the last", n)
	}
}

// A headend counts on though somebody has removed the file: then what is in the
// kernel goes to the disk again.
func TestCeilingsInTheKernelGoToTheDiskThoughTheFileIsLost(t *testing.T) {
	dir, k := t.TempDir(), tables.CounterKey{Path: abi.BE32(7), Epoch: 1}
	s, err := openNumbers(dir).reserve(map[tables.CounterKey]ration{k: {span: span{5, 1 << 36}}})
	if err != nil || s[k] != (span{5, 1 << 36}) {
		t.Errorf("%+v, %v; want nothing more", s, err)
	}
	if s := reserveOne(t, dir, k); s.start != 1<<36 {
		t.Errorf("%+v; want to start where the kernel's end", s)
	}
}

// A range that is not the last one reserved says nothing of where the last one
// stopped.
func TestOldNumbersAreNotGivenBack(t *testing.T) {
	dir, k := t.TempDir(), tables.CounterKey{Path: abi.BE32(7), Epoch: 1}
	old := reserveOne(t, dir, k)
	newer := reserveOne(t, dir, k)
	if err := openNumbers(dir).giveBack(map[tables.CounterKey]span{k: {100, old.ceiling}}); err != nil {
		t.Fatal(err)
	}
	if s := reserveOne(t, dir, k); s.start != newer.ceiling {
		t.Errorf("starts after %d, want after %d", s.start, newer.ceiling)
	}
}

func TestDamagedRecordGivesNoNumbers(t *testing.T) {
	good := `{"record":"packet numbers","version":1,"boot":"","entries":[{"path":"0x00000007","epoch":1,"ceiling":5}]}`
	for name, content := range map[string]string{
		"empty":                "",
		"cut off":              good[:len(good)-3],
		"another version":      strings.Replace(good, `"version":1`, `"version":2`, 1),
		"another record":       strings.Replace(good, "packet numbers", "replay windows", 1),
		"no header":            `{"entries":[]}`,
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
			_, err := openNumbers(dir).reserve(map[tables.CounterKey]ration{{Path: 1, Epoch: 1}: {}})
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
	if _, err := openNumbers("").reserve(nil); err == nil {
		t.Error("without a directory there are numbers")
	}
}
