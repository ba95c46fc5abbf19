package explain

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/event"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/pot"
	"github.com/waystamp/waystamp/test/packets"
)

func world(t testing.TB) packets.World {
	t.Helper()
	w, err := packets.LoadWorld()
	if err != nil {
		t.Fatal(err)
	}
	return w
}

// eventOf is the event that one of Scapy's packets makes at its node.
func eventOf(t testing.TB, name string) event.Event {
	t.Helper()
	p, err := packets.Load(name)
	if err != nil {
		t.Fatal(err)
	}
	e := event.Event{Node: p.Node, Interface: "core", Reason: p.Reason, Text: "TEXT", Packet: p.Frame, Len: uint32(len(p.Frame))}
	if len(p.Reports) > 0 && p.Reason == "" {
		e.Reason, e.Reported = p.Reports[0], true
	}
	if e.Reason == "" {
		t.Fatalf("%s is no refusal", name)
	}
	return e
}

var routers = Names{netip.MustParseAddr("fc00:0:0:401::"): "r4", netip.MustParseAddr("fc00:0:0:501::1"): "r5"}

const (
	same    = "; its segment list is the planned one"
	noWay   = ", no other epoch or chain, no single bit changed"
	ones    = "nothing that was tried gives the values of this packet (RND 0xffffffffffffffff, CML 0xffffffffffffffff): "
	primeIs = "which is not below the prime 0x1fffffffffffffff: no headend gives out such a number"
)

// Every sentence, on packets whose proofs Python computed.
func TestSentences(t *testing.T) {
	w := world(t)
	for name, want := range map[string]string{
		"list-r4-r5-unstamped":  "r2 (fw) and r3 (dpi) never stamped this packet; its segment list says r4, r5",
		"list-swapped":          "r3 (dpi) stamped this packet before r2 (fw); its segment list says r3 (dpi), r2 (fw)",
		"list-short":            "r2 (fw) never stamped this packet; its segment list says r3 (dpi)",
		"list-r4-r5":            "every hop of chain web stamped this packet in order; its segment list says r4, r5",
		"list-longer":           "every hop of chain web stamped this packet in order; its segment list says r4, r2 (fw), r3 (dpi)",
		"list-argument":         "every hop of chain web stamped this packet in order; its segment list says r2 (fw) as fc00:0:0:201::1, r3 (dpi)",
		"reduced-at-egress":     "every hop of chain web stamped this packet in order; its segment list says r3 (dpi)",
		"report-segments":       "every hop of chain report stamped this packet in order; its segment list says r4",
		"keyed-skipped-1":       "r2 (fw) never stamped this packet" + same,
		"keyed-skipped-both":    "r2 (fw) and r3 (dpi) never stamped this packet" + same,
		"keyed-skipped-headend": "the headend r1 never stamped this packet" + same,
		"keyed-swapped":         "r3 (dpi) stamped this packet before r2 (fw)" + same,
		"keyed-twice":           "r2 (fw) stamped this packet twice: the order is r1, r2 (fw), r2 (fw), r3 (dpi)" + same,
		"keyed-cml-zero":        "this packet carries no stamp, not even that of its headend: its CML is zero" + same,
		"keyed-zero":            "this packet carries no stamp, not even that of its headend: its CML is zero" + same,
		"keyed-rnd-bit":         "every hop of chain web stamped this packet in order, but bit 3 of its RND was changed between r3 (dpi) and r6" + same,
		"keyed-cml-bit":         "every hop of chain web stamped this packet in order, but bit 40 of its CML was changed between r3 (dpi) and r6" + same,
		"keyed-ones":            ones + "no selection or order of the hops of chain web, none of them repeated" + noWay + same,
		"opot-skipped-1":        "r2 (fw) never stamped this packet" + same,
		"opot-skipped-2":        "r3 (dpi) never stamped this packet" + same,
		"opot-skipped-both":     "r2 (fw) and r3 (dpi) never stamped this packet" + same,
		"opot-skipped-headend":  "the headend r1 never stamped this packet" + same,
		"opot-swapped":          "r3 (dpi) stamped this packet before r2 (fw)" + same,
		"opot-twice":            "r2 (fw) stamped this packet twice: the order is r1, r2 (fw), r2 (fw), r3 (dpi)" + same,
		"opot-rnd-bit":          "every hop of chain ordered stamped this packet in order, but bit 3 of its RND was changed between r3 (dpi) and r6" + same,
		"opot-cml-bit":          "every hop of chain ordered stamped this packet in order, but bit 40 of its CML was changed between r3 (dpi) and r6" + same,
		"opot-range-rnd":        "every hop of chain ordered stamped this packet in order, but it started with RND 0x2000000000000006, " + primeIs + same,
		"opot-range-cml":        "every hop of chain ordered stamped this packet in order, but its CML is the prime more than what was sent" + same,
		"pot-skipped-2":         "r3 (dpi) never stamped this packet" + same,
		"pot-twice":             "r2 (fw) stamped this packet twice" + same,
		"pot-range-cml":         "every hop of chain unordered stamped this packet (pot does not show in which order), but its CML is the prime more than what was sent" + same,
		"pot-ones":              ones + "no selection of the hops of chain unordered, none of them repeated" + noWay + same,
		"pot-cml-bit":           "every hop of chain unordered stamped this packet (pot does not show in which order), but bit 40 of its CML was changed between r2 (fw) and r3 (dpi) or between r3 (dpi) and r6" + same,
		"splice-path":           "this packet carries the stamps of chain special, while its proof names chain web" + same,
		"splice-epoch":          "this packet carries the stamps of epoch 2 of chain web, while its proof names epoch 1" + same,
		"flow-other-source-port": "this packet carries the proof of a packet of another flow, stamped by every hop of chain bound: " +
			"its source port was 4243, here it is 4242" + same,
		"flow-other-destination-port": "this packet carries the proof of a packet of another flow, stamped by every hop of chain bound: " +
			"its destination port was 54, here it is 53" + same,
		"flow-other-protocol": "this packet carries the proof of a packet of another flow, stamped by every hop of chain bound: " +
			"its protocol was 6, here it is 17" + same,
		"flow-skipped":         "r2 (fw) never stamped this packet" + same,
		"flow-cml-bit":         "every hop of chain bound stamped this packet in order, but bit 0 of its CML was changed between r3 (dpi) and r6" + same,
		"flow-lying-3":         "a packet from fc00:1::1 to r6 (its proof names chain bound, inside is a packet from fc00:7::2 to fc00:10::2) was refused: TEXT",
		"unproven":             "a packet from fc00:7::2 to fc00:8::2, which chain web requires, came without proof",
		"unproven-special":     "a packet from fc00:7::5:0:0:2 to fc00:8::2, which chain special requires, came without proof",
		"unproven-srh":         "a packet from fc00:1::1 to fc00:8::2, which chain web requires, came without proof",
		"wrong-chain":          "a packet from fc00:7::2 to fc00:9::2 came with a proof of chain web, but chain ordered takes it; every hop of chain web stamped this packet in order",
		"no-chain":             "a packet from fc00:7::2 to fc00:99::1 came with a proof of chain web, but no chain that ends there takes it; every hop of chain web stamped this packet in order",
		"unknown-sid":          "a packet is addressed to fc00:0:0:2ff::, where there is nothing",
		"unknown-path":         "the proof of a packet to r2 (fw) names path 0x12345678, which no chain has; this packet carries the stamps of chain web, while its proof names path 0x12345678",
		"path-of-another-sid":  "the proof of a packet to r2 (fw) names chain ordered, which has another SID there or does not go there; this packet carries the stamps of chain web, while its proof names chain ordered; its segment list says r2 (fw) as fc00:0:0:201::, r3 (dpi) as fc00:0:0:301::, r6",
		"unknown-epoch":        "the proof of a packet to r2 (fw) names epoch 9 of chain web; known here is epoch 1 and 2; this packet carries the stamps of epoch 1 of chain web, while its proof names epoch 9" + same,
		"scheme-pot":           "the proof of a packet to r2 (fw) says scheme pot, but chain web has keyed; the headend of chain web stamped this packet" + same,
		"scheme-downgrade":     "the proof of a packet to r6 says scheme pot, but chain ordered has opot; every hop of chain ordered stamped this packet in order" + same,
		"no-srh-udp":           "a packet from fc00:1::1 to r2 (fw) was refused: TEXT",
		"tlv-missing":          "a packet from fc00:1::1 to r2 (fw) was refused: TEXT",
		"tlv-overrun":          "a packet from fc00:1::1 to r2 (fw) was refused: TEXT (byte 111 (TLV Length): of type 252 is 22, 14 bytes are left in the header)",
		"inner-hop-limit-1":    "a packet from fc00:1::1 to r6 (its proof names chain web, inside is a packet from fc00:7::2 to fc00:8::2) was refused: TEXT",
		"outside-sid-own":      "a packet from fc00:7::2 to fc00:0:0:100::1 was refused: TEXT",
		"ipv6-truncated":       "TEXT; the packet cannot be read: byte 14 (IPv6 header): needs 40 bytes, 39 are left",
		"report-proof":         "the packet does not tell these apart: every hop of chain report stamped this packet in order, but bit 0 of its CML was changed between r2 (fw) and r6; or every hop of chain report stamped this packet in order, but bit 61 of its CML was changed between r1 and r2 (fw)" + same,
		"inner-ipv4":           "a packet from 192.0.2.1 to 192.0.2.2 came with a proof of chain web, but no chain that ends there takes it; every hop of chain web stamped this packet in order",
		"inner-ipv4-other":     "a packet from 192.0.2.2 to 198.51.100.2 came with a proof of chain web, but chain four takes it; every hop of chain web stamped this packet in order",
		"inner-udp":            "a packet from fc00:1::1 to r6 (its proof names chain web) was refused: TEXT",
		"unproven-ipv4":        "a packet from 192.0.2.2 to 198.51.100.2, which chain four requires, came without proof",
		"unproven-ipv4-source": "a packet from 203.0.113.1 to 8.8.8.8, which chain fourth requires, came without proof",
		"edge-ipv4-checksum":   "a packet from 192.0.2.2 to 198.51.100.2 was refused: TEXT",
	} {
		t.Run(name, func(t *testing.T) {
			x := Explain(eventOf(t, name), w.Paths, routers)
			if diff := cmp.Diff(want, x.Sentence); diff != "" {
				t.Errorf("sentence (-want +got):\n%s", diff)
			}
		})
	}
}

// What a function on byte streams cannot take is said with its reason, and with its connection's ends: its headers
// are off by then.
func TestRefusalsAtAFunctionOnByteStreamsAreSaid(t *testing.T) {
	w := world(t)
	for _, r := range []abi.Reason{abi.ReasonStreamDown, abi.ReasonStreamsFull, abi.ReasonStreamQuota} {
		e := eventOf(t, "unproven")
		e.Node, e.Reason, e.Text = "r2", r.String(), r.Text()
		want := "a packet from fc00:7::2 to fc00:8::2 was refused: " + r.Text()
		if got := Explain(e, w.Paths, nil).Sentence; got != want {
			t.Errorf("%s: %s; want %s", e.Reason, got, want)
		}
	}
}

// Sentences that no packet of the world makes.
func TestMoreSentences(t *testing.T) {
	w := world(t)
	long := w.Paths[5] // sixteen segments: r1, fw and dpi in turn, r6
	web, web2 := w.Paths[0], w.Paths[1]
	reversed := web
	reversed.Direction = model.Reverse
	several := web
	several.Ingress = []plan.Ingress{{Node: "r1", Lane: 0, Lanes: 4}, {Node: "r9", Lane: 4, Lanes: 4}}
	short := web
	short.Hops = slices.Clone(web.Hops)
	all := []byte{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
	for name, c := range map[string]struct {
		path   plan.Path
		others []plan.Path
		reason string
		stamps []pot.Share
		list   []int  // positions; nil: as planned
		want   string // "": that nothing fits, with the values
	}{
		"a hop missing and the others exchanged": {
			path: w.Paths[2], reason: "PROOF", stamps: pick(w.Paths[2], 2, 1),
			want: "the headend r1 never stamped this packet, and the others did in the order r3 (dpi), r2 (fw)" + same,
		},
		"no simple exchange": {
			path: w.Paths[2], reason: "PROOF", stamps: pick(w.Paths[2], 2, 1, 0),
			want: "this packet was stamped in the order r3 (dpi), r2 (fw), r1" + same,
		},
		"a hop instead of another": {
			path: web, reason: "PROOF", stamps: pick(web, 0, 1, 1),
			want: "r2 (fw) stamped this packet twice, and r3 (dpi) never: the order is r1, r2 (fw), r2 (fw)" + same,
		},
		"a hop three times": {
			path: web, reason: "PROOF", stamps: pick(web, 0, 1, 1, 1, 2),
			want: "r2 (fw) stamped this packet 3 times: the order is r1, r2 (fw), r2 (fw), r2 (fw), r3 (dpi)" + same,
		},
		"the segment list names only the egress": {
			path: web, reason: "SEGMENTS", stamps: pick(web, 0), list: []int{3},
			want: "r2 (fw) and r3 (dpi) never stamped this packet; its segment list names nothing before r6",
		},
		"a reverse path": {
			path: reversed, reason: "SEGMENTS", stamps: pick(web, 0, 1, 2), list: []int{1, 3},
			want: "every hop of chain web (reverse) stamped this packet in order; its segment list says r2 (fw)",
		},
		"one of several headends": {
			path: several, reason: "PROOF", stamps: pick(web, 0, 0, 1, 2),
			want: "the headend (r1 or r9) stamped this packet twice: the order is r9, r9, r2 (fw), r3 (dpi)" + same,
		},
		"none of several headends": {
			path: several, reason: "PROOF", stamps: pick(web, 1, 2),
			want: "the headend (r1 or r9) never stamped this packet" + same,
		},
		"another epoch at one hop": {
			path: web, others: []plan.Path{web2}, reason: "PROOF", stamps: []pot.Share{web.Shares[0], web2.Shares[1], web.Shares[2]},
			want: "r2 (fw) stamped this packet with the secrets of epoch 2 of chain web, and the others with those of epoch 1, which its proof names" + same,
		},
		"the egress has other secrets": {
			path: web, reason: "PROOF", stamps: pick(web, 0, 1, 2),
			want: "every hop of chain web stamped this packet in order with the secrets known here, so that r6 holds others" + same,
		},
		"a long path's neighbours exchanged": {
			path: long, reason: "PROOF", stamps: pick(long, move(all, 3, 4)...),
			want: "r3 (dpi) stamped this packet before r2 (fw)" + same,
		},
		"a long path, nothing fits": {
			path: long, reason: "PROOF", stamps: pick(long, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
		},
	} {
		t.Run(name, func(t *testing.T) {
			h := c.path.Header()
			steps := pot.Walk(h, 5<<48|7, c.stamps...)
			p := tampered{path: c.path, position: len(c.path.Hops) - 1, header: h, values: steps[len(steps)-1].WireOut}
			for _, j := range c.list {
				p.list = append(p.list, c.path.Hops[j].SID)
			}
			x := Explain(event.Event{Node: "r6", Reason: c.reason, Packet: p.frame(t)}, append([]plan.Path{c.path}, c.others...), nil)
			if c.want == "" {
				c.want = fmt.Sprintf("nothing that was tried gives the values of this packet (RND %s, CML %s): "+
					"no selection of the hops of chain longest, none of them moved, exchanged with another or repeated",
					Hex64(p.values.RND), Hex64(p.values.CML)) + noWay + same
			}
			if diff := cmp.Diff(c.want, x.Sentence); diff != "" {
				t.Errorf("sentence (-want +got):\n%s", diff)
			}
		})
	}
}

func pick(p plan.Path, positions ...byte) []pot.Share {
	var s []pot.Share
	for _, j := range positions {
		s = append(s, p.Shares[j])
	}
	return s
}

// move takes the element at i to place j.
func move(seq []byte, i, j int) []byte {
	return slices.Insert(slices.Delete(slices.Clone(seq), i, i+1), j, seq[i])
}

func TestUnprovenWithoutAChainSaysSo(t *testing.T) {
	w := world(t)
	want := "a packet from fc00:7::2 to fc00:8::2 came without proof, and no chain of these paths requires it: r6 has another plan"
	if x := Explain(eventOf(t, "unproven"), w.Paths[2:3], nil); x.Sentence != want {
		t.Errorf("got %s, want %s", x.Sentence, want)
	}
}

func TestUnverifiedNamesItsChain(t *testing.T) {
	e := eventOf(t, "unproven")
	e.Reason, e.Text, e.Reported = "unverified", "TEXT", true
	const between = "a packet from fc00:7::2 to fc00:8::2"
	if x, want := Explain(e, world(t).Paths, nil), between+", which chain web requires, was to leave the domain without having been verified"; x.Sentence != want {
		t.Errorf("got %s, want %s", x.Sentence, want)
	}
	if x, want := Explain(e, world(t).Paths[2:3], nil), between+" was audited: TEXT"; x.Sentence != want {
		t.Errorf("got %s, want %s", x.Sentence, want)
	}
}

func TestNothingCapturedIsSaid(t *testing.T) {
	x := Explain(event.Event{Node: "r6", Reason: "proof", Text: "the proof does not verify"}, world(t).Paths, nil)
	if want := "the proof does not verify; the packet cannot be read: nothing of it was captured"; x.Sentence != want {
		t.Errorf("got %s, want %s", x.Sentence, want)
	}
	if x = Explain(event.Event{Reason: "proof"}, nil, nil); x.Sentence != "proof; the packet cannot be read: nothing of it was captured" {
		t.Errorf("got %s", x.Sentence)
	}
}

func TestWithoutPathsOnlyTheReasonIsSaid(t *testing.T) {
	x := Explain(eventOf(t, "keyed-skipped-1"), nil, nil)
	if want := "a packet from fc00:1::1 to fc00:0:0:601:: was refused: TEXT"; x.Sentence != want || x.Tried {
		t.Errorf("got %s, tried %t, want %s", x.Sentence, x.Tried, want)
	}
	x = Explain(eventOf(t, "report-proof"), nil, nil)
	if want := "a packet from fc00:1::1 to fc00:0:0:608:: was reported: TEXT"; x.Sentence != want {
		t.Errorf("got %s, want %s", x.Sentence, want)
	}
}

func TestReasonsAreTakenInBothForms(t *testing.T) {
	w := world(t)
	e := eventOf(t, "list-short")
	a := Explain(e, w.Paths, nil)
	e.Reason = event.ReasonName(e.Reason)
	if b := Explain(e, w.Paths, nil); a.Sentence != b.Sentence || a.Reason != "segments" {
		t.Errorf("%s: %s, or %s", a.Reason, a.Sentence, b.Sentence)
	}
}

// A waypoint is named as one, and its visit is not missed.
func TestWaypointsAreNamed(t *testing.T) {
	w := world(t)
	for i := range w.Paths {
		if p := &w.Paths[i]; p.Chain == "web" {
			p.Hops = slices.Clone(p.Hops)
			p.Hops[2].Waypoints = []netip.Addr{netip.MustParseAddr("fc00:0:0:401::")}
		}
	}
	for name, want := range map[string]string{
		"list-r4-r5-unstamped": "r2 (fw) and r3 (dpi) never stamped this packet; its segment list says waypoint fc00:0:0:401::, r5",
		"keyed-skipped-1":      "r2 (fw) never stamped this packet; its segment list says r2 (fw), r3 (dpi)",
	} {
		x := Explain(eventOf(t, name), w.Paths, Names{netip.MustParseAddr("fc00:0:0:501::1"): "r5"})
		if diff := cmp.Diff(want, x.Sentence); diff != "" {
			t.Errorf("%s: sentence (-want +got):\n%s", name, diff)
		}
	}
}

func TestJSONHoldsWhatTheSentenceSays(t *testing.T) {
	w := world(t)
	b, err := json.MarshalIndent(Explain(eventOf(t, "list-r4-r5-unstamped"), w.Paths, routers), "", " ")
	if err != nil {
		t.Fatal(err)
	}
	p, err := packets.Load("list-r4-r5-unstamped")
	if err != nil {
		t.Fatal(err)
	}
	cml := p.Frame[14+40+8+48+16:][:8]
	want := `{
 "sentence": "r2 (fw) and r3 (dpi) never stamped this packet; its segment list says r4, r5",
 "node": "r6",
 "interface": "core",
 "reason": "segments",
 "source": "fc00:7::2",
 "destination": "fc00:8::2",
 "proof": {
  "scheme": "keyed",
  "epoch": 1,
  "path": "0x5eed0001",
  "chain": "web",
  "direction": "forward",
  "rnd": "0x0005000000000007",
  "cml": "0x` + event.Hex(cml).String() + `"
 },
 "carried": [
  {
   "sid": "fc00:0:0:401::",
   "name": "r4"
  },
  {
   "sid": "fc00:0:0:501::",
   "name": "r5"
  }
 ],
 "planned": [
  {
   "sid": "fc00:0:0:201::",
   "name": "r2 (fw)"
  },
  {
   "sid": "fc00:0:0:301::",
   "name": "r3 (dpi)"
  }
 ],
 "hypotheses": [
  {
   "kind": "skipped",
   "sentence": "r2 (fw) and r3 (dpi) never stamped this packet",
   "stamps": [
    {
     "chain": "web",
     "path": "0x5eed0001",
     "epoch": 1,
     "position": 0,
     "name": "r1"
    }
   ],
   "start": "0x0005000000000007",
   "origin": {
    "headend": "r1",
    "lane": 5,
    "frames": 1,
    "number": 7
   }
  }
 ],
 "tried": true
}`
	if diff := cmp.Diff(want, string(b)); diff != "" {
		t.Errorf("JSON (-want +got):\n%s", diff)
	}
}

// No packet of Scapy's, and no cut of it, may make Explain panic, under any
// reason.
func TestExplainTakesEveryPacket(t *testing.T) {
	w := world(t)
	all, err := packets.All()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range all {
		for _, reason := range []string{"PROOF", "SEGMENTS", "UNPROVEN", "WRONG_CHAIN", "UNKNOWN_PATH", "UNKNOWN_EPOCH", "SCHEME", "TLV_MISSING"} {
			for _, n := range []int{len(p.Frame), 150, 100, 60, 54, 20} {
				if n > len(p.Frame) || n < len(p.Frame) && p.File != "good.txt" {
					continue
				}
				if x := Explain(event.Event{Node: p.Node, Reason: reason, Packet: p.Frame[:n]}, w.Paths, nil); x.Sentence == "" {
					t.Errorf("%s, %d bytes, %s: nothing said", p.Name, n, reason)
				}
			}
		}
	}
}

// A proof that is right, and refused for its number alone.
func TestTheWindowsRefusalsNameTheNumber(t *testing.T) {
	w := world(t)
	p, err := packets.Load("web-3")
	if err != nil {
		t.Fatal(err)
	}
	for reason, says := range map[string]string{
		"REPLAY": "has been here before", "STALE": "is older than the numbers in the replay window",
	} {
		e := event.Event{Node: p.Node, Reason: reason, Packet: p.Frame, Len: uint32(len(p.Frame))}
		want := "every hop of chain web stamped this packet in order, but number 7 of lane 5 (r1) " + says + same
		if got := Explain(e, w.Paths, nil).Sentence; got != want {
			t.Errorf("%s: %s; want %s", reason, got, want)
		}
	}
}
