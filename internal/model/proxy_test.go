package model

import (
	"math/big"
	"net/netip"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func TestCacheFollowsFromRateAndDelay(t *testing.T) {
	for _, c := range []struct {
		rate  int
		delay time.Duration
		want  int
	}{
		{1, time.Microsecond, 1024},              // a burst is no rate
		{1_000_000, 5 * time.Millisecond, 10000}, // 5000 at once, and as many again
		{200_001, 5 * time.Millisecond, 2001},    // 2000.01, rounded up
		{1 << 20, time.Second, 1 << 21},
		{RateMax, LifetimeMax, 120_000_000_000},
	} {
		if got := CacheFor(c.rate, c.delay); got != c.want {
			t.Errorf("%d/s for %s: %d headers; want %d", c.rate, c.delay, got, c.want)
		}
	}
}

func TestCacheIsWhatLittleSaysTwice(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		rate := rapid.IntRange(1, RateMax).Draw(t, "rate")
		delay := time.Duration(rapid.Int64Range(1, int64(LifetimeMax)).Draw(t, "delay"))
		n := new(big.Rat).SetFrac(big.NewInt(int64(delay)), big.NewInt(int64(time.Second)))
		n.Mul(n, big.NewRat(2*int64(rate), 1))
		got := big.NewRat(int64(CacheFor(rate, delay)), 1)
		over := new(big.Rat).Sub(got, n)
		if over.Sign() < 0 || over.Cmp(big.NewRat(1, 1)) >= 0 && got.Cmp(big.NewRat(CacheForMin, 1)) != 0 {
			t.Fatalf("%s headers; want %s, rounded up", got.FloatString(3), n.FloatString(3))
		}
	})
}

func TestProxyKeepsItsRules(t *testing.T) {
	good := func() Proxy {
		return Proxy{To: "eth2", From: "eth3", Via: netip.MustParseAddr("fe80::2"), Cache: 1, Lifetime: time.Second}
	}
	if err := good().Check(); err != nil {
		t.Fatalf("refused before the change: %v", err)
	}
	for _, c := range []struct {
		change func(*Proxy)
		want   string // "": accepted
	}{
		{func(p *Proxy) { p.To = "" }, `attach: to "" is empty`},
		{func(p *Proxy) { p.From = "a/b" }, `attach: from "a/b" has the character`},
		{func(p *Proxy) { p.From = p.To }, ""},
		{func(p *Proxy) { p.Via = netip.Addr{} }, ""},
		{func(p *Proxy) { p.Via = netip.MustParseAddr("192.0.2.1") }, "is an IPv4 address"},
		{func(p *Proxy) { p.Via = netip.MustParseAddr("ff02::1") }, "is not the address of a neighbour"},
		{func(p *Proxy) { p.Local = true }, "attach: is local and names interfaces"},
		{func(p *Proxy) { *p = Proxy{Local: true, Cache: 1, Lifetime: time.Second} }, `recognise: "content" cannot be combined with attach: local`},
		{func(p *Proxy) {
			*p = Proxy{Local: true, Recognise: RecogniseMetadata, Segments: SegmentsKeep, Rewrites: true, Cache: SlotsMax, Lifetime: LifetimeMax}
		}, ""},
		{func(p *Proxy) { p.Rewrites = true }, "rewrites: true cannot be combined with recognise: content"},
		{func(p *Proxy) { p.Recognise = RecogniseMetadata }, `segments: "cut" cannot be combined with recognition by metadata`},
		{func(p *Proxy) { p.Segments = SegmentsKeep }, ""},
		{func(p *Proxy) { p.Cache = 0 }, "cache: 0 keeps no header"},
		{func(p *Proxy) { p.Cache = CacheMax }, ""},
		{func(p *Proxy) { p.Cache = CacheMax + 1 }, "is too many headers"},
		{func(p *Proxy) { p.Recognise, p.Segments, p.Cache = RecogniseMetadata, SegmentsKeep, SlotsMax+1 }, "whose index has 16 bits"},
		{func(p *Proxy) { p.Lifetime = LifetimeMin - 1 }, "is not from 10ms to 1m0s"},
		{func(p *Proxy) { p.Lifetime = LifetimeMax + 1 }, "is not from 10ms to 1m0s"},
		{func(p *Proxy) { p.Recognise = 9 }, `recognise: "Recognise(9)" is not known`},
		{func(p *Proxy) { p.Segments = 9 }, `segments: "Segments(9)" is not known`},
		{func(p *Proxy) { p.OnUnknown = 9 }, `on-unknown: "OnUnknown(9)" is not known`},
	} {
		p := good()
		c.change(&p)
		err := p.Check()
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%+v: error %v; want %q in it", p, err, c.want)
		}
	}
}

func TestProxySaysWhatItTakes(t *testing.T) {
	p := Proxy{To: "eth2", From: "eth3", Cache: 1000}
	if p.CacheEntries() != 2000 || p.CacheMemory() != 964_000 || p.Attachment() != "to eth2, from eth3" {
		t.Errorf("content: %d entries, %d bytes, %s", p.CacheEntries(), p.CacheMemory(), p.Attachment())
	}
	p = Proxy{Local: true, Recognise: RecogniseMetadata, Cache: 1000}
	if p.CacheEntries() != 0 || p.CacheMemory() != 472_000 || p.Attachment() != "local" {
		t.Errorf("metadata: %d entries, %d bytes, %s", p.CacheEntries(), p.CacheMemory(), p.Attachment())
	}
}

func TestMatchesThatOverlapShareAPacket(t *testing.T) {
	prefix := func(s string) (p netip.Prefix) {
		if s != "" {
			p = netip.MustParsePrefix(s)
		}
		return p
	}
	for _, c := range []struct {
		dst1, src1, dst2, src2 string
		want                   bool
	}{
		{"", "", "", "", true},
		{"2001:db8::/32", "", "2001:db8:1::/48", "", true},
		{"2001:db8::/32", "", "2001:db9::/32", "", false},
		{"2001:db8::/32", "", "", "2001:db9::/32", true},
		{"2001:db8::/32", "fd00::/16", "2001:db8::/32", "fd01::/16", false},
	} {
		a := Match{Destination: prefix(c.dst1), Source: prefix(c.src1)}
		b := Match{Destination: prefix(c.dst2), Source: prefix(c.src2)}
		if a.Overlaps(b) != c.want || b.Overlaps(a) != c.want {
			t.Errorf("%s and %s: overlap %v; want %v", a, b, a.Overlaps(b), c.want)
		}
	}
}
