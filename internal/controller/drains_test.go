package controller

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/waystamp/waystamp/internal/event"
	"github.com/waystamp/waystamp/internal/identity"
	"github.com/waystamp/waystamp/internal/metrics"
	"github.com/waystamp/waystamp/internal/plan"
	v1 "github.com/waystamp/waystamp/internal/rpc/waystampv1"
)

// asked waits until the controller asks an agent for the numbers of so many epochs, and returns them.
func (f *fake) asked(n int) []event.Epoch {
	f.w.Helper()
	ctx, cancel := context.WithTimeout(f.w.Context(), patience)
	defer cancel()
	for {
		of := f.member.Drains()
		if len(of) == n {
			return of
		}
		select {
		case <-f.member.DrainsChanged():
		case <-ctx.Done():
			f.w.Fatalf("%s is asked for the numbers of %v; want %d epochs", f.name, of, n)
		}
	}
}

// gave are 7 numbers on the first CPU of each path of these that the node began.
func (f *fake) gave(of []event.Epoch) (out []event.Given) {
	for _, e := range of {
		for _, p := range f.plans() {
			i := slices.IndexFunc(p.Headends, func(h plan.Headend) bool { return h.Path == e.Path && h.Epoch == e.Epoch })
			if i >= 0 {
				out = append(out, event.Given{Epoch: e, Lanes: []event.Lane{{Lane: p.Headends[i].Lane, Number: 7}}})
				break
			}
		}
	}
	return out
}

// saw is what the node as an egress has seen of them.
func (f *fake) saw(of []event.Epoch, s event.Seen) (out []event.Seen) {
	for _, e := range of {
		if slices.ContainsFunc(f.now().Egresses, func(x plan.Egress) bool { return x.Path == e.Path && x.Epoch == e.Epoch }) {
			s.Epoch = e
			out = append(out, s)
		}
	}
	return out
}

// allSeen: the last of all numbers has come, and none is missing.
var allSeen = event.Seen{Lanes: []event.Lane{{Number: 7}}, Quiet: 2 * drainSeen}

// numbersTold waits until the controller knows what an agent told it last.
func (w *world) numbersTold(what, drain string) {
	w.Helper()
	w.until(what, func(s *v1.State) bool {
		return slices.ContainsFunc(s.Epochs, func(e *v1.EpochState) bool {
			return e.State == epochDraining && strings.Contains(e.Drain, drain)
		})
	})
}

// draining is a domain whose old epochs drain after a rotation, and would for an hour by time alone.
func drainingDomain(t *testing.T, with ...func(*world, map[string]*fake)) (*world, map[string]*fake) {
	t.Helper()
	w := newWorld(t)
	w.drain = time.Hour
	w.start()
	agents := map[string]*fake{}
	for _, name := range []string{"r1", "r2", "r3"} {
		agents[name] = w.join(name)
	}
	w.until("settled", settled(w.apply(file)))
	for _, f := range with {
		f(w, agents)
	}
	w.until("turned", settled(w.rotate()))
	return w, agents
}

// drainedBy holds that so many generations have drained, and how.
func (w *world) drainedBy(numbers, time int) {
	w.Helper()
	read := func(by string) int {
		var b strings.Builder
		w.must(metrics.Write(&b, Metrics, w.ctl.counted))
		_, after, _ := strings.Cut(b.String(), fmt.Sprintf("%s{by=%q} ", metricDrained, by))
		value, _, _ := strings.Cut(after, "\n")
		if value == "" {
			return 0
		}
		n, err := strconv.Atoi(value)
		w.must(err)
		return n
	}
	n, t := read(drainedByNumbers), read(drainedByTime)
	for n+t < numbers+time && w.Context().Err() == nil { // it counts what it has just written to the store
		runtime.Gosched()
		n, t = read(drainedByNumbers), read(drainedByTime)
	}
	if n != numbers || t != time {
		w.Errorf("%d generations drained by numbers and %d by time; want %d and %d", n, t, numbers, time)
	}
}

// set moves it there.
func (c *clock) set(at time.Time) { c.add(at.Sub(c.now())) }

func TestAnEpochIsErasedWhenItsNumbersWereSeen(t *testing.T) {
	w, agents := drainingDomain(t)
	w.numbersTold("nothing is known", "time: headend r1 has not said which numbers it gave out")
	for _, name := range []string{"r1", "r3"} { // each begins one path, and ends the other
		f := agents[name]
		of := f.asked(2)
		f.member.Numbers(f.gave(of), f.saw(of, allSeen))
	}
	if of := agents["r2"].member.Drains(); len(of) > 0 {
		t.Errorf("r2 begins and ends no path, and is asked for %v", of)
	}
	w.until("drained", drained)
	for name, f := range agents {
		if sends, takes := epochsOf(f.now(), "web"); slices.Contains(sends, 1) || slices.Contains(takes, 1) {
			t.Errorf("%s still has epoch 1: %v, %v", name, sends, takes)
		}
		f.asked(0)
	}
	w.drainedBy(1, 0)
}

// What shows no more than that packets may be under way keeps an epoch, and the state says for what it waits.
func TestAnEpochStaysWhileItsPacketsMayCome(t *testing.T) {
	told := func(name string, s event.Seen) func(*world, map[string]*fake) {
		return func(_ *world, agents map[string]*fake) {
			f := agents[name]
			of := f.asked(2)
			f.member.Numbers(f.gave(of), f.saw(of, s))
		}
	}
	for name, c := range map[string]struct {
		r1, r3 func(*world, map[string]*fake)
		say    string // of the path that ends at r3
	}{
		"a headend that has told nothing": {func(_ *world, agents map[string]*fake) {
			agents["r1"].member.Numbers(nil, agents["r1"].saw(agents["r1"].asked(2), allSeen))
		}, told("r3", allSeen), "time: headend r1 has not said which numbers it gave out"},
		"an egress that has told nothing": {nil, func(_ *world, agents map[string]*fake) {
			agents["r3"].member.Numbers(agents["r3"].gave(agents["r3"].asked(2)), nil)
		}, "time: egress r3 has not said which numbers it has seen"},
		"a last number that was not seen": {nil, told("r3", event.Seen{Lanes: []event.Lane{{Number: 6}}, Quiet: 59 * time.Minute}), "egress r3 to see the last numbers of 1 lanes, or time if they are lost"},
		"no number at all":                {nil, told("r3", event.Seen{Quiet: 59 * time.Minute}), "egress r3 to see the last numbers of 1 lanes, or time if they are lost"},
		"numbers of another lane":         {nil, told("r3", event.Seen{Lanes: []event.Lane{{Lane: 1, Number: 99}}, Quiet: 59 * time.Minute}), "egress r3 to see the last numbers of 1 lanes, or time if they are lost"},
		"numbers that are missing":        {nil, told("r3", event.Seen{Lanes: allSeen.Lanes, Missing: 3, Quiet: 59 * time.Minute}), "egress r3 to see 3 numbers, or 1h0m0s without any, since they may be lost"},
		"a frame of a moment ago":         {nil, told("r3", event.Seen{Lanes: allSeen.Lanes, Quiet: drainSeen - time.Millisecond}), "1s without packets at egress r3, which has seen all numbers"},
		"the word of others": {nil, func(w *world, agents map[string]*fake) {
			// r2 is neither headend nor egress, and r3 gives out no number of the path that it ends.
			of := agents["r3"].asked(2)
			var given []event.Given
			all := &v1.NumbersRequest{}
			for _, e := range of {
				given = append(given, event.Given{Epoch: e})
				all.Given = append(all.Given, &v1.GivenNumbers{Path: e.Path, Epoch: uint32(e.Epoch)})
				all.Seen = append(all.Seen, &v1.SeenNumbers{Path: e.Path, Epoch: uint32(e.Epoch), Lanes: []*v1.LaneNumber{{Number: 7}}, QuietMilliseconds: 1 << 20})
			}
			w.ctl.drains.take("r2", all, time.Now())
			agents["r3"].member.Numbers(given, nil)
		}, "time: egress r3 has not said which numbers it has seen"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w, agents := drainingDomain(t)
			if c.r1 == nil {
				c.r1 = told("r1", allSeen)
			}
			c.r1(w, agents)
			c.r3(w, agents)
			w.numbersTold("the reason", c.say)
			v, err := w.ctl.view(t.Context())
			w.must(err)
			if len(v.state.Old) != 1 {
				t.Fatalf("%d generations drain, want 1", len(v.state.Old))
			}
			if is, by, _ := w.ctl.drained(v.state.Old[0]); is {
				t.Errorf("it has drained by %s", by)
			}
			// And when all has come, it goes.
			for _, name := range []string{"r1", "r3"} {
				told(name, allSeen)(w, agents)
			}
			w.until("drained", drained)
		})
	}
}

// A packet that is lost never comes. Where the last number of each lane has been there for as long as a packet may be under way, those below are lost; where it
// has not, time alone says so.
func TestLostPacketsDoNotKeepAnEpoch(t *testing.T) {
	t.Run("in between", func(t *testing.T) {
		t.Parallel()
		w, agents := drainingDomain(t)
		for _, name := range []string{"r1", "r3"} {
			f := agents[name]
			of := f.asked(2)
			f.member.Numbers(f.gave(of), f.saw(of, event.Seen{Lanes: allSeen.Lanes, Missing: 3, Quiet: time.Hour}))
		}
		w.until("drained", drained)
		w.drainedBy(1, 0)
	})
	t.Run("at the end", func(t *testing.T) {
		t.Parallel()
		now := &clock{at: time.Now()}
		w := newWorld(t)
		w.drain, w.now = time.Hour, now.now
		w.start()
		agents := map[string]*fake{}
		for _, name := range []string{"r1", "r2", "r3"} {
			agents[name] = w.join(name)
		}
		w.until("settled", settled(w.apply(file)))
		w.until("turned", settled(w.rotate()))
		old := func() oldRecord {
			v, err := w.ctl.view(t.Context())
			w.must(err)
			if len(v.state.Old) != 1 {
				t.Fatalf("%d generations drain, want 1", len(v.state.Old))
			}
			return v.state.Old[0]
		}
		tell := func(quiet time.Duration) {
			for _, name := range []string{"r1", "r3"} {
				f := agents[name]
				of := f.asked(2)
				f.member.Numbers(f.gave(of), f.saw(of, event.Seen{Lanes: []event.Lane{{Number: 6}}, Quiet: quiet, Moved: true}))
			}
		}
		until := func(want time.Duration) {
			t.Helper()
			is := func(e *v1.EpochState) bool {
				return e.State == epochDraining && e.Until.AsTime().Sub(old().Until.UTC()) == want
			}
			for limit := time.Now().Add(patience); !slices.ContainsFunc(w.state().Epochs, is); time.Sleep(5 * time.Millisecond) { // nothing tells of it
				if time.Now().After(limit) {
					t.Fatalf("it does not drain until %s later: %v", want, w.state().Epochs)
				}
			}
		}
		until(0)
		// Packets still come ten minutes before the end: it is put off, and not for ever.
		now.set(old().Until.Add(-10 * time.Minute))
		tell(0)
		until(50 * time.Minute)
		now.set(old().Until.Add(40 * time.Minute))
		if is, _, _ := w.ctl.drained(old()); is {
			t.Error("it is erased while packets come")
		}
		tell(0)
		until(time.Hour)
		now.set(old().Until.Add(time.Hour))
		w.token("r9") // a record changes, so that the controller looks at its clock
		w.until("drained", drained)
		w.drainedBy(0, 1)
	})
}

// An agent of before is not asked for numbers, and its epochs drain by time, though others tell theirs.
func TestAnAgentThatTellsNoNumbersDrainsByTime(t *testing.T) {
	at := &clock{at: time.Now()}
	w := newWorld(t)
	w.drain, w.now = time.Hour, at.now
	w.start()
	agents := map[string]*fake{"r3": {w: w, name: "r3", dir: t.TempDir(), before: true}}
	agents["r3"].run(w.token("r3"))
	for _, name := range []string{"r1", "r2"} {
		agents[name] = w.join(name)
	}
	w.until("settled", settled(w.apply(file)))
	w.until("turned", settled(w.rotate()))
	f := agents["r1"]
	of := f.asked(2)
	f.member.Numbers(f.gave(of), f.saw(of, allSeen))
	w.numbersTold("of r3 nothing is known", "time: egress r3 has not said which numbers it has seen")
	at.add(time.Hour)
	w.token("r9") // a record changes, so that the controller looks at its clock
	w.until("drained", drained)
	w.drainedBy(0, 1)
	select {
	case <-agents["r3"].member.DrainsChanged():
		t.Error("r3 was asked for numbers")
	default:
	}
}

// A headend that has not turned may give out numbers yet: nobody is asked for any, whatever others tell. One that goes away when it has turned, without telling of its numbers, leaves time alone.
func TestAHeadendThatIsAwayKeepsAnEpoch(t *testing.T) {
	w, agents := drainingDomain(t, func(w *world, agents map[string]*fake) {
		agents["r2"].hush() // the turn comes no earlier than r1 is silent
		w.rotate()
		w.until("r2 is waited for", func(s *v1.State) bool { return slices.Equal(s.WaitingFor, []string{"r2"}) })
		agents["r1"].hush()
		agents["r2"].speak()
		w.until("r1 is waited for", func(s *v1.State) bool {
			return s.Step == string(stepTurn) && slices.Equal(s.WaitingFor, []string{"r1"})
		})
		agents["r3"].member.Numbers(nil, agents["r3"].saw([]event.Epoch{{Path: agents["r3"].now().Egresses[0].Path, Epoch: 1}}, allSeen))
		for name, f := range agents {
			if of := f.member.Drains(); len(of) > 0 {
				t.Errorf("%s is asked for %v before r1 has turned", name, of)
			}
		}
		v, err := w.ctl.view(t.Context())
		w.must(err)
		if is, _, until := w.ctl.drained(v.state.Old[0]); is || !until.IsZero() {
			t.Errorf("it drains until %s", until)
		}
		agents["r1"].speak()
		w.until("turned", func(s *v1.State) bool { return s.Settled })
	})
	agents["r1"].stop()
	f := agents["r3"]
	of := f.asked(4) // of both rotations
	f.member.Numbers(f.gave(of), f.saw(of, allSeen))
	w.numbersTold("r1 has told nothing", "time: headend r1 has not said which numbers it gave out")
	v, err := w.ctl.view(t.Context())
	w.must(err)
	for _, o := range v.state.Old {
		if is, _, _ := w.ctl.drained(o); is {
			t.Error("it has drained without the numbers of r1")
		}
	}
}

// What nodes have told is in the memory of the controller that led. Another one erases nothing before they have told it, too; and the commit of the one before, which
// comes late, is refused.
func TestTheNextControllerIsToldOfNumbersAnew(t *testing.T) {
	w, seats, trap := cluster(t, 2, nil, func(w *world) { w.drain = time.Hour })
	agents := map[string]*fake{}
	for _, name := range []string{"r1", "r2", "r3"} {
		agents[name] = w.join(name)
	}
	w.until("settled", settled(w.apply(file)))
	trap.mu.Lock()
	trap.what = "erase"
	trap.mu.Unlock()
	w.until("turned", settled(w.rotate()))
	tell := func() {
		for _, name := range []string{"r1", "r3"} {
			f := agents[name]
			of := f.asked(2)
			f.member.Numbers(f.gave(of), f.saw(of, allSeen))
		}
	}
	tell()
	var dead *seat
	select {
	case dead = <-trap.sprung:
	case <-time.After(patience):
		t.Fatal("nobody erases what has drained")
	}
	dead.kill(t)
	w.until("another leads, and has been told nothing", func(s *v1.State) bool {
		away := slices.ContainsFunc(s.Nodes, func(n *v1.NodeState) bool { return n.State != nodeReady })
		return !away && len(s.Epochs) == 4 && slices.ContainsFunc(s.Epochs, func(e *v1.EpochState) bool { return strings.HasPrefix(e.Drain, "time: headend") })
	})
	v, err := seats[1].ctl.view(t.Context())
	w.must(err)
	if is, _, _ := seats[1].ctl.drained(v.state.Old[0]); is {
		t.Error("it has drained by what another was told")
	}
	tell()
	w.until("drained", drained)
}

// Whoever tells of numbers again and again, or acknowledges something new each time, is put off: the latter is written to the store.
func TestANodeIsPutOffThatCallsTooOften(t *testing.T) {
	now := &clock{at: time.Now()}
	w := newWorld(t)
	w.now = now.now
	w.start()
	w.must((&fake{w: w, name: "r1", dir: t.TempDir()}).try(w.token("r1"), "r1"))
	r, err := w.ctl.node(t.Context(), "r1")
	w.must(err)
	ctx := context.WithValue(t.Context(), callerKey{}, caller{peer: identity.Peer{ID: identity.ID{Node: "r1"}, KeyID: r.Key}})
	calls := map[string]func(i int) error{
		"Numbers": func(int) error {
			_, err := node{w.ctl}.Numbers(ctx, connect.NewRequest(&v1.NumbersRequest{}))
			return err
		},
		"Acknowledge": func(i int) error {
			_, err := node{w.ctl}.Acknowledge(ctx, connect.NewRequest(&v1.AcknowledgeRequest{Error: fmt.Sprint("error ", i)}))
			return err
		},
	}
	for name, most := range map[string]int{"Numbers": numbersMost, "Acknowledge": ackMost} {
		done := 0
		for ; done <= 2*most; done++ {
			if err = calls[name](done); err != nil {
				break
			}
		}
		if done != most || code(err) != connect.CodeResourceExhausted {
			t.Errorf("%s: %d calls were answered, want %d; then %v", name, done, most, err)
		}
	}
	now.set(now.now().Add(time.Second))
	for name, call := range calls {
		if err := call(-1); err != nil {
			t.Errorf("%s: a second later: %v", name, err)
		}
	}
}
