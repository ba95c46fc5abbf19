package oracle

import (
	"encoding/binary"
	"net/netip"
	"os"
	"slices"
	"testing"

	"github.com/waystamp/waystamp/internal/manifest"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
)

// tcp is a frame with a segment of TCP.
func tcp(from, to netip.AddrPort) []byte {
	b := make([]byte, 14+40+20)
	binary.BigEndian.PutUint16(b[12:], 0x86dd)
	ip := b[14:]
	ip[0], ip[5], ip[6], ip[7] = 0x60, 20, 6, 64
	source, destination := from.Addr().As16(), to.Addr().As16()
	copy(ip[8:], source[:])
	copy(ip[24:], destination[:])
	binary.BigEndian.PutUint16(ip[40:], from.Port())
	binary.BigEndian.PutUint16(ip[42:], to.Port())
	ip[52], ip[53] = 0x50, 0x10
	return b
}

// The guard of a service asks for the very chain that a connection's port stands for, and for
// some chain of the service from all other ports.
func TestAServiceTakesWhatCameByItsChains(t *testing.T) {
	const file = "../../examples/zerotrust.yaml"
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	m, err := manifest.Parse(file, text)
	if err != nil {
		t.Fatal(err)
	}
	d, err := plan.Compile(m.Domain, nil)
	if err != nil {
		t.Fatal(err)
	}
	nodes := map[string]Node{}
	for _, n := range d.Nodes {
		nodes[n.Name] = Node{Node: n, Armed: true}
	}
	at := func(node string, role model.Role) model.Interface {
		i := slices.IndexFunc(nodes[node].Interfaces, func(i model.Interface) bool { return i.Role == role })
		return nodes[node].Interfaces[i]
	}
	client, origin := netip.MustParseAddr("fc00:7::2"), m.Domain.Services[0].Origin.Address
	ports, forward := map[string]uint16{}, map[string]uint32{}
	for _, c := range nodes["r1"].Gateway().Chains {
		ports[c.Chain], forward[c.Chain] = c.Ports.First+7, c.Forward
	}

	// What clients send is in no chain: connections of the gateway alone are.
	for _, port := range []uint16{1, ports["light"], ports["deep"], 65535} {
		r := nodes["r1"].Process(Arrival{Interface: at("r1", model.RoleEdge), Frame: tcp(netip.AddrPortFrom(client, port), origin), Number: 1})
		if r.Verdict == Forward {
			t.Errorf("a client's packet from port %d goes into a chain", port)
		}
	}
	// What comes to r6 without a proof is refused, from whatever port.
	for _, port := range []uint16{0, 1, 443, ports["light"], ports["deep"], 40000, 65535} {
		r := nodes["r6"].Process(Arrival{Interface: at("r6", model.RoleCore), Frame: tcp(netip.AddrPortFrom(client, port), origin)})
		if r.Verdict != Drop || r.Reason != Unproven {
			t.Errorf("from port %d, without a proof: %s %s", port, r.Verdict, r.Reason)
		}
	}
	if r := nodes["r6"].Process(Arrival{Interface: at("r6", model.RoleCore), Frame: tcp(netip.AddrPortFrom(client, 40000), netip.AddrPortFrom(origin.Addr(), 22))}); r.Verdict != Pass {
		t.Errorf("to another port: %s %s", r.Verdict, r.Reason)
	}

	// A node that can stamp for both chains sends connections of one by the other.
	by := func(chain string) Node {
		r1 := nodes["r1"]
		r1.Headends, r1.Proxies, r1.Egresses = nil, nil, nil
		for _, h := range nodes["r1"].Headends {
			if h.Path == forward[chain] {
				h.From, h.Match = "", model.Match{Destination: netip.PrefixFrom(origin.Addr(), 128)}
				r1.Headends = append(r1.Headends, h)
			}
		}
		return r1
	}
	ways := map[string][]string{"light": {"r4"}, "deep": {"r2", "r3"}}
	for chain, way := range ways {
		for its, port := range ports {
			r := by(chain).Process(Arrival{Interface: at("r1", model.RoleEdge), Frame: tcp(netip.AddrPortFrom(client, port), origin), Number: 1})
			for _, hop := range append(slices.Clone(way), "r6") {
				if r.Verdict != Forward {
					t.Fatalf("before %s: %s %s", hop, r.Verdict, r.Reason)
				}
				frame := append(make([]byte, 14), r.Packet...)
				binary.BigEndian.PutUint16(frame[12:], 0x86dd)
				r = nodes[hop].Process(Arrival{Interface: at(hop, model.RoleCore), Frame: frame})
			}
			switch {
			case its == chain && (r.Verdict != Forward || len(r.Reported) > 0):
				t.Errorf("by %s from its port %d: %s %s, reported %v", chain, port, r.Verdict, r.Reason, r.Reported)
			case its != chain && (r.Verdict != Drop || r.Reason != WrongChain):
				t.Errorf("by %s from port %d of %s: %s %s", chain, port, its, r.Verdict, r.Reason)
			}
		}
	}
}
