package e2e

import (
	"bytes"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/srv6"
)

// marker puts hop-by-hop options, with data that it changes at each pass as IOAM
// does (RFC 9486), and destination options before the SRH of packets from headends.
// Afterwards they must be there, as it has left them.
type marker struct {
	mu    sync.Mutex
	taken int   // that came without
	kept  int   // that came with them
	bad   error // what came otherwise
}

// passes is the byte in which the marker counts.
const passes = 4

func (k *marker) mark(from string, p srv6.Packet) srv6.Packet {
	k.mu.Lock()
	defer k.mu.Unlock()
	switch {
	case p.SRH == nil:
		return p
	case len(p.Options) == 0 && (from == "r1" || from == "r6"):
		k.taken++
		p.Options = slices.Concat(
			[]byte{srv6.NextHeaderDestination, 1, 0x31, 12}, make([]byte, 12),
			[]byte{srv6.NextHeaderRoute, 0, 0x1e, 4, 0xde, 0xad, 0xbe, 0xef})
		p.Header.NextHeader = srv6.NextHeaderHopByHop
		return p
	}
	k.kept++
	want := slices.Concat([]byte{srv6.NextHeaderDestination, 1, 0x31, 12}, make([]byte, 12),
		[]byte{srv6.NextHeaderRoute, 0, 0x1e, 4, 0xde, 0xad, 0xbe, 0xef})
	want[passes] = 2 - p.SRH.SegmentsLeft - 1 // of three segments
	if k.bad == nil && !bytes.Equal(p.Options, want) {
		k.bad = fmt.Errorf("from %s with %d segments left: options %x, want %x", from, p.SRH.SegmentsLeft, p.Options, want)
	}
	p.Options = slices.Clone(p.Options)
	if len(p.Options) > passes {
		p.Options[passes]++
	}
	return p
}

// done tells whether enough packets got options, and nearly all of them had them
// at both later passes.
func (k *marker) done() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.bad != nil || k.taken < 300 || k.kept < 2*k.taken*9/10 {
		return fmt.Errorf("%d packets got options, %d had them further on: %v", k.taken, k.kept, k.bad)
	}
	return nil
}

// Somebody between the nodes adds options to what is not his: TCP still passes its
// chain and is verified, nodes leave the options as they are, and the egress takes
// them off with the outer header.
func TestOptionsBeforeTheSRHArePassed(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		scheme model.Scheme
		hook   model.Datapath
	}{{model.SchemeKeyed, model.DatapathTC}, {model.SchemeKeyedFlow, model.DatapathTC}, {model.SchemeOPoT, model.DatapathXDP}} {
		t.Run(c.scheme.String()+" at "+c.hook.String(), func(t *testing.T) {
			t.Parallel()
			w := build(t, star, proven(c.scheme), datapath(c.hook))
			for _, h := range []string{"h1", "h2"} {
				node := map[string]string{"h1": "r1", "h2": "r6"}[h]
				must(t, w.net(h).SetMTU(h+"-"+node, 1400)) // the marker needs room
				if c.hook == model.DatapathTC {            // else they are
					w.offloadsOff(h, h+"-"+node)
				}
				must(t, w.net(h).SetOffload(h+"-"+node, host.TransmitSum, false)) // it sees bytes only
			}
			m := w.meddle("m")
			web := w.path("web", model.Forward)
			k := &marker{}
			passed := w.counting(web)
			m.with(func(from string, p srv6.Packet) []srv6.Packet { return []srv6.Packet{k.mark(from, p)} }, func() {
				w.reaches("h1", "h2")
				if r := w.download("h2", "h1", 500_000); r.Bytes != 500_000 {
					t.Errorf("%d bytes came", r.Bytes)
				}
				eventually(t, k.done) // what ends a connection is on its way still
			})
			if f := passed(); f.frames() < 20 {
				t.Errorf("%d frames passed chain web", f.frames())
			}

			t.Run("a hop is skipped", func(t *testing.T) {
				w := w.in(t)
				since := time.Now()
				m.with(between("r1", 2, one(func(p srv6.Packet) srv6.Packet { return (&marker{}).mark("r1", p.AtSegment(1)) }))(w, web), func() {
					w.isCutOff("h1", "h2", probes)
				})
				w.refused("r6", "proof", probes)
				w.explained(w.event(since, "r6", "proof"), "r2 (fw) never stamped this packet"+planned)
			})
			t.Run("an option that must not be passed over", func(t *testing.T) {
				w := w.in(t)
				since := time.Now()
				m.with(unknownOption(w, web), func() { w.isCutOff("h1", "h2", probes) })
				w.refused("r2", "option-unknown", probes)
				if e := w.event(since, "r2", "option-unknown"); e.Hook != "tc" {
					t.Errorf("refused at %s", e.Hook)
				}
			})
			w.reaches("h1", "h2")
		})
	}
}

func unknownOption(w *world, web plan.Path) tamper {
	return between("r1", 2, one(func(p srv6.Packet) srv6.Packet {
		p = (&marker{}).mark("r1", p)
		p.Options[16+2] = 0x5e
		return p
	}))(w, web)
}
