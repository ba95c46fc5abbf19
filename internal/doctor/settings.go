package doctor

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
)

// Network is a node's network, as the checks of settings read it.
type Network interface {
	Link(name string) (host.Link, error)
	Sysctl(key string) (string, error)
	// NextHops are those of all equally good routes to an address; host.ErrNoWay: no route leads there.
	NextHops(to netip.Addr) ([]host.Neighbour, error)
	// Addresses are the node's own.
	Addresses() ([]netip.Addr, error)
	LinkAt(index int) (host.Link, error)
	HasIPv4(name string) (bool, error)
	// FeatureOn: by the name that ethtool -k has in the kernel.
	FeatureOn(name, feature string) (bool, error)
}

// Settings compares the settings of a node's interfaces with its plan. Of interfaces that
// are not there it says nothing: Interfaces does, and so does the data path.
func Settings(net Network, n plan.Node) []Finding {
	return slices.Concat(forwarding(net, n), ipv6(net, n), seg6(net, n), mtu(net, n), chainMTU(net, n), equalRoutes(net, n), ownAddresses(net, n), devices(net, n), reversePath(net, n))
}

// ownAddresses: where a service says that its address is the node's, clients are to find it.
func ownAddresses(net Network, n plan.Node) (out []Finding) {
	g := n.Gateway()
	if g == nil {
		return nil
	}
	for _, s := range g.Services {
		if s.Mode == model.ModeTransparent {
			continue
		}
		c := check{"address", s.Name, Warning}
		own, err := net.Addresses()
		switch at := s.Address.Addr(); {
		case err != nil:
			out = append(out, c.unknown(err))
		case !slices.Contains(own, at):
			out = append(out, c.no("clients on its links do not find it, and others only if a route leads them to this node",
				fmt.Sprintf("ip address add %s dev DEVICE, or correct the domain's file", netip.PrefixFrom(at, at.BitLen())),
				"no interface has %s, the address of service %s (mode: %s)", at, s.Name, s.Mode))
		default:
			out = append(out, c.yes("the node has %s, the address of service %s", at, s.Name))
		}
	}
	return out
}

// used is an interface that the packets of a plan need, and how to speak of it.
type used struct{ name, of string }

func usedBy(n plan.Node) (all []used) {
	for _, i := range n.Interfaces {
		all = append(all, used{i.Name, fmt.Sprintf("%s interface %s", i.Role, i.Name)})
	}
	for _, p := range n.Proxies {
		if p.Local || p.Netfilter != nil || p.To == "" { // the agent makes them, or there are none
			continue
		}
		all = append(all, used{p.To, fmt.Sprintf("interface %s to function %s", p.To, p.Function)})
		if p.From != p.To {
			all = append(all, used{p.From, fmt.Sprintf("interface %s from function %s", p.From, p.Function)})
		}
	}
	return all
}

func (i used) check() check { return check{"interface", i.name, Warning} }

func (i used) down() Finding {
	return i.check().no("no packet can arrive on it or leave by it", fmt.Sprintf("ip link set %s up, at both ends", i.name), "%s is down", i.of)
}

// Down finds interfaces of a node's plan that are there and not up.
func Down(net Network, n plan.Node) (out []Finding) {
	for _, i := range usedBy(n) {
		switch l, err := net.Link(i.name); {
		case errors.Is(err, host.ErrNoLink):
		case err != nil:
			out = append(out, i.check().unknown(err))
		case !l.Up:
			out = append(out, i.down())
		}
	}
	return out
}

// Interfaces looks whether the interfaces of a node's plan are there, of Ethernet, and up.
func Interfaces(net Network, n plan.Node) (out []Finding) {
	for _, i := range usedBy(n) {
		c := i.check()
		l, err := net.Link(i.name)
		switch {
		case errors.Is(err, host.ErrNoLink):
			out = append(out, c.no("packets that should arrive on it are not processed", "create it, or correct the domain's file", "%s does not exist", i.of))
		case err != nil:
			out = append(out, c.unknown(err))
		case l.Frame != "ether":
			out = append(out, c.no("no program is attached to it", "choose an Ethernet interface", "%s has frames of type %s", i.of, l.Frame))
		case !l.Up:
			out = append(out, i.down())
		default:
			out = append(out, c.yes("%s is up (%s)", i.of, l.Kind))
		}
	}
	return out
}

// Wrong are the findings that say no, or could not tell, as sentences.
func Wrong(all []Finding) (sentences []string) {
	for _, f := range all {
		if f.Verdict != Yes {
			sentences = append(sentences, f.String())
		}
	}
	return sentences
}

// forwards are the interfaces that packets of a plan come in by, on their way to
// somewhere else.
func forwards(n plan.Node) []string {
	var out []string
	for _, i := range n.Interfaces {
		out = append(out, i.Name)
	}
	for _, p := range n.Proxies {
		if !p.Local {
			out = append(out, p.From)
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// carriesIPv4: packets of IPv4 begin a chain here, or end one.
func carriesIPv4(n plan.Node) bool {
	ipv4 := func(m model.Match) bool { return m.Is4() }
	return slices.ContainsFunc(n.Headends, func(h plan.Headend) bool { return ipv4(h.Match) }) ||
		slices.ContainsFunc(n.Egresses, func(e plan.Egress) bool { return ipv4(e.Match) })
}

// labelsByIPv4: packets with labels take routes of IPv4, and the kernel tells programs of these
// where it forwards IPv4 alone.
func labelsByIPv4(n plan.Node) bool {
	return n.MPLS != nil && slices.ContainsFunc(n.MPLS.Nodes, func(to plan.MPLSNode) bool { return to.Address.Is4() })
}

// withoutIPv6: nothing of the node's core is of IPv6.
func withoutIPv6(n plan.Node) bool {
	other := func(p plan.PathID) bool { return !p.OverLabels() }
	return labelsByIPv4(n) && !slices.ContainsFunc(n.MPLS.Nodes, func(to plan.MPLSNode) bool { return !to.Address.Is4() }) &&
		!slices.ContainsFunc(n.Headends, func(h plan.Headend) bool { return other(h.PathID) }) &&
		!slices.ContainsFunc(n.Endpoints, func(e plan.Endpoint) bool { return other(e.PathID) }) &&
		!slices.ContainsFunc(n.Egresses, func(e plan.Egress) bool { return other(e.PathID) })
}

// setting reads a setting of an interface; false: the interface is not there.
func setting(net Network, version, name, key string) (value string, there bool, err error) {
	value, err = net.Sysctl("net/" + version + "/conf/" + name + "/" + key)
	if errors.Is(err, fs.ErrNotExist) {
		return "", false, nil
	}
	return value, true, err
}

// forwarding: where the kernel forwards nothing from an interface, programs there are
// told of no way.
func forwarding(net Network, n plan.Node) (out []Finding) {
	versions := []string{"ipv6"}
	if carriesIPv4(n) || labelsByIPv4(n) {
		versions = append(versions, "ipv4")
	}
	for _, name := range forwards(n) {
		for _, v := range versions {
			c := check{"forwarding", name, Warning}
			called := strings.Replace(v, "ip", "IP", 1)
			switch now, there, err := setting(net, v, name, "forwarding"); {
			case err != nil:
				out = append(out, c.unknown(err))
			case there && now == "0":
				out = append(out, c.no("packets for a chain that arrive on it have no route (no-route, inner-no-route)",
					fmt.Sprintf("sysctl -w %s=1", sysctlName(v, name, "forwarding")),
					"interface %s does not forward %s", name, called))
			case there:
				out = append(out, c.yes("interface %s forwards %s", name, called))
			}
		}
	}
	return out
}

// ipv6: an interface without IPv6 has no link-local address, and takes no packet of a chain.
func ipv6(net Network, n plan.Node) (out []Finding) {
	if withoutIPv6(n) {
		return nil
	}
	look := func(name, effect string) {
		c := check{"ipv6", name, Warning}
		switch now, there, err := setting(net, "ipv6", name, "disable_ipv6"); {
		case err != nil:
			out = append(out, c.unknown(err))
		case there && now != "0":
			out = append(out, c.no(effect, fmt.Sprintf("sysctl -w %s=0", sysctlName("ipv6", name, "disable_ipv6")), "IPv6 is switched off on interface %s", name))
		case there:
			out = append(out, c.yes("IPv6 is on, on interface %s", name))
		}
	}
	for _, i := range n.Interfaces {
		if i.Role == model.RoleCore {
			look(i.Name, "the interface has no IPv6 address and no neighbours, and chains have no route through it")
		}
	}
	for _, p := range n.Proxies {
		// An agent switches it off on interfaces of a function that reads what is sealed, and it stays off when the function
		// becomes one of another kind.
		if p.Local || p.Netfilter != nil || p.Stream != nil || p.Gateway != nil || p.To == "" {
			continue
		}
		names := []string{p.To}
		if p.From != p.To {
			names = append(names, p.From)
		}
		for _, name := range names {
			look(name, fmt.Sprintf("the node and function %s do not find each other there by IPv6", p.Function))
		}
	}
	return out
}

// seg6: the kernel's own SRv6 takes packets with an SRH for addresses of the node, and
// knows no proof (RFC 8754 4.3.1). It does so where the setting of all interfaces and the interface's own
// are both on (ipv6_srh_rcv).
func seg6(net Network, n plan.Node) (out []Finding) {
	all, there, err := setting(net, "ipv6", "all", "seg6_enabled")
	if !there && err == nil {
		return nil
	}
	for _, i := range n.Interfaces {
		c := check{"seg6", i.Name, Warning}
		own, there, bad := setting(net, "ipv6", i.Name, "seg6_enabled")
		switch bad = errors.Join(err, bad); {
		case bad != nil:
			out = append(out, c.unknown(bad))
		case there && all != "0" && own != "0":
			out = append(out, c.no("packets with a segment routing header for an address of this node are forwarded without a proof",
				fmt.Sprintf("sysctl -w %s=0", sysctlName("ipv6", i.Name, "seg6_enabled")),
				"the kernel's own segment routing is on, on interface %s", i.Name))
		case there:
			out = append(out, c.yes("the kernel's own segment routing is off, on interface %s", i.Name))
		}
	}
	return out
}

// mtu: what is too long for an interface as it comes in is dropped before any program
// sees it, and nobody is told.
func mtu(net Network, n plan.Node) (out []Finding) {
	for _, i := range n.Interfaces {
		if i.MTU == 0 {
			continue
		}
		c := check{"mtu", i.Name, Warning}
		switch l, err := net.Link(i.Name); {
		case errors.Is(err, host.ErrNoLink):
		case err != nil:
			out = append(out, c.unknown(err))
		case l.MTU < i.MTU:
			out = append(out, c.no("longer packets may be lost without an ICMP error",
				fmt.Sprintf("ip link set %s mtu %d, or write the smaller one into the domain's file", i.Name, i.MTU),
				"interface %s has an MTU of %d, and the plan counts on %d", i.Name, l.MTU, i.MTU))
		default:
			out = append(out, c.yes("interface %s has an MTU of %d, and the plan counts on %d", i.Name, l.MTU, i.MTU))
		}
	}
	return out
}

// chainMTU: core interfaces that leave too little to the packets of a chain. The file need
// not say the MTU of an interface, and then nobody has compared it with the chain's headers
// before.
func chainMTU(net Network, n plan.Node) (out []Finding) {
	type need struct {
		chain  string
		header int
	}
	var most need // of IPv6, which asks for so many bytes on every link
	add := func(p plan.PathID, m model.Match, segments []netip.Addr) {
		if m.Is4() {
			return
		}
		if h := plan.OuterLen(p.Encapsulation, segments); h > most.header {
			most = need{p.Chain, h}
			if p.Direction != model.Forward {
				most.chain = fmt.Sprintf("%s (%s)", p.Chain, p.Direction)
			}
		}
	}
	for _, h := range n.Headends {
		add(h.PathID, h.Match, h.Segments)
	}
	for _, e := range n.Egresses {
		add(e.PathID, e.Match, e.Segments)
	}
	if most.header == 0 {
		return nil
	}
	for _, i := range n.Interfaces {
		if i.Role != model.RoleCore {
			continue
		}
		c := check{"chain-mtu", i.Name, Warning}
		l, err := net.Link(i.Name)
		switch left := l.MTU - most.header; {
		case err != nil: // mtu speaks of it, or Interfaces
		case left < model.MTUMin:
			out = append(out, c.no(fmt.Sprintf("the chain's packets can have only %d bytes on this interface, and IPv6 needs %d", left, model.MTUMin),
				fmt.Sprintf("ip link set %s mtu %d, at both ends of the link", i.Name, model.MTUMin+most.header),
				"interface %s has an MTU of %d, and the headers of chain %s take %d", i.Name, l.MTU, most.chain, most.header))
		default:
			out = append(out, c.yes("interface %s leaves %d bytes to packets of chain %s", i.Name, left, most.chain))
		}
	}
	return out
}

// Fields of fib_multipath_hash_fields (FIB_MULTIPATH_HASH_FIELD of include/net/ip_fib.h).
const (
	hashFlowLabel = 1 << 3
	hashPorts     = 1<<4 | 1<<5
)

// equalRoutes: programs ask for a way with the entropy label as ports of IPv4, or as a flow label of
// IPv6. Where the kernel chooses among equal routes by something else, all packets of a chain go one way.
func equalRoutes(net Network, n plan.Node) (out []Finding) {
	if n.MPLS == nil {
		return nil
	}
	for _, v := range []struct {
		version, good string
		is4           bool
		policies      []string
		fields        uint64
	}{
		{"ipv4", "1", true, []string{"1"}, hashPorts},
		{"ipv6", "0", false, []string{"0", "2"}, hashFlowLabel},
	} {
		i := slices.IndexFunc(n.MPLS.Nodes, func(to plan.MPLSNode) bool {
			if to.Name == n.Name || to.Address.Is4() != v.is4 {
				return false
			}
			hops, err := net.NextHops(to.Address)
			return err == nil && len(hops) > 1 // the agent speaks of errors
		})
		if i < 0 {
			continue
		}
		to := n.MPLS.Nodes[i]
		key := "net/" + v.version + "/fib_multipath_hash_"
		c := check{"equal-routes", to.Name, Warning}
		policy, err := net.Sysctl(key + "policy")
		good := slices.Contains(v.policies, policy)
		if err == nil && policy == "3" {
			var fields string
			if fields, err = net.Sysctl(key + "fields"); err == nil {
				set, bad := strconv.ParseUint(fields, 0, 32)
				good, err = set&v.fields != 0, bad
			}
		}
		switch {
		case errors.Is(err, fs.ErrNotExist): // a kernel without equal routes
		case err != nil:
			out = append(out, c.unknown(err))
		case !good:
			out = append(out, c.no("all packets with labels to one node take the same of these routes",
				fmt.Sprintf("sysctl -w net.%s.fib_multipath_hash_policy=%s", v.version, v.good),
				"equal routes lead to %s, the address of label %d (%s), and the kernel does not choose among them by the entropy label (fib_multipath_hash_policy is %s)",
				to.Address, to.Label, to.Name, policy))
		default:
			out = append(out, c.yes("equal routes lead to %s, the address of label %d (%s), and the kernel chooses by the entropy label", to.Address, to.Label, to.Name))
		}
	}
	return out
}

// sysctlName is a setting as sysctl(8) writes it, where a dot in a name is a slash.
func sysctlName(version, name, key string) string {
	return "net." + version + ".conf." + strings.ReplaceAll(name, ".", "/") + "." + key
}
