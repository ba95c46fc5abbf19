package bench

import (
	"context"
	"os"
	"path/filepath"
	"testing"
)

// Memory that changes leave behind is in the figures of afterwards, each of which follows one more change.
func TestMemoryThatChangesLeaveIsMeasured(t *testing.T) {
	const each, changes, runs = 1 << 18, 64, 2
	file := filepath.Join(t.TempDir(), "store")
	var kept [][]byte
	made, closed := 0, false
	h := &holder{
		name: "controller", what: "store",
		start: func(context.Context) error { return os.WriteFile(file, nil, 0o600) },
		change: func(context.Context) error {
			made++
			b := make([]byte, each)
			for i := range b {
				b[i] = byte(i) // else the kernel gives no page
			}
			kept = append(kept, b)
			return os.Truncate(file, int64(made*each))
		},
		quiet: func(context.Context) error { return nil },
		file:  func() string { return file },
		close: func() error { closed = true; return nil },
	}
	of := map[string]*Series{}
	for _, what := range []string{"heap", "resident", "store"} {
		for _, n := range []string{"0", "64"} {
			of["control/memory/controller-"+what+"/changes-"+n] = &Series{}
		}
	}
	if err := (Config{Runs: runs}).memoryOf(t.Context(), h, changes, of); err != nil {
		t.Fatal(err)
	}
	if want := memoryAhead + changes + 2*runs; made != want || !closed {
		t.Errorf("%d changes, want %d; closed: %t", made, want, closed)
	}
	for _, what := range []string{"heap", "resident", "store"} {
		before, behind := of["control/memory/controller-"+what+"/changes-0"].Samples, of["control/memory/controller-"+what+"/changes-64"].Samples
		if len(before) != runs || len(behind) != runs {
			t.Fatalf("%s: %v and %v; want %d samples each", what, before, behind, runs)
		}
		const want = (changes + 1) * each / 1000.0 // KB from the last sample before to the first behind
		if got := behind[0] - before[runs-1]; got < 0.9*want || got > 1.3*want {
			t.Errorf("%s: %v and %v: %.0f KB more; want about %.0f", what, before, behind, got, want)
		}
	}
	if len(kept) != made {
		t.Error("what was kept is gone")
	}
}
