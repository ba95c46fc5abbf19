package model

import (
	"errors"
	"fmt"
	"math/bits"
	"net/netip"
	"time"
)

// Bounds of the headers that a proxy keeps of packets in a function.
const (
	// CacheMax is how many headers the functions of one node keep together that
	// are recognised by content.
	CacheMax = 1 << 20
	// SlotsMax is the bound for packets that are recognised by metadata: their index has 16
	// bits, and 0 means none.
	SlotsMax = 65535
	// CacheDefault is for a function that declares nothing.
	CacheDefault = 10000
	// CacheForMin is the least result of CacheFor: a burst exceeds the rate.
	CacheForMin = 1024

	// RateMax is in packets per second.
	RateMax = 1_000_000_000

	LifetimeMin     = 10 * time.Millisecond
	LifetimeMax     = 60 * time.Second
	LifetimeDefault = time.Second
)

// Bytes that the kernel takes for one header, whether it keeps one or not.
const (
	cacheEntryBytes = 482
	slotBytes       = 472
)

// cacheSlack is how many entries are allocated for each header that is to be
// kept by content: each packet has fourteen places only, and with two entries for
// each header one packet in a million finds them all taken.
const cacheSlack = 2

// CacheFor is the number of headers that must be kept for a function with this rate of packets
// per second, at most RateMax, and this delay of each packet, at most LifetimeMax: Little's law,
// doubled, since rate and delay are averages.
func CacheFor(rate int, delay time.Duration) int {
	const second = uint64(time.Second)
	high, low := bits.Mul64(2*uint64(rate), uint64(delay))
	low, carry := bits.Add64(low, second-1, 0) // rounded up
	n, _ := bits.Div64(high+carry, low, second)
	return max(CacheForMin, int(n))
}

// CacheMemory is how many bytes of the kernel's memory the cache takes. It is
// taken whether packets are in the function or not.
func (p Proxy) CacheMemory() int {
	if p.Recognise == RecogniseMetadata {
		return p.Cache * slotBytes
	}
	return p.CacheEntries() * cacheEntryBytes
}

// CacheEntries is how many entries of the content cache the function needs; none
// if it is recognised by metadata.
func (p Proxy) CacheEntries() int {
	if p.Recognise == RecogniseMetadata {
		return 0
	}
	return cacheSlack * p.Cache
}

// Attachment names the place of the function.
func (p Proxy) Attachment() string {
	switch {
	case p.Local:
		return "local"
	case p.Via.IsValid():
		return "to " + p.To + ", from " + p.From + ", via " + p.Via.String()
	}
	return "to " + p.To + ", from " + p.From
}

// Check checks one proxy by itself. Its errors start with the name of the setting that breaks a
// rule.
func (p Proxy) Check() error {
	for _, c := range []struct {
		setting string
		err     error
	}{
		{"attach:", p.checkAttachment()},
		{fmt.Sprintf("recognise: %q", p.Recognise), known(p.Recognise <= RecogniseMetadata)},
		{fmt.Sprintf("segments: %q", p.Segments), known(p.Segments <= SegmentsKeep)},
		{fmt.Sprintf("on-unknown: %q", p.OnUnknown), known(p.OnUnknown <= OnUnknownOriginate)},
		{fmt.Sprintf("recognise: %q", p.Recognise), CheckRecognise(p.Recognise, p.Local)},
		{fmt.Sprintf("rewrites: %t", p.Rewrites), CheckRewrites(p.Rewrites, p.Recognise)},
		{fmt.Sprintf("segments: %q", p.Segments), CheckSegments(p.Segments, p.Recognise)},
		{fmt.Sprintf("cache: %d", p.Cache), CheckCache(p.Cache, p.Recognise)},
		{fmt.Sprintf("lifetime: %s", p.Lifetime), CheckLifetime(p.Lifetime)},
	} {
		if c.err != nil {
			return fmt.Errorf("%s %w", c.setting, c.err)
		}
	}
	return nil
}

func known(ok bool) error {
	if !ok {
		return errors.New("is not known")
	}
	return nil
}

func (p Proxy) checkAttachment() error {
	if p.Local {
		if p.To != "" || p.From != "" || p.Via.IsValid() {
			return errors.New("is local and names interfaces or a next hop; a local function has none")
		}
		return nil
	}
	if err := CheckInterfaceName(p.To); err != nil {
		return fmt.Errorf("to %q %w", p.To, err)
	}
	if err := CheckInterfaceName(p.From); err != nil {
		return fmt.Errorf("from %q %w", p.From, err)
	}
	if p.Via.IsValid() {
		if err := CheckVia(p.Via); err != nil {
			return fmt.Errorf("via %q %w", p.Via, err)
		}
	}
	return nil
}

// CheckVia holds the rule for the next hop of a function: a neighbour.
func CheckVia(a netip.Addr) error {
	switch {
	case a.Is4(), a.Is4In6():
		return errors.New("is an IPv4 address; expect an IPv6 address, which may be link-local")
	case !a.IsValid(), a.Zone() != "", a.IsUnspecified(), a.IsLoopback(), a.IsMulticast():
		return errors.New("is not the address of a neighbour; expect a unicast IPv6 address without a zone, which may be link-local")
	}
	return nil
}

// CheckRecognise holds that packets can be recognised where the function is.
func CheckRecognise(r Recognise, local bool) error {
	if local && r == RecogniseContent {
		return errors.New("cannot be combined with attach: local: packets from this node's kernel may have any content, and are recognised by their index; expect metadata")
	}
	return nil
}

// CheckRewrites refuses a function that rewrites bytes by which its packets are recognised.
func CheckRewrites(rewrites bool, r Recognise) error {
	if rewrites && r == RecogniseContent {
		return errors.New("cannot be combined with recognise: content: a packet that the function rewrites cannot be recognised by content; use metadata, which a packet keeps only if the function is in the kernel")
	}
	return nil
}

// CheckFlow refuses a function that changes fields to which a proof is bound.
func CheckFlow(s Scheme, f Function) error {
	if s == SchemeKeyedFlow && f.Kind.Behaviour().Proxied() && f.Proxy.Rewrites {
		return errors.New("rewrites addresses or ports, which the proofs of keyed-flow are bound to: every packet that it changes would be refused; expect another scheme, such as keyed")
	}
	return nil
}

// CheckSegments holds that super-packets and recognition fit together.
func CheckSegments(s Segments, r Recognise) error {
	if s == SegmentsCut && r == RecogniseMetadata {
		return errors.New("cannot be combined with recognition by metadata: whole super-packets keep the index, and segmenting or merging loses it; expect keep")
	}
	return nil
}

// CheckCache holds the bounds of one function's cache.
func CheckCache(n int, r Recognise) error {
	switch {
	case n < 1:
		return errors.New("keeps no header; expect 1 or more")
	case r == RecogniseMetadata && n > SlotsMax:
		return fmt.Errorf("is too many headers for recognition by metadata, whose index has 16 bits; expect %d or fewer", SlotsMax)
	case n > CacheMax:
		return fmt.Errorf("is too many headers; a node keeps %d or fewer", CacheMax)
	}
	return nil
}

// CheckLifetime holds the bounds of a header's life time.
func CheckLifetime(d time.Duration) error {
	if d < LifetimeMin || d > LifetimeMax {
		return fmt.Errorf("is not from %s to %s", LifetimeMin, LifetimeMax)
	}
	return nil
}
