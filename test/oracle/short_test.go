package oracle

import (
	"net/netip"
	"testing"

	"github.com/waystamp/waystamp/internal/srv6"
)

// A packet may end in the middle of a routing header, whoever sent it.
func TestShortRoutingHeaderIsNoOuterHeader(t *testing.T) {
	own := netip.MustParseAddr("fc00:1::1")
	h := srv6.Header{NextHeader: srv6.NextHeaderRoute, HopLimit: 64, Source: own, Destination: netip.MustParseAddr("fc00:8::2")}
	header, err := h.Append(nil)
	if err != nil {
		t.Fatal(err)
	}
	for more := range 8 {
		p := &packet{b: append(header[:len(header):len(header)], make([]byte, more)...)}
		p.node.Address = own
		if got := p.ownOuter(); got != 0 {
			t.Errorf("with %d bytes of it: %d", more, got)
		}
	}
	p := &packet{b: append(header[:len(header):len(header)], make([]byte, 8)...)}
	p.node.Address = own
	if got := p.ownOuter(); got != srv6.IPv6Len+8 {
		t.Errorf("with all of it: %d, want %d", got, srv6.IPv6Len+8)
	}
}
