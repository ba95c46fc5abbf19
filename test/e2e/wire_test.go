package e2e

import (
	"bytes"
	"errors"
	"slices"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/lab"
	"github.com/waystamp/waystamp/internal/mpls"
	"github.com/waystamp/waystamp/internal/plan"
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
	r.startIn(w, w.ns(node), name, size, keep)
}

// startIn is start in a namespace that is no station's.
func (r *recorder[T]) startIn(w *world, ns *host.NetNS, name string, size int, keep func(frame []byte) (T, bool)) {
	w.t.Helper()
	r.t, r.port = w.t, openPort(w.t, ns, name, unix.ETH_P_ALL)
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

// stamps keeps the proofs that come in by an interface, over either outer header.
type stamps struct{ recorder[srv6.Proof] }

func (w *world) stamps(node, name string) *stamps {
	w.t.Helper()
	s := &stamps{}
	isService := func(uint32) bool { return false }
	if m := w.manifest.Domain.MPLS; m != nil {
		isService = m.IsService
	}
	s.start(w, node, name, 512, func(frame []byte) (srv6.Proof, bool) {
		if p, err := mpls.ParseFrame(frame, isService); err == nil && p.Proof != nil {
			return srv6.ReadProof(*p.Proof)
		}
		p, err := srv6.DecodeFrame(frame)
		if err != nil {
			return srv6.Proof{}, false
		}
		return p.Proof()
	})
	return s
}

// of are those of a path that have come so far, in their order.
func (s *stamps) of(path uint32) (out []srv6.Proof) {
	for _, p := range s.soFar() {
		if p.Path == path {
			out = append(out, p)
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

// lastLink runs f, and returns the last packet of a path that was on its way from its last function to
// its egress meanwhile. All packets go on.
func (m *meddler) lastLink(p plan.Path, f func()) (found *lab.Sent) {
	last := p.Hops[len(p.Hops)-1]
	m.Set(func(_ string, v srv6.Packet, raw []byte) []lab.Sent {
		if proof, ok := v.Proof(); ok && proof.Path == p.Path && v.Header.Destination == last.SID {
			found = &lab.Sent{Packet: bytes.Clone(raw)}
		}
		return []lab.Sent{{Packet: raw}}
	})
	m.SetLabels(func(_ string, v mpls.Packet) []lab.Sent {
		out := labelled(v)
		if proof, ok := proofOf(v); ok && proof.Path == p.Path && len(v.Labels()) == 2 && v.Labels()[1] == last.ServiceLabel {
			found = &out
		}
		return []lab.Sent{out}
	})
	defer m.Set(nil)
	defer m.SetLabels(nil)
	f()
	return found
}

func proofOf(p mpls.Packet) (srv6.Proof, bool) {
	if p.Proof == nil {
		return srv6.Proof{}, false
	}
	return srv6.ReadProof(*p.Proof)
}

// labelled is a packet with labels as it goes out.
func labelled(p mpls.Packet) lab.Sent {
	p.Ethernet = nil
	return lab.Sent{Packet: p.Append(nil), Labels: true}
}

// withLabels tampers with packets of labels while f runs.
func (m *meddler) withLabels(do func(from string, p mpls.Packet) lab.Sent, f func()) {
	m.SetLabels(func(from string, p mpls.Packet) []lab.Sent { return []lab.Sent{do(from, p)} })
	defer m.SetLabels(nil)
	f()
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
