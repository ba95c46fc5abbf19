package dataplane

import (
	"errors"
	"slices"
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
		}, nil)
		err = errors.Join(err, where.whole())
		if (err != nil) != wantErr {
			t.Errorf("frames of type %q: got error %v, want one: %t", frame, err, wantErr)
		}
		if err != nil && !strings.Contains(err.Error(), "interface wg0") {
			t.Errorf("got %v, want it to name the interface", err)
		}
	}
}

// What clashes on this machine is left out of a reconciliation, as what is missing:
// Apply refuses the plan, and the rest goes on to be guarded.
func TestDevicesThatClashAreLeftOut(t *testing.T) {
	devices := map[string]host.Device{}
	add := func(name string, index int, v host.VLAN) {
		devices[name] = host.Device{Link: host.Link{Name: name, Index: index, Frame: "ether", MTU: 1500, VLAN: v}}
	}
	add("a", 1, host.VLAN{})
	add("alias", 1, host.VLAN{})
	add("b", 2, host.VLAN{})
	add("a.5", 3, host.VLAN{Parent: 1, ID: 5})
	for _, c := range []struct {
		names []string
		xdp   string
		want  []int  // devices that are guarded
		says  string // by what is missing
	}{
		{[]string{"a", "b"}, "a", []int{1, 2}, ""},
		{[]string{"a", "alias", "b"}, "", []int{1, 2}, "interface alias is the same device as interface a"},
		{[]string{"a", "a.5", "b"}, "a", []int{1, 3, 2}, "interface a has datapath xdp, and a.5 on top of it is in the plan too"},
		{[]string{"a", "gone", "b"}, "", []int{1, 2}, "interface gone"},
	} {
		n := plan.Node{}
		for _, name := range c.names {
			i := model.Interface{Name: name, Role: model.RoleEdge, Datapath: model.DatapathTC}
			if name == c.xdp {
				i.Datapath = model.DatapathXDP
			}
			n.Interfaces = append(n.Interfaces, i)
		}
		at, err := resolve(n, func(name string) (host.Device, error) {
			dev, ok := devices[name]
			if !ok {
				return host.Device{}, host.ErrNoLink
			}
			return dev, nil
		}, nil)
		if err != nil {
			t.Errorf("%v: %v", c.names, err)
			continue
		}
		var got []int
		for _, b := range at.bindings {
			got = append(got, b.device.Index)
			if b.needsXDP() && at.hasVLANs(b) {
				t.Errorf("%v: XDP of %s sees the frames of a VLAN in the plan", c.names, b.Name)
			}
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%v: devices %v are guarded, want %v", c.names, got, c.want)
		}
		if err := at.whole(); (err == nil) != (c.says == "") || err != nil && !strings.Contains(err.Error(), c.says) {
			t.Errorf("%v: missing is %v, want %q", c.names, err, c.says)
		}
	}
}
