package dataplane

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/ringbuf"
	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/event"
	"github.com/waystamp/waystamp/internal/tables"
)

// eventSource is a ring buffer that events are read from. It changes when a
// new generation does not take the old one's over.
type eventSource struct {
	table   tables.Map
	mu      sync.Mutex
	ring    *ebpf.Map // of its own; nil: none yet
	id      ebpf.MapID
	reader  *ringbuf.Reader // of the running call of read
	reading bool
	closed  bool
	changed chan struct{} // closed when ring or closed changes
	node    string
	names   map[uint32]string // of interfaces
}

func newEventSource(table tables.Map) *eventSource {
	return &eventSource{table: table, changed: make(chan struct{}), names: map[uint32]string{}}
}

// use makes the generation's ring buffer the one to read. It stays the generation's.
func (s *eventSource) use(g *generation) error {
	m := g.maps[s.table]
	info, err := m.Info()
	if err != nil {
		return fmt.Errorf("look at map %s: %w", s.table, err)
	}
	id, _ := info.ID()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || s.ring != nil && s.id == id {
		return nil
	}
	own, err := m.Clone()
	if err != nil {
		return fmt.Errorf("hold map %s: %w", s.table, err)
	}
	err = s.dropLocked()
	s.ring, s.id = own, id
	return err
}

// label sets the names in events.
func (s *eventSource) label(node string, bs []binding) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.node = node
	for _, b := range bs {
		s.names[uint32(b.device.Index)] = b.Name
	}
}

func (s *eventSource) close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	return s.dropLocked()
}

// dropLocked closes the ring buffer and wakes its reader.
func (s *eventSource) dropLocked() error {
	var errs []error
	if s.reader != nil {
		errs = append(errs, s.reader.Close())
		s.reader = nil
	}
	if s.ring != nil {
		errs = append(errs, s.ring.Close())
		s.ring = nil
	}
	close(s.changed)
	s.changed = make(chan struct{})
	return errors.Join(errs...)
}

// open returns a reader, once there is a ring buffer. A nil reader means that
// the source was closed.
func (s *eventSource) open(ctx context.Context) (*ringbuf.Reader, error) {
	for {
		s.mu.Lock()
		if s.closed {
			s.mu.Unlock()
			return nil, nil
		}
		if s.ring != nil {
			r, err := ringbuf.NewReader(s.ring)
			s.reader = r
			s.mu.Unlock()
			if err != nil {
				return nil, fmt.Errorf("read map %s: %w", s.table, err)
			}
			return r, nil
		}
		changed := s.changed
		s.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// Events calls f for each refused packet that the programs sample, and returns when ctx ends
// (with its cause) or the data path is closed (with nil). It also returns earlier events, as far
// as the buffer had room. There can be one call at a time: a record is read once.
func (d *Dataplane) Events(ctx context.Context, f func(event.Event)) error {
	return d.events.read(ctx, func(raw []byte) error {
		e, err := d.events.decode(raw)
		if err == nil {
			f(e)
		}
		return err
	})
}

// Traced calls f for each traced packet at each position of a path that this node is; else it is as Events.
func (d *Dataplane) Traced(ctx context.Context, f func(event.Hop)) error {
	return d.traced.read(ctx, func(raw []byte) error {
		h, err := d.traced.decodeHop(raw)
		if err == nil {
			f(h)
		}
		return err
	})
}

// read calls f with each record; f must not keep it.
func (s *eventSource) read(ctx context.Context, f func(raw []byte) error) error {
	s.mu.Lock()
	if s.reading {
		s.mu.Unlock()
		return fmt.Errorf("map %s is being read already", s.table)
	}
	s.reading = true
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		s.reading = false
		s.mu.Unlock()
	}()

	for {
		r, err := s.open(ctx)
		if r == nil || err != nil {
			return err
		}
		err = s.readAll(ctx, r, f)
		s.mu.Lock()
		if s.reader == r {
			s.reader = nil
		}
		s.mu.Unlock()
		if cerr := r.Close(); err == nil && cerr != nil {
			err = fmt.Errorf("close map %s: %w", s.table, cerr)
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err != nil {
			return err
		}
	}
}

// readAll returns nil when r was closed: there is another ring buffer now, or
// none any more.
func (s *eventSource) readAll(ctx context.Context, r *ringbuf.Reader, f func(raw []byte) error) error {
	// Only this wakes a reader: it reads its deadline when it starts to wait.
	closed := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		r.Close()
		close(closed)
	})
	defer func() {
		if !stop() {
			<-closed
		}
	}()
	var rec ringbuf.Record
	for {
		if err := r.ReadInto(&rec); errors.Is(err, ringbuf.ErrClosed) {
			return nil
		} else if ctx.Err() != nil {
			return nil
		} else if err != nil {
			return fmt.Errorf("read map %s: %w", s.table, err)
		}
		if err := f(rec.RawSample); err != nil {
			return err
		}
	}
}

func (s *eventSource) decode(raw []byte) (event.Event, error) {
	var r abi.Event
	if err := binary.Read(bytes.NewReader(raw), binary.NativeEndian, &r); err != nil {
		return event.Event{}, fmt.Errorf("a record of map %s has %d bytes: %w", s.table, len(raw), err)
	}
	node, name := s.name(r.Ifindex)
	at, err := wallClock(r.TimeNs)
	if err != nil {
		return event.Event{}, err
	}
	reason := abi.Reason(r.Reason)
	return event.Event{
		Time: at, Node: node, Interface: name,
		Hook: abi.Hook(r.Hook).String(), Reason: reason.String(), Text: reason.Text(), Place: decidedAt(r),
		Reported: r.Reported != 0, Suppressed: r.Suppressed, Len: r.Len, Errno: r.Err,
		Packet: slices.Clone(r.Data[:min(int(r.Caplen), len(r.Data))]),
	}, nil
}

// decidedAt is the line of the source that decided about the packet; "" for programs of an older
// version, which have no line.
func decidedAt(r abi.Event) string {
	if r.File == 0 {
		return ""
	}
	return fmt.Sprintf("%s:%d", abi.File(r.File), r.Line)
}

// name is the node, and an interface by its index.
func (s *eventSource) name(ifindex uint32) (node, name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if name = s.names[ifindex]; name == "" {
		name = fmt.Sprintf("interface %d", ifindex)
	}
	return s.node, name
}

func (s *eventSource) decodeHop(raw []byte) (event.Hop, error) {
	var r abi.Traced
	if err := binary.Read(bytes.NewReader(raw), binary.NativeEndian, &r); err != nil {
		return event.Hop{}, fmt.Errorf("a record of map %s has %d bytes: %w", s.table, len(raw), err)
	}
	node, name := s.name(r.Ifindex)
	at, err := wallClock(r.TimeNs)
	if err != nil {
		return event.Hop{}, err
	}
	h := event.Hop{
		Time: at, Node: node, Interface: name, Hook: abi.Hook(r.Hook).String(),
		Path: abi.BE32(r.Path), Epoch: r.Epoch, Number: r.Number, Position: int(r.Position),
		Scheme: abi.Scheme(r.Scheme).String(), Verified: r.Verified != 0, Len: r.Len, Suppressed: r.Suppressed,
	}
	// The masks of opot hide its values on links. Beside the number without a mask they would show them.
	if abi.Scheme(r.Scheme) != abi.SchemeOPoT {
		if h.Position > 0 {
			h.Before = valueOf(r.Before)
		}
		if !h.Verified {
			h.After = valueOf(r.After)
		}
	}
	return h, nil
}

// valueOf is a CML as it is in the packet.
func valueOf(be uint64) event.Hex { return binary.NativeEndian.AppendUint64(nil, be) }

// clockReadings is how often wallClock compares the two clocks: another process may run between two readings.
const clockReadings = 3

// wallClock is the time of day at which CLOCK_MONOTONIC was ns.
func wallClock(ns uint64) (time.Time, error) {
	var best time.Time
	least := time.Duration(math.MaxInt64)
	for range clockReadings {
		var before, after unix.Timespec
		err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &before)
		now := time.Now().Round(0)
		if err = errors.Join(err, unix.ClockGettime(unix.CLOCK_MONOTONIC, &after)); err != nil {
			return time.Time{}, fmt.Errorf("read the clock: %w", err)
		}
		if took := time.Duration(after.Nano() - before.Nano()); took < least {
			least, best = took, now.Add(-time.Duration(before.Nano()-int64(ns))-took/2)
		}
	}
	return best, nil
}
