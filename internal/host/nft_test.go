package host

import (
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
)

func TestRulesetIsLoadedInItsNamespaceOrNotAtAll(t *testing.T) {
	n := scratch(t)
	if err := n.LoadRuleset(t.Context(), "table ip6 a {\n}\ntable ip6 b {\n  nonsense\n}\n"); err == nil || !strings.HasPrefix(err.Error(), "nft says: line 4:") {
		t.Errorf("got %v, want an error that says where", err)
	}
	list := func(n *Net) string {
		out, err := Command(t.Context(), n.NetNS(), "nft", "list", "tables").CombinedOutput()
		if err != nil {
			t.Fatal(err)
		}
		return strings.TrimSpace(string(out))
	}
	if got := list(n); got != "" {
		t.Errorf("a ruleset with a mistake has left %q", got)
	}
	for _, text := range []string{"table ip6 a {\n}\n", "table ip6 b {\n}\n"} {
		if err := n.LoadRuleset(t.Context(), text); err != nil {
			t.Fatal(err)
		}
	}
	if got := list(n); got != "table ip6 a\ntable ip6 b" {
		t.Errorf("got %q", got)
	}
	if got := list(scratch(t)); got != "" {
		t.Errorf("another namespace has %q", got)
	}
}

func TestMissingNftIsSaid(t *testing.T) {
	n := scratch(t)
	t.Setenv("PATH", "/nowhere")
	if err := n.LoadRuleset(t.Context(), ""); !errors.Is(err, ErrNoNft) {
		t.Errorf("got %v, want %v", err, ErrNoNft)
	}
}

// IPv4 is routed by a neighbour that has no IPv4 address.
func TestRouteOfIPv4ByANeighbourOfIPv6(t *testing.T) {
	n := scratch(t)
	for _, err := range []error{
		n.AddVeth(Veth{Name: "a", PeerName: "b"}), n.SetUp("a"), n.SetUp("b"),
		n.AddRoute(Route{Destination: netip.MustParsePrefix("0.0.0.0/0"), Via: netip.MustParseAddr("fe80::1"), Device: "a"}),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	list, err := n.h.RouteList(nil, netlink.FAMILY_V4)
	must(t, err)
	if len(list) != 1 || list[0].Gw != nil || list[0].Via == nil || list[0].Via.String() != "Family: 10, Address: fe80::1" {
		t.Errorf("got %v", list)
	}
}
