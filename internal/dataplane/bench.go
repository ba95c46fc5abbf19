package dataplane

import (
	"errors"
	"fmt"
	"time"

	"github.com/waystamp/waystamp/internal/model"
)

// ForgetWindows empties the replay windows of the plan in force, so that packets
// can be sent again. It is for measurements.
func (d *Dataplane) ForgetWindows() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.gen == nil || d.node == nil {
		return errors.New("forget replay windows: no plan is in force")
	}
	for _, e := range d.node.Egresses {
		_, v, err := encodeEgress(e, 0)
		if err != nil {
			return err
		}
		w := window{windowKey{counterKey{be32(e.Path), e.Epoch}, v.secrets()}, int(e.Lanes), e.Window}
		m, err := d.heldShared(d.gen, w.shared(d))
		if err != nil {
			return err
		}
		if m == nil {
			return fmt.Errorf("forget the %s: it is not there", w)
		}
		err = writeWords(m, make([]uint64, w.words()))
		if err := errors.Join(err, m.Close()); err != nil {
			return fmt.Errorf("forget the %s: %w", w, err)
		}
	}
	return nil
}

// TestRun gives a frame to a program of the plan in force, repeat times, as if
// it had come to an interface, and returns the kernel's own measurement per run
// and the last verdict. The frame is copied in once: what the program changes
// stays for the next repetition. It is for measurements; nothing leaves the
// machine, though counters and packet numbers move on.
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
	p, err := d.gen.programs[programFor(role, h)].Clone()
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
