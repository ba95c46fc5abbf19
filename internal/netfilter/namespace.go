package netfilter

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"strconv"
	"strings"

	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
)

// Interfaces inside a function's namespace, if its Namespace names no others: packets
// come in by one and leave by the other.
const (
	InsideIn  = "waystamp-in"
	InsideOut = "waystamp-out"
)

// Addresses of both pairs: the node's ends, and the ends inside. Link-local ones are
// in no routing protocol, belong to their link alone, so that they collide with none
// of the operator's and are the same everywhere, and carry IPv4 as well: its next hop
// may be an address of IPv6 (RFC 8950). So no pool of addresses is needed.
var (
	nodeAddress   = netip.MustParseAddr("fe80::1")
	insideAddress = netip.MustParseAddr("fe80::2")
)

// Namespace is the network namespace of a function, and two veth pairs to it:
//
//	node  To ------> In  namespace  Out ------> From  node
//
// Whatever goes in by To is routed, meets the rules, and comes out at From.
type Namespace struct {
	// Name is the namespace's name in host.NamespaceDir, where `ip netns` finds it and
	// it outlives the agent. Of an existing namespace it may be the path of a file.
	Name string

	// Existing: somebody else owns the namespace. Then only the pairs are made, and no
	// setting is changed but of their ends.
	Existing bool

	Node      *host.NetNS  // where To and From are; nil: the namespace of the process
	To, From  string       // the node's ends; "" for Remove: both pairs lead elsewhere
	In, Out   string       // the ends inside; "": InsideIn and InsideOut
	MTU       int          // of all four ends, in bytes of an IP packet; at least 1280
	Addresses []netip.Addr // on the loopback interface of an own namespace, for ICMP errors

	// Bypass: connection tracking does not see all packets of a flow, and must not take TCP
	// segments for wrong because of those that it has not seen.
	Bypass bool

	// Plain: the function gets plain connections, in both directions, instead of packets of chains. What comes in by one
	// pair leaves by the other; the node's IP stack has no part in it.
	Plain bool

	// step is called before each change; tests stop there.
	step func(what string) error
}

// State is what Ensure has found and done.
type State struct {
	Changed []string // what was not as it is to be, and is now, in order
	Missing []string // what an existing namespace lacks, and how to add it
}

// ErrTaken means that a name belongs to something that is not waystamp's.
var ErrTaken = errors.New("the name is taken")

// minMTU is that of IPv6 (RFC 8200 section 5).
const minMTU = 1280

func (n Namespace) names() Namespace {
	if n.In == "" {
		n.In = InsideIn
	}
	if n.Out == "" {
		n.Out = InsideOut
	}
	return n
}

// mark is the alias of both pairs' ends: it tells ours from others of these names.
func (n Namespace) mark() string { return "waystamp " + n.To + " " + n.From }

// ownerMark is the alias of the loopback interface of a namespace that is ours.
func (n Namespace) ownerMark() string { return "waystamp " + n.Name }

// Open opens the namespace; fs.ErrNotExist: it is not there. The caller closes it.
func (n Namespace) Open() (*host.NetNS, error) {
	if n.Existing && strings.Contains(n.Name, "/") {
		return host.OpenPath(n.Name)
	}
	return host.OpenNamed(n.Name)
}

// Ensure makes the namespace and its pairs, and repairs whatever of them is not as it
// is to be; what is right it does not touch. Of one without a name, which is the node's own,
// it only says what is missing. It may be broken off anywhere, and called
// again. The error is ErrTaken if a name belongs to somebody else, fs.ErrNotExist if
// an existing namespace is not there.
func (n Namespace) Ensure(ctx context.Context) (State, error) {
	n = n.names()
	var s State
	if n.Name == "" {
		return s, n.nodeMissing(&s)
	}
	err := n.ensure(ctx, &s)
	if err != nil {
		err = fmt.Errorf("namespace %s of the function behind %s and %s: %w", n.Name, n.To, n.From, err)
	}
	return s, err
}

func (n Namespace) ensure(ctx context.Context, s *State) error {
	if n.MTU < minMTU {
		return fmt.Errorf("an MTU of %d bytes is less than IPv6 needs, %d", n.MTU, minMTU)
	}
	k := keeper{Namespace: n, ctx: ctx, state: s}
	ns, err := k.namespace()
	if err != nil {
		return err
	}
	defer ns.Close()
	return n.inBoth(ns, func(node, inside *host.Net) error {
		k.node, k.inside = node, inside
		if err := k.pair(n.To, n.In); err != nil {
			return err
		}
		if err := k.pair(n.From, n.Out); err != nil {
			return err
		}
		if err := k.ends(); err != nil {
			return err
		}
		if n.Existing {
			return k.missing()
		}
		return k.own()
	})
}

// liberal is the setting by which connection tracking does not hold TCP segments against
// those that it has seen. It is there with the module nf_conntrack.
const liberal = "net/netfilter/nf_conntrack_tcp_be_liberal"

// nodeMissing finds what the node's own namespace lacks.
func (n Namespace) nodeMissing(s *State) error {
	if !n.Bypass {
		return nil
	}
	node, err := host.Open(n.Node)
	if err != nil {
		return err
	}
	defer node.Close()
	return saysLiberal(node, "the node", s)
}

func saysLiberal(n *host.Net, whose string, s *State) error {
	on, err := n.HasSysctl(liberal, "1")
	if errors.Is(err, fs.ErrNotExist) { // nothing tracks connections yet
		err = nil
	}
	if err == nil && !on {
		s.Missing = append(s.Missing, whose+": with bypass: established, connection tracking drops nothing for its TCP sequence numbers only with net.netfilter.nf_conntrack_tcp_be_liberal = 1; set it there")
	}
	return err
}

func (n Namespace) inBoth(ns *host.NetNS, f func(node, inside *host.Net) error) error {
	node, err := host.Open(n.Node)
	if err != nil {
		return err
	}
	defer node.Close()
	inside, err := host.Open(ns)
	if err != nil {
		return err
	}
	defer inside.Close()
	return f(node, inside)
}

// keeper is one run of Ensure.
type keeper struct {
	Namespace
	ctx          context.Context
	state        *State
	node, inside *host.Net
}

// want makes a thing so unless it is.
func (k *keeper) want(what string, is func() (bool, error), make func() error) error {
	ok, err := is()
	if err != nil || ok {
		return err
	}
	return k.change(what, make)
}

func (k *keeper) change(what string, make func() error) error {
	if k.ctx.Err() != nil {
		return context.Cause(k.ctx)
	}
	if k.step != nil {
		if err := k.step(what); err != nil {
			return err
		}
	}
	if err := make(); err != nil {
		return err
	}
	k.state.Changed = append(k.state.Changed, what)
	return nil
}

// namespace opens the namespace, and makes one that is to be ours.
func (k *keeper) namespace() (*host.NetNS, error) {
	ns, err := k.Open()
	if k.Existing {
		if errors.Is(err, fs.ErrNotExist) {
			err = fmt.Errorf("it does not exist; create it (ip netns add %s), or give the function another namespace: %w", k.Name, err)
		}
		return ns, err
	}
	switch {
	case err == nil:
		ours, err := k.isOurs(ns)
		if err == nil && !ours {
			err = fmt.Errorf("a namespace of that name is there and not waystamp's; delete it (ip netns delete %s) or name the function otherwise: %w", k.Name, ErrTaken)
		}
		if err != nil {
			return nil, errors.Join(err, ns.Close())
		}
		return ns, nil
	case !errors.Is(err, fs.ErrNotExist):
		return nil, err
	}
	if ns, err = host.Anonymous(); err != nil {
		return nil, err
	}
	// Marked before it has a name: one with a name and no mark is somebody else's.
	err = k.change("make namespace "+k.Name, func() error {
		n, err := host.Open(ns)
		if err != nil {
			return err
		}
		defer n.Close()
		return n.SetAlias("lo", k.ownerMark())
	})
	if err == nil {
		err = k.change("name namespace "+k.Name, func() error { return ns.Publish(k.Name) })
	}
	if err != nil {
		return nil, errors.Join(err, ns.Close())
	}
	return ns, nil
}

func (n Namespace) isOurs(ns *host.NetNS) (bool, error) {
	net, err := host.Open(ns)
	if err != nil {
		return false, err
	}
	defer net.Close()
	lo, err := net.Link("lo")
	return lo.Alias == n.ownerMark(), err
}

// find returns an interface; ok is false if there is none.
func find(n *host.Net, name string) (l host.Link, ok bool, err error) {
	l, err = n.Link(name)
	if errors.Is(err, host.ErrNoLink) {
		return l, false, nil
	}
	return l, err == nil, err
}

// pair makes a veth pair, of an end on the node and one inside.
func (k *keeper) pair(near, far string) error {
	whole, err := k.node.ArePeers(near, k.inside, far)
	if err != nil || whole {
		return err
	}
	// What is left of a pair of ours gives way; an interface of somebody else does not.
	for _, end := range []struct {
		net  *host.Net
		name string
		ours bool
	}{{k.node, near, false}, {k.inside, far, !k.Existing}} {
		l, there, err := find(end.net, end.name)
		if err != nil {
			return err
		}
		if !there {
			continue
		}
		if !end.ours && l.Alias != k.mark() {
			return fmt.Errorf("an interface %s is there in %s and not waystamp's; remove or rename it, or give the function another name: %w",
				end.name, end.net.NetNS(), ErrTaken)
		}
		if err := k.change("remove a stray "+end.name, func() error { return end.net.DeleteLink(end.name) }); err != nil {
			return err
		}
	}
	return k.change("make "+near+" and "+far, func() error {
		return k.node.AddVeth(host.Veth{
			Name: near, PeerName: far, Peer: k.inside.NetNS(), MTU: k.MTU, MAC: k.mac(near, "node"), PeerMAC: k.mac(near, "inside"),
		})
	})
}

// mac is the address of an end: the same each time, so that whoever has read it may
// keep it, and set from the start, so that no device manager gives it another.
func (n Namespace) mac(near, side string) (mac [6]byte) {
	sum := sha256.Sum256([]byte(n.Name + "\x00" + near + "\x00" + side))
	copy(mac[:], sum[:])
	mac[0] = mac[0]&^1 | 2 // locally administered, of one station
	return mac
}

// ends makes the four ends what they are to be.
func (k *keeper) ends() error {
	for _, e := range []struct {
		net       *host.Net
		name      string
		own, peer netip.Addr
		mac, far  [6]byte
		inside    bool
	}{
		{k.node, k.To, nodeAddress, insideAddress, k.mac(k.To, "node"), k.mac(k.To, "inside"), false},
		{k.inside, k.In, insideAddress, nodeAddress, k.mac(k.To, "inside"), k.mac(k.To, "node"), true},
		{k.inside, k.Out, insideAddress, nodeAddress, k.mac(k.From, "inside"), k.mac(k.From, "node"), true},
		{k.node, k.From, nodeAddress, insideAddress, k.mac(k.From, "node"), k.mac(k.From, "inside"), false},
	} {
		l, err := e.net.Link(e.name)
		if err != nil {
			return err
		}
		about := func(what string) string { return what + " of " + e.name }
		if l.Alias != k.mark() {
			if err := k.change(about("alias"), func() error { return e.net.SetAlias(e.name, k.mark()) }); err != nil {
				return err
			}
		}
		if l.MTU != k.MTU {
			if err := k.change(about("MTU"), func() error { return e.net.SetMTU(e.name, k.MTU) }); err != nil {
				return err
			}
		}
		if l.MAC != e.mac {
			if err := k.change(about("MAC address"), func() error { return e.net.SetHardwareAddress(e.name, e.mac) }); err != nil {
				return err
			}
		}
		// The address is ours, not one that the kernel makes or hears of.
		settings := []setting{
			{"net/ipv6/conf/" + e.name + "/disable_ipv6", "0"},
			{"net/ipv6/conf/" + e.name + "/addr_gen_mode", "1"},
			{"net/ipv6/conf/" + e.name + "/accept_ra", "0"},
			{"net/ipv4/conf/" + e.name + "/rp_filter", "0"},
			{"net/ipv4/conf/" + e.name + "/send_redirects", "0"},
			// Inside the kernel forwards; on the node the programs ask it for the way.
			{"net/ipv4/conf/" + e.name + "/forwarding", "1"},
			{"net/ipv6/conf/" + e.name + "/forwarding", "1"},
		}
		if k.Plain && !e.inside {
			// Workers have the frames of these interfaces. Without a worker they get nowhere.
			settings = []setting{
				{"net/ipv6/conf/" + e.name + "/disable_ipv6", "1"},
				{"net/ipv4/conf/" + e.name + "/forwarding", "0"},
				{"net/ipv4/conf/" + e.name + "/rp_filter", "1"}, // no route leads back there
			}
		}
		if err := k.settings(e.net, settings); err != nil {
			return err
		}
		// Super-packets stay whole: whoever receives them at the end cuts them.
		for _, o := range []host.Offload{host.TransmitSum, host.ScatterGather, host.TSO, host.GSO} {
			if err := k.want(about("offload "+o.String()),
				func() (bool, error) { return e.net.Offload(e.name, o) },
				func() error { return e.net.SetOffload(e.name, o, true) }); err != nil {
				return err
			}
		}
		if err := k.want(about("state up"),
			func() (bool, error) { return e.net.IsUp(e.name) },
			func() error { return e.net.SetUp(e.name) }); err != nil {
			return err
		}
		if k.Plain && !e.inside {
			continue
		}
		address := netip.PrefixFrom(e.own, 64)
		if err := k.want(about("address"),
			func() (bool, error) { return e.net.HasAddress(e.name, address) },
			func() error { return e.net.AddAddress(e.name, address) }); err != nil {
			return err
		}
		if err := k.want(about("neighbour"),
			func() (bool, error) { return e.net.HasNeighbour(e.name, e.peer, e.far) },
			func() error { return e.net.AddNeighbour(e.name, e.peer, e.far) }); err != nil {
			return err
		}
	}
	return nil
}

// setting is a kernel setting, by its path below /proc/sys.
type setting struct{ key, value string }

func (k *keeper) settings(n *host.Net, list []setting) error {
	for _, s := range list {
		if err := k.want(s.key+" = "+s.value,
			func() (bool, error) { return n.HasSysctl(s.key, s.value) },
			func() error { return n.SetSysctl(s.key, s.value) }); err != nil {
			return err
		}
	}
	return nil
}

// defaultRoutes lead all packets out by the second pair.
func (k *keeper) defaultRoutes() []host.Route {
	return []host.Route{
		{Destination: netip.PrefixFrom(netip.IPv6Unspecified(), 0), Via: nodeAddress, Device: k.Out, Protocol: host.ProtocolWaystamp, Metric: 1},
		{Destination: netip.PrefixFrom(netip.IPv4Unspecified(), 0), Via: nodeAddress, Device: k.Out, Protocol: host.ProtocolWaystamp},
	}
}

// own makes the settings of a namespace that is ours.
func (k *keeper) own() error {
	if err := k.settings(k.inside, []setting{
		{"net/ipv4/ip_forward", "1"},
		{"net/ipv6/conf/all/forwarding", "1"},
		{"net/ipv4/conf/all/rp_filter", "0"}, // the larger one of this and the interface's counts
		{"net/ipv4/conf/all/send_redirects", "0"},
	}); err != nil {
		return err
	}
	if k.Bypass {
		if err := k.beLiberal(); err != nil {
			return err
		}
	}
	for _, a := range k.Addresses {
		p := netip.PrefixFrom(a, a.BitLen())
		if err := k.want("address "+a.String(),
			func() (bool, error) { return k.inside.HasAddress("lo", p) },
			func() error { return k.inside.AddAddress("lo", p) }); err != nil {
			return err
		}
	}
	if err := k.want("state up of lo",
		func() (bool, error) { return k.inside.IsUp("lo") },
		func() error { return k.inside.SetUp("lo") }); err != nil {
		return err
	}
	routes := k.defaultRoutes()
	if k.Plain {
		routes = k.plainRoutes()
	}
	for _, r := range routes {
		if err := k.want(fmt.Sprintf("route to %s by %s", r.Destination, r.Device),
			func() (bool, error) { return k.inside.HasRoute(r) },
			func() error { return k.inside.ReplaceRoute(r) }); err != nil {
			return err
		}
	}
	for _, r := range k.plainRules() {
		if err := k.want(fmt.Sprintf("routing rule %d", r.Priority),
			func() (bool, error) {
				has, err := k.inside.HasRule(r)
				return has == k.Plain, err
			},
			func() error {
				if k.Plain {
					return k.inside.AddRule(r)
				}
				return k.inside.DeleteRule(r) // of a function that was intrusive before
			}); err != nil {
			return err
		}
	}
	return nil
}

// Routing tables of plain connections: to servers, and to clients.
const (
	toServers = 1
	toClients = 2
)

// plainRoutes lead to clients, unless a rule says otherwise.
func (k *keeper) plainRoutes() (routes []host.Route) {
	for _, any := range []netip.Prefix{netip.PrefixFrom(netip.IPv6Unspecified(), 0), netip.PrefixFrom(netip.IPv4Unspecified(), 0)} {
		metric := 0
		if any.Addr().Is6() {
			metric = 1
		}
		for _, r := range []host.Route{{Device: k.In}, {Device: k.Out, Table: toServers}, {Device: k.In, Table: toClients}} {
			r.Destination, r.Via, r.Protocol, r.Metric = any, nodeAddress, host.ProtocolWaystamp, metric
			routes = append(routes, r)
		}
	}
	return routes
}

// plainRules are those by which packets leave by the other pair than they came in by. What the namespace sends itself, such as
// the RST of a reject, goes to servers by their port; else to clients.
func (k *keeper) plainRules() (rules []host.Rule) {
	for _, ipv4 := range []bool{false, true} {
		rules = append(rules,
			host.Rule{IPv4: ipv4, Priority: 100, Input: k.In, Table: toServers},
			host.Rule{IPv4: ipv4, Priority: 101, Input: k.Out, Table: toClients},
			host.Rule{IPv4: ipv4, Priority: 102, DestinationPort: model.StreamPlainPort, Table: toServers})
	}
	return rules
}

// beLiberal makes the setting, of whose module the kernel may not have had any use yet: rules
// that track connections make it load that.
func (k *keeper) beLiberal() error {
	s := []setting{{liberal, "1"}}
	err := k.settings(k.inside, s)
	if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := Check(k.ctx, Ruleset{Function: "conntrack", Text: "chain c {\n\ttype filter hook forward priority 0;\n\tct state new\n}\n"}); err != nil {
		return fmt.Errorf("have the kernel track connections: %w", err)
	}
	return k.settings(k.inside, s)
}

// missing finds what a namespace lacks that is not ours to set.
func (k *keeper) missing() error {
	say := func(format string, args ...any) {
		k.state.Missing = append(k.state.Missing, fmt.Sprintf("namespace %s: ", k.Name)+fmt.Sprintf(format, args...))
	}
	// IPv4 is forwarded by the setting of the interface that a packet comes in by.
	on, err := k.inside.HasSysctl("net/ipv6/conf/all/forwarding", "1")
	if err != nil {
		return err
	}
	if !on {
		say("it does not forward IPv6; set net.ipv6.conf.all.forwarding to 1 in it")
	}
	if k.Bypass {
		if err := saysLiberal(k.inside, "namespace "+k.Name, k.state); err != nil {
			return err
		}
	}
	filter, err := k.inside.Sysctl("net/ipv4/conf/all/rp_filter")
	if err != nil {
		return err
	}
	if level, err := strconv.Atoi(filter); err != nil || level != 0 {
		say("it drops IPv4 packets by their source; set net.ipv4.conf.all.rp_filter to 0 in it")
	}
	for _, r := range k.defaultRoutes() {
		family, ipv4 := "-6", r.Destination.Addr().Is4()
		if ipv4 {
			family = "-4"
		}
		has, err := k.inside.RoutesLeaveBy(k.Out, ipv4)
		if err != nil {
			return err
		}
		if !has {
			say("no route leads back by %s; add one in it, for example: ip %s route add default via inet6 %s dev %s", k.Out, family, nodeAddress, k.Out)
		}
	}
	return nil
}

// Load loads rulesets into the namespace; see the function Load.
func (n Namespace) Load(ctx context.Context, sets ...Ruleset) error {
	ns, err := n.Open()
	if err != nil {
		return err
	}
	defer ns.Close()
	return Load(ctx, ns, sets...)
}

// Counters reads what the rules of a function have counted; see ReadCounters.
func (n Namespace) Counters(ctx context.Context, function string) (Counters, error) {
	ns, err := n.Open()
	if err != nil {
		return Counters{}, err
	}
	defer ns.Close()
	return ReadCounters(ctx, ns, function)
}

// Remove takes away what Ensure has made, and nothing else: both pairs (none without To
// and From), of an own namespace its name too. It may be broken off anywhere, and called again. Rules in an
// existing namespace stay; Unload removes them.
func (n Namespace) Remove(ctx context.Context) (err error) {
	n = n.names()
	defer func() {
		if err != nil {
			err = fmt.Errorf("remove namespace %s of the function behind %s and %s: %w", n.Name, n.To, n.From, err)
		}
	}()
	k := keeper{Namespace: n, ctx: ctx, state: &State{}}
	ns, err := n.Open()
	if errors.Is(err, fs.ErrNotExist) {
		ns, err = nil, nil
	}
	if err != nil {
		return err
	}
	if ns != nil {
		defer ns.Close()
		if !n.Existing {
			if ours, err := n.isOurs(ns); err != nil {
				return err
			} else if !ours {
				ns = nil
			}
		}
	}
	if err := k.removePairs(ns); err != nil {
		return err
	}
	if ns == nil || n.Existing {
		return nil
	}
	return k.change("delete namespace "+n.Name, ns.Delete)
}

// removePairs removes the node's ends that are ours, and with them the ends inside. A
// process in the namespace would keep both otherwise.
func (k *keeper) removePairs(ns *host.NetNS) error {
	if k.To == "" {
		return nil
	}
	node, err := host.Open(k.Node)
	if err != nil {
		return err
	}
	defer node.Close()
	var inside *host.Net
	if ns != nil {
		if inside, err = host.Open(ns); err != nil {
			return err
		}
		defer inside.Close()
	}
	for _, p := range []struct{ near, far string }{{k.To, k.In}, {k.From, k.Out}} {
		l, there, err := find(node, p.near)
		if err != nil {
			return err
		}
		ours := there && l.Alias == k.mark()
		if there && !ours && inside != nil {
			if ours, err = node.ArePeers(p.near, inside, p.far); err != nil {
				return err
			}
		}
		if !ours {
			continue
		}
		if err := k.change("remove "+p.near, func() error { return node.DeleteLink(p.near) }); err != nil {
			return err
		}
	}
	return nil
}
