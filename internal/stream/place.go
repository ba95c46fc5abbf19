package stream

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"

	"github.com/waystamp/waystamp/internal/host"
)

// Place is a network namespace in which every address is the worker's own on the way
// in, and none on the way out. So a worker accepts connections to any address, and opens
// others from any, of both IP versions and without a capability. Nothing else runs
// there.
type Place struct {
	Link       string     // the only interface besides lo, by which everything comes and goes
	Gateway    netip.Addr // a link-local IPv6 address behind Link; next hop of IPv4 too (RFC 8950)
	GatewayMAC [6]byte
}

// The namespace's settings of TCP, which are the worker's alone.
var placeSettings = []struct{ key, value string }{
	{"net/ipv4/ip_forward", "0"},
	{"net/ipv6/conf/all/forwarding", "0"},
	{"net/ipv4/conf/all/rp_filter", "0"}, // sources are whoever opens connections
	{"net/core/somaxconn", "65535"},
	{"net/ipv4/tcp_max_syn_backlog", "65535"},
	{"net/ipv4/tcp_mtu_probing", "1"},     // where errors about sizes do not arrive
	{"net/ipv4/tcp_tw_reuse", "1"},        // a client may use its port again
	{"net/ipv4/tcp_keepalive_time", "60"}, // a dead peer is noticed within two minutes
	{"net/ipv4/tcp_keepalive_intvl", "10"},
	{"net/ipv4/tcp_keepalive_probes", "6"},
	{"net/ipv4/tcp_retries2", "8"}, // some 100 s, the least that RFC 1122 section 4.2.3.5 allows
}

// Prepare makes a namespace that has the interface a worker's place. It may be called
// again, and then changes only what is not right.
func (p Place) Prepare(n *host.Net) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("prepare the place of a worker: %w", err)
		}
	}()
	if err := n.SetSysctl("net/ipv4/conf/"+p.Link+"/rp_filter", "0"); err != nil {
		return err
	}
	for _, s := range placeSettings {
		if err := n.SetSysctl(s.key, s.value); err != nil {
			return err
		}
	}
	for _, link := range []string{"lo", p.Link} {
		if err := n.SetUp(link); err != nil {
			return err
		}
	}
	if err := n.AddNeighbour(p.Link, p.Gateway, p.GatewayMAC); err != nil {
		return err
	}
	for _, any := range []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")} {
		ipv4 := any.Addr().Is4()
		for _, r := range []host.Route{
			// Also what makes any address a valid source of own packets.
			{Destination: any, Type: host.RouteLocal, Device: "lo", Table: host.LocalTable},
			{Destination: any, Device: p.Link, Via: p.Gateway},
		} {
			if err := n.AddRoute(r); err != nil && !errors.Is(err, fs.ErrExist) {
				return err
			}
		}
		if err := n.AddRule(host.Rule{IPv4: ipv4, Priority: 100, Input: p.Link, Table: host.LocalTable}); err != nil {
			return err
		}
		// The kernel's rule has all packets look into the local table first.
		if err := n.DeleteRule(host.Rule{IPv4: ipv4, Priority: 0, Table: host.LocalTable}); err != nil {
			return err
		}
	}
	return nil
}
