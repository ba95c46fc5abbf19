package e2e

import (
	"errors"
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

// capture keeps the headers of the IPv6 packets that come in by an interface.
type capture struct {
	mu      sync.Mutex
	packets []srv6.Packet
}

func (w *world) capture(node, name string) *capture {
	w.t.Helper()
	c := &capture{}
	p := openPort(w.t, w.ns(node), name, unix.ETH_P_ALL)
	done := make(chan error, 1)
	go func() {
		done <- p.Receive(make([]byte, 512), func(frame []byte) {
			if pkt, err := srv6.DecodeFrame(frame); err == nil {
				c.mu.Lock()
				c.packets = append(c.packets, pkt)
				c.mu.Unlock()
			}
		})
	}()
	w.t.Cleanup(func() {
		p.Close()
		if err := <-done; err != nil {
			w.t.Errorf("capture at %s: %v", name, err)
		}
	})
	return c
}

// proofs are those of a path that have come so far, in their order.
func (c *capture) proofs(path uint32) (out []srv6.Proof) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, p := range c.packets {
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

// meddle takes a router of the lab over.
func (w *world) meddle(router string) *meddler {
	w.t.Helper()
	r, err := w.TakeOver(router, w.manifest.Domain, *w.manifest.Lab)
	must(w.t, err)
	w.t.Cleanup(func() {
		r.Close()
		if err := r.Err(); err != nil {
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
