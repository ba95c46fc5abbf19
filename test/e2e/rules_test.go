package e2e

import (
	"fmt"
	"strings"
	"testing"

	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
)

// Chains by ports and by DSCP to the same host, of which the latter comes first.
var choosing = strings.NewReplacer(
	`match: {destination: "fc00:8::/64"}`, `match: {destination: "fc00:8::/64", protocol: tcp, destination-port: 8443-8449, priority: 10}`,
	"lab:\n", `  - name: fast
    ingress: [r1]
    functions: [dpi]
    egress: r6
    match: {destination: "fc00:8::/64", dscp: 46, priority: 5}
lab:
`).Replace(narrowing)

// Ports and DSCP choose the chain, with real TCP, on both hooks.
func TestPortsAndDSCPChooseAChain(t *testing.T) {
	t.Parallel()
	for _, d := range []model.Datapath{model.DatapathTC, model.DatapathXDP} {
		pass := func(t *testing.T, carried change) {
			w := build(t, choosing, datapath(d), carried)
			if d == model.DatapathXDP { // so that a veth takes what XDP sends
				for host1, link := range map[string]string{"h1": "h1-r1", "h2": "h2-r6"} {
					must(t, w.net(host1).SetOffload(link, host.GRO, true))
					must(t, w.net(host1).SetOffload(link, host.TransmitSum, false))
				}
			}
			took := w.countingChains()
			w.reaches("h1", "h2")
			took.takes(t, "echo requests", false, false, false)
			w.shell("h1", "ping", "-6", "-c", "5", "-i", "0.2", "-Q", "0xb8", w.addr("h2").String())
			took.takes(t, "echo requests of class EF", false, false, true)
			if d == model.DatapathXDP { // which leaves nothing to TC that it can judge itself
				const n = 100
				countRuns(t)
				eventually(t, func() error { // a neighbour that is looked for anew takes XDP its ways
					tc := map[string]func() uint64{"r1": w.runs("r1", "ws_edge_tc"), "r6": w.runs("r6", "ws_core_tc")}
					w.shell("h1", "ping", "-6", "-c", fmt.Sprint(n), "-i", "0.002", "-Q", "0xb8", w.addr("h2").String())
					for node, ran := range tc {
						// The answers take no chain, and come in at r6 by its edge.
						if ran := ran(); ran > n/5 {
							return fmt.Errorf("%s: TC ran %d times for %d packets", node, ran, n)
						}
					}
					return nil
				})
				took.takes(t, "more of them", false, false, true)
			}
			w.upload("h1", "h2", 8443, 0, 1_000_000)
			took.takes(t, "TCP to the first port", true, true, false)
			w.upload("h1", "h2", 8449, 0, 1_000_000)
			took.takes(t, "TCP to the last port", true, true, false)
			w.upload("h1", "h2", 8450, 0, 1_000_000)
			took.takes(t, "TCP to another port", false, false, false)
		}
		t.Run(d.String(), func(t *testing.T) {
			t.Parallel()
			alsoOverLabels(t, pass)
		})
	}
}
