package bench

import (
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/srv6"
)

func TestFramesAreOfTheSizeAskedFor(t *testing.T) {
	w, err := newWorld(worldSpec{scheme: model.SchemeKeyed, segments: 16, chains: 2, xdp: true})
	if err != nil {
		t.Fatal(err)
	}
	for _, h := range []hop{
		{task: taskEnd, chains: 2, segments: 16, size: 512}, {task: taskEgress, chains: 2, segments: 16, size: 512}, {task: taskHeadend, chains: 2, segments: 16, size: 128},
	} {
		for chain := range 2 {
			frame, head, err := h.frame(w, chain, [6]byte{2})
			if err != nil {
				t.Fatal(err)
			}
			if len(frame) != h.size || head > len(frame) {
				t.Errorf("%s: a frame of %d bytes, %d of them head; want %d", h.task, len(frame), head, h.size)
			}
			p, err := srv6.DecodeFrame(frame)
			if err != nil {
				t.Fatalf("%s: %v", h.task, err)
			}
			if int(p.Header.PayloadLength) != h.size-srv6.EthernetLen-srv6.IPv6Len {
				t.Errorf("%s: payload length %d does not fill the frame", h.task, p.Header.PayloadLength)
			}
		}
	}
	if _, _, err := (hop{task: taskEnd, segments: 16, size: 256}).frame(w, 0, [6]byte{2}); err == nil {
		t.Error("a frame too short for its headers was made")
	}
}

func TestFieldsMakeTheFrameOfEveryChain(t *testing.T) {
	const chains = 3
	w, err := newWorld(worldSpec{scheme: model.SchemeKeyed, segments: 3, chains: chains, xdp: true})
	if err != nil {
		t.Fatal(err)
	}
	h := hop{task: taskEgress, segments: 3, size: 256, chains: chains, numbers: 2}
	to := [6]byte{2}
	first, head, err := h.frame(w, 0, to)
	if err != nil {
		t.Fatal(err)
	}
	fields, err := h.fields(w, to, first, head)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 2 * chains {
		got := slices.Clone(first)
		for _, f := range fields {
			copy(got[f.Offset:], f.Values[i])
		}
		want, _, err := h.frame(w, i, to)
		if err != nil {
			t.Fatal(err)
		}
		if string(got) != string(want) {
			t.Errorf("frame %d: the generator would send\n%x, want\n%x", i, got, want)
		}
	}
}

func TestOnlyKeepsBaselinesAndFloors(t *testing.T) {
	all := []subject{
		{Series: Series{Name: "drop"}}, {Series: Series{Name: "end/kernel", Floor: "drop"}},
		{Series: Series{Name: "end-opot/xdp", Baseline: "end/kernel", Floor: "drop"}}, {Series: Series{Name: "other"}},
	}
	var got []string
	for _, s := range (Config{Only: "opot"}).wanted(all) {
		got = append(got, s.Name)
	}
	if want := []string{"drop", "end/kernel", "end-opot/xdp"}; !slices.Equal(got, want) {
		t.Errorf("kept %v, want %v", got, want)
	}
}

// The real thing, as short as can be: every case comes through, and the data
// path counts every packet as its own (hop.measure).
func TestHopOnTheKernel(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	// Shorter than a packet takes on a slow machine: a run has as many as can be timed all the same.
	r, err := Hop(t.Context(), Config{Runs: 1, Duration: time.Microsecond, CPU: -1, Quick: true})
	if err != nil {
		t.Fatal(err)
	}
	have := map[string]Figure{}
	for _, f := range r.Figures {
		have[f.Name] = f
	}
	for name, baseline := range map[string]string{
		"hop/end-opot/xdp": "hop/end/kernel", "hop/end-keyed/xdp": "hop/end/kernel", "hop/headend-opot/xdp": "hop/h.encaps/kernel",
		"hop/verify-opot/xdp": "hop/end.dt6/kernel", "hop/end-opot/tc": "hop/end/kernel", "hop/ipv6/kernel": "",
		"hop/redirect/xdp": "hop/ipv6/kernel",
	} {
		f, ok := have[name]
		if !ok || f.Baseline != baseline || f.Median < 20 || f.Median > 1e6 {
			t.Errorf("%s: got %+v, want a figure between 20 ns and 1 ms beside %q", name, f, baseline)
		}
	}
}

// Packets of many chains are all verified, each by its own secrets.
func TestManyChainsOnTheKernel(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	r, err := Scale(t.Context(), Config{Runs: 1, Duration: 5 * time.Millisecond, CPU: -1, Quick: true, Only: "chains-256"})
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, f := range r.Figures {
		names = append(names, f.Name)
	}
	if s := strings.Join(names, " "); !strings.Contains(s, "scale/verify-keyed/chains-256") || !strings.Contains(s, "scale/end-keyed/chains-256") {
		t.Errorf("measured %s", s)
	}
}

// Packets of every other kind come through too, and on two CPUs at once.
func TestHopVariantsOnTheKernel(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	for only, want := range map[string]string{
		"end-keyed/xdp/compressed":    "hop/end/kernel/compressed",
		"headend-keyed/xdp/ipv4":      "hop/h.encaps/kernel/ipv4",
		"verify-keyed/xdp/ipv4":       "hop/end.dx4/kernel/ipv4",
		"verify-keyed/xdp/cores-2":    "hop/end.dt6/kernel/cores-2",
		"headend-keyed/xdp/size-1500": "hop/h.encaps/kernel/size-1500",
	} {
		if strings.Contains(only, "cores") && runtime.NumCPU() < 2 {
			continue
		}
		r, err := Hop(t.Context(), Config{Runs: 1, Duration: 5 * time.Millisecond, CPU: -1, Only: only})
		if err != nil {
			t.Fatalf("%s: %v", only, err)
		}
		var names []string
		for _, f := range r.Figures {
			names = append(names, f.Name)
			if f.Median < 10 || f.Median > 1e6 {
				t.Errorf("%s: %v ns", f.Name, f.Median)
			}
		}
		for _, w := range []string{"hop/" + only, want} {
			if !slices.Contains(names, w) {
				t.Errorf("--only %s measured %v, not %s", only, names, w)
			}
		}
	}
}

// Names are what goals, plots and readers go by.
func TestFiguresOfAHopHaveTheirBaselinesAndAreNamedOnce(t *testing.T) {
	seen := map[string]bool{}
	for _, quick := range []bool{true, false} {
		clear(seen)
		for _, s := range hopSections(quick) {
			subjects := s.subjects(Config{}, &Result{})
			here := map[string]bool{}
			for _, x := range subjects {
				here[x.Name] = true
				if seen[x.Name] {
					t.Errorf("%s is measured twice", x.Name)
				}
				seen[x.Name] = true
			}
			for _, x := range subjects {
				if x.Baseline != "" && !here[x.Baseline] || x.Floor != "" && !here[x.Floor] {
					t.Errorf("%s is held against %s and %s, which are not measured in the same rounds", x.Name, x.Baseline, x.Floor)
				}
			}
		}
		for _, g := range goals() {
			if strings.HasPrefix(g.figure, "hop/") && !seen[g.figure] {
				t.Errorf("a goal is about %s, which nobody measures (quick: %t)", g.figure, quick)
			}
		}
	}
}

// Each segment leaves what the kernel would: the next C-SID, or the next entry.
func TestFramesOfCompressedListsAreAsTheSegmentsLeaveThem(t *testing.T) {
	w, err := newWorld(worldSpec{scheme: model.SchemeKeyed, segments: 7, chains: 1, xdp: true, compressed: true})
	if err != nil {
		t.Fatal(err)
	}
	sids := w.plan.Paths[0].SIDs()
	for i, sid := range sids {
		frame, err := w.stampedFrame(0, 1, i, 512, [6]byte{2})
		if err != nil {
			t.Fatal(err)
		}
		p, err := srv6.DecodeFrame(frame)
		if err != nil {
			t.Fatal(err)
		}
		if got := netip.PrefixFrom(p.Header.Destination, 64).Masked().Addr(); got != sid {
			t.Errorf("segment %d: the frame goes to %s, want %s", i, p.Header.Destination, sid)
		}
	}
	if _, err := w.stampedFrame(0, 1, len(sids), 512, [6]byte{2}); err == nil {
		t.Error("a frame behind the end of its list was made")
	}
}
