package model

import (
	"net/netip"
	"strings"
	"testing"
)

func TestFlowsAreReadAsTheyArePrinted(t *testing.T) {
	for text, want := range map[string]Flow{
		"2001:db8::1,2001:db8:8::/64,tcp,any,443": {
			Source: netip.MustParsePrefix("2001:db8::1/128"), Destination: netip.MustParsePrefix("2001:db8:8::/64"), Protocol: 6, DestinationPort: 443,
		},
		"any,192.0.2.0/24,17,53,any": {Destination: netip.MustParsePrefix("192.0.2.0/24"), Protocol: 17, SourcePort: 53},
		"0.0.0.0/0,any,any":          {Source: netip.MustParsePrefix("0.0.0.0/0")},
		"any,any,icmpv6":             {Protocol: 58},
		"any,any,udp,any,any":        {Protocol: 17},
		"192.0.2.1,any,89":           {Source: netip.MustParsePrefix("192.0.2.1/32"), Protocol: 89},
	} {
		f, err := ParseFlow(text)
		if err != nil || f != want {
			t.Errorf("%s: %+v, %v; want %+v", text, f, err, want)
		}
		if again, err := ParseFlow(f.String()); err != nil || again != f {
			t.Errorf("%s: printed as %s, which is read as %+v, %v", text, f, again, err)
		}
		if f.Reverse() == f || f.Reverse().Reverse() != f {
			if f.Source != f.Destination || f.SourcePort != f.DestinationPort {
				t.Errorf("%s: reversed %s", text, f.Reverse())
			}
		}
	}
}

func TestFlowsThatNoPacketHas(t *testing.T) {
	for text, want := range map[string]string{
		"":                                 "has 1 fields; expect SRC,DST,PROTO or SRC,DST,PROTO,SPORT,DPORT",
		"any,any,tcp,80":                   "has 4 fields; expect",
		"2001:db8::1/64,any,tcp":           "source: 2001:db8::1/64 has bits set behind its length; expect 2001:db8::/64, or the address alone",
		"any,2001:db8::g,tcp":              `destination: "2001:db8::g" is neither an address nor a prefix`,
		"any,fe80::1%eth0,tcp":             "is neither an address nor a prefix",
		"::ffff:192.0.2.1,any,tcp":         "is neither an address nor a prefix",
		"::ffff:0:0/96,any,tcp":            "is neither an address nor a prefix",
		"any,192.0.2.0/33,tcp":             "is neither an address nor a prefix",
		"192.0.2.1,2001:db8::1,tcp":        "a source and a destination of different versions of IP",
		"any,any,any":                      "selects all packets; name an address, a protocol or a port",
		"any,any,tcq":                      `"tcq" is not a protocol; expect tcp`,
		"any,any,44":                       `"44" is not a protocol`,
		"any,any,0":                        `"0" is not a protocol`,
		"any,any,icmp,any,8":               "has ports, and protocol icmp; expect one of tcp, udp",
		"any,any,any,any,443":              "has ports, and protocol any; expect one of tcp, udp",
		"any,any,tcp,0,any":                `source port: "0" is not a port; expect a number from 1 to 65535, or any`,
		"any,any,tcp,any,65536":            `destination port: "65536" is not a port`,
		"any,any,tcp,any,https":            `destination port: "https" is not a port`,
		"any,any,tcp,any,80-90":            `destination port: "80-90" is not a port`,
		"2001:db8::1, 2001:db8::2,tcp":     `destination: " 2001:db8::2" is neither`,
		"2001:db8::1,2001:db8::2,tcp,1,2,": "has 6 fields",
	} {
		if f, err := ParseFlow(text); err == nil || !strings.Contains(err.Error(), want) || f != (Flow{}) {
			t.Errorf("%s: %+v, %v; want %q", text, f, err, want)
		}
	}
}

func TestAFlowMeetsAMatchThatTakesOneOfItsPackets(t *testing.T) {
	prefix := netip.MustParsePrefix
	six := Match{Destination: prefix("2001:db8:8::/48"), Priority: 1, Protocol: 6, DestinationPort: Ports{400, 500}}
	four := Match{Source: prefix("192.0.2.0/24")}
	for _, c := range []struct {
		flow string
		m    Match
		want bool
	}{
		{"any,2001:db8:8::1,tcp,any,443", six, true},
		{"any,2001:db8::/32,any", six, true},
		{"any,any,tcp,443,any", six, true},
		{"any,any,tcp,any,500", six, true},
		{"any,any,tcp,any,501", six, false},
		{"any,any,tcp,any,399", six, false},
		{"any,2001:db8:9::1,any", six, false},
		{"any,any,udp", six, false},
		{"192.0.2.1,any,any", six, false},
		{"::/0,any,any", six, true},
		{"::/0,any,any", four, false},
		{"192.0.2.9,any,udp,53,53", four, true},
		{"192.0.3.9,any,any", four, false},
		{"any,198.51.100.1,any", four, true},
		{"any,2001:db8::1,any", four, false},
		{"any,any,tcp", Match{}, true},
	} {
		f, err := ParseFlow(c.flow)
		if err != nil {
			t.Fatal(err)
		}
		if got := f.Meets(c.m); got != c.want {
			t.Errorf("flow %s and a match of %s: %t, want %t", c.flow, c.m, got, c.want)
		}
	}
}
