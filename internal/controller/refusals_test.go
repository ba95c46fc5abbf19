package controller

import (
	"bytes"
	"context"
	"encoding/hex"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/waystamp/waystamp/internal/event"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	v1 "github.com/waystamp/waystamp/internal/rpc/waystampv1"
	"github.com/waystamp/waystamp/internal/srv6"
)

// unstamped is a refused packet of a path that nobody has stamped.
func unstamped(t *testing.T, agents map[string]*fake) event.Event {
	t.Helper()
	h := agents["r1"].now().Headends[0]
	inner := append([]byte{0x60, 0, 0, 0, 0, 0, 59, 64}, make([]byte, 32)...)
	frame, err := srv6.Wrap(netip.MustParseAddr("fc00:1::1"), h.Segments, srv6.Proof{Scheme: h.Scheme, Epoch: h.Epoch, Path: h.Path}, srv6.NextHeaderIPv6, inner)
	if err != nil {
		t.Fatal(err)
	}
	return event.Event{Time: time.Now(), Interface: "r2-r1", Hook: "tc", Reason: "proof", Text: "the proof is wrong\x1b[2J", Len: uint32(len(frame)), Packet: frame, Suppressed: 3}
}

// refused are those that the controller has, at least so many.
func (w *world) refused(chain string, least int) (out []*v1.Refusal) {
	w.Helper()
	stream, err := w.admin.Refusals(w.Context(), connect.NewRequest(&v1.RefusalsRequest{Chain: chain, Follow: true}))
	w.must(err)
	defer stream.Close()
	for present := false; !present || len(out) < least; {
		if !stream.Receive() {
			w.Fatal(stream.Err())
		}
		if present = present || stream.Msg().Present; stream.Msg().Refusal != nil {
			out = append(out, stream.Msg().Refusal)
		}
	}
	return out
}

func TestRefusedPacketsAreExplainedByTheController(t *testing.T) {
	w, agents := domain(t)
	w.until("drained", drained)
	e := unstamped(t, agents)
	stream, err := w.admin.Refusals(t.Context(), connect.NewRequest(&v1.RefusalsRequest{Follow: true}))
	w.must(err)
	defer stream.Close()
	if !stream.Receive() || !stream.Msg().Present {
		t.Fatalf("there is something before anything was refused: %v, %v", stream.Msg(), stream.Err())
	}
	e.Node = "r1" // a node speaks for itself alone
	agents["r2"].member.Refused(e)
	if !stream.Receive() {
		t.Fatal(stream.Err())
	}
	x := stream.Msg().Refusal
	if x.Chain != "web" || x.Direction != "forward" || !strings.HasPrefix(x.Sentence, "this packet carries no stamp, not even that of its headend") {
		t.Errorf("refusal %v", x)
	}
	got, err := event.Parse(x.Event)
	if err != nil || got.Node != "r2" || strings.Contains(got.Text, "\x1b") || !bytes.Equal(got.Packet, e.Packet) {
		t.Errorf("event %s, %v", x.Event, err)
	}
	if list := w.refused("web", 0); len(list) != 1 {
		t.Errorf("%d of chain web are kept", len(list))
	}
	if list := w.refused("other", 0); len(list) != 0 {
		t.Errorf("%d of another chain are kept", len(list))
	}
	d := w.describe("node", "r2")
	if len(d.Refusals) != 1 || d.Refusals[0].Node != "r2" || d.Refusals[0].Reason != "proof" || d.Refusals[0].Packets != 4 || d.Refusals[0].Sentence != x.Sentence {
		t.Errorf("node r2: %v", d.Refusals)
	}
	// A packet without a proof is the chain's that requires it, where it leaves the domain.
	plain := append([]byte{12: 0x86, 0xdd}, append([]byte{0x60, 0, 0, 0, 0, 0, 59, 64}, make([]byte, 32)...)...)
	copy(plain[22:], netip.MustParseAddr("2001:db8:1::1").AsSlice())
	copy(plain[38:], netip.MustParseAddr("2001:db8:3::1").AsSlice())
	agents["r3"].member.Refused(event.Event{Interface: "r3-r2", Reason: "unproven", Text: "TEXT", Packet: plain})
	if !stream.Receive() {
		t.Fatal(stream.Err())
	}
	if x := stream.Msg().Refusal; x.Chain != "web" || x.Direction != "" || !strings.Contains(x.Sentence, "which chain web requires, came without proof") {
		t.Errorf("without a proof: %v", x)
	}
	// No secret goes to whom may read.
	wire := x.String() + string(x.Event)
	for name, a := range agents {
		for _, p := range a.plans() {
			for _, secret := range secretsOf(p) {
				if strings.Contains(wire, string(secret)) || strings.Contains(wire, hex.EncodeToString(secret)) {
					t.Errorf("a secret of %s is in it", name)
				}
			}
		}
	}
}

func TestANodeCannotTellTooMuch(t *testing.T) {
	w, agents := domain(t)
	m := agents["r2"].member
	many := 2 * tellMost
	for range many {
		m.Refused(event.Event{Reason: "proof", Text: "TEXT"})
	}
	// The agent holds some of them, and says how many it has lost: with the first call or with the second one, and a
	// call may have begun before all of them came.
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	stream, err := w.admin.Refusals(ctx, connect.NewRequest(&v1.RefusalsRequest{Follow: true}))
	w.must(err)
	defer stream.Close()
	for lost := uint64(0); lost < uint64(many-tellMost-RefusedMax); lost += stream.Msg().Refusal.GetDropped() {
		if !stream.Receive() {
			t.Fatalf("it says that %d are lost: %v", lost, stream.Err())
		}
	}
	for _, bad := range []string{"{", `{"text":"no reason"}`, `{"reason":"` + strings.Repeat("x", refusedBytes) + `"}`} {
		if _, err := readRefusal("r2", []byte(bad)); err == nil {
			t.Errorf("%.20s is taken", bad)
		}
	}
	// One of a later version may have more.
	if e, err := readRefusal("r2", []byte(`{"reason":"proof","later":1}`)); err != nil || e.Node != "r2" {
		t.Errorf("%v, %v", e, err)
	}
}

func TestExplanationsTakeAShareOfTheTime(t *testing.T) {
	var b budget
	now, took, n := time.Unix(1, 0), time.Duration(0), 0
	const each, span = 50 * time.Millisecond, 100 * time.Second
	for range int(span / (10 * time.Millisecond)) { // 100 packets a second
		if now = now.Add(10 * time.Millisecond); b.mayBegin(now) {
			b.took(each)
			took += each
			n++
		}
	}
	if most := explainAhead + time.Duration(explainShare*float64(span)) + each; took > most || took < most-2*each {
		t.Errorf("%d explanations in %s took %s, want %s", n, span, took, most)
	}
}

func TestAChainUnderAttackDoesNotPushOutOthers(t *testing.T) {
	var r refusals
	r.begin()
	add := func(chain string, n int) {
		for i := range n {
			r.add("r1", event.Event{Reason: fmt.Sprint("reason", i)}, &v1.Refusal{Chain: chain})
		}
	}
	add("quiet", 10)
	add("loud", 2*refusalsMax)
	add("quiet", 10)
	count := map[string]int{}
	for at, done := uint64(0), false; !done; {
		list, next, _ := r.after(at, "")
		for _, x := range list {
			count[x.Chain]++
		}
		at, done = next, len(list) == 0
	}
	if count["quiet"] != 20 || count["loud"] != refusalsMax-20 {
		t.Errorf("kept are %v", count)
	}
	if len(r.counts) > countsMax+1 {
		t.Errorf("%d counts", len(r.counts))
	}
}

// A node that tells of ever other reasons has its own counted together, and not another one's.
func TestANodeDoesNotFillTheCounts(t *testing.T) {
	var r refusals
	r.begin()
	for i := range 2 * countsMax {
		r.add("loud", event.Event{Reason: fmt.Sprint("reason", i)}, &v1.Refusal{Chain: "web"})
	}
	r.add("quiet", event.Event{Reason: "proof"}, &v1.Refusal{Chain: "web"})
	got := r.counted(func(node, _ string) bool { return node == "quiet" })
	if len(got) != 1 || got[0].Reason != "proof" {
		t.Errorf("counted of the other node: %v", got)
	}
	if n := len(r.counted(func(node, _ string) bool { return node == "loud" })); n != countsOfNode+1 {
		t.Errorf("%d reasons are counted of the first, want %d and one for the others", n, countsOfNode)
	}
}

// Without time left, what a node tells of costs neither a record nor a look at all paths, and its chain is known by its number.
func TestWithoutTimeLeftNothingIsRead(t *testing.T) {
	var c Controller // without a store
	id := plan.PathID{Path: 7, Epoch: 1, Chain: "web", Direction: model.Reverse}
	c.refusals.know([][]plan.Path{{{PathID: id}}})
	c.refusals.spent = budget{left: -time.Hour, at: time.Now()}
	frame, err := srv6.Wrap(netip.MustParseAddr("fc00:1::1"), []netip.Addr{netip.MustParseAddr("fc00:0:0:200::")}, srv6.Proof{Scheme: id.Scheme, Epoch: id.Epoch, Path: id.Path}, srv6.NextHeaderIPv6,
		append([]byte{0x60, 0, 0, 0, 0, 0, 59, 64}, make([]byte, 32)...))
	if err != nil {
		t.Fatal(err)
	}
	var live [][]plan.Path
	out, err := c.explained(t.Context(), &live, event.Event{Reason: "proof", Len: uint32(len(frame)), Packet: frame})
	if err != nil || out.Chain != "web" || out.Direction != "reverse" || out.Sentence != "" || live != nil {
		t.Errorf("%v, %v", out, err)
	}
}
