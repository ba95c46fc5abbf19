package agent

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/dataplane"
)

func TestRefusalsOfTheLastMinute(t *testing.T) {
	var r recentRefusals
	at := func(s int) time.Time { return time.Unix(1000, 0).Add(time.Duration(s) * time.Second) }
	counts := func(proof, replay uint64) []dataplane.RefusalCount {
		return []dataplane.RefusalCount{{Reason: abi.ReasonProof, Dropped: proof}, {Reason: abi.ReasonReplay, Dropped: 7, Reported: replay}}
	}
	check := func(now int, c []dataplane.RefusalCount, want api.Recent) {
		t.Helper()
		if diff := cmp.Diff(want, r.since(at(now), c)); diff != "" {
			t.Errorf("at second %d (-want +got):\n%s", now, diff)
		}
	}
	none := []api.Refusal{}
	check(0, counts(5, 0), api.Recent{Refusals: none})
	for s := 0; s <= 300; s += 10 { // one a second by proof, since second 100
		n := uint64(max(0, s-100))
		r.note(at(s), counts(5+n, 0))
	}
	check(304, counts(5+204, 2), api.Recent{Seconds: 64, Refusals: []api.Refusal{
		{Reason: "proof", Dropped: 64}, {Reason: "replay", Reported: 2},
	}})
	if len(r.samples) > 8 {
		t.Errorf("%d samples are kept", len(r.samples))
	}
	// A detached data path counts from 0.
	check(305, []dataplane.RefusalCount{{Reason: abi.ReasonProof, Dropped: 3}}, api.Recent{Seconds: 65, Refusals: []api.Refusal{{Reason: "proof", Dropped: 3}}})
}
