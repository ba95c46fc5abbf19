package agent

import (
	"slices"
	"testing"

	"github.com/waystamp/waystamp/internal/model"
)

// What a function makes itself has paths of its own, which go by the name of their chain.
func TestUnguardedPathsHaveTheNamesOfTheirChains(t *testing.T) {
	s := state{
		Guarded: []guarded{{"web", model.Forward, 1}},
		Epochs: []epoch{
			{Chain: "web", Direction: model.Forward, Path: 1},
			{Chain: "web", Direction: model.Forward, Path: 2},
			{Chain: "dns", Direction: model.Reverse, Path: 3},
		},
	}
	want := []string{"web", "dns (reverse)", "path 0x4"}
	if got := names(s, []uint32{1, 2, 3, 4}); !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}
