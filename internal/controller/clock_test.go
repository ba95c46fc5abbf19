package controller

import (
	"testing"
	"time"

	v1 "github.com/waystamp/waystamp/internal/rpc/waystampv1"
)

// A clock that is an hour wrong, on a node or on the controller, keeps nobody from joining, from getting plans, and from coming back
// with the certificate that the other clock is the date of.
func TestAClockThatIsWrongKeepsNobodyOut(t *testing.T) {
	for name, off := range map[string]struct{ controller, node time.Duration }{
		"the controller's is ahead":  {controller: time.Hour},
		"the controller's is behind": {controller: -time.Hour},
		"the node's is ahead":        {node: time.Hour},
		"the node's is behind":       {node: -time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.now = func() time.Time { return time.Now().Add(off.controller) }
			w.start()
			agents := map[string]*fake{}
			for _, name := range []string{"r1", "r2", "r3"} {
				f := &fake{w: w, name: name, dir: t.TempDir()}
				if name == "r2" {
					f.clock = func() time.Time { return time.Now().Add(off.node) }
				}
				f.run(w.token(name))
				agents[name] = f
			}
			w.until("the file", settled(w.apply(file)))
			agents["r2"].stop()
			agents["r2"].run("")
			w.until("fresh secrets", settled(w.rotate()))
			w.must(agents["r2"].member.Renew(t.Context()))
			w.until("fresh secrets again", settled(w.rotate()))
		})
	}
}

// A node knows how far its clock is from that of the controller that answers.
func TestANodeKnowsHowFarItsClockIsOff(t *testing.T) {
	w := newWorld(t)
	w.start()
	f := &fake{w: w, name: "r1", dir: t.TempDir(), clock: func() time.Time { return time.Now().Add(5 * time.Minute) }}
	f.run(w.token("r1"))
	w.until("an answer", func(*v1.State) bool { _, known := f.member.ClockOff(); return known })
	// The controller tells whole seconds, and answers when it can.
	if off, _ := f.member.ClockOff(); off < 4*time.Minute || off > 6*time.Minute {
		t.Errorf("off by %s, want 5m", off)
	}
}
