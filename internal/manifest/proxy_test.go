package manifest

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/waystamp/waystamp/internal/model"
)

// functions is a file up to where its functions are.
const functions = `version: 1
domain: {block: "fd00:5::/48"}
nodes:
  - {name: a, address: "fd00:1::a", locator: "fd00:5:0:a00::/56", interfaces: [{name: eth1, role: core}]}
functions:
`

func TestEveryFieldOfAFunctionReachesTheModel(t *testing.T) {
	ms := time.Millisecond
	for line, want := range map[string]model.Proxy{
		"attach: local": {
			Local: true, Recognise: model.RecogniseMetadata, Segments: model.SegmentsKeep, Cache: 10000, Lifetime: time.Second,
		},
		"attach: {to: eth2, from: eth3}": {
			To: "eth2", From: "eth3", Cache: 10000, Lifetime: time.Second,
		},
		`attach: {to: eth2, from: eth2, via: "fd00:2::1"}, segments: keep, on-unknown: plain, cache: {size: 1}, lifetime: 10ms`: {
			To: "eth2", From: "eth2", Via: netip.MustParseAddr("fd00:2::1"), Segments: model.SegmentsKeep,
			OnUnknown: model.OnUnknownPlain, Cache: 1, Lifetime: 10 * ms,
		},
		`attach: {to: eth2, from: eth3, via: "fe80::1"}, recognise: metadata, rewrites: true, cache: {size: 65535}`: {
			To: "eth2", From: "eth3", Via: netip.MustParseAddr("fe80::1"), Recognise: model.RecogniseMetadata,
			Segments: model.SegmentsKeep, Rewrites: true, Cache: 65535, Lifetime: time.Second,
		},
		"attach: local, recognise: metadata, segments: keep, on-unknown: drop, rewrites: false, cache: {rate: 1000000, delay: 5ms}, lifetime: 60s": {
			Local: true, Recognise: model.RecogniseMetadata, Segments: model.SegmentsKeep, Cache: 10000, Lifetime: time.Minute,
		},
		"attach: {to: eth2, from: eth3}, recognise: content, segments: cut, cache: {rate: 100, delay: 999ms}": {
			To: "eth2", From: "eth3", Cache: 1024, Lifetime: time.Second,
		},
	} {
		m, err := Parse("x.yaml", []byte(functions+"  - {name: f, node: a, kind: unaware, "+line+"}\n"))
		if err != nil {
			t.Errorf("%s: %v", line, err)
			continue
		}
		f := model.Function{Name: "f", Node: "a", Kind: model.KindUnaware, Proxy: want}
		if diff := cmp.Diff([]model.Function{f}, m.Domain.Functions, equal); diff != "" {
			t.Errorf("%s (-want +got):\n%s", line, diff)
		}
		if err := m.Domain.Functions[0].Proxy.Check(); err != nil {
			t.Errorf("%s: accepted, but %v", line, err)
		}
	}
}

func TestFunctionsOfALabAreWhatTheFileSays(t *testing.T) {
	m := parse1(t, "../../examples/functions.yaml")
	var got []string
	for _, f := range m.Lab.Functions {
		got = append(got, f.Name+" "+f.Kind.String())
		if nft := f.Kind == model.LabNftables; nft != strings.HasPrefix(f.Ruleset, "table ip6 ") || nft != strings.HasSuffix(f.Ruleset, "}\n") {
			t.Errorf("%s has the ruleset %q", f.Name, f.Ruleset)
		}
	}
	if diff := cmp.Diff([]string{"fw nftables", "dpi raw", "nat nftables"}, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// A chain may go through one function twice, and several chains through one.
func TestFunctionsAreShared(t *testing.T) {
	src := string(read(t, "../../examples/functions.yaml"))
	src = strings.Replace(src, "functions: [fw, dpi, nat]", "functions: [nat, fw, nat, dpi, fw, fw]", 1)
	src = strings.Replace(src, "\nlab:", `
  - {name: second, ingress: [r1], functions: [nat, fw], egress: r6, match: {destination: "2001:db8::/32"}}

lab:`, 1)
	m, err := Parse("x.yaml", []byte(src))
	if err != nil {
		t.Fatal(err)
	}
	if len(m.Domain.Chains) != 2 || len(m.Domain.Chains[0].Functions) != 6 {
		t.Errorf("got %+v", m.Domain.Chains)
	}
}
