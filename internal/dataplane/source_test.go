package dataplane

import (
	"net/netip"
	"testing"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/dataplane/object"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/tables/xtest"
)

// The entry of a path with several headends has :: in the place of the one, and no
// packet may come from there because of that.
func TestUnspecifiedAddressIsNoHeadend(t *testing.T) {
	n := proxyNode()
	for i := range n.Endpoints {
		n.Endpoints[i].Sources = []netip.Addr{xtest.Sources[0], xtest.Addr("fc00:2::9")}
	}
	r := newProxyRun(t, n)
	frame := func(source netip.Addr) []byte {
		p := outerOf(1, 1, model.SchemeKeyed, 5, udp(1))
		p.Header.Source = source
		return frameOf(p)
	}
	for _, a := range n.Endpoints[0].Sources {
		if v, _, err := r.run(object.CoreTC, "in", frame(a), 0); err != nil || v != verdictRedirect {
			t.Errorf("from %s: verdict %d, %v", a, v, err)
		}
	}
	for _, a := range []string{"::", "::1", "fc00:3::9"} {
		r.wantRefused(abi.ReasonSource, object.CoreTC, "in", frame(xtest.Addr(a)), 0)
	}
}
