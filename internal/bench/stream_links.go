package bench

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
)

// streamLinks is what the links between the nodes are like.
type streamLinks uint8

const (
	linksFree   streamLinks = iota // as quick as the machine
	linksSlow                      // a millisecond each
	linksLossy                     // 25 ms each, and one frame of a hundred is lost
	linksBehind                    // 50 ms behind the function's node, and two frames of a hundred are lost there
	linksTwo                       // 1 Gbit/s each, with a second node for a second function
)

const streamRate = 1_000_000_000 // bit/s, of linksTwo

// streamRelay is what a link does in each direction.
type streamRelay struct {
	delay time.Duration
	lose  float64
}

// relays are those before and behind the function's node; none: links are free.
func (l streamLinks) relays() []streamRelay {
	switch l {
	case linksSlow:
		return []streamRelay{{delay: time.Millisecond}, {delay: time.Millisecond}}
	case linksLossy:
		return []streamRelay{{25 * time.Millisecond, 0.01}, {25 * time.Millisecond, 0.01}}
	case linksBehind:
		return []streamRelay{{}, {50 * time.Millisecond, 0.02}}
	}
	return nil
}

func (l streamLinks) lossy() bool { return l == linksLossy || l == linksBehind }

// nodes are those with functions.
func (k streamCase) nodes() []string {
	count := max(k.many, 1)
	if k.links == linksTwo {
		count = 2
	}
	out := []string{"r2"}
	for i := 1; i < count; i++ {
		out = append(out, fmt.Sprintf("r%d", 3+i)) // r3 is the last of the row
	}
	return out
}

// relay is the name of the router whose place a relay takes: the first is between r1 and r2.
func relayName(i int) string { return fmt.Sprintf("d%d", i+1) }

// row are nodes and routers from the client to the server.
func (k streamCase) row() []string {
	if k.links.relays() == nil {
		return slices.Concat([]string{"r1"}, k.nodes(), []string{"r3"})
	}
	return []string{"r1", relayName(0), "r2", relayName(1), "r3"}
}

// domain is the case's. Its chain has a function on each of nodes.
func (k streamCase) domain() (model.Domain, model.Lab) {
	c := proxyCase{way: wayPlain}
	d, l := c.domain()
	d.Functions, l.Functions = nil, nil
	d.Chains[0].Functions = nil
	for i, node := range k.nodes() {
		f := model.Function{Name: fmt.Sprintf("fn%d", i+1), Node: node}
		if k.way.stream() {
			f.Kind, f.Proxy = model.KindStream, model.StreamDetour(f.Name)
			f.Stream = model.Stream{
				Run: []string{`"identity"`}, Back: k.back(), Early: k.way == streamEarly,
				Connections: model.StreamConnectionsDefault, Buffer: model.StreamBufferDefault,
				Idle: model.StreamIdleDefault, HalfClosed: model.StreamHalfClosedDefault,
			}
		}
		d.Functions = append(d.Functions, f)
		d.Chains[0].Functions = append(d.Chains[0].Functions, f.Name)
	}
	for i, name := range k.nodes()[1:] {
		d.Nodes = append(d.Nodes, model.Node{
			Name: name, Address: netip.MustParseAddr(fmt.Sprintf("fc00:%x::1", 4+i)), Locator: netip.MustParsePrefix(fmt.Sprintf("fc00:0:0:%x00::/56", 4+i)),
		})
	}
	for i := range k.links.relays() {
		l.Routers = append(l.Routers, model.LabRouter{Name: relayName(i), Address: netip.MustParseAddr(fmt.Sprintf("fc00:d%d::1", i+1))})
	}
	l.Links = nil
	for i := range d.Nodes {
		d.Nodes[i].Interfaces = slices.DeleteFunc(d.Nodes[i].Interfaces, func(f model.Interface) bool { return f.Role == model.RoleCore })
	}
	row := k.row()
	for i := range len(row) - 1 {
		a, b := row[i], row[i+1]
		l.Links = append(l.Links, model.LabLink{A: a, B: b})
		for _, end := range [][2]string{{a, b}, {b, a}} {
			if n := slices.IndexFunc(d.Nodes, func(n model.Node) bool { return n.Name == end[0] }); n >= 0 {
				d.Nodes[n].Interfaces = append(d.Nodes[n].Interfaces, model.Interface{
					Name: end[0] + "-" + end[1], Role: model.RoleCore, Datapath: model.DatapathTC, MTU: proxyMTU,
				})
			}
		}
	}
	return d, l
}

// back is the list of the functions: downloads go there, and the server has to understand what
// clients ask.
func (k streamCase) back() []string {
	switch k.way {
	case streamBytewise:
		return []string{`{"xor":{"passes":0}}`}
	case streamXOR:
		return []string{fmt.Sprintf(`{"xor":{"passes":%d}}`, k.passes)}
	}
	return []string{`"identity"`}
}

// limit makes the links what they shall be like.
func (t *streamTrack) limit() error {
	if t.links == linksTwo {
		row := t.row()
		for i := range len(row) - 1 {
			for _, end := range [][2]string{{row[i], row[i+1]}, {row[i+1], row[i]}} {
				err := onMember(t.lab, end[0], func(n *host.Net) error { return n.SetRate(end[0]+"-"+end[1], streamRate) })
				if err != nil {
					return err
				}
			}
		}
	}
	for i, r := range t.links.relays() {
		if err := t.relay(i, r); err != nil {
			return err
		}
	}
	if t.links.lossy() {
		return t.control()
	}
	return nil
}

// relay has a program take a router's place, frame by frame in each direction.
func (t *streamTrack) relay(i int, r streamRelay) error {
	row, me := t.row(), relayName(i)
	at := slices.Index(row, me)
	var macs [2][6]byte
	for side, peer := range []string{row[at-1], row[at+1]} {
		err := onMember(t.lab, peer, func(n *host.Net) (err error) {
			link := peer + "-" + me
			// Frames come one by one, and nobody completes checksums behind here.
			for _, o := range []host.Offload{host.TSO, host.GSO, host.TransmitSum} {
				if err := n.SetOffload(link, o, false); err != nil {
					return err
				}
			}
			macs[side], err = n.HardwareAddress(link)
			return err
		})
		if err != nil {
			return err
		}
	}
	return onMember(t.lab, me, func(n *host.Net) error {
		if err := n.SetSysctl("net/ipv6/conf/all/forwarding", "0"); err != nil {
			return err
		}
		before, behind := me+"-"+row[at-1], me+"-"+row[at+1]
		for side, way := range [][2]string{{behind, before}, {before, behind}} {
			d, err := newDelayer(n, way[0], way[1], macs[side], r.delay, r.lose)
			if err != nil {
				return err
			}
			t.relays = append(t.relays, d)
		}
		return nil
	})
}

// lossControl is the congestion control where packets are lost: one that goes by losses.
const lossControl = "reno"

// control has all that send use lossControl.
func (t *streamTrack) control() error {
	const key = "net/ipv4/tcp_congestion_control"
	for _, name := range []string{"h1", "h2"} {
		if err := onMember(t.lab, name, func(n *host.Net) error { return n.SetSysctl(key, lossControl) }); err != nil {
			return err
		}
	}
	pids, err := t.process()
	if err != nil {
		return err
	}
	for _, pid := range pids {
		if err := controlOf(pid, key); err != nil {
			return err
		}
	}
	return nil
}

// controlOf sets it in the namespace of a process.
func controlOf(pid int, key string) (err error) {
	ns, err := host.OpenProcess(pid)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, ns.Close()) }()
	n, err := host.Open(ns)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, n.Close()) }()
	return n.SetSysctl(key, lossControl)
}
