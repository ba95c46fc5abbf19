package host

import (
	"crypto/rand"
	"errors"
	"fmt"
	"strings"

	"github.com/vishvananda/netlink"
)

// cutterMTU is the largest MTU of a veth: frames from a cutter may be as large as any frame of
// the node.
const cutterMTU = 65535

// A Cutter is a veth pair within one namespace that segments super-packets: a super-packet sent
// into In arrives at Out as frames. The namespace forwards packets that arrive there; neither
// end has an address.
type Cutter struct {
	In, Out string
	// Owner is the mark of both devices (ifalias): only devices with this mark are taken over,
	// changed or removed.
	Owner string
}

// ErrForeignLink means that another program's interface has the name.
var ErrForeignLink = errors.New("the interface is somebody else's")

func (c Cutter) foreign(l Link) error {
	return fmt.Errorf("interface %s is needed to cut super-packets, but one of that name, of kind %s and not marked %q, is there: rename or remove it: %w", l.Name, l.Kind, c.Owner, ErrForeignLink)
}

// EnsureCutter makes a cutter, or takes over an existing one and corrects its settings. made: it
// did not exist.
func (n *Net) EnsureCutter(c Cutter) (made bool, err error) {
	in, out, whole, err := n.findCutter(c)
	if err != nil {
		return false, err
	}
	if !whole {
		for _, l := range []*Link{in, out} {
			if l == nil {
				continue
			}
			if err := n.DeleteLink(l.Name); err != nil && !errors.Is(err, ErrNoLink) {
				return false, err
			}
		}
		if err := n.makeCutter(c); err != nil {
			return false, err
		}
	}
	return !whole, n.setCutter(c)
}

// RemoveCutter removes a cutter, or its remains; a missing cutter is no error.
func (n *Net) RemoveCutter(c Cutter) error {
	in, out, _, err := n.findCutter(c)
	if errors.Is(err, ErrForeignLink) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, l := range []*Link{in, out} {
		if l == nil {
			continue
		}
		if err := n.DeleteLink(l.Name); err != nil && !errors.Is(err, ErrNoLink) {
			return err
		}
	}
	return nil
}

// findCutter looks both ends up; nil is one that is not there. whole: they are,
// and are each other's peer.
func (n *Net) findCutter(c Cutter) (in, out *Link, whole bool, err error) {
	ends := [2]*Link{}
	var peers [2]int
	for i, name := range []string{c.In, c.Out} {
		l, err := n.link(name)
		if errors.Is(err, ErrNoLink) {
			continue
		}
		if err != nil {
			return nil, nil, false, err
		}
		found := linkOf(l)
		if found.Kind != "veth" || found.Alias != c.Owner {
			return nil, nil, false, c.foreign(found)
		}
		ends[i], peers[i] = &found, l.Attrs().ParentIndex
	}
	in, out = ends[0], ends[1]
	whole = in != nil && out != nil && peers[0] == out.Index && peers[1] == in.Index
	return in, out, whole, nil
}

// makeCutter names the devices last: a device with the name has the mark.
func (n *Net) makeCutter(c Cutter) error {
	tmp := "ws" + strings.ToLower(rand.Text()[:11])
	names := [2]string{tmp + "0", tmp + "1"}
	if err := n.AddVeth(Veth{Name: names[0], PeerName: names[1], MTU: cutterMTU}); err != nil {
		return err
	}
	for i, name := range []string{c.In, c.Out} {
		err := n.onLink("mark", names[i], func(l netlink.Link) error { return n.h.LinkSetAlias(l, c.Owner) })
		if err == nil {
			// Before it comes up: it shall have no address, not even a link-local one.
			err = n.SetSysctl("net/ipv6/conf/"+names[i]+"/addr_gen_mode", "1")
		}
		if err == nil {
			err = n.onLink("rename", names[i], func(l netlink.Link) error { return n.h.LinkSetName(l, name) })
		}
		if err != nil {
			return errors.Join(err, n.deleteAny(names[0], names[1], c.In))
		}
	}
	return nil
}

// deleteAny removes the pair by any of its names.
func (n *Net) deleteAny(names ...string) error {
	for _, name := range names {
		if err := n.DeleteLink(name); !errors.Is(err, ErrNoLink) {
			return err
		}
	}
	return nil
}

func (n *Net) setCutter(c Cutter) error {
	for _, name := range []string{c.In, c.Out} {
		l, err := n.Link(name)
		if err != nil {
			return err
		}
		if l.MTU != cutterMTU {
			if err := n.SetMTU(name, cutterMTU); err != nil {
				return err
			}
		}
		// The programs look up routes for packets that arrive there, which works only if the
		// device forwards.
		for key, value := range map[string]string{
			"net/ipv6/conf/" + name + "/disable_ipv6": "0",
			"net/ipv6/conf/" + name + "/forwarding":   "1",
			"net/ipv4/conf/" + name + "/forwarding":   "1",
		} {
			if now, err := n.Sysctl(key); err != nil {
				return err
			} else if now == value {
				continue
			}
			if err := n.SetSysctl(key, value); err != nil {
				return err
			}
		}
	}
	if err := n.CutOnSend(c.In); err != nil {
		return err
	}
	if err := n.SetOffload(c.Out, GRO, false); err != nil {
		return err
	}
	for _, name := range []string{c.In, c.Out} {
		if l, err := n.Link(name); err != nil {
			return err
		} else if l.Up {
			continue
		}
		if err := n.SetUp(name); err != nil {
			return err
		}
	}
	return nil
}
