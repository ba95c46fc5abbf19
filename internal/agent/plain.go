package agent

import (
	"errors"
	"fmt"
	"net/netip"
	"os"

	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/stream"
)

// An intrusive function that knows nothing of seals is behind two interfaces of the node. The worker's place
// gets the frames of the one, and a namespace of its own gets those of the other: the node's IP stack
// routes none of them. The node's packet sockets see them.

// The interfaces in these namespaces.
const (
	plainTo   = "plain-to"
	plainFrom = "plain-from"
)

// takenOver is an interface in another namespace that has the frames of one of the node's.
type takenOver struct {
	ns    *host.NetNS
	link  string
	from  string // the node's
	index int    // its index when it was taken over
}

// check gives an error if the node's interface is gone, or is another one of the same name. One that was made
// anew has the kernel's settings, and has to be taken over again.
func (t takenOver) check(node *host.Net) (err error) {
	of, err := node.Link(t.from)
	if err != nil {
		return err
	}
	if of.Index != t.index {
		return fmt.Errorf("interface %s was made anew", t.from)
	}
	n, err := host.Open(t.ns)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, n.Close()) }()
	_, err = n.Link(t.link) // it went with the node's, whose index another one may have got
	return err
}

func (t takenOver) release() (err error) {
	n, err := host.Open(t.ns)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, n.Close()) }()
	if err := n.DeleteLink(t.link); !errors.Is(err, host.ErrNoLink) {
		return err
	}
	return nil
}

// attach makes the way through a function: its listeners are where plain connections come out.
func (w *kernelWorker) attach(a model.Attached) (listeners []*os.File, err error) {
	if w.behind, err = host.Anonymous(); err != nil {
		return nil, err
	}
	sides := []struct {
		from string // the node's interface
		ns   *host.NetNS
		side stream.PlainSide
		net  *host.Net
		mac  [6]byte
	}{
		{from: a.To, ns: w.ns, side: stream.PlainSide{Link: plainTo}},
		{from: a.From, ns: w.behind, side: stream.PlainSide{Link: plainFrom, Accepts: true}},
	}
	for i := range sides {
		s := &sides[i]
		// What the function sends while there is no worker gets nowhere: the settings stay.
		for _, kv := range [][2]string{
			{"net/ipv6/conf/" + s.from + "/disable_ipv6", "1"},
			{"net/ipv4/conf/" + s.from + "/forwarding", "0"},
			{"net/ipv4/conf/" + s.from + "/rp_filter", "1"}, // no route leads back there
		} {
			if err := w.node.SetSysctl(kv[0], kv[1]); err != nil {
				return nil, err
			}
		}
		if err := w.node.SetUp(s.from); err != nil {
			return nil, err
		}
		of, err := w.node.Link(s.from)
		if err != nil {
			return nil, err
		}
		if err := w.node.AddPassthru(s.from, s.side.Link, s.ns); err != nil {
			return nil, fmt.Errorf("%w; it has to be the function's alone", err)
		}
		w.taken = append(w.taken, takenOver{s.ns, s.side.Link, s.from, of.Index})
		if s.net, err = host.Open(s.ns); err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, s.net.Close()) }()
		l, err := s.net.Link(s.side.Link)
		if err != nil {
			return nil, err
		}
		s.mac = l.MAC
	}
	for i := range sides {
		s := &sides[i]
		s.side.Port = model.StreamPlainPort
		// Without a next hop the function takes any frame, and the two sides are each other's.
		s.side.Own, s.side.Via, s.side.ViaMAC = plainAddress(1+i), plainAddress(2-i), sides[1-i].mac
		if a.Via.IsValid() {
			s.side.Own, s.side.Via, s.side.ViaMAC = plainAddress(1), a.Via, [6]byte{}
			if s.side.Own == s.side.Via {
				s.side.Own = plainAddress(2)
			}
		}
		if err := s.side.Prepare(s.net); err != nil {
			return nil, err
		}
	}
	err = w.behind.Do(func() error {
		listeners, err = stream.PlainListeners(model.StreamPlainPort)
		return err
	})
	return listeners, err
}

// plainAddress is fe80::N.
func plainAddress(n int) netip.Addr {
	b := netip.MustParseAddr("fe80::").As16()
	b[15] = byte(n)
	return netip.AddrFrom16(b)
}
