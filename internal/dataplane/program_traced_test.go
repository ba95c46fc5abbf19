package dataplane

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/srv6"
	"github.com/waystamp/waystamp/internal/tables"
	"github.com/waystamp/waystamp/internal/tables/xtest"
	"github.com/waystamp/waystamp/test/oracle"
	"github.com/waystamp/waystamp/test/packets"
)

// hops are the events of traced packets since the last call, which get their whole share of a second again.
func (l *loaded) hops() (all []abi.Traced, err error) {
	l.traced.SetDeadline(time.Unix(1, 0))
	for {
		raw, err := l.traced.Read()
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return all, l.g.maps[tables.MapTracing].Put(uint32(0), make([]abi.Tracing, l.possible))
		}
		if err != nil {
			return nil, err
		}
		var e abi.Traced
		if len(raw.RawSample) != len(xtest.BytesOf(&e)) {
			return nil, fmt.Errorf("an event of %d bytes, want %d", len(raw.RawSample), len(xtest.BytesOf(&e)))
		}
		copy(xtest.BytesOf(&e), raw.RawSample)
		all = append(all, e)
	}
}

// withFlag is a frame whose SRH has the O-flag, wherever it is; nil: it has no SRH.
func withFlag(b []byte) []byte {
	p, err := srv6.DecodeFrame(b)
	if err != nil || p.SRH == nil || p.SRH.Flags&srv6.FlagOAM != 0 {
		return nil
	}
	at := srv6.EthernetLen + srv6.IPv6Len
	for next := b[srv6.EthernetLen+6]; next != 43; at += 8 + 8*int(b[at+1]) {
		if next != 0 && next != 60 || at+8+8*int(b[at+1]) >= len(b) {
			return nil
		}
		next = b[at]
	}
	b = slices.Clone(b)
	b[at+5] |= srv6.FlagOAM
	return b
}

// proofOf is the proof of a packet from its IPv6 header on, as srv6 reads it: Scapy has written it.
func proofOf(t *testing.T, packet []byte) srv6.Proof {
	t.Helper()
	p, err := srv6.Decode(packet)
	if err != nil {
		t.Fatal(err)
	}
	proof, ok := p.Proof()
	if !ok {
		t.Fatalf("no proof in %x", packet)
	}
	return proof
}

// maskUp is the mask of RND on the link towards the headend, at a visit.
func (r *rig) maskUp(v oracle.Visit) (mask uint64) {
	for k, h := range r.have.Hops {
		if k.Path == abi.BE32(v.Path) && k.Epoch == v.Epoch && h.Position == v.Position {
			mask = h.Share.UpRnd
		}
	}
	return mask
}

// The O-flag changes nothing of what becomes of a packet, on both hooks, and who stamps or verifies a packet that has
// it says so, with what the packet carries.
func TestFlaggedPacketsGoOnAsOthersDo(t *testing.T) {
	t.Parallel()
	all, err := packets.All()
	if err != nil {
		t.Fatal(err)
	}
	s := newScapyRigs(t, false)
	kinds := map[string]int{}
	for _, p := range all {
		b := withFlag(p.Frame)
		if b == nil || p.Frames != 1 {
			continue
		}
		t.Run(p.Name, func(t *testing.T) {
			r := s.at(t, p)
			f := frame{port: p.Interface.Name, b: b}
			if f.truncated() {
				return
			}
			must := func(err error) {
				t.Helper()
				if err != nil {
					t.Fatalf("%s: %v", p.Note, err)
				}
			}
			must(errors.Join(r.g.flushNexthops(), r.freshEvents()))
			_, err := r.hops()
			must(err)
			var got, plain struct {
				seen
				hops []abi.Traced
			}
			must(r.in(func() (err error) {
				got.seen, err = r.check(f, &oracle.Labels{}, true)
				if err != nil {
					return err
				}
				if got.hops, err = r.hops(); err != nil {
					return err
				}
				if plain.seen, err = r.check(frame{port: f.port, b: p.Frame}, &oracle.Labels{}, true); err != nil {
					return err
				}
				plain.hops, err = r.hops()
				return err
			}))
			if string(got.want.Verdict.String()) != string(p.Verdict) || string(got.want.Reason) != p.Reason {
				t.Errorf("%s: %s %s, want %s %s", p.Note, got.want.Verdict, got.want.Reason, p.Verdict, p.Reason)
			}
			if len(plain.hops) != 0 {
				t.Errorf("%d events without the flag", len(plain.hops))
			}
			times := 1
			if got.took {
				times = 2
			}
			visits := got.want.Visits
			// Its proof and its number were verified, and then the packet was refused, or handed to a function in
			// the node, which stamps it later.
			verified := got.want.Spent != nil && (len(visits) == 0 || visits[len(visits)-1].Position == 0)
			if p.Verdict == packets.Drop && verified || len(got.want.Reported) > 0 {
				return
			}
			if len(got.hops) != times*len(visits) {
				t.Fatalf("%s: %d events, want %d of %d visits: %+v", p.Note, len(got.hops), times*len(visits), len(visits), got.hops)
			}
			if len(got.hops) == 0 {
				return
			}
			was := proofOf(t, p.Frame[srv6.EthernetLen:])
			for i, e := range got.hops {
				v := visits[i%len(visits)]
				hook, port := abi.HookTC, r.ports[f.port]
				if i >= len(visits) {
					hook, port = abi.HookXDP, 1 // a test run comes by the loopback device
				}
				number := was.RND ^ r.maskUp(v)
				if i%len(visits) > 0 { // a list that visits a position twice takes masks that do not fit each other
					number = e.Number
				}
				want := abi.Traced{
					TimeNs: e.TimeNs, Number: number, Before: e.Before, After: e.After, Path: abi.BE32(v.Path), Ifindex: port, Len: uint32(len(b)),
					Epoch: v.Epoch, Scheme: uint8(was.Scheme), Position: v.Position, Verified: e.Verified, Hook: uint8(hook),
				}
				if e != want || e.TimeNs == 0 {
					t.Errorf("event\n%+v, want\n%+v", e, want)
				}
				if first := i%len(visits) == 0; first && abi.BE64(e.Before) != was.CML {
					t.Errorf("it came with %#x, and the event says %#x", was.CML, abi.BE64(e.Before))
				} else if !first && e.Before != got.hops[i-1].After {
					t.Errorf("it came with %#x behind a stamp of %#x", e.Before, got.hops[i-1].After)
				}
				kinds[fmt.Sprintf("hook %d, verified %d", e.Hook, e.Verified)]++
				last := i%len(visits) == len(visits)-1
				switch {
				case e.Verified != 0:
					if e.After != 0 || !last {
						t.Errorf("verified, and event %+v", e)
					}
				case last && p.Verdict == packets.Forward:
					if now := proofOf(t, p.Out); abi.BE64(e.After) != now.CML {
						t.Errorf("Scapy's stamp is %#x, and the event says %#x", now.CML, abi.BE64(e.After))
					}
				}
			}
			// Where it goes on with its outer header, it keeps the flag.
			if want := withFlag(plain.tc.b); p.Verdict == packets.Forward && want != nil && !bytes.Equal(want[srv6.EthernetLen:], got.tc.b[srv6.EthernetLen:]) {
				t.Errorf("sent\n%s\nwant the flag and nothing else to differ from\n%s", layers(got.tc.b), layers(plain.tc.b))
			}
		})
	}
	for _, what := range []string{"hook 0, verified 0", "hook 0, verified 1", "hook 1, verified 0", "hook 1, verified 1"} {
		if kinds[what] < 3 {
			t.Errorf("%s: %d events", what, kinds[what])
		}
	}
}

// A headend sets the flag in as many packets as are left to trace, and in no other, on both hooks.
func TestAHeadendFlagsSoManyPackets(t *testing.T) {
	t.Parallel()
	all, err := packets.All()
	if err != nil {
		t.Fatal(err)
	}
	s := newScapyRigs(t, false)
	hooks := map[uint8]int{}
	for _, p := range all {
		if p.Frames != 1 || p.Interface.Name == portCore || p.Verdict != packets.Forward || !p.Armed {
			continue
		}
		t.Run(p.Name, func(t *testing.T) {
			r := s.at(t, p)
			f := frame{port: p.Interface.Name, b: p.Frame}
			must := func(err error) {
				t.Helper()
				if err != nil {
					t.Fatalf("%s: %v", p.Note, err)
				}
			}
			must(errors.Join(r.g.flushNexthops(), r.freshEvents()))
			want, _ := r.expect(f)
			if !want.Encapsulated || len(want.Visits) == 0 {
				return
			}
			var index uint32
			var h abi.Headend
			for i, x := range r.have.Headends {
				if x.Path == abi.BE32(want.Visits[0].Path) && x.Epoch == want.Visits[0].Epoch {
					index, h = i, x
				}
			}
			const entry, packetsLeft = 3, 2
			marked := h
			marked.Trace = entry + 1
			run := func(xdp bool) (out outcome) {
				t.Helper()
				must(r.in(func() (err error) {
					if xdp {
						out, err = r.runXDP(f)
					} else {
						out, err = r.runTC(f)
					}
					return err
				}))
				r.resetNumber(h)
				return out
			}
			must(r.g.flushNexthops())
			run(false) // TC learns the way out
			for _, xdp := range []bool{false, true} {
				plain := run(xdp)
				if xdp && plain.verdict == xdpPass {
					continue
				}
				_, err := r.hops()
				must(errors.Join(err, r.put(tables.MapHeadends, index, marked), r.put(tables.MapTraces, uint32(entry), abi.Trace{Left: packetsLeft})))
				for n := range packetsLeft + 2 {
					got := run(xdp)
					hops, err := r.hops()
					must(err)
					if n >= packetsLeft {
						if !bytes.Equal(got.b, plain.b) || len(hops) != 0 {
							t.Errorf("packet %d: %d events, sent\n%s\nwant\n%s", n, len(hops), layers(got.b), layers(plain.b))
						}
						continue
					}
					if !bytes.Equal(got.b, withFlag(plain.b)) {
						t.Fatalf("packet %d: sent\n%s\nwant the flag and nothing else to differ from\n%s", n, layers(got.b), layers(plain.b))
					}
					if len(hops) != len(want.Visits) {
						t.Fatalf("packet %d: %d events, want %d", n, len(hops), len(want.Visits))
					}
					proof := proofOf(t, p.Out)
					e := hops[0]
					number := proof.RND ^ h.Share.DownRnd
					if len(hops) > 1 { // other positions have masked it too
						number = e.Number
					}
					wantE := abi.Traced{
						TimeNs: e.TimeNs, Number: number, After: e.After, Path: h.Path, Ifindex: e.Ifindex, Len: uint32(len(got.b)),
						Epoch: h.Epoch, Scheme: h.Scheme, Position: 0, Hook: e.Hook,
					}
					if e != wantE || number&abi.RNDCounterMax != r.number {
						t.Errorf("event\n%+v, want\n%+v", e, wantE)
					}
					if last := hops[len(hops)-1]; abi.BE64(last.After) != proof.CML {
						t.Errorf("Scapy's stamp is %#x, and the event says %#x", proof.CML, abi.BE64(last.After))
					}
					hooks[e.Hook]++
				}
				must(r.put(tables.MapHeadends, index, h))
				var left abi.Trace
				must(r.g.maps[tables.MapTraces].Lookup(uint32(entry), &left))
				if left.Left != 0 {
					t.Errorf("%d are left", left.Left)
				}
			}
			_, err := r.counted()
			must(err)
		})
	}
	if hooks[0] < 6 || hooks[1] < 6 {
		t.Errorf("so many packets were traced by hook: %v", hooks)
	}
}

// Whoever sets the flag gets so many events, and the next one says how many were not sent. Refusals have their own.
func TestEventsOfTracedPacketsAreLimited(t *testing.T) {
	t.Parallel()
	r := newScapyRig(t, "r2")
	p, err := packets.Load("web-1")
	if err != nil {
		t.Fatal(err)
	}
	f := frame{port: p.Interface.Name, b: withFlag(p.Frame)}
	send := func(n int) (hops []abi.Traced) {
		t.Helper()
		r.must(r.in(func() error {
			for range n {
				if _, err := r.runTC(f); err != nil {
					return err
				}
			}
			return nil
		}))
		r.traced.SetDeadline(time.Unix(1, 0))
		for {
			raw, err := r.traced.Read()
			if errors.Is(err, os.ErrDeadlineExceeded) {
				return hops
			}
			if err != nil {
				t.Fatal(err)
			}
			var e abi.Traced
			copy(xtest.BytesOf(&e), raw.RawSample)
			hops = append(hops, e)
		}
	}
	const more = abi.TracedPerSecond + 9 // all in one second, or in two: then more of them are sent
	hops := send(abi.TracedPerSecond + more)
	if len(hops) < abi.TracedPerSecond {
		t.Fatalf("%d events, want %d at least", len(hops), abi.TracedPerSecond)
	}
	// A second begins with its first event; the programs of a rig run on one CPU.
	got, sent, began := uint32(len(hops)), 0, uint64(0)
	for _, e := range hops {
		got += e.Suppressed
		if e.TimeNs-began >= uint64(time.Second) {
			began, sent = e.TimeNs, 0
		}
		if sent++; sent == abi.TracedPerSecond+1 {
			t.Errorf("more than %d events in a second", abi.TracedPerSecond)
		}
	}
	// What is still to be told comes with the next event, in another second.
	now := make([]abi.Tracing, r.possible)
	r.must(r.g.maps[tables.MapTracing].Lookup(uint32(0), &now))
	for i := range now {
		now[i].WindowNs = 0
	}
	r.must(r.put(tables.MapTracing, uint32(0), now))
	for _, e := range send(1) {
		got += 1 + e.Suppressed
	}
	if want := uint32(abi.TracedPerSecond + more + 1); got != want {
		t.Errorf("%d packets are told of, want %d", got, want)
	}
}
