package dataplane

import (
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/waystamp/waystamp/internal/dataplane/object"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/mpls"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/srv6"
	"github.com/waystamp/waystamp/internal/tables/xtest"
)

// Over labels, too, a flow that the rules are done with goes past the function with its stamp, and any other goes in.
func TestFlowsOverLabelsGoPastAFunctionThatIsDoneWithThem(t *testing.T) {
	if err := haveLookUp(); err != nil {
		t.Skipf("no look-up of flows: %v", err)
	}
	for _, scheme := range []model.Scheme{model.SchemeKeyed, model.SchemeKeyedFlow} {
		t.Run(scheme.String(), func(t *testing.T) {
			d := labelDomain(scheme, 6)
			d.Nodes[1].Interfaces = []model.Interface{{Name: "in", Role: model.RoleCore}, {Name: "side", Role: model.RoleCore}}
			d.Functions[0] = model.Function{
				Name: "fw", Node: "r2", Kind: model.KindNetfilter,
				Netfilter: model.Netfilter{Namespace: model.NamespaceNode, Bypass: true, Rules: "ct mark set $bypass"},
				Proxy:     model.Proxy{Local: true, Recognise: model.RecogniseMetadata, Segments: model.SegmentsKeep, Cache: 1000, Lifetime: time.Minute},
			}
			out, err := plan.Compile(d, plan.NewKeyring(rand.NewChaCha8([32]byte{7}), nil))
			if err != nil {
				t.Fatal(err)
			}
			l := &labelRun{T: t, domain: out}
			r := newProxyRun(t, l.node("r2"))
			r.must(errors.Join(
				r.net.AddRoute(host.Route{Destination: xtest.Prefix("fd00:2::3/128"), Via: xtest.Addr("fd00:5::2"), Device: "side"}),
				r.net.AddNeighbour("side", xtest.Addr("fd00:5::2"), [6]byte{2, 9, 9, 9, 9, 9}),
			))
			mark := d.Functions[0].Netfilter.BypassMark("fw")

			// past gives packets of a flow to the function's label: does one go past it? turn changes each.
			number := uint64(0)
			past := func(chain string, turn func(tcp []byte)) bool {
				t.Helper()
				for range 20 { // for the one packet in a second that goes in, and others of this goroutine's CPUs
					number++
					p := l.onLabelsOf(chain, 1, number)
					turn(p.Payload[len(p.Payload)-40:])
					want := l.onLabelsOf(chain, 2, number)
					turn(want.Payload[len(want.Payload)-40:])
					before := r.function("fw")
					verdict, b, err := r.run(object.CoreTC, "in", p.Append(nil), 0)
					r.must(err)
					after := r.function("fw")
					switch {
					case after.Bypassed == before.Bypassed+1 && after.RxSuccess == before.RxSuccess:
						got, err := mpls.ParseFrame(b, func(label uint32) bool { return label-testServices < 1<<16 })
						r.must(err)
						if verdict != verdictRedirect || *got.Proof != *want.Proof || *got.Word != *want.Word || !slices.Equal(got.Stack[1:], want.Stack[1:]) || got.Stack[0].Label() != want.Stack[0].Label() ||
							!slices.Equal(got.Payload, want.Payload) {
							t.Fatalf("%s, past the function: verdict %d\n%+v, want\n%+v", chain, verdict, got, want)
						}
						return true
					case after.Bypassed == before.Bypassed && after.RxSuccess == before.RxSuccess+1:
						if verdict != verdictUnspec || !slices.Equal(b[srv6.EthernetLen:], p.Payload) {
							t.Fatalf("%s, into the function: verdict %d, refusals %v\n%x, want\n%x", chain, verdict, r.refusals(), b, p.Payload)
						}
					default:
						t.Fatalf("%s: verdict %d, refusals %v, %+v after %+v", chain, verdict, r.refusals(), after, before)
					}
				}
				return false
			}
			flags := func(f byte) func([]byte) { return func(tcp []byte) { tcp[13] = f } }
			const ack, synAck, finAck = 0x10, 0x12, 0x11
			for _, chain := range []string{"web", "legacy"} {
				other := func(tcp []byte) {
					tcp[13] = ack
					binary.BigEndian.PutUint16(tcp, 1026)
				}
				// Of a flow that the kernel does not track; bound to its flow the proof is another one.
				if scheme == model.SchemeKeyed && past(chain, other) {
					t.Errorf("%s: a packet of another flow goes past", chain)
				}
				inner, _ := testInner(chain)
				r.track(inner, tracked{mark: mark, status: seenReply, state: established})
				if !past(chain, flags(ack)) {
					t.Errorf("%s: no packet goes past", chain)
				}
				for _, f := range []byte{synAck, finAck} {
					if past(chain, flags(f)) {
						t.Errorf("%s: a packet with the TCP flags %#x goes past", chain, f)
					}
				}
			}
		})
	}
}
