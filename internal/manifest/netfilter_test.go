package manifest

import (
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/waystamp/waystamp/internal/model"
)

func TestEveryFieldOfNetfilterReachesTheModel(t *testing.T) {
	m, err := Parse("dir/x.yaml", []byte(`version: 1
domain: {block: "fd00:5::/48"}
nodes:
  - {name: a, address: "fd00:1::a", locator: "fd00:5:0:a00::/56", interfaces: [{name: eth0, role: edge}, {name: eth1, role: core}]}
  - {name: b, address: "fd00:1::b", locator: "fd00:5:0:b00::/56", interfaces: [{name: eth0, role: edge}, {name: eth1, role: core}]}
functions:
  - name: a-very-long-function-name
    node: a
    kind: netfilter
    namespace: own
    arguments: {guest: 1, staff: 4294967295}
    zones: argument
    rewrites: true
    on-unknown: plain
    address: ["fd00:2::f", 192.0.2.1]
    cache: {size: 9}
    lifetime: 3s
    rules: |

      chain forward {
        accept
      }
  - {name: here, node: b, kind: netfilter, namespace: node, rules-file: rules/here.nft}
  - {name: there, node: a, kind: netfilter, namespace: ct_1.x, bypass: established, rules: "chain c { ct mark set $bypass; }"}
chains:
  - name: web
    ingress: [a]
    functions: [{name: a-very-long-function-name, argument: {forward: guest, reverse: staff}}, {sid: "fd00:5:0:f00::"}, there, {name: a-very-long-function-name, argument: staff}]
    egress: b
    match: {destination: "2001:db8::/64"}
    direction: both
`))
	if err != nil {
		t.Fatal(err)
	}
	detour := model.Proxy{Recognise: model.RecogniseMetadata, Segments: model.SegmentsKeep, Cache: 10000, Lifetime: time.Second}
	own, node, named := detour, detour, detour
	own.To, own.From = "wsi-a-ve14a795d", "wso-a-ve14a795d"
	own.Rewrites, own.OnUnknown, own.Cache, own.Lifetime = true, model.OnUnknownPlain, 9, 3*time.Second
	node.Local = true
	named.To, named.From = "wsi-there", "wso-there"
	want := []model.Function{
		{Name: "a-very-long-function-name", Node: "a", Kind: model.KindNetfilter, Proxy: own, Netfilter: model.Netfilter{
			Namespace: "own", Arguments: map[string]uint32{"guest": 1, "staff": 1<<32 - 1}, Zones: true,
			Rules: "\nchain forward {\n  accept\n}\n", RulesAt: model.Source{File: "dir/x.yaml", Line: 19, Column: 7},
			Addresses: []netip.Addr{netip.MustParseAddr("fd00:2::f"), netip.MustParseAddr("192.0.2.1")},
		}},
		{Name: "here", Node: "b", Kind: model.KindNetfilter, Proxy: node, Netfilter: model.Netfilter{Namespace: "node", RulesFile: "rules/here.nft"}},
		{Name: "there", Node: "a", Kind: model.KindNetfilter, Proxy: named, Netfilter: model.Netfilter{
			Namespace: "ct_1.x", Bypass: true, Rules: "chain c { ct mark set $bypass; }", RulesAt: model.Source{File: "dir/x.yaml", Line: 24, Column: 92},
		}},
	}
	if diff := cmp.Diff(want, m.Domain.Functions, equal); diff != "" {
		t.Errorf("functions (-want +got):\n%s", diff)
	}
	for _, f := range m.Domain.Functions {
		if err := f.Netfilter.Check(); err != nil {
			t.Errorf("%s: accepted, but %v", f.Name, err)
		}
	}
	c := m.Domain.Chains[0]
	if diff := cmp.Diff([]model.Argument{{Of: 0, Forward: 1, Reverse: 1<<32 - 1}, {Of: 2, Forward: 1<<32 - 1, Reverse: 1<<32 - 1}}, c.Arguments); diff != "" {
		t.Errorf("arguments (-want +got):\n%s", diff)
	}
	back := c.Directed(model.Reverse)
	if got := []uint32{back.ArgumentOf(0), back.ArgumentOf(1), back.ArgumentOf(2)}; !cmp.Equal(got, []uint32{1<<32 - 1, 0, 1<<32 - 1}) {
		t.Errorf("the way back has arguments %v", got)
	}
}

// What the agent's own namespaces send can only be of their chains or made there; of
// others nobody knows, until somebody says so.
func TestOnUnknownGoesByTheNamespace(t *testing.T) {
	for setting, want := range map[string]model.OnUnknown{
		"":                                      model.OnUnknownOriginate,
		"namespace: own":                        model.OnUnknownOriginate,
		"namespace: node":                       model.OnUnknownDrop,
		"namespace: c1":                         model.OnUnknownDrop,
		"on-unknown: drop":                      model.OnUnknownDrop,
		"on-unknown: plain":                     model.OnUnknownPlain,
		"namespace: c1, on-unknown: originate":  model.OnUnknownOriginate,
		"namespace: node, on-unknown: plain":    model.OnUnknownPlain,
		"namespace: own, on-unknown: originate": model.OnUnknownOriginate,
	} {
		m, err := Parse("x.yaml", []byte(`version: 1
domain: {block: "fd00:5::/48"}
nodes:
  - {name: a, address: "fd00:1::a", locator: "fd00:5:0:a00::/56", interfaces: [{name: eth0, role: edge}, {name: eth1, role: core}]}
  - {name: b, address: "fd00:1::b", locator: "fd00:5:0:b00::/56", interfaces: [{name: eth0, role: edge}, {name: eth1, role: core}]}
functions:
  - {name: fw, node: a, kind: netfilter, `+setting+`}
chains:
  - {name: web, ingress: [a], functions: [fw], egress: b, match: {destination: "2001:db8::/64"}}
`))
		if err != nil {
			t.Errorf("%q: %v", setting, err)
			continue
		}
		if got := m.Domain.Functions[0].Proxy.OnUnknown; got != want {
			t.Errorf("%q: on-unknown is %s; want %s", setting, got, want)
		}
	}
}
