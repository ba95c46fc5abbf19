package model

import (
	"net/netip"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func TestConditionsAreReadAsTheyAreWritten(t *testing.T) {
	for _, c := range []struct {
		into interface {
			UnmarshalText([]byte) error
			MarshalText() ([]byte, error)
		}
		text, want string
	}{
		{new(Protocol), "tcp", "tcp"}, {new(Protocol), "6", "tcp"}, {new(Protocol), "99", "99"}, {new(Protocol), "255", "255"},
		{new(Protocol), "0", ""}, {new(Protocol), "44", ""}, {new(Protocol), "256", ""}, {new(Protocol), "TCP", ""}, {new(Protocol), "", ""},
		{new(Ports), "443", "443"}, {new(Ports), "1-65535", "1-65535"}, {new(Ports), "8-8", "8"},
		{new(Ports), "0", ""}, {new(Ports), "9-8", ""}, {new(Ports), "65536", ""}, {new(Ports), "1-", ""}, {new(Ports), "-1", ""}, {new(Ports), "1-2-3", ""},
		{new(DSCP), "0", "0"}, {new(DSCP), "63", "63"}, {new(DSCP), "64", ""}, {new(DSCP), "-1", ""}, {new(DSCP), "ef", ""},
		{new(Mark), "16", "0x10"}, {new(Mark), "0x10/0xf0", "0x10/0xf0"}, {new(Mark), "1/0xffffffff", "0x1"}, {new(Mark), "0xffffffff", "0xffffffff"},
		{new(Mark), "0", ""}, {new(Mark), "0/1", ""}, {new(Mark), "3/1", ""}, {new(Mark), "0x100000000", ""}, {new(Mark), "-1", ""}, {new(Mark), "1/", ""}, {new(Mark), "/1", ""},
	} {
		err := c.into.UnmarshalText([]byte(c.text))
		if c.want == "" {
			if err == nil || !strings.Contains(err.Error(), "expect") {
				t.Errorf("%T %q: %v; want an error that says what is expected", c.into, c.text, err)
			}
			continue
		}
		if got, _ := c.into.MarshalText(); err != nil || string(got) != c.want {
			t.Errorf("%T %q: %q, %v; want %q", c.into, c.text, got, err, c.want)
		}
	}
}

// Two matches overlap exactly if some packet is in both.
func TestOverlapIsThatSomePacketIsInBoth(t *testing.T) {
	hosts := []netip.Addr{netip.MustParseAddr("2001:db8::1"), netip.MustParseAddr("2001:db8:1::1")}
	prefixes := []netip.Prefix{{}, netip.MustParsePrefix("2001:db8::/32"), netip.MustParsePrefix("2001:db8::/48"), netip.MustParsePrefix("2001:db8:1::/48")}
	ports := []Ports{{}, {1, 2}, {2, 3}, {3, 3}}
	match := rapid.Custom(func(t *rapid.T) Match {
		p := rapid.SampledFrom(prefixes)
		return Match{
			Destination: p.Draw(t, "destination"), Source: p.Draw(t, "source"), Priority: 1,
			Protocol:        rapid.SampledFrom([]Protocol{0, 6, 17}).Draw(t, "protocol"),
			DestinationPort: rapid.SampledFrom(ports).Draw(t, "port"),
			DSCP:            rapid.SampledFrom([]DSCP{0, 1, 2}).Draw(t, "DSCP"),
			Mark:            rapid.SampledFrom([]Mark{{}, {1, 3}, {2, 3}, {4, 4}, {1, ^uint32(0)}}).Draw(t, "mark"),
		}
	})
	takes := func(m Match, dst, src netip.Addr, protocol Protocol, port uint16, dscp DSCP, mark uint32) bool {
		return m.Covers(dst, src) && (m.Protocol == 0 || m.Protocol == protocol) && (m.DSCP == 0 || m.DSCP == dscp) && mark&m.Mark.Mask == m.Mark.Value &&
			(m.DestinationPort == Ports{} || m.DestinationPort.First <= port && port <= m.DestinationPort.Last)
	}
	rapid.Check(t, func(t *rapid.T) {
		a, b := match.Draw(t, "a"), match.Draw(t, "b")
		some := false
		for _, dst := range hosts {
			for _, src := range hosts {
				for _, protocol := range []Protocol{6, 17} {
					for port := range uint16(4) {
						for dscp := DSCP(1); dscp <= 2; dscp++ {
							for mark := range uint32(8) {
								some = some || takes(a, dst, src, protocol, port, dscp, mark) && takes(b, dst, src, protocol, port, dscp, mark)
							}
						}
					}
				}
			}
		}
		if a.Overlaps(b) != some || b.Overlaps(a) != some {
			t.Fatalf("%s and %s: overlap %t, %t; want %t", a, b, a.Overlaps(b), b.Overlaps(a), some)
		}
	})
}
