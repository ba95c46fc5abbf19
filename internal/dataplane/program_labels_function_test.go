package dataplane

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/dataplane/object"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/mpls"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/srv6"
	"github.com/waystamp/waystamp/internal/tables/xtest"
)

// detour is a way to and from a function.
type detour struct {
	function model.Function
	sent     uint32 // the verdict for a packet to the function
	back, at string // the program that finds the kept header of a packet that comes back, and where
}

var detours = map[string]detour{
	"by content": {model.Function{Kind: model.KindUnaware, Proxy: model.Proxy{
		To: "to", From: "from", Segments: model.SegmentsCut, Cache: 100, Lifetime: time.Minute,
	}}, verdictRedirect, object.FunctionTC, "from"},
	"by metadata": {model.Function{Kind: model.KindUnaware, Proxy: model.Proxy{
		To: "to", From: "from", Recognise: model.RecogniseMetadata, Segments: model.SegmentsKeep, Cache: 100, Lifetime: time.Minute,
	}}, verdictRedirect, object.FunctionTC, "from"},
	"in the node's kernel": {model.Function{Kind: model.KindUnaware, Proxy: model.Proxy{
		Local: true, Recognise: model.RecogniseMetadata, Segments: model.SegmentsKeep, Cache: 100, Lifetime: time.Minute,
	}}, verdictUnspec, object.CoreOutTC, "side"},
}

// A function that knows nothing of labels gets a packet without them, and the packet gets its own
// back from there, advanced and stamped.
func TestAFunctionGetsPacketsWithoutTheirLabels(t *testing.T) {
	for _, scheme := range []model.Scheme{model.SchemeKeyed, model.SchemeKeyedFlow} {
		for name, way := range detours {
			t.Run(scheme.String()+", "+name, func(t *testing.T) { functionGetsPacketsWithoutLabels(t, scheme, way) })
		}
	}
}

func functionGetsPacketsWithoutLabels(t *testing.T, scheme model.Scheme, way detour) {
	d := labelDomain(scheme, 6)
	d.Nodes[1].Interfaces = []model.Interface{{Name: "in", Role: model.RoleCore}, {Name: "side", Role: model.RoleCore}}
	way.function.Name, way.function.Node = "fw", "r2"
	d.Functions[0] = way.function
	out, err := plan.Compile(d, plan.NewKeyring(rand.NewChaCha8([32]byte{7}), nil))
	if err != nil {
		t.Fatal(err)
	}
	l := &labelRun{T: t, domain: out}
	r := newProxyRun(t, l.node("r2"))
	next := [6]byte{2, 9, 9, 9, 9, 9}
	hop := r.traced(r.d)
	r.must(errors.Join(
		r.net.AddRoute(host.Route{Destination: xtest.Prefix("fd00:2::3/128"), Via: xtest.Addr("fd00:5::2"), Device: "side"}),
		r.net.AddNeighbour("side", xtest.Addr("fd00:5::2"), next),
	))
	for i, change := range []func(s []mpls.Entry) []mpls.Entry{
		func(s []mpls.Entry) []mpls.Entry { return s },
		func(s []mpls.Entry) []mpls.Entry { return s[1:] }, // popped
	} {
		for j, chain := range []string{"web", "legacy"} {
			number := uint64(1 + 2*i + j)
			p := l.onLabelsOf(chain, 1, number)
			p.Stack = change(p.Stack)
			if traced := i == 1; traced {
				p.Word.Flags = mpls.FlagTrace
			}
			verdict, b, err := r.run(object.CoreTC, "in", p.Append(nil), 0)
			if err != nil || verdict != way.sent || !slices.Equal(b[srv6.EthernetLen:], p.Payload) || !slices.Equal(b[12:14], etherType(chain == "legacy")) {
				t.Fatalf("%s: to the function: verdict %d, %v, refusals %v\n%x, want\n%x", chain, verdict, err, r.refusals(), b, p.Payload)
			}
			program := r.d.program(way.back)
			if way.function.Proxy.Recognise == model.RecogniseMetadata {
				_, kept := r.keptSlot()
				program = setsIndex(t, program, uint32(kept.Fingerprint))
			}
			// From the kernel it goes on by the interface by which it leaves already, where the way is remembered.
			goes := []uint32{verdictRedirect}
			if way.function.Proxy.Local {
				goes = append(goes, verdictUnspec)
			}
			if verdict, b, err = r.runOf(program, way.at, b, 0); err != nil || !slices.Contains(goes, verdict) {
				t.Fatalf("%s: back: verdict %d, %v, refusals %v", chain, verdict, err, r.refusals())
			}
			got, err := mpls.ParseFrame(b, func(label uint32) bool { return label-testServices < 1<<16 })
			if err != nil {
				t.Fatalf("%s: %v: %x", chain, err, b)
			}
			want := l.onLabelsOf(chain, 2, number)
			want.Word.Flags = p.Word.Flags
			if p.Word.Flags != 0 {
				was, _ := srv6.ReadProof(*p.Proof)
				now, _ := srv6.ReadProof(*want.Proof)
				if h := hop(); h.Path != was.Path || h.Position != 1 || h.Verified || h.Number != number || !bytes.Equal(h.Before, beBytes(was.CML)) || !bytes.Equal(h.After, beBytes(now.CML)) || int(h.Len) != len(b) {
					t.Errorf("%s: traced, %+v; it came with CML %x and left with %x", chain, h, was.CML, now.CML)
				}
			}
			if [6]byte(b) != next || *got.Proof != *want.Proof || *got.Word != *want.Word || !slices.Equal(got.Payload, p.Payload) {
				t.Errorf("%s: back it is\n%+v, want\n%+v", chain, got, want)
			}
			if i == 0 && !slices.Equal(got.Stack, want.Stack) || !slices.Equal(withoutRepeated(got.Labels()), withoutRepeated(want.Labels())) {
				t.Errorf("%s: back its stack is %v, want %v", chain, got.Stack, want.Stack)
			}
			before := r.refusals()[abi.ReasonNotCached]
			if verdict, _, err = r.runOf(program, way.at, ether(p.Payload), 0); err != nil || verdict != verdictShot || r.refusals()[abi.ReasonNotCached] != before+1 {
				t.Errorf("%s: back once more: verdict %d, %v, refusals %v; want NOT_CACHED", chain, verdict, err, r.refusals())
			}
		}
	}
	if f := r.function("fw"); f.RxSuccess != 4 || f.TxSuccess != 4 || f.InFlight == nil || *f.InFlight != 0 {
		t.Errorf("counted %+v", f)
	}
	r.mergedIsRefused(way, l.onLabelsOf("web", 1, 99))
}

// mergedIsRefused holds that frames which a function by metadata has merged are refused: they have one
// index, and nothing cuts what has labels. The header is given up.
func (r *proxyRun) mergedIsRefused(way detour, p mpls.Packet) {
	r.Helper()
	if way.function.Proxy.Recognise != model.RecogniseMetadata {
		return
	}
	verdict, b, err := r.run(object.CoreTC, "in", p.Append(nil), 0)
	if err != nil || verdict != way.sent {
		r.Fatalf("to the function: verdict %d, %v, refusals %v", verdict, err, r.refusals())
	}
	_, kept := r.keptSlot()
	before := r.refusals()[abi.ReasonLabelTrain]
	verdict, _, err = r.runOf(setsIndex(r.T, r.d.program(way.back), uint32(kept.Fingerprint)), way.at, b, 20)
	if err != nil || verdict != verdictShot || r.refusals()[abi.ReasonLabelTrain] != before+1 {
		r.Errorf("merged: verdict %d, %v, refusals %v; want LABEL_TRAIN", verdict, err, r.refusals())
	}
	if f := r.function("fw"); f.InFlight == nil || *f.InFlight != 0 {
		r.Errorf("merged: counted %+v; want no header kept", f)
	}
}
