package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/waystamp/waystamp/internal/dataplane"
)

// keepPins keeps the instance's pins: another program may remove them while the agent runs, and
// then the guard would end with the agent. A value on look means that this may have happened.
func (a *agent) keepPins(ctx context.Context, w *fileWatch, look <-chan struct{}) error {
	watching, told := true, false
	for ctx.Err() == nil {
		fresh, err := w.watchPins(a.dp.PinDir())
		if err != nil && watching {
			a.cfg.Log.Warn("removal of pins cannot be watched, and is detected later", "within", a.cfg.ReconcileEvery, "err", err)
		}
		watching = err == nil
		back, ok := a.lookAtPins()
		if fresh || back {
			continue // a new directory may have been removed before it was watched
		}
		if !told {
			a.cfg.Log.Debug("the pins are watched", "below", a.dp.PinDir())
			told = true
		}
		var again <-chan time.Time
		if !ok {
			again = time.After(failurePause)
		}
		select {
		case <-look:
		case <-again:
		case <-ctx.Done():
		}
	}
	return context.Cause(ctx)
}

// lookAtPins restores and logs missing pins; back: some were missing, ok: all exist.
func (a *agent) lookAtPins() (back, ok bool) {
	names, err := a.dp.KeepPins()
	if len(names) > 0 {
		a.cfg.Log.Warn("pins were removed, and the agent has restored them", "below", a.dp.PinDir(), "pins", len(names), "first", names[0])
		a.status.pinsLost(a.dp.PinDir(), len(names))
	}
	switch news := a.status.pinned(err); {
	case news && err != nil:
		a.cfg.Log.Error("pins are missing, so the guard would end with the agent", "err", err)
	case news:
		a.cfg.Log.Info("all pins are there again")
	}
	return len(names) > 0, err == nil
}

// watchMounts calls changed when something was mounted or unmounted, which a bpf
// filesystem may have been, until ctx ends.
func watchMounts(ctx context.Context, changed func()) error {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return fmt.Errorf("watch the mounts: %w", err)
	}
	defer f.Close()
	conn, err := f.SyscallConn()
	if err != nil {
		return fmt.Errorf("watch the mounts: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { f.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	// The kernel reports a change as if it were data. Nothing is read: false means to
	// wait for the next one.
	err = conn.Read(func(uintptr) bool {
		changed()
		return ctx.Err() != nil
	})
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return fmt.Errorf("watch the mounts: %w", err)
}

// withoutPins are the problems except those with pins, which lookAtPins logs.
func withoutPins(problems []error) (out []error) {
	for _, p := range problems {
		if _, pins := errors.AsType[*dataplane.PinsError](p); !pins {
			out = append(out, p)
		}
	}
	return out
}
