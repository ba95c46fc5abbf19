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

// devices are the checks of what an interface of the plan is and does to packets. What only costs time
// is left to offloads.
func devices(net Network, n plan.Node) (out []Finding) {
	for _, i := range n.Interfaces {
		l, err := net.Link(i.Name)
		switch {
		case errors.Is(err, host.ErrNoLink): // Interfaces speaks of it
		case err != nil:
			out = append(out, check{"device", i.Name, Warning}.unknown(err))
		default:
			out = append(out, master(net, l), merges(net, l), superPackets(l))
		}
	}
	return out
}

// master: packets of an interface below another one are the other one's to the kernel, and routes lead to that.
func master(net Network, l host.Link) Finding {
	c := check{"master", l.Name, Warning}
	if l.Master == 0 {
		return c.yes("interface %s belongs to no other", l.Name)
	}
	above, err := net.LinkAt(l.Master)
	switch {
	case err != nil:
		return c.unknown(fmt.Errorf("find out to what interface %s belongs: %w", l.Name, err))
	case above.Kind == "vrf":
		return c.no("routes of the node's main table do not count for its packets, and verified packets are refused", fmt.Sprintf("ip link set %s nomaster", l.Name),
			"interface %s is in the VRF %s", l.Name, above.Name)
	}
	return c.no(fmt.Sprintf("routes lead to %s, and packets that leave by it are not checked", above.Name),
		fmt.Sprintf("ip link set %s nomaster, or write %s into the domain's file in its place", l.Name, above.Name),
		"interface %s belongs to %s, of kind %s", l.Name, above.Name, above.Kind)
}

// merges: LRO makes one packet of several, and what they were is lost. The kernel drops such packets where it should forward them.
func merges(net Network, l host.Link) Finding {
	c := check{"lro", l.Name, Warning}
	switch on, err := net.FeatureOn(l.Name, "rx-lro"); {
	case err != nil:
		return c.unknown(err)
	case on:
		return c.no("the kernel drops merged packets that it should forward", fmt.Sprintf("ethtool -K %s lro off", l.Name), "interface %s merges packets (LRO)", l.Name)
	}
	return c.yes("interface %s does not merge packets by LRO", l.Name)
}

// superMost is the longest IP packet without a jumbo payload option (RFC 2675), in bytes, and the kernel's default for what it merges.
const superMost = 65536

// superPackets: Linux 5.19 and later may make longer packets (BIG TCP), with which an outer header has no length to write.
func superPackets(l host.Link) Finding {
	c := check{"big-tcp", l.Name, Warning}
	if l.SuperMax > superMost {
		return c.no("longer super-packets are refused (train-too-big), and TCP nearly stops", fmt.Sprintf("ip link set %s gso_max_size %d gro_max_size %[2]d", l.Name, superMost),
			"interface %s takes super-packets of up to %d bytes (BIG TCP)", l.Name, l.SuperMax)
	}
	return c.yes("super-packets of interface %s have at most %d bytes", l.Name, superMost)
}

// routes: whether the node's packets have a route to the first segments of its chains, and whether it leads out by an interface of the
// core. What comes behind the first segment other nodes know.
func routes(net Network, n plan.Node) (out []Finding) {
	core := map[string]bool{}
	for _, i := range n.Interfaces {
		core[i.Name] = i.Role == model.RoleCore
	}
	seen := map[netip.Addr]bool{}
	for _, h := range n.Headends {
		if h.OverLabels() || len(h.Segments) == 0 {
			continue // the agent speaks of the routes of labels
		}
		to := h.Segments[0]
		if seen[to] || n.Locator.Contains(to) {
			continue
		}
		seen[to] = true
		c := check{"route", to.String(), Warning}
		hops, err := net.NextHops(to)
		if err != nil && !errors.Is(err, host.ErrNoWay) {
			out = append(out, c.unknown(err))
			continue
		}
		if len(hops) == 0 {
			out = append(out, c.no("its packets are refused (no-route)", fmt.Sprintf("ip -6 route get %s; add a route to the locator of that node", to),
				"no route leads to %s, the first segment of chain %s (%s)", to, h.Chain, h.Direction))
			continue
		}
		if i := slices.IndexFunc(hops, func(h host.Neighbour) bool { return !core[h.Device] }); i >= 0 {
			out = append(out, c.no("its packets leave by an interface that no program is at, and what comes in there is not checked",
				fmt.Sprintf("write %s into the domain's file as a core interface of %s, or correct the route", hops[i].Device, n.Name),
				"the route to %s, the first segment of chain %s (%s), leads out by %s, which is no core interface of the plan", to, h.Chain, h.Direction, hops[i].Device))
			continue
		}
		out = append(out, c.yes("the route to %s, the first segment of chain %s (%s), leads out by %s", to, h.Chain, h.Direction, hops[0].Device))
	}
	return out
}

// delivered are the packets of IPv4 that this node's own IP stack gets from a chain, with the address
// that they come in under: those for a function in the node's own kernel, and those at an egress for an
// address of the node.
func delivered(net Network, n plan.Node) (out []model.Match, err error) {
	for _, p := range n.Proxies {
		if p.Local || p.Netfilter != nil && p.Netfilter.Namespace == model.NamespaceNode {
			out = append(out, slices.DeleteFunc(slices.Clone(p.Matches), func(m model.Match) bool { return !m.Is4() })...)
		}
	}
	if !slices.ContainsFunc(n.Egresses, func(e plan.Egress) bool { return e.Match.Is4() }) {
		return out, nil
	}
	own, err := net.Addresses()
	if err != nil {
		return nil, err
	}
	for _, e := range n.Egresses {
		if e.Match.Is4() && slices.ContainsFunc(own, func(a netip.Addr) bool { return a.Is4() && !a.IsLoopback() && e.Match.Destination.Contains(a) }) {
			out = append(out, e.Match)
		}
	}
	return out, nil
}

// reversePath: the kernel's reverse-path filter of IPv4 sees the inner packet come in by the core interface that its
// outer packet came by. Strict (1), it takes it only if the route back to its sender leads there. Loose
// (2), any route does, but only on an interface that has an IPv4 address itself (fib_validate_source):
// on others it is as strict.
func reversePath(net Network, n plan.Node) (out []Finding) {
	matches, err := delivered(net, n)
	if err != nil {
		return []Finding{check{"reverse-path", "", Warning}.unknown(err)}
	}
	if len(matches) == 0 {
		return nil
	}
	all, err := net.Sysctl("net/ipv4/conf/all/rp_filter")
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return []Finding{check{"reverse-path", "", Warning}.unknown(err)}
	}
	for _, i := range n.Interfaces {
		if i.Role != model.RoleCore {
			continue
		}
		if f, there := reversePathOf(net, i.Name, all, matches); there {
			out = append(out, f)
		}
	}
	return out
}

func reversePathOf(net Network, name, all string, matches []model.Match) (f Finding, there bool) {
	c := check{"reverse-path", name, Warning}
	own, there, err := setting(net, "ipv4", name, "rp_filter")
	if !there && err == nil {
		return f, false
	}
	now := 0
	for _, v := range []string{all, own} {
		n, bad := strconv.Atoi(v)
		err = errors.Join(err, bad)
		now = max(now, n) // the kernel takes the larger one
	}
	if err != nil {
		return c.unknown(fmt.Errorf("read rp_filter of interface %s: %w", name, err)), true
	}
	if now == 0 {
		return c.yes("interface %s does not filter IPv4 by the reverse path", name), true
	}
	has, err := net.HasIPv4(name)
	if err != nil {
		return c.unknown(err), true
	}
	loose := now == 2 && has
	mend := fmt.Sprintf("sysctl -w net.ipv4.conf.all.rp_filter=0 %s=0", sysctlName("ipv4", name, "rp_filter"))
	const effect = "the kernel drops them before a function in the node's kernel, or the node itself, gets them"
	for _, m := range matches {
		if !m.Source.IsValid() || m.Source.Bits() == 0 {
			if loose {
				continue
			}
			return c.unknown(fmt.Errorf("interface %s filters IPv4 by the reverse path (rp_filter is %d), and whether the routes to all senders of packets to %s lead by it cannot be told; %s", name, now, m.Destination, mend)), true
		}
		to := m.Source.Masked().Addr()
		if m.Source.Bits() < 31 {
			to = to.Next() // the first is the subnet's own
		}
		hops, err := net.NextHops(to)
		if err != nil && !errors.Is(err, host.ErrNoWay) {
			return c.unknown(err), true
		}
		switch by := slices.ContainsFunc(hops, func(h host.Neighbour) bool { return h.Device == name }); {
		case len(hops) == 0:
			return c.no(effect, mend+", or add a route", "interface %s filters IPv4 by the reverse path (rp_filter is %d), and no route leads back to %s, from where packets come", name, now, m.Source), true
		case !by && !loose:
			return c.no(effect, mend, "interface %s filters IPv4 by the reverse path (rp_filter is %d), and the route back to %s, from where packets come, leads to %s", name, now, m.Source, hops[0].Device), true
		}
	}
	return c.yes("the reverse-path filter of interface %s lets packets pass (rp_filter is %d)", name, now), true
}

// lists: frames that arrive are merged into a list of packets, each of which keeps its headers, and the kernel copies them all where an
// outer header is put on.
func lists(net Network, name string) Finding {
	c := check{"gro-list", name, Cost}
	switch on, err := net.FeatureOn(name, "rx-gro-list"); {
	case err != nil:
		return c.unknown(err)
	case on:
		return c.no("TCP through chains is about half as fast", fmt.Sprintf("ethtool -K %s rx-gro-list off", name), "interface %s merges packets into lists (rx-gro-list)", name)
	}
	return c.yes("interface %s does not merge packets into lists", name)
}

// cutters tells whether the kernel cuts all super-packets in front of a device; *host.Net does.
type cutters interface {
	Link(name string) (host.Link, error)
	CutsOnSend(name string) (bool, error)
}

// functionDevices: how super-packets get to a function. With segments: cut each has to become frames, by the
// kernel in front of a device that takes no super-packets, or in a veth pair of the agent. With keep they go whole
// to a device that takes them.
func functionDevices(net cutters, n plan.Node) (out []Finding) {
	for _, p := range n.Proxies {
		if p.Local || p.Netfilter != nil || p.Stream != nil || p.Gateway != nil || p.To == "" {
			continue
		}
		c := check{"function-device", p.To, Cost}
		if _, err := net.Link(p.To); errors.Is(err, host.ErrNoLink) {
			continue
		}
		cuts, err := net.CutsOnSend(p.To)
		switch {
		case err != nil:
			out = append(out, c.unknown(err))
		case p.Segments == model.SegmentsCut && !cuts:
			out = append(out, c.no("super-packets are cut in a veth pair of the agent (wscut0, wscut1), which costs CPU time",
				fmt.Sprintf("ethtool -K %s tso off gso off tx-udp-segmentation off, which takes the speed of super-packets from all that use it", p.To),
				"interface %s to function %s takes super-packets whole, and the function wants frames (segments: cut)", p.To, p.Function))
		case p.Segments == model.SegmentsKeep && cuts:
			out = append(out, c.no("super-packets are cut after all, before the device, and each frame is processed by itself",
				fmt.Sprintf("ethtool -K %s tso on gso on", p.To),
				"interface %s to function %s takes no super-packets, and the function wants them whole (segments: keep)", p.To, p.Function))
		default:
			out = append(out, c.yes("interface %s to function %s takes super-packets as segments: %s needs it", p.To, p.Function, p.Segments))
		}
	}
	return out
}

// cpuList reads a list of CPUs or nodes as the kernel writes it: 0-3,8.
func cpuList(text string) (out []int, err error) {
	for part := range strings.SplitSeq(strings.TrimSpace(text), ",") {
		if part == "" {
			continue
		}
		first, last, isRange := strings.Cut(part, "-")
		if !isRange {
			last = first
		}
		a, errA := strconv.Atoi(first)
		b, errB := strconv.Atoi(last)
		if errA != nil || errB != nil || b < a || b-a > 1<<16 {
			return nil, fmt.Errorf("%q is no list of CPUs", text)
		}
		for n := a; n <= b; n++ {
			out = append(out, n)
		}
	}
	return out, nil
}

// nic compares a NIC's queues and interrupts with the CPUs. sys is /sys, of this network namespace, and
// proc /proc.
func nic(sys, proc fs.FS, name string) (out []Finding) {
	dir := "class/net/" + name
	if _, err := fs.Stat(sys, dir+"/device"); err != nil {
		return nil // no hardware, or not to be seen here
	}
	read := func(from fs.FS, file string) ([]int, error) {
		b, err := fs.ReadFile(from, file)
		if err != nil {
			return nil, err
		}
		return cpuList(string(b))
	}
	c := check{"queues", name, Cost}
	cpus, err := read(sys, "devices/system/cpu/online")
	if err != nil {
		return []Finding{c.unknown(err)}
	}
	queues, err := fs.Glob(sys, dir+"/queues/rx-*")
	if err != nil {
		return []Finding{c.unknown(err)}
	}
	steered := slices.ContainsFunc(queues, func(q string) bool {
		b, err := fs.ReadFile(sys, q+"/rps_cpus")
		return err == nil && strings.Trim(strings.TrimSpace(string(b)), "0,") != ""
	})
	switch {
	case len(queues) < len(cpus) && !steered:
		out = append(out, c.no(fmt.Sprintf("at most %d of the CPUs process what arrives on it", len(queues)),
			fmt.Sprintf("ethtool -L %s combined %d, or receive packet steering (rps_cpus)", name, len(cpus)),
			"interface %s has %d receive queues for %d CPUs", name, len(queues), len(cpus)))
	case len(queues) < len(cpus):
		out = append(out, c.yes("interface %s has %d receive queues for %d CPUs, and spreads packets (rps_cpus)", name, len(queues), len(cpus)))
	default:
		out = append(out, c.yes("interface %s has %d receive queues for %d CPUs", name, len(queues), len(cpus)))
	}

	c = check{"numa", name, Cost}
	node, err := fs.ReadFile(sys, dir+"/device/numa_node")
	at, bad := strconv.Atoi(strings.TrimSpace(string(node)))
	if err != nil || bad != nil || at < 0 {
		return out // the machine has one node
	}
	near, err := read(sys, fmt.Sprintf("devices/system/node/node%d/cpulist", at))
	if err != nil {
		return append(out, c.unknown(err))
	}
	irqs, err := fs.ReadDir(sys, dir+"/device/msi_irqs")
	if errors.Is(err, fs.ErrNotExist) {
		return out
	}
	if err != nil {
		return append(out, c.unknown(err))
	}
	far := 0
	for _, irq := range irqs {
		to, err := read(proc, "irq/"+irq.Name()+"/effective_affinity_list")
		if err != nil {
			return append(out, c.unknown(err))
		}
		if slices.ContainsFunc(to, func(cpu int) bool { return !slices.Contains(near, cpu) }) {
			far++
		}
	}
	if far > 0 {
		return append(out, c.no("packets and the programs' maps cross between memories of two nodes", fmt.Sprintf("give the interrupts to CPUs %s (/proc/irq/NUMBER/smp_affinity_list; irqbalance undoes it)", listOf(near)),
			"%d of %d interrupts of interface %s, which is at NUMA node %d, go to CPUs of another node", far, len(irqs), name, at))
	}
	return append(out, c.yes("the interrupts of interface %s go to CPUs of its NUMA node %d", name, at))
}

// listOf writes CPUs as the kernel does.
func listOf(cpus []int) string {
	var out []string
	for i := 0; i < len(cpus); {
		j := i
		for j+1 < len(cpus) && cpus[j+1] == cpus[j]+1 {
			j++
		}
		if i == j {
			out = append(out, strconv.Itoa(cpus[i]))
		} else {
			out = append(out, fmt.Sprintf("%d-%d", cpus[i], cpus[j]))
		}
		i = j + 1
	}
	return strings.Join(out, ",")
}
