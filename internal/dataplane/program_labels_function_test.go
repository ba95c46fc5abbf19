package dataplane

import (
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

// A function that knows nothing of labels gets a packet without them, and the packet gets its own
// back from there, advanced and stamped.
func TestAFunctionGetsPacketsWithoutTheirLabels(t *testing.T) {
	for _, scheme := range []model.Scheme{model.SchemeKeyed, model.SchemeKeyedFlow} {
		t.Run(scheme.String(), func(t *testing.T) { functionGetsPacketsWithoutLabels(t, scheme) })
	}
}

func functionGetsPacketsWithoutLabels(t *testing.T, scheme model.Scheme) {
	d := labelDomain(scheme, 6)
	d.Nodes[1].Interfaces = []model.Interface{{Name: "in", Role: model.RoleCore}, {Name: "side", Role: model.RoleCore}}
	d.Functions[0] = model.Function{Name: "fw", Node: "r2", Kind: model.KindUnaware, Proxy: model.Proxy{
		To: "to", From: "from", Segments: model.SegmentsCut, Cache: 100, Lifetime: time.Minute,
	}}
	out, err := plan.Compile(d, plan.NewKeyring(rand.NewChaCha8([32]byte{7}), nil))
	if err != nil {
		t.Fatal(err)
	}
	l := &labelRun{T: t, domain: out}
	r := newProxyRun(t, l.node("r2"))
	next := [6]byte{2, 9, 9, 9, 9, 9}
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
			verdict, b, err := r.run(object.CoreTC, "in", p.Append(nil), 0)
			if err != nil || verdict != verdictRedirect || !slices.Equal(b[srv6.EthernetLen:], p.Payload) || !slices.Equal(b[12:14], etherType(chain == "legacy")) {
				t.Fatalf("%s: to the function: verdict %d, %v, refusals %v\n%x, want\n%x", chain, verdict, err, r.refusals(), b, p.Payload)
			}
			if verdict, b, err = r.run(object.FunctionTC, "from", b, 0); err != nil || verdict != verdictRedirect {
				t.Fatalf("%s: back: verdict %d, %v, refusals %v", chain, verdict, err, r.refusals())
			}
			got, err := mpls.ParseFrame(b, func(label uint32) bool { return label-testServices < 1<<16 })
			if err != nil {
				t.Fatalf("%s: %v: %x", chain, err, b)
			}
			want := l.onLabelsOf(chain, 2, number)
			if [6]byte(b) != next || *got.Proof != *want.Proof || *got.Word != *want.Word || !slices.Equal(got.Payload, p.Payload) {
				t.Errorf("%s: back it is\n%+v, want\n%+v", chain, got, want)
			}
			if i == 0 && !slices.Equal(got.Stack, want.Stack) || !slices.Equal(withoutRepeated(got.Labels()), withoutRepeated(want.Labels())) {
				t.Errorf("%s: back its stack is %v, want %v", chain, got.Stack, want.Stack)
			}
			before := r.refusals()[abi.ReasonNotCached]
			if verdict, _, err = r.run(object.FunctionTC, "from", ether(p.Payload), 0); err != nil || verdict != verdictShot || r.refusals()[abi.ReasonNotCached] != before+1 {
				t.Errorf("%s: back once more: verdict %d, %v, refusals %v; want NOT_CACHED", chain, verdict, err, r.refusals())
			}
		}
	}
	if f := r.function("fw"); f.RxSuccess != 4 || f.TxSuccess != 4 || f.InFlight == nil || *f.InFlight != 0 {
		t.Errorf("counted %+v", f)
	}
}
