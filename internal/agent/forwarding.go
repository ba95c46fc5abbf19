package agent

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
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

// lookAtForwarding shows what it has found of the node's settings, once.
func (a *agent) lookAtForwarding() {
	if a.plan == nil {
		return
	}
	fresh, gone := a.status.warned(slices.Concat(a.notForwarding(*a.plan), a.tooNarrow(*a.plan)))
	for _, w := range fresh {
		a.cfg.Log.Warn("the node's settings stop packets", "warning", w)
	}
	for _, w := range gone {
		a.cfg.Log.Info("the node's settings no longer stop packets", "warning", w)
	}
}
