package tables

import (
	"net/netip"
	"testing"

	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
)

// A path over labels has a source that no packet of IPv6 has: its proof counts in labels alone,
// also while another epoch of the path is over SRv6 and ws_sources names its headends.
func TestPathsOverLabelsHaveNoSourceInIPv6(t *testing.T) {
	id := plan.PathID{Encapsulation: model.Encapsulation{Type: model.EncapsulationSRMPLS}}
	sources := []netip.Addr{netip.MustParseAddr("fd00:1::1"), netip.MustParseAddr("fd00:1::2")}
	for n := 1; n <= len(sources); n++ {
		got, err := encodeSource(id, sources[:n])
		if want := Words(netip.IPv6Loopback()); err != nil || got != want {
			t.Errorf("of %d headends: %v, %v; want ::1", n, got, err)
		}
	}
}
