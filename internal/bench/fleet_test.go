package bench

import (
	"testing"
)

// A fleet changes one chain and back, and measure itself is an error if others than its nodes
// are sent something.
func TestAFleetChangesOneChain(t *testing.T) {
	var r Result
	f, err := prepareFleet(t.Context(), 10, &r)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if ms, err := f.measure(t.Context()); err != nil || ms <= 0 {
			t.Errorf("%g ms, %v", ms, err)
		}
	}
	if err := f.close(); err != nil {
		t.Error(err)
	}
	if len(r.Notes) != 1 {
		t.Errorf("notes: %q", r.Notes)
	}
}
