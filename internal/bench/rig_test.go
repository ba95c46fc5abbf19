package bench

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// What is pinned says which bench it is of.
func TestWhatABenchHasLeftIsKnown(t *testing.T) {
	dir := t.TempDir()
	const nobody = 1<<22 + 1 // no process has so high a number
	own, left := instancePrefix(os.Getpid())+"0a1b2c3d", instancePrefix(nobody)+"0a1b2c3d"
	for _, name := range []string{own, left, instancePrefix(os.Getppid()) + "1", "node", "bench-of-mine", "bench-4194305e1", "bench-4194305e1-1", fmt.Sprint(nobody)} {
		if err := os.Mkdir(filepath.Join(dir, name), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	gotOwn, orphans, err := ownedIn(dir)
	if err != nil || !slices.Equal(gotOwn, []string{own}) || !slices.Equal(orphans, []string{left}) {
		t.Errorf("own %v, orphans %v, %v; want %s and %s", gotOwn, orphans, err, own, left)
	}
	if gotOwn, orphans, err = ownedIn(filepath.Join(dir, "none")); err != nil || len(gotOwn)+len(orphans) > 0 {
		t.Errorf("where nothing is pinned: %v, %v, %v", gotOwn, orphans, err)
	}
}
