package dataplane

import (
	"errors"
	"strings"
	"testing"

	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
)

func TestDevicesWithoutEthernetFramesAreRefused(t *testing.T) {
	for frame, wantErr := range map[string]bool{"ether": false, "none": true, "ppp": true, "loopback": true, "": true} {
		n := plan.Node{Interfaces: []model.Interface{{Name: "wg0", Role: model.RoleCore}}}
		where, err := resolve(n, func(name string) (host.Device, error) {
			return host.Device{Link: host.Link{Name: name, Index: 7, Frame: frame, MTU: 1420}}, nil
		})
		err = errors.Join(err, where.whole())
		if (err != nil) != wantErr {
			t.Errorf("frames of type %q: got error %v, want one: %t", frame, err, wantErr)
		}
		if err != nil && !strings.Contains(err.Error(), "interface wg0") {
			t.Errorf("got %v, want it to name the interface", err)
		}
	}
}
