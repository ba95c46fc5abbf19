package bench

import (
	"context"
	"errors"

	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/netfilter"
	"github.com/waystamp/waystamp/internal/plan"
)

// bypassRules are done with flows that have been answered.
const bypassRules = `chain forward {
	type filter hook forward priority filter; policy accept;
	ct state established ct mark set $bypass accept
}
`

// bypass loads the rules of a function with a bypass, and puts the flow of a packet of UDP into
// its connection tracking as one that they are done with: the generator gets no answers.
func bypass(ctx context.Context, ns netfilter.Namespace, p plan.Proxy, inner []byte) (err error) {
	mark := p.Netfilter.BypassMark(p.Function)
	if err := ns.Load(ctx, netfilter.Ruleset{Function: p.Function, Text: p.Netfilter.Rules, Arguments: p.Netfilter.Arguments, Bypass: mark}); err != nil {
		return err
	}
	inside, err := ns.Open()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, inside.Close()) }()
	n, err := host.Open(inside)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, n.Close()) }()
	// It is not to go between two runs, of which each renews it.
	if err := n.SetSysctl("net/netfilter/nf_conntrack_udp_timeout_stream", "3600"); err != nil {
		return err
	}
	return n.TrackAnswered(inner, mark)
}
