package e2e

import (
	"errors"
	"slices"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/lab"
	"github.com/waystamp/waystamp/internal/srv6"
)

// openPort opens an interface in a namespace for frames of a protocol.
func openPort(t *testing.T, ns *host.NetNS, name string, protocol uint16) *host.Frames {
	t.Helper()
	p, err := host.OpenFrames(ns, name, protocol)
	must(t, err)
	t.Cleanup(func() { p.Close() })
	return p
}

// sendBy puts a frame on the wire. PayloadLength is made true.
func sendBy(p *host.Frames, frame srv6.Packet) error {
	if err := frame.Fix(); err != nil {
		return err
	}
	b, err := frame.Append(nil)
	if err == nil {
		err = p.Send(b)
	}
	return err
}

// recorder keeps what it makes of the frames that come in by an interface.
type recorder[T any] struct {
	t    *testing.T
	port *host.Frames
	mu   sync.Mutex
	all  []T
}

// start has keep look at the first so many bytes of each frame. What it gets is
// not its own; what it does not want is left out.
func (r *recorder[T]) start(w *world, node, name string, size int, keep func(frame []byte) (T, bool)) {
	w.t.Helper()
	r.t, r.port = w.t, openPort(w.t, w.ns(node), name, unix.ETH_P_ALL)
	done := make(chan error, 1)
	go func() {
		done <- r.port.Receive(make([]byte, size), func(frame []byte) {
			if v, ok := keep(frame); ok {
				r.mu.Lock()
				r.all = append(r.all, v)
				r.mu.Unlock()
			}
		})
	}()
	w.t.Cleanup(func() {
		r.port.Close()
		if err := <-done; err != nil {
			w.t.Errorf("recorder at %s: %v", name, err)
		}
	})
}

// soFar is what has come in until now, whether the recorder had read it already
// or not. It may not be changed.
func (r *recorder[T]) soFar() []T {
	r.t.Helper()
	dropped, err := r.port.CaughtUp(soon(r.t))
	must(r.t, err)
	if dropped != 0 {
		r.t.Logf("%d frames were too many for the recorder", dropped)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clip(r.all)
}

// capture keeps the headers of the IPv6 packets that come in by an interface.
type capture struct{ recorder[srv6.Packet] }

func (w *world) capture(node, name string) *capture {
	w.t.Helper()
	c := &capture{}
	c.start(w, node, name, 512, func(frame []byte) (srv6.Packet, bool) {
		p, err := srv6.DecodeFrame(frame)
		return p, err == nil
	})
	return c
}

// proofs are those of a path that have come so far, in their order.
func (c *capture) proofs(path uint32) (out []srv6.Proof) {
	for _, p := range c.soFar() {
		if p.SRH == nil {
			continue
		}
		if proof, err := p.SRH.Proof(); err == nil && proof.Path == path {
			out = append(out, proof)
		}
	}
	return out
}

// meddler is a router in somebody else's hands. What it does to packets is said
// packet by packet; else it is as honest as any wire.
type meddler struct {
	w *world
	*lab.Router
}

// tamper makes of a packet that came from a neighbour what goes on in its
// place; each packet is sent to whom its destination belongs.
type tamper func(from string, p srv6.Packet) []srv6.Packet

// meddle takes a router of the lab over, while the test runs.
func (w *world) meddle(router string) *meddler {
	w.t.Helper()
	r, err := w.TakeOver(router, w.manifest.Domain, *w.manifest.Lab)
	must(w.t, err)
	w.t.Cleanup(func() {
		r.Close()
		if err := r.Err(); err != nil {
			w.t.Errorf("%s: %v", router, err)
		}
		if err := w.net(router).SetSysctl("net/ipv6/conf/all/forwarding", "1"); err != nil {
			w.t.Errorf("%s: %v", router, err)
		}
	})
	return &meddler{w, r}
}

// send passes a packet on to whom its destination belongs.
func (m *meddler) send(p srv6.Packet) {
	for _, s := range m.whole(p) {
		m.Send(s)
	}
}

// whole is a packet as bytes, with a payload length that is true.
func (m *meddler) whole(packets ...srv6.Packet) (out []lab.Sent) {
	for _, p := range packets {
		p.Ethernet = nil
		err := p.Fix()
		b, more := p.Append(nil)
		if err := errors.Join(err, more); err != nil {
			m.w.t.Errorf("a packet cannot be written: %v", err)
			continue
		}
		out = append(out, lab.Sent{Packet: b})
	}
	return out
}

// with tampers while f runs.
func (m *meddler) with(do tamper, f func()) {
	m.Set(func(from string, p srv6.Packet, _ []byte) []lab.Sent { return m.whole(do(from, p)...) })
	defer m.Set(nil)
	f()
}
