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
