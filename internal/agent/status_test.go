package agent

import (
	"errors"
	"strings"
	"testing"
)

// What cannot be saved is told once, and shown until it can, whatever else comes
// right in between.
func TestAnErrorOfSavingStays(t *testing.T) {
	b := newStatusBoard("test")
	if b.saved(nil) {
		t.Error("that nothing is wrong is news")
	}
	full := errors.New("no space left on device")
	if !b.saved(full) {
		t.Error("the first error is no news")
	}
	if b.saved(errors.New(full.Error())) {
		t.Error("the same error is news again")
	}
	b.failed(nil) // a reconciliation succeeds
	if s := b.get(); !strings.Contains(s.Error, full.Error()) {
		t.Errorf("the status says %q, want %q in it", s.Error, full)
	}
	if !b.saved(errors.New("read-only file system")) {
		t.Error("another error is no news")
	}
	if !b.saved(nil) {
		t.Error("that it has come right is no news")
	}
	if s := b.get(); s.Error != "" {
		t.Errorf("the status says %q after all came right", s.Error)
	}
}
