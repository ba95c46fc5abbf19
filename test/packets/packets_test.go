package packets

import (
	"encoding/hex"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/pot"
)

func TestPacketsAreWhole(t *testing.T) {
	all, err := All()
	if err != nil {
		t.Fatal(err)
	}
	w, err := LoadWorld()
	if err != nil {
		t.Fatal(err)
	}
	whole(t, all, w)
	if len(all) < 200 {
		t.Errorf("only %d packets were found", len(all))
	}
	labelled, err := MPLS()
	if err != nil {
		t.Fatal(err)
	}
	if w, err = LoadMPLSWorld(); err != nil {
		t.Fatal(err)
	}
	whole(t, labelled, w)
	if len(labelled) < 100 {
		t.Errorf("only %d packets with labels were found", len(labelled))
	}
}

func whole(t *testing.T, all []Packet, w World) {
	t.Helper()
	seen := make(map[string]bool)
	for _, p := range all {
		if seen[p.Name] {
			t.Errorf("%s: two packets are called %s", p.File, p.Name)
		}
		seen[p.Name] = true
		if _, err := w.Node(p.Node); err != nil {
			t.Errorf("%s: %v", p.Name, err)
		}
		if len(p.Frame) < 14 || p.Interface.Name == "" || p.Note == "" {
			t.Errorf("%s: a frame of %d bytes on %q, note %q", p.Name, len(p.Frame), p.Interface.Name, p.Note)
		}
		if (p.Verdict == Drop) != (p.Reason != "") || (p.Verdict == Forward) != (p.Out != nil) {
			t.Errorf("%s: verdict %q, reason %q, out %d bytes", p.Name, p.Verdict, p.Reason, len(p.Out))
		}
		switch p.Verdict {
		case Pass, Forward, Deliver, Drop:
		default:
			t.Errorf("%s: verdict %q is not known", p.Name, p.Verdict)
		}
	}
}

func TestLoadNamesWhatIsMissing(t *testing.T) {
	if _, err := Load("no-such-packet"); err == nil || !strings.Contains(err.Error(), `"no-such-packet"`) {
		t.Errorf("got %v", err)
	}
}

func TestParseNamesTheLine(t *testing.T) {
	for text, want := range map[string]string{
		"name: a\nframe:\n  0g":    "line 3",
		"name: a\ncolour: red":     `line 2: key "colour" is not known`,
		"note: first":              "line 1: note stands before the first name",
		"name: a\nport: sideways":  `line 2: port "sideways" is not known`,
		"name: a\n\nno colon here": "line 3",
	} {
		if _, err := parse(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: got %v, want %q in it", text, err, want)
		}
	}
}

// Python's secrets must be such as the model takes, and its stamps the model's.
func TestWorldIsConsistent(t *testing.T) {
	for name, load := range map[string]func() (World, error){"SRv6": LoadWorld, "labels": LoadMPLSWorld} {
		w, err := load()
		if err != nil {
			t.Fatal(err)
		}
		t.Run(name, func(t *testing.T) { consistent(t, w) })
	}
}

func consistent(t *testing.T, w World) {
	t.Helper()
	for _, p := range w.Paths {
		last := len(p.Shares) - 1
		if err := p.Verifier.Check(p.Scheme, p.Shares[last]); err != nil {
			t.Errorf("%s: %v", p.Chain, err)
		}
		h := pot.Header{Scheme: p.Scheme, Epoch: p.Epoch, Path: p.Path}
		flow := pot.Flow{Source: netip.MustParseAddr("fc00:7::2"), Destination: p.Match.Destination.Addr().Next(), Protocol: 17}
		egress := p.Shares[last]
		steps := pot.WalkFlow(h, 5<<48|7, flow, p.Shares[:last]...)
		if _, r := p.Verifier.VerifyFlow(egress, h, steps[last-1].WireOut, egress.Binding(flow)); r != pot.Verified {
			t.Errorf("%s: a whole walk is %v", p.Chain, r)
		}
	}
	for _, n := range w.Nodes {
		if _, err := plan.EncodeNode(n.Node); err != nil {
			t.Errorf("%s has no plan that a node takes: %v", n.Name, err)
		}
	}
	r6, err := w.Node("r6")
	if err != nil {
		t.Fatal(err)
	}
	if len(r6.Egresses) == 0 || len(r6.Headends) != 0 {
		t.Errorf("r6 is the egress of %d paths and the headend of %d", len(r6.Egresses), len(r6.Headends))
	}
	reports := 0
	for _, e := range r6.Egresses {
		if e.OnViolation == model.OnViolationReport {
			reports++
		}
	}
	if reports != 1 {
		t.Errorf("%d paths report, want 1", reports)
	}
}

// The vectors of the documentation are Scapy's packets.
func TestDocumentedLabelsAreScapys(t *testing.T) {
	text, err := os.ReadFile("../../docs/protocol/mpls.md")
	if err != nil {
		t.Fatal(err)
	}
	_, vectors, _ := strings.Cut(string(text), "## Vectors")
	vectors = strings.Join(strings.Fields(vectors), "")
	all, err := MPLS()
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"mpls-keyed-1", "mpls-keyed-2", "mpls-keyed-3"} {
		i := slices.IndexFunc(all, func(p Packet) bool { return p.Name == name })
		if i < 0 {
			t.Fatalf("no packet is called %s", name)
		}
		const ethernet, headers = 14, 60 // for three visits
		if want := hex.EncodeToString(all[i].Frame[ethernet:][:headers]); !strings.Contains(vectors, want) {
			t.Errorf("docs/protocol/mpls.md lacks %s: %s", name, want)
		}
	}
}
