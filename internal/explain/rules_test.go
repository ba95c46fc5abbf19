package explain

import (
	"encoding/binary"
	"net/netip"
	"strings"
	"testing"

	"github.com/waystamp/waystamp/internal/event"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
)

// plain is a frame of a packet from fc00:7::2 to fc00:8::2, or of such a fragment.
func plain(protocol uint8, port uint16, dscp uint8, fragment bool) []byte {
	upper := make([]byte, 20)
	binary.BigEndian.PutUint16(upper, 40000)
	binary.BigEndian.PutUint16(upper[2:], port)
	next := protocol
	if fragment {
		upper = append([]byte{protocol, 0, 0, 1, 0, 0, 0, 9}, upper...)
		next = 44
	}
	b := append(make([]byte, 12), 0x86, 0xdd, 0x60|dscp>>2, dscp<<6, 0, 0)
	b = binary.BigEndian.AppendUint16(b, uint16(len(upper)))
	b = append(b, next, 64)
	b = append(b, netip.MustParseAddr("fc00:7::2").AsSlice()...)
	b = append(b, netip.MustParseAddr("fc00:8::2").AsSlice()...)
	return append(b, upper...)
}

func TestUnprovenGoesByTheRules(t *testing.T) {
	to := netip.MustParsePrefix("fc00:8::/64")
	path := func(chain string, m model.Match) plan.Path {
		return plan.Path{PathID: plan.PathID{Chain: chain}, Match: m, Hops: []plan.Hop{{Node: "r6"}}}
	}
	web := model.Match{Destination: to, Priority: 20, Protocol: 6, DestinationPort: model.Ports{First: 440, Last: 443}}
	voice := model.Match{Destination: to, Priority: 10, DSCP: 46 + 1}
	marked := model.Match{Destination: to, Priority: 5, Mark: model.Mark{Value: 1, Mask: 1}}
	paths := []plan.Path{path("rest", model.Match{Destination: to}), path("web", web), path("voice", voice), path("marked", marked)}
	for _, c := range []struct {
		name  string
		frame []byte
		want  string
	}{
		{"a port in the range", plain(6, 441, 0, false), "chain web"},
		{"a port beside it", plain(6, 444, 0, false), "chain rest"},
		{"another protocol", plain(17, 441, 0, false), "chain rest"},
		{"the lower number first", plain(6, 443, 46, false), "chain voice"},
		{"a fragment, whose ports nobody knows", plain(6, 80, 0, true), "chain web"},
		{"a fragment of another protocol", plain(17, 80, 0, true), "chain rest"},
		{"a packet that was cut off", plain(6, 80, 0, false)[:56], "chain web"},
	} {
		t.Run(c.name, func(t *testing.T) {
			x := Explain(event.Event{Node: "r6", Reason: "unproven", Packet: c.frame, Len: uint32(len(c.frame))}, paths, nil)
			if want := "a packet from fc00:7::2 to fc00:8::2, which " + c.want + " requires, came without proof"; !strings.HasPrefix(x.Sentence, want) {
				t.Errorf("got %s; want %s", x.Sentence, want)
			}
		})
	}
}
