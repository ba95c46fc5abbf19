package explain_test

import (
	"strings"
	"testing"

	"github.com/waystamp/waystamp/internal/event"
	"github.com/waystamp/waystamp/internal/explain"
	"github.com/waystamp/waystamp/test/packets"
)

// Scapy's packets with labels, refused: what their stamps and labels say.
func TestPacketsWithLabelsAreExplained(t *testing.T) {
	w, err := packets.LoadMPLSWorld()
	if err != nil {
		t.Fatal(err)
	}
	all, err := packets.MPLS()
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]string{
		"mpls-proof-without-0":    "the headend r1 never stamped this packet; its labels say r6",
		"mpls-proof-without-1":    "r2 (fw) never stamped this packet; its labels say r6",
		"mpls-proof-order":        "r3 (dpi) stamped this packet before r2 (fw); its labels say r6",
		"mpls-service-swapped":    "its labels say r2 (fw), r3 (dpi), r6",
		"mpls-service-of-another": "which r2 has not; its labels say",
		"mpls-top-17000":          "a packet with labels to label 17000, r2 (fw), r3 (dpi), r6 (its proof names chain web, inside is a packet from fc00:7::2 to fc00:8::2) was refused",
		"mpls-cut-15":             "a packet with labels to r2 was refused",
		"mpls-flow-changed":       "",
		"mpls-wrong-chain":        "fc00:9::2",
		"mpls-transit-hop-limit":  "a packet with labels to r2 (fw), r3 (dpi), r6 (its proof names chain web",
	}
	for _, p := range all {
		if p.Verdict != packets.Drop {
			continue
		}
		e := event.Event{Node: p.Node, Interface: "core", Reason: p.Reason, Packet: p.Frame}
		x := explain.Explain(e, w.Paths, nil)
		s, ok := want[p.Name]
		delete(want, p.Name)
		if x.Sentence == "" || ok && !strings.Contains(x.Sentence, s) {
			t.Errorf("%s: %q\nwant in it: %q", p.Name, x.Sentence, s)
		}
	}
	for name := range want {
		t.Errorf("no packet %s", name)
	}
}
