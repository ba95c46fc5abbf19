package doctor

import (
	"slices"
	"testing"

	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
)

func TestForwardsWhatPacketsComeInBy(t *testing.T) {
	n := plan.Node{
		Interfaces: []model.Interface{{Name: "b"}, {Name: "a"}},
		Proxies: []plan.Proxy{
			{Function: "x", Proxy: model.Proxy{To: "to", From: "from"}}, {Function: "y", Proxy: model.Proxy{Local: true}},
			{Function: "z", Proxy: model.Proxy{To: "a", From: "a"}},
		},
	}
	if got := forwards(n); !slices.Equal(got, []string{"a", "b", "from"}) {
		t.Errorf("got %q", got)
	}
	if got := sysctlName("ipv4", "eth0.7", "forwarding"); got != "net.ipv4.conf.eth0/7.forwarding" {
		t.Errorf("got %q", got)
	}
}
