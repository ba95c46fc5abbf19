package dataplane

import (
	"errors"
	"fmt"
	"time"

	"github.com/waystamp/waystamp/internal/model"
)

// ForgetWindows empties the replay windows of the plan in force, so that packets
// can be sent again. It is for measurements.
func (d *Dataplane) ForgetWindows() (err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.gen == nil || d.node == nil {
		return errors.New("forget replay windows: no plan is in force")
	}
	mem, err := d.memory(d.gen)
	if err != nil {
		return fmt.Errorf("forget replay windows: %w", err)
	}
	defer func() { err = errors.Join(err, mem.close()) }()
	for _, w := range mem.Placed.Windows {
		mem.windows.clear(w.At, w.End())
	}
	return nil
}

// TestRun gives a frame to a program of the plan in force, repeat times, as if it had arrived on
// an interface, and returns the kernel's own measurement per run and the last verdict. The frame
// is copied in once: changes by the program stay for the next repetition. It is for
// measurements; no packet leaves the machine, but counters and packet numbers advance.
func (d *Dataplane) TestRun(role model.Role, xdp bool, frame []byte, repeat int) (time.Duration, uint32, error) {
	h := hookTC
	if xdp {
		h = hookXDP
	}
	d.mu.Lock()
	if d.gen == nil {
		d.mu.Unlock()
		return 0, 0, errors.New("test run: no plan is in force")
	}
	name := programFor(role, h)
	needed := []string{name}
	if over := overLabels[name]; over != "" && d.node != nil && d.node.MPLS != nil {
		needed = append(needed, over)
	}
	err := d.need(d.gen, needed)
	if err != nil {
		d.mu.Unlock()
		return 0, 0, fmt.Errorf("test run: %w", err)
	}
	p, err := d.gen.programs[name].Clone()
	d.mu.Unlock()
	if err != nil {
		return 0, 0, fmt.Errorf("test run: %w", err)
	}
	defer p.Close()
	verdict, each, err := p.Benchmark(frame, repeat, nil)
	if err != nil {
		return 0, 0, fmt.Errorf("test run of %s: %w", programFor(role, h), err)
	}
	return each, verdict, nil
}
