package tables_test

import (
	"strings"
	"testing"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/tables"
)

func TestModelAgreesOnSlabs(t *testing.T) {
	if model.WindowSlab != 8*abi.WindowSlab || model.WindowHead != 8*abi.WindowHead || model.WindowMemoryMax > 4*abi.WindowSlabs*abi.WindowSlab {
		t.Errorf("slabs of %d bytes with heads of %d in the plan, and of %d words with heads of %d in the programs; %d bytes, twice, do not fit %d slabs",
			model.WindowSlab, model.WindowHead, abi.WindowSlab, abi.WindowHead, model.WindowMemoryMax, abi.WindowSlabs)
	}
	w := tables.WindowSlot{Window: tables.Window{Lanes: 3, Size: 256}, At: 1000}
	if got := 8 * (w.End() - w.Head()); got != model.WindowMemory(3, 256) {
		t.Errorf("a window takes %d bytes, and the plan says %d", got, model.WindowMemory(3, 256))
	}
}

// More windows than a node can have say what to do.
func TestNoRoomForWindowsIsSaid(t *testing.T) {
	have := map[tables.WindowKey]tables.WindowSlot{}
	huge := tables.Window{Lanes: 4096, Size: 65536}
	var err error
	for i := 0; err == nil && i < 100; i++ {
		huge.Key.Path = uint32(i)
		var at uint32
		if at, err = tables.NewWindowSpace(have).Get(huge); err == nil {
			have[huge.Key] = tables.WindowSlot{Window: huge, At: int(at)}
		}
	}
	if len(have) != 3 || err == nil || !strings.Contains(err.Error(), "take paths out of the plan") {
		t.Errorf("%d windows of 512 MiB have room; then %v", len(have), err)
	}
}
