package agent

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"
	"strings"

	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/srv6"
)

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

// notForwarding says which interfaces of the plan the kernel forwards nothing
// from, so that programs there are told of no way. Of one that is not there the
// data path speaks.
func (a *agent) notForwarding(n plan.Node) (warnings []string) {
	versions := []string{"ipv6"}
	if carriesIPv4(n) {
		versions = append(versions, "ipv4")
	}
	for _, name := range forwards(n) {
		for _, v := range versions {
			key := "net/" + v + "/conf/" + name + "/forwarding"
			now, err := a.net.Sysctl(key)
			switch {
			case errors.Is(err, fs.ErrNotExist):
			case err != nil:
				warnings = append(warnings, err.Error())
			case now == "0":
				warnings = append(warnings, fmt.Sprintf("interface %s does not forward %s, so that packets for a chain that come in by it find no way (no-route, inner-no-route): sysctl -w %s=1",
					name, strings.Replace(v, "ip", "IP", 1), sysctlName(v, name)))
			}
		}
	}
	return warnings
}

// tooNarrow says which interfaces have a smaller MTU than the plan counts on. What is
// too long for one as it comes in is dropped before any program sees it, and nobody
// is told.
func (a *agent) tooNarrow(n plan.Node) (warnings []string) {
	for _, i := range n.Interfaces {
		l, err := a.net.Link(i.Name)
		switch {
		case errors.Is(err, host.ErrNoLink):
		case err != nil:
			warnings = append(warnings, err.Error())
		case l.MTU < i.MTU:
			warnings = append(warnings, fmt.Sprintf("interface %s has an MTU of %d, and the plan counts on %d: longer packets may be lost unseen; ip link set %[1]s mtu %[3]d, or write the smaller one into the domain's file",
				i.Name, l.MTU, i.MTU))
		}
	}
	return warnings
}

// sysctlName is the setting as sysctl(8) writes it, where a dot in a name is a slash.
func sysctlName(version, name string) string {
	return "net." + version + ".conf." + strings.ReplaceAll(name, ".", "/") + ".forwarding"
}

// tooNarrowForChains says which core interfaces leave too little to the packets of a
// chain. The file need not say the MTU of an interface, and then nobody has compared
// it with the chain's headers before.
func (a *agent) tooNarrowForChains(n plan.Node) (warnings []string) {
	type need struct {
		chain  string
		header int
	}
	var most need // of IPv6, which asks for so many bytes on every link
	add := func(p plan.PathID, m model.Match, segments []netip.Addr) {
		if m.Is4() {
			return
		}
		if h := srv6.OuterLen(len(srv6.Carried(segments, p.Encapsulation))); h > most.header {
			most = need{guarded{p.Chain, p.Direction, p.Path}.String(), h}
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
		l, err := a.net.Link(i.Name)
		if err != nil || l.MTU-most.header >= model.MTUMin {
			continue // tooNarrow speaks of the error
		}
		warnings = append(warnings, fmt.Sprintf("interface %s has an MTU of %d, and the headers of chain %s take %d: its packets that leave by it keep %d bytes, and IPv6 needs %d; ip link set %[1]s mtu %[7]d, at both ends of the link",
			i.Name, l.MTU, most.chain, most.header, l.MTU-most.header, model.MTUMin, model.MTUMin+most.header))
	}
	return warnings
}

// warningKind is what the log says of warnings that come and go together.
type warningKind struct{ fresh, gone string }

var (
	warnSettings = warningKind{"node settings block packets", "node settings no longer block packets"}
	warnSilence  = warningKind{"a function gives no packets back", "the function gives packets back again"}
)

// lookAtForwarding shows what it has found of the node's settings, once.
func (a *agent) lookAtForwarding() {
	if a.plan == nil {
		return
	}
	a.warn(warnSettings, slices.Concat(a.notForwarding(*a.plan), a.tooNarrow(*a.plan), a.tooNarrowForChains(*a.plan)))
}

// warn shows the warnings of a kind, and logs those that are new or gone.
func (a *agent) warn(kind warningKind, warnings []string) {
	fresh, gone := a.status.warned(kind.fresh, warnings)
	for _, w := range fresh {
		a.cfg.Log.Warn(kind.fresh, "warning", w)
	}
	for _, w := range gone {
		a.cfg.Log.Info(kind.gone, "warning", w)
	}
}
