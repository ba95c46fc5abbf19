package tables

import (
	"testing"

	"github.com/waystamp/waystamp/internal/plan"
)

// Functions on byte streams have equal shares of a node's connections, and those that a gateway opens are apart.
func TestFunctionsOnByteStreamsShareTheConnections(t *testing.T) {
	stream, gateway, other := plan.Proxy{Stream: &plan.Stream{}}, plan.Proxy{Gateway: &plan.Gateway{}}, plan.Proxy{}
	for _, c := range []struct {
		proxies []plan.Proxy
		want    uint32
	}{
		{[]plan.Proxy{other, stream}, 262144},
		{[]plan.Proxy{stream, other, stream, stream}, 262144 / 3},
		{[]plan.Proxy{gateway}, 131072},
		{[]plan.Proxy{stream, gateway}, 65536},
	} {
		if got := connShare(c.proxies); got != c.want {
			t.Errorf("%d proxies: a share of %d, want %d", len(c.proxies), got, c.want)
		}
	}
}
