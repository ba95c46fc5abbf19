package flowrecords

import (
	"encoding/binary"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/waystamp/waystamp/internal/api"
)

// frames are what the records of a call say, by what they describe: without own elements and outer
// headers each has the times, the node's name, packets, bytes, status, addresses, name and description.
func frames(t *testing.T, r *Recorder, now time.Time, c api.Counters) map[string]uint64 {
	t.Helper()
	messages, err := r.Messages(now, nil, c)
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]uint64{}
	for _, m := range messages {
		for set := m[16:]; len(set) > 0; set = set[binary.BigEndian.Uint16(set[2:]):] {
			id := binary.BigEndian.Uint16(set)
			b := set[4:binary.BigEndian.Uint16(set[2:])]
			for id >= 256 && len(b) > 0 {
				b = b[16:] // the times
				b = b[1+int(b[0]):]
				n := binary.BigEndian.Uint64(b)
				b = b[8+8+1+32:]
				b = b[1+int(b[0]):]
				all[string(b[1:1+int(b[0])])] += n
				b = b[1+int(b[0]):]
				if id == templatePath {
					b = b[8:]
				}
			}
		}
	}
	return all
}

// Records say what was counted since the call before, also where a counter has begun anew, and say nothing
// of what did not change.
func TestRecordsAreDifferences(t *testing.T) {
	r, err := New("r2", "default", 0)
	if err != nil {
		t.Fatal(err)
	}
	path := func(role string, frames uint64) api.Path {
		return api.Path{Role: role, Chain: "web", Direction: "forward", Path: 7, From: "fw", Frames: frames, Bytes: 100 * frames}
	}
	now := time.Unix(1_800_000_000, 0)
	for i, step := range []struct {
		paths    []api.Path
		refusals []api.Refusal
		want     map[string]uint64
	}{
		{[]api.Path{path("headend", 10)}, []api.Refusal{{Reason: "replay", Dropped: 3}}, map[string]uint64{}}, // nothing to compare with
		{[]api.Path{path("headend", 12)}, []api.Refusal{{Reason: "replay", Dropped: 3}}, map[string]uint64{"headend, forward, from fw": 2}},
		{[]api.Path{path("headend", 12), path("egress", 4)}, []api.Refusal{{Reason: "replay", Dropped: 8, Reported: 1}}, map[string]uint64{"egress, forward, from fw": 4, "refused: replay": 5, "reported: replay": 1}},
		{[]api.Path{path("headend", 5), path("egress", 4)}, nil, map[string]uint64{"headend, forward, from fw": 5}},                                           // made anew
		{[]api.Path{path("egress", 4)}, []api.Refusal{{Reason: "replay", Dropped: 2}}, map[string]uint64{"refused: replay": 2}},                               // likewise
		{[]api.Path{path("headend", 6), path("egress", 4)}, []api.Refusal{{Reason: "replay", Dropped: 2}}, map[string]uint64{"headend, forward, from fw": 6}}, // gone, and back
	} {
		got := frames(t, r, now.Add(time.Duration(i)*time.Minute), api.Counters{Node: "r2", Paths: step.paths, Refusals: step.refusals})
		if diff := cmp.Diff(step.want, got); diff != "" {
			t.Errorf("step %d (-want +got):\n%s", i, diff)
		}
	}
}

// Two instances on one machine are two observation domains, and one is the same after a restart.
func TestObservationDomains(t *testing.T) {
	domain := func(node, instance string) uint32 {
		r, err := New(node, instance, 0)
		if err != nil {
			t.Fatal(err)
		}
		m, err := r.Messages(time.Unix(0, 0), nil, api.Counters{})
		if err != nil || len(m) != 1 {
			t.Fatal(m, err)
		}
		return binary.BigEndian.Uint32(m[0][12:])
	}
	if a, b := domain("r1", "default"), domain("r1", "default"); a != b || a == 0 {
		t.Errorf("it is %d, and then %d", a, b)
	}
	if domain("r1", "default") == domain("r1", "other") || domain("r1", "default") == domain("r2", "default") {
		t.Error("two have the same")
	}
}
