package bench

import (
	"os"
	"testing"
	"time"

	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/mpls"
	"github.com/waystamp/waystamp/internal/srv6"
)

func TestLabelledCasesHaveTheirBaselines(t *testing.T) {
	for _, quick := range []bool{false, true} {
		names := map[string]bool{}
		for _, l := range labelledCases(quick) {
			if names[l.name()] {
				t.Errorf("%s is there twice", l.name())
			}
			names[l.name()] = true
			if l.labels {
				l.labels = false
				if !names[l.name()] {
					t.Errorf("%s is not measured before what is held against it", l.name())
				}
			}
		}
	}
}

// A frame with labels comes to each place of a chain with the labels that are left, and holds
// the same packet as one over SRv6.
func TestFramesWithLabelsHoldTheSamePacket(t *testing.T) {
	frame := func(h hop) []byte {
		w, err := newWorld(h.spec())
		must(t, err)
		f, head, err := h.frame(w, 0, [6]byte{2})
		must(t, err)
		if want := srv6.EthernetLen + w.outerLen() + mplsInner; len(f) != want || head > len(f) {
			t.Errorf("%s: a frame of %d bytes, %d of them head; want %d", h.task, len(f), head, want)
		}
		return f
	}
	for _, c := range []struct {
		task     task
		segments int
		left     int // visits
	}{{taskEnd, 3, 3}, {taskEgress, 3, 1}, {taskEgress, model.SegmentsMax, 1}} {
		h := hop{task: c.task, by: byXDP, scheme: model.SchemeKeyed, segments: c.segments, chains: 1, inner: mplsInner}
		plain := frame(h)
		h.labels = true
		f := frame(h)
		p, err := mpls.ParseFrame(f, model.MPLS{Services: serviceLabels}.IsService)
		must(t, err)
		if len(p.Stack) != mpls.Len(c.segments)/mpls.EntryLen || len(p.Labels()) != 2*c.left || p.Proof == nil || p.Word == nil {
			t.Errorf("%s, %d segments: the stack is %v, of %d visits; want %d", c.task, c.segments, p.Stack, len(p.Labels())/2, c.left)
		}
		if got, want := string(p.Payload), string(plain[len(plain)-mplsInner:]); got != want {
			t.Errorf("%s: inside is\n%x, want\n%x", c.task, got, want)
		}
	}
}

// The real thing, as short as can be: every case comes through, and the data path counts every
// packet as its own (hop.measure).
func TestLabelsOnTheKernel(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	r, err := MPLS(t.Context(), Config{Runs: 1, Duration: 5 * time.Millisecond, CPU: -1, Quick: true, Only: "-keyed-"})
	must(t, err)
	n := 0
	for _, f := range r.Figures {
		if f.Baseline != "" {
			n++
		}
		if f.Median < 20 || f.Median > 1e6 {
			t.Errorf("%s: %v ns", f.Name, f.Median)
		}
	}
	if n != 6 {
		t.Errorf("%d figures over labels have a baseline; want 6", n)
	}
}
