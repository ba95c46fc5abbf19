package cli

import (
	"bytes"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/command"
	v1 "github.com/waystamp/waystamp/internal/rpc/waystampv1"
	"github.com/waystamp/waystamp/internal/rpc/waystampv1/waystampv1connect"
)

// What a trace shows of a packet that arrives, and of one that is refused.
func TestATraceIsPrintedHopByHop(t *testing.T) {
	var out, notes strings.Builder
	p := tracePrinter{out: &out, notes: &notes, table: true, all: api.TraceOutput{Chain: "web"}}
	p.begin(&v1.TraceBegun{
		Paths: []*v1.TracedPath{{
			Path: 0xf2b9a3b7, Direction: "forward", Scheme: "keyed", Headends: []string{"r1"},
			Positions: []*v1.TracedPosition{{Node: "r1"}, {Node: "r2", Function: "fw"}, {Node: "r3"}},
		}},
		Warnings: []string{"node r9 has no connection to the controller: its hops will be missing"},
	})
	at := func(us int) *timestamppb.Timestamp { return timestamppb.New(time.Unix(100, int64(us)*1000)) }
	hops := []*v1.TracedHop{
		{Time: at(0), Node: "r1", Interface: "r1-h1", Hook: "tc", Bytes: 238, After: []byte{1, 2, 3, 4, 5, 6, 7, 8}},
		{Time: at(39), Position: 1, Node: "r2", Function: "fw", Interface: "r2-r1", Hook: "xdp", Bytes: 238, Before: []byte{1, 2, 3, 4, 5, 6, 7, 8}, After: []byte{9, 9, 9, 9, 9, 9, 9, 9}},
		{Time: at(36), Position: 2, Node: "r3", Interface: "r3-r2", Hook: "xdp", Bytes: 238, Before: []byte{9, 9, 9, 9, 9, 9, 9, 9}, Verified: true},
	}
	packets := []*v1.TracedPacket{
		{Path: 0xf2b9a3b7, Epoch: 3, Number: "0000000000000007", Hops: hops, Outcome: "verified", Sentence: "position 2 (r3, egress) has verified it"},
		{
			Path: 0xf2b9a3b7, Epoch: 3, Hops: hops[:2], Outcome: "refused", Sentence: "r3 refused it as proof",
			Refusals: []*v1.TracedRefusal{{Time: at(50), Node: "r3", Interface: "r3-r2", Hook: "tc", Reason: "proof", Text: "the proof is wrong"}, {Time: at(51), Node: "r3", Interface: "r3-r2", Hook: "tc", Reason: "replay", Text: "TEXT", Reported: true}},
		},
	}
	for _, k := range packets {
		x := tracedPacket(k)
		p.all.Packets = append(p.all.Packets, x)
		if err := p.packet(x); err != nil {
			t.Fatal(err)
		}
	}
	want := `chain web, forward: path 0xf2b9a3b7, epoch 3, packet 0x0000000000000007
  POSITION  NODE  FUNCTION   INTERFACE  HOOK  SINCE LAST  BYTES  CML BEFORE        CML AFTER
         0  r1    (headend)  r1-h1      tc            0s    238  -                 0102030405060708
         1  r2    fw         r2-r1      xdp         39µs    238  0102030405060708  0909090909090909
         2  r3    (egress)   r3-r2      xdp         -3µs    238  0909090909090909  verified
  verified: position 2 (r3, egress) has verified it

chain web, forward: path 0xf2b9a3b7, epoch 3
  POSITION  NODE  FUNCTION   INTERFACE  HOOK  SINCE LAST  BYTES  CML BEFORE        CML AFTER
         0  r1    (headend)  r1-h1      tc            0s    238  -                 0102030405060708
         1  r2    fw         r2-r1      xdp         39µs    238  0102030405060708  0909090909090909
  refused at r3 (r3-r2, tc): proof: the proof is wrong
  reported, and let go on, at r3 (r3-r2, tc): replay: TEXT
  refused: r3 refused it as proof

`
	if out.String() != want {
		t.Errorf("it prints\n%s\nwant\n%s", out.String(), want)
	}
	p.all.TimedOut, p.all.Foreign, p.all.Suppressed = true, 4, 5
	err := p.verdict(time.Minute)
	if e, ok := err.(*command.ExitError); !ok || e.Code != command.ExitRefused {
		t.Errorf("%v, want exit code %d", err, command.ExitRefused)
	}
	for _, note := range []string{"warning: node r9", "4 packets of the chain had the O-flag", "5 hops are missing: a CPU of a node tells of 256", "only 2 packets came within 1m0s"} {
		if !strings.Contains(notes.String(), note) {
			t.Errorf("on standard error\n%s\nwithout %q", notes.String(), note)
		}
	}
	p.all.Packets = p.all.Packets[:1]
	if err := p.verdict(time.Minute); err != nil {
		t.Errorf("all are verified: %v", err)
	}
	p.all.Packets = nil
	if err := p.verdict(time.Minute); err == nil || !strings.Contains(err.Error(), "no packet took chain web within 1m0s") {
		t.Errorf("none came: %v", err)
	}
	p.all.Flow = "any,any,tcp"
	if err := p.verdict(time.Minute); err == nil || !strings.Contains(err.Error(), "no packet of flow any,any,tcp took chain web within 1m0s") {
		t.Errorf("none of a flow came: %v", err)
	}
}

// A controller that knows no flows would trace all packets: it does not have the call.
func TestAFlowIsNotTracedByAControllerThatKnowsNone(t *testing.T) {
	at := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", at)
	if err != nil {
		t.Fatal(err)
	}
	var called atomic.Value
	server := http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		called.Store(r.URL.Path)
		http.NotFound(w, r) // as connect answers a call that a service does not have
	})}
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(l) }()
	defer func() {
		server.Close()
		<-ended
	}()
	var out, errs bytes.Buffer
	code := command.Run(t.Context(), NewRootCommand(), []string{"trace", "web", "--flow", "any,any,tcp", "--controller", "unix:" + at}, strings.NewReader(""), &out, &errs)
	if code != command.ExitFailed || !strings.Contains(errs.String(), "the controller is of an earlier version, which cannot trace a flow; update it, or leave --flow out") {
		t.Errorf("exit code %d, %s", code, errs.String())
	}
	if called.Load() != waystampv1connect.AdminTraceFlowProcedure {
		t.Errorf("it called %v", called.Load())
	}
}
