package doctor

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
)

// neighbourhood has all interfaces of a network; *host.Net does.
type neighbourhood interface {
	Network
	Links() ([]host.Link, error)
	// FiltersForwarded tells whether a packet filter looks at forwarded packets.
	FiltersForwarded() (bool, error)
	XDPFeatures(name string) (host.XDPFeatures, error)
}

// ourMark begins the alias of interfaces that agents make, of all instances.
const ourMark = "waystamp "

// unplanned are interfaces from which the kernel forwards packets, and at which no program looks at them. guarded tells
// whether a program of ours is at one after all: another instance's.
func unplanned(net neighbourhood, n plan.Node, guarded func(host.Link) (bool, error)) (out []Finding) {
	c := check{"unplanned", "", Warning}
	links, err := net.Links()
	if err != nil {
		return []Finding{c.unknown(err)}
	}
	planned, kinds := map[string]bool{}, map[int]string{}
	for _, u := range usedBy(n) {
		planned[u.name] = true
	}
	for _, l := range links {
		kinds[l.Index] = l.Kind
	}
	filtered := sync.OnceValue(func() bool {
		yes, err := net.FiltersForwarded()
		return yes && err == nil
	})
	for _, l := range links {
		// What belongs to a bridge or bond sends its packets up to that; a VRF routes them itself.
		below := l.Master != 0 && kinds[l.Master] != "vrf"
		if planned[l.Name] || !l.Up || below || l.Kind == "vrf" || l.Kind == "dummy" || l.Frame == "loopback" || strings.HasPrefix(l.Alias, ourMark) {
			continue
		}
		c.about = l.Name
		by, err := forwardsFrom(net, l.Name, carriesIPv4(n) || labelsByIPv4(n))
		if err == nil && len(by) > 0 {
			var ours bool
			if ours, err = guarded(l); ours {
				continue
			}
		}
		switch {
		case err != nil:
			out = append(out, c.unknown(fmt.Errorf("interface %s, which is in no plan: %w", l.Name, err)))
		case len(by) > 0:
			mend := fmt.Sprintf("keep the kernel from forwarding what arrives on it (%s)", strings.Join(withoutForwarding(l.Name, by), "; "))
			if l.Frame == "ether" {
				mend = fmt.Sprintf("write it into the domain's file as an edge interface of %s, or %s", n.Name, mend)
			}
			f := c.no("packets that arrive on it take no chain, and are not refused if they are for a SID", mend,
				"interface %s is up and in no plan, and the kernel forwards %s from it", l.Name, strings.Join(by, " and "))
			if filtered() {
				f.Verdict = Unknown
				f.Says += ", unless a rule at hook forward drops it"
			}
			out = append(out, f)
		}
	}
	if len(out) == 0 {
		c.about = ""
		out = append(out, c.yes("the kernel forwards packets from no interface that is in no plan"))
	}
	return out
}

// tagsUnderXDP: a device that takes VLAN tags off frames does so before XDP, where programs would take the frames of a VLAN for the
// interface's own. VLANs that are in the plan leave the interface below them to TC.
func tagsUnderXDP(net neighbourhood, n plan.Node) (out []Finding) {
	links, err := net.Links()
	if err != nil {
		return []Finding{check{"xdp-vlan", "", Warning}.unknown(err)}
	}
	planned := map[string]bool{}
	for _, u := range usedBy(n) {
		planned[u.name] = true
	}
	for _, i := range n.Interfaces {
		at := slices.IndexFunc(links, func(l host.Link) bool { return l.Name == i.Name })
		if at < 0 || i.Datapath != model.DatapathXDP && (i.Datapath != model.DatapathAuto || links[at].Kind != "device") {
			continue
		}
		// TC does all the work where the driver has no XDP; a kernel that cannot tell leaves it open.
		if f, err := net.XDPFeatures(i.Name); err == nil && !f.Native && i.Datapath == model.DatapathAuto {
			continue
		}
		var above []string
		ours := false
		for _, l := range links {
			if l.VLAN.ID != 0 && l.VLAN.Parent == links[at].Index && l.PeerNamespace == 0 { // the parent is in this namespace
				above = append(above, l.Name)
				ours = ours || planned[l.Name]
			}
		}
		if len(above) == 0 || ours {
			continue
		}
		c := check{"xdp-vlan", i.Name, Warning}
		switch on, err := net.FeatureOn(i.Name, "rx-vlan-hw-parse"); {
		case err != nil:
			out = append(out, c.unknown(err))
		case on:
			out = append(out, c.no(fmt.Sprintf("XDP takes frames for %s for those of %s", strings.Join(above, ", "), i.Name), fmt.Sprintf("ethtool -K %s rxvlan off, or datapath: tc", i.Name),
				"interface %s takes VLAN tags off frames before XDP sees them, and %s is on top of it", i.Name, strings.Join(above, ", ")))
		default:
			out = append(out, c.yes("interface %s leaves VLAN tags on frames", i.Name))
		}
	}
	return out
}

// forwardsFrom are the versions of IP that the kernel forwards from an interface. Of IPv6 one setting is for
// all (ip6_forward), and since Linux 6.17 one of an interface's own (force_forwarding).
func forwardsFrom(net Network, name string, ipv4 bool) (versions []string, err error) {
	read := func(version, conf, key string) bool {
		value, there, bad := setting(net, version, conf, key)
		err = errors.Join(err, bad)
		return there && value != "0"
	}
	if _, there, _ := setting(net, "ipv6", name, "disable_ipv6"); there && !read("ipv6", name, "disable_ipv6") &&
		(read("ipv6", "all", "forwarding") || read("ipv6", name, "force_forwarding")) {
		versions = append(versions, "IPv6")
	}
	if ipv4 && read("ipv4", name, "forwarding") {
		versions = append(versions, "IPv4")
	}
	return versions, err
}

// withoutForwarding are commands that end it.
func withoutForwarding(name string, versions []string) (commands []string) {
	for _, v := range versions {
		if v == "IPv4" {
			commands = append(commands, "sysctl -w "+sysctlName("ipv4", name, "forwarding")+"=0")
		} else {
			commands = append(commands, "an nftables rule: iifname "+name+" drop, at hook forward; or sysctl -w "+sysctlName("ipv6", name, "disable_ipv6")+"=1")
		}
	}
	return commands
}
