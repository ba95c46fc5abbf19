package dataplane

import (
	"testing"
	"time"

	"github.com/waystamp/waystamp/test/packets"
)

// A flood of what is answered is answered a few times, and those who must be told
// of sizes are told all the same.
func TestErrorsAreFew(t *testing.T) {
	n := scapyNode(t, "r1")
	const atOnce = 5
	r := newRig(t, rigSpec{
		name: "r1", block: n.Block, locator: n.Locator, address: n.Address, own: n.Local,
		errors: [2]uint64{uint64(time.Hour), uint64(atOnce * time.Hour)}, // none comes back while the test runs
	})
	r.must(r.apply(&n.Node))
	send := func(name string, times int) (sent int) {
		t.Helper()
		p, err := packets.Load(name)
		r.must(err)
		r.must(r.in(func() error {
			for range times {
				got, err := r.runTC(frame{port: p.Interface.Name, b: p.Frame})
				if err != nil {
					return err
				}
				if got.verdict == tcRedirect {
					sent++
				} else if got.verdict != tcDrop {
					t.Errorf("%s: verdict %d", name, int32(got.verdict))
				}
			}
			return nil
		}))
		return sent
	}
	if got := send("error-edge-hop-limit", 40); got != atOnce {
		t.Errorf("%d of 40 were answered, want %d", got, atOnce)
	}
	if got := send("no-error-about-error", 3); got != 0 {
		t.Errorf("an error was answered by an error")
	}
	if got := send("error-chain-mtu-just", 1); got != 1 {
		t.Error("who sends too long packets is not told, since others ask for other errors")
	}
	got, err := r.counted()
	r.must(err)
	if len(got.dropped) != 44 {
		t.Errorf("%d were counted as refused, want 44", len(got.dropped))
	}
	var c ErrorCount
	r.must(r.g.readErrors(&c))
	if want := (ErrorCount{TooBig: 1, TimeExceeded: atOnce, Suppressed: 40 - atOnce, Unanswerable: 3}); c != want {
		t.Errorf("counted %+v, want %+v", c, want)
	}
}
