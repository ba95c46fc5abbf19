package agent

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"
)

// A clock that is far from the controller's is a warning until it is near.
func TestAClockFarFromTheControllersIsToldOf(t *testing.T) {
	n := newNode(t)
	off, known := 90*time.Second, false
	n.cfg.ClockOff = func() (d time.Duration, k bool) {
		n.set(func() { d, k = off, known })
		return d, k
	}
	n.write(n.encode(r1(t, nil)))
	s := n.start()
	warned := func() bool {
		return slices.ContainsFunc(s.status().Warnings, func(w string) bool {
			return strings.HasPrefix(w, "this machine's clock is more than a minute ahead of the controller's")
		})
	}
	if warned() {
		t.Error("it is not known yet")
	}
	n.set(func() { known = true })
	s.reconciled("a warning", warned)
	n.set(func() { off = time.Second })
	s.reconciled("no warning", func() bool { return !warned() })
}

// What the machine lacks keeps an agent from starting before anything is done.
func TestAnUnfitMachineIsRefused(t *testing.T) {
	n := newNode(t)
	n.write(n.encode(r1(t, nil)))
	n.fails["check"] = errors.New("/state is not a directory, so that the agent cannot start")
	if err := run(t.Context(), n.cfg, n.on); !errors.Is(err, n.fails["check"]) {
		t.Errorf("it ends with %v", err)
	}
	if steps := n.taken(); len(steps) != 2 || steps[0] != "check" || steps[1] != "close network" {
		t.Errorf("steps: %q", steps)
	}
}
