package dataplane

import (
	"bytes"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/dataplane/object"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/srv6"
	"github.com/waystamp/waystamp/internal/tables/xtest"
)

// A function at a SID of the NEXT-C-SID flavour advances like End: with C-SIDs
// ahead the header that comes back is shifted, whatever is left of the list;
// behind the last one of a container the next entry counts.
func TestFunctionOfACompressedPath(t *testing.T) {
	n := proxyNode()
	id := n.Endpoints[0].PathID
	id.Path, id.Encapsulation.SIDs = 3, model.SIDsCompressed
	n.Endpoints = append(n.Endpoints, plan.Endpoint{PathID: id, SID: xtest.OwnSID(3), Behaviour: model.BehaviourEndAD, Function: "fw", Sources: n.Endpoints[0].Sources, Share: xtest.Share(1, 3)})
	r := newProxyRun(t, n)
	container := srv6.Compress([]netip.Addr{xtest.OwnSID(3), xtest.OtherSID(1), xtest.OtherSID(9)})[0]
	next := srv6.Compress([]netip.Addr{xtest.OtherSID(1), xtest.OtherSID(9)})[0]
	for i, c := range []struct {
		name           string
		to, then       netip.Addr
		left, leftThen uint8
	}{
		{"C-SIDs ahead, one entry", container, next, 0, 0},
		{"C-SIDs ahead, and entries", container, next, 2, 2},
		{"the last of its container", xtest.OwnSID(3), xtest.OtherSID(1), 2, 1},
	} {
		inner := innerOf(17, bytes.Repeat([]byte{byte(i)}, 40))
		p := outerOf(3, 3, model.SchemeKeyed, uint64(i+1), inner)
		p.Header.Destination, p.SRH.SegmentsLeft = c.to, c.left
		if verdict, out, err := r.run(object.CoreTC, "in", frameOf(p), 0); err != nil || verdict != verdictRedirect || !bytes.Equal(out[srv6.EthernetLen:], inner) {
			t.Fatalf("%s: to the function: verdict %d, %v, %x, refusals %v", c.name, verdict, err, out, r.refusals())
		}
		verdict, out, err := r.run(object.FunctionTC, "from", ether(inner), 0)
		if err != nil || verdict != verdictRedirect {
			t.Fatalf("%s: on return: verdict %d, %v, refusals %v", c.name, verdict, err, r.refusals())
		}
		// restored advances by the list.
		want := p
		srh := *p.SRH
		srh.SegmentsLeft = c.leftThen + 1
		srh.Segments = slices.Clone(srh.Segments)
		srh.Segments[c.leftThen] = c.then
		want.SRH = &srh
		b := restored(t, want, xtest.Share(1, 3), inner)
		list := srv6.IPv6Len + srv6.SRHLen
		for j, a := range p.SRH.Segments { // the list itself stays
			a16 := a.As16()
			copy(b[list+srv6.SegmentLen*j:], a16[:])
		}
		if d := cmp.Diff(b, out[srv6.EthernetLen:]); d != "" {
			t.Errorf("%s (-want +got):\n%s", c.name, d)
		}
	}
	p := outerOf(3, 3, model.SchemeKeyed, 9, innerOf(17, make([]byte, 40)))
	p.SRH.SegmentsLeft = 0
	if verdict, _, err := r.run(object.CoreTC, "in", frameOf(p), 0); err != nil || verdict != verdictShot || r.refusals()[abi.ReasonUpperLayer] != 1 {
		t.Errorf("neither C-SIDs nor segments are left: verdict %d, %v, refusals %v", verdict, err, r.refusals())
	}
}
