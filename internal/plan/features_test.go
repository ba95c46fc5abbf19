package plan

import (
	"slices"
	"testing"

	"github.com/waystamp/waystamp/internal/model"
)

func TestAgentsOfBeforeKnowNothingThatCameLater(t *testing.T) {
	all := Features()
	for _, f := range FirstFeatures {
		if !slices.Contains(all, f) {
			t.Errorf("this program knows %q no more, and plans of agents of before may have it", f)
		}
	}
}

func TestAPlanAsksForWhatItHas(t *testing.T) {
	id := PathID{Path: 1, Scheme: model.SchemeOPoT}
	id.Encapsulation.Type, id.Encapsulation.SIDs = model.EncapsulationSRMPLS, model.SIDsPlain
	n := Node{
		Headends:  []Headend{{PathID: id, Seal: &Seal{}}},
		Endpoints: []Endpoint{{PathID: id, Function: "fw"}, {PathID: id, Function: "ids"}},
		Proxies:   []Proxy{{Function: "ids", Netfilter: &Netfilter{}}},
	}
	want := []string{"encapsulation sr-mpls", "kind forward", "kind netfilter", "scheme opot", "seal", "sids plain"}
	got := n.Features()
	if !slices.Equal(got, want) {
		t.Errorf("it asks for %q, want %q", got, want)
	}
	for _, f := range got {
		if !slices.Contains(Features(), f) {
			t.Errorf("nobody says that he knows %q", f)
		}
	}
}

// A function with a key asks for an agent that reads its file.
func TestAPlanAsksForKeysOfFunctions(t *testing.T) {
	for entry, asks := range map[string]bool{`{"seal": {"key": 7, "file": "/k"}}`: true, `"gzip"`: false} {
		for _, s := range []model.Stream{{Run: []string{entry}}, {Run: []string{`"count"`}, Back: []string{entry}}} {
			n := Node{Proxies: []Proxy{{Function: "lock", Stream: &Stream{Stream: s}}}}
			if got := slices.Contains(n.Features(), featureKeys); got != asks {
				t.Errorf("%+v: it asks for keys: %t; want %t", s, got, asks)
			}
		}
	}
	if slices.Contains(FirstFeatures, featureKeys) || !slices.Contains(Features(), featureKeys) {
		t.Error("agents of before know keys of functions, or those of this program do not")
	}
}
