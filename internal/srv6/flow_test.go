package srv6

import (
	"encoding/hex"
	"net/netip"
	"testing"
)

func flowPacket(t testing.TB, digits string) []byte {
	t.Helper()
	b, err := hex.DecodeString(digits)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// Headers of packets from 2001:db8::1 to 2001:db8::2, but for the first 8 bytes,
// and of one from 192.0.2.1 to 192.0.2.2.
const (
	flowAddresses = "20010db8000000000000000000000001" + "20010db8000000000000000000000002"
	flowIPv4      = "c0000201c0000202"
)

func TestFlowsAreRead(t *testing.T) {
	six := Flow{Source: netip.MustParseAddr("2001:db8::1"), Destination: netip.MustParseAddr("2001:db8::2")}
	four := Flow{Source: netip.MustParseAddr("192.0.2.1"), Destination: netip.MustParseAddr("192.0.2.2")}
	as := func(f Flow, protocol uint8, known Known, sport, dport uint16) Flow {
		f.Protocol, f.Known, f.SourcePort, f.DestinationPort = protocol, known, sport, dport
		return f
	}
	for name, c := range map[string]struct {
		next   uint8
		packet string
		want   Flow
	}{
		"UDP":               {41, "6000000000081140" + flowAddresses + "1092003500080000", as(six, 17, ProtocolAndPorts, 4242, 53)},
		"ICMPv6":            {41, "6000000000083a40" + flowAddresses + "8000000000010002", as(six, 58, ProtocolAndPorts, 0, 0)},
		"hop-by-hop, UDP":   {41, "6000000000100040" + flowAddresses + "1100010400000000" + "1092003500080000", as(six, 17, ProtocolAndPorts, 4242, 53)},
		"AH of 24, TCP":     {41, "60000000001c3340" + flowAddresses + "0604000000000001000000010000000000000000000000000400005000000000"[:56], as(six, 6, ProtocolAndPorts, 1024, 80)},
		"first fragment":    {41, "6000000000102c40" + flowAddresses + "1100000100000007" + "1092003500080000", as(six, 17, ProtocolOnly, 0, 0)},
		"fragment, options": {41, "6000000000102c40" + flowAddresses + "3c00000100000007" + "1100010400000000", as(six, 60, Hidden, 0, 0)},
		"later fragment":    {41, "6000000000102c40" + flowAddresses + "1100000800000007" + "1092003500080000", as(six, 17, Later, 0, 0)},
		"later, options":    {41, "6000000000102c40" + flowAddresses + "3c00000800000007" + "1100010400000000", as(six, 60, Later, 0, 0)},
		"whole fragment":    {41, "6000000000102c40" + flowAddresses + "1100000000000007" + "1092003500080000", as(six, 17, ProtocolOnly, 0, 0)},
		"two fragments":     {41, "6000000000182c40" + flowAddresses + "2c00000000000007" + "1100000000000007" + "1092003500080000", as(six, 44, Hidden, 0, 0)},
		"mobility":          {41, "6000000000088740" + flowAddresses + "1100000000000000", as(six, 135, Hidden, 0, 0)},
		"HIP":               {41, "6000000000088b40" + flowAddresses + "1100000000000000", as(six, 139, Hidden, 0, 0)},
		"Shim6":             {41, "6000000000088c40" + flowAddresses + "1100000000000000", as(six, 140, Hidden, 0, 0)},
		"experiment":        {41, "600000000008fd40" + flowAddresses + "1100000000000000", as(six, 253, Hidden, 0, 0)},
		"options, another":  {41, "6000000000103c40" + flowAddresses + "fe00010400000000" + "1100000000000000", as(six, 254, Hidden, 0, 0)},
		"ESP":               {41, "6000000000083240" + flowAddresses + "0000000100000001", as(six, 50, ProtocolAndPorts, 0, 0)},
		"nothing behind it": {41, "6000000000083b40" + flowAddresses + "1092003500080000", as(six, 59, ProtocolAndPorts, 0, 0)},
		"IPv4 AH":           {4, "4500001c000040004033" + "0000" + flowIPv4 + "0601000000000000", as(four, 51, Hidden, 0, 0)},
		"IPv4 AH, cut":      {4, "4500001c000020004033" + "0000" + flowIPv4 + "0601000000000000", as(four, 51, Hidden, 0, 0)},
		"IPv4 UDP":          {4, "4500001c000040004011" + "0000" + flowIPv4 + "1092003500080000", as(four, 17, ProtocolAndPorts, 4242, 53)},
		"IPv4 options":      {4, "46000020000000004006" + "0000" + flowIPv4 + "01010101" + "0400005000000000", as(four, 6, ProtocolAndPorts, 1024, 80)},
		"IPv4 fragment":     {4, "4500001c000020004011" + "0000" + flowIPv4 + "1092003500080000", as(four, 17, ProtocolOnly, 0, 0)},
		"IPv4 last of some": {4, "4500001c000000014011" + "0000" + flowIPv4 + "1092003500080000", as(four, 17, ProtocolOnly, 0, 0)},
	} {
		got, ok := ReadFlow(c.next, flowPacket(t, c.packet))
		if !ok || got != c.want {
			t.Errorf("%s: %+v, %t; want %+v", name, got, ok, c.want)
		}
	}
}

// What is read depends on nothing behind it, and of a part of a packet either
// the same is read or nothing.
func FuzzReadFlow(f *testing.F) {
	f.Add(uint8(41), flowPacket(f, "6000000000083a40"+flowAddresses+"8000000000010002"))
	f.Add(uint8(41), flowPacket(f, "6000000000100040"+flowAddresses+"1100010400000000"+"1092003500080000"))
	f.Add(uint8(41), flowPacket(f, "6000000000102c40"+flowAddresses+"1100000100000007"+"1092003500080000"))
	f.Add(uint8(4), flowPacket(f, "46000020000000004006"+"0000"+flowIPv4+"01010101"+"0400005000000000"))
	f.Add(uint8(17), []byte{1, 2, 3, 4})
	f.Fuzz(func(t *testing.T, next uint8, b []byte) {
		want, ok := ReadFlow(next, b)
		if ok && next != 4 && next != 41 {
			t.Fatalf("Next Header %d has a flow", next)
		}
		if ok && (want.Known != ProtocolAndPorts || !hasPorts(want.Protocol)) && (want.SourcePort != 0 || want.DestinationPort != 0) {
			t.Fatalf("%+v has ports", want)
		}
		if more, still := ReadFlow(next, append(b[:len(b):len(b)], 0xff, 0xff, 0xff, 0xff)); ok && (!still || more != want) {
			t.Fatalf("with bytes behind it %+v, %t; without %+v", more, still, want)
		}
		for n := range min(len(b), 400) {
			if part, whole := ReadFlow(next, b[:n]); whole && (!ok || part != want) {
				t.Fatalf("its first %d bytes are of %+v, all of %+v, %t", n, part, want, ok)
			}
		}
	})
}
