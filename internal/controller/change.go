package controller

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/waystamp/waystamp/internal/manifest"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/store"
)

// OldMax is how many generations drain at once; a change waits until there are fewer.
const OldMax = 8

// A domain changes by these commits, and only by these. What comes next follows from the
// records and the clock, so that a controller that died goes on where it was; but for whether
// another file goes over a change, which depends on who is connected to the one that leads:
//
//	begin    a request is compiled; functions and egresses get its epochs beside those in force.
//	         A change is given up for another file if it waits for a node that may never come
//	turn     all have acknowledged: headends get the new epochs and give up the old ones
//	settle   all have acknowledged: from now on the old generation drains
//	erase    it has drained: nodes and the store give up its secrets
//	forget   all have acknowledged that: the epochs' numbers may be given out again
//	exclude  a node was revoked: whatever it was on gets fresh secrets at once
//	resume   the records are of a backup, and all nodes have said what they hold: all get fresh secrets at once
//
// advance does the one that is due. It returns whether it did, and else when one may be
// due without a record changing; zero: never.
func (c *Controller) advance(ctx context.Context) (did bool, wake time.Time, err error) {
	c.watchful = false
	v, err := c.view(ctx)
	if err != nil {
		return false, time.Time{}, err
	}
	did, caWake, err := c.advanceCA(ctx, v)
	if did || err != nil {
		return did, time.Time{}, err
	}
	defer func() {
		if !did && err == nil && !caWake.IsZero() && (wake.IsZero() || caWake.Before(wake)) {
			wake = caWake
		}
	}()
	s := &v.state
	if !s.Restored.IsZero() {
		if len(v.unheard()) > 0 {
			return false, time.Time{}, nil
		}
		return c.resume(ctx, v)
	}
	if excluded := slices.DeleteFunc(v.revoked(), func(n string) bool { return slices.Contains(s.Revoked, n) }); len(excluded) > 0 && s.Now != 0 {
		return c.exclude(ctx, v)
	}
	if s.Step != stepNone && len(v.waitingFor()) == 0 {
		if s.Step == stepPrepare {
			return c.turn(ctx, v)
		}
		return c.settle(ctx, v)
	}
	wentOver := func(o oldRecord) bool { return o.Waiting != nil }
	if slices.ContainsFunc(s.Old, func(o oldRecord) bool { return wentOver(o) && v.turnedFrom(o) }) {
		if err := c.drain(ctx, v, wentOver); err != nil {
			return false, time.Time{}, err
		}
		return c.commit(ctx, v, "settle", store.Txn{})
	}
	if err := c.follow(ctx, v); err != nil {
		return false, time.Time{}, err
	}
	for _, o := range s.Old {
		is, _, until := c.drained(o)
		if is {
			return c.erase(ctx, v)
		}
		if !until.IsZero() && (wake.IsZero() || until.Before(wake)) {
			wake = until
		}
	}
	if i := slices.IndexFunc(s.Erasing, func(e erasingRecord) bool { return v.erased(e) }); i >= 0 {
		s.Erasing = slices.Delete(slices.Clone(s.Erasing), i, i+1)
		return c.commit(ctx, v, "forget", store.Txn{})
	}
	due := s.Step == stepNone && v.wanted.File != 0 && (v.wanted.Serial != s.Serial || !slices.Equal(v.revoked(), s.Revoked))
	if !due && s.Step != stepNone {
		if due, err = c.goesOver(ctx, v); err != nil {
			return false, time.Time{}, err
		}
	}
	var owed map[string][]string
	if !due && s.Step == stepNone {
		now, err := c.generation(ctx, v, s.Now)
		if err != nil {
			return false, time.Time{}, err
		}
		owed = c.owed(v, now)
		c.watchful = len(owed) > 0
		for _, stuck := range owed {
			due = due || len(stuck) == 0
		}
	}
	if due {
		did, err := c.begin(ctx, v)
		return did, wake, err
	}
	// Not while something else waits: secrets do not get fresher by a second request.
	at, _, err := c.nextRotation(ctx, v)
	if err != nil {
		return false, time.Time{}, err
	}
	if !at.IsZero() && s.Step == stepNone && v.wanted.Serial == s.Serial && len(owed) == 0 {
		if !c.cfg.Now().Before(at) {
			return c.rotate(ctx, v)
		}
		if wake.IsZero() || at.Before(wake) {
			wake = at
		}
	}
	return false, wake, nil
}

// goesOver tells whether another change may begin though one is under way: it waits for a node that refuses
// its plan or has no connection, and another domain is wanted since. Only a domain that differs counts, so
// that rotations do not use up the epochs while a node is away.
func (c *Controller) goesOver(ctx context.Context, v *view) (bool, error) {
	s := v.state
	if c.watchful = v.wanted.Serial != s.Serial; !c.watchful {
		return false, nil
	}
	connected, _ := c.connected()
	if !slices.ContainsFunc(v.waitingFor(), func(name string) bool { return c.stuck(v, name, connected) }) {
		return false, nil
	}
	g, err := c.generation(ctx, v, cmp.Or(s.Next, s.Now))
	if err != nil {
		return false, err
	}
	if !slices.Equal(g.Deleted, v.wanted.Deleted) {
		return true, nil
	}
	var carried, wanted fileRecord
	if err := c.record(ctx, keyFile(g.File), &carried); err != nil {
		return false, err
	}
	if err := c.record(ctx, keyFile(v.wanted.File), &wanted); err != nil {
		return false, err
	}
	return !slices.Equal(encode(carried), encode(wanted)), nil
}

// stuck tells whether a node cannot take its plan for now: its kernel refuses it, its agent does not know what is
// in it, or has no connection.
func (c *Controller) stuck(v *view, name string, connected map[string]bool) bool {
	return v.refuses(name) || !connected[name] || len(c.incompatible(name)) > 0
}

// erased: all nodes that held these epochs have said that they do not, or are out.
func (v *view) erased(e erasingRecord) bool { return len(v.without(e.Nodes)) == 0 }

// turnedFrom: no headend sends what drains there any more, and it has not begun to drain.
func (v *view) turnedFrom(o oldRecord) bool {
	return o.Until.IsZero() && len(v.without(o.Waiting)) == 0
}

// commit writes the state with what belongs to it.
func (c *Controller) commit(ctx context.Context, v *view, what string, t store.Txn) (bool, time.Time, error) {
	if t.Put == nil {
		t.Put = map[string][]byte{}
	}
	t.If = append(t.If, v.at(keyState))
	v.state.Version = recordsVersion
	t.Put[keyState] = encode(v.state)
	if _, err := c.store.Commit(ctx, t); err != nil {
		return false, time.Time{}, fmt.Errorf("%s: %w", what, err)
	}
	c.counted.Add(metricCommits, 1, what)
	c.journal.add(c.cfg.Now(), aboutChange, what, v.state.text(what)+v.note)
	c.keep(v.made)
	c.forget(v.state.live()...)
	c.cfg.Log.Info("the domain goes on", "commit", what, "generation", v.state.Generation, "step", string(v.state.Step), "nodes", len(v.state.Waiting))
	return true, time.Time{}, nil
}

// text is how far the domain is, for people.
func (s *stateRecord) text(commit string) string {
	if commit == "problem" {
		return s.Problem
	}
	text := fmt.Sprintf("request %d", s.Serial)
	if n := len(s.Waiting); s.Step != stepNone && n > 0 {
		text += fmt.Sprintf(", step %s: nodes that have to acknowledge it: %d", s.Step, n)
	}
	return text
}

// ended is a commit that ends a step.
func (c *Controller) ended(ctx context.Context, v *view, what string, t store.Txn, was step, since time.Time) (bool, time.Time, error) {
	did, wake, err := c.commit(ctx, v, what, t)
	if err == nil {
		c.counted.Observe(metricTook, c.cfg.Now().Sub(since).Seconds(), string(was))
	}
	return did, wake, err
}

// begin compiles what is wanted, and prepares it.
func (c *Controller) begin(ctx context.Context, v *view) (bool, error) {
	attempt := fmt.Sprint(v.wanted.Serial, v.revoked(), v.state.live(), len(v.state.Erasing))
	if attempt == c.failed { // and nothing has changed since
		return false, nil
	}
	before := v.state
	if err := c.prepare(ctx, v); err != nil {
		if ctx.Err() != nil {
			return false, context.Cause(ctx)
		}
		if _, passes := errors.AsType[*store.Failure](err); passes || errors.Is(err, store.ErrConflict) {
			return false, err
		}
		c.failed = attempt
		v.state, v.made = before, map[uint64]*generation{}
		return c.problem(ctx, v, err)
	}
	return true, nil
}

// prepare is begin without what becomes of its errors.
func (c *Controller) prepare(ctx context.Context, v *view) error {
	s := &v.state
	now, err := c.generation(ctx, v, s.Now)
	if err != nil {
		return err
	}
	w := v.wanted
	w.Rotate = maps.Clone(w.Rotate)
	for chain, stuck := range c.owed(v, now) {
		// What was asked for before would wait again, and take this with it.
		if tried := w.Rotate[chain] <= s.Serial; len(stuck) > 0 && (tried || s.Step != stepNone) {
			w.Rotate[chain] = now.Rotated[chain]
		}
	}
	next, err := c.compile(ctx, v, now, w)
	if err != nil {
		return err
	}
	had, keeps := map[pathEpoch]bool{}, map[string]bool{}
	for i := range now.domain.Paths {
		had[idOf(&now.domain.Paths[i])] = true
	}
	for i := range next.domain.Paths {
		if p := &next.domain.Paths[i]; had[idOf(p)] {
			keeps[p.Chain] = true
		}
	}
	for chain, at := range v.wanted.Rotate { // of what changes anyway the secrets are fresh
		if !keeps[chain] {
			next.Rotated[chain] = at
		}
	}
	if err := c.room(ctx, v, next); err != nil {
		return err
	}
	t := store.Txn{Put: map[string][]byte{}, If: []store.Condition{v.at(keyWanted)}}
	waiting, givenUp := map[string]uint64{}, s.Next
	if s.Step == stepTurn { // it goes over one
		for _, name := range v.waitingFor() {
			waiting[name] = s.Waiting[name]
		}
		s.Old = slices.Clone(s.Old)
		for i, o := range s.Old {
			if o.Until.IsZero() && o.Waiting == nil {
				s.Old[i].Waiting = waiting
			}
		}
	}
	v.leave(waiting, s.Since)
	if s.Next, err = c.add(ctx, v, next, &t); err != nil {
		return err
	}
	if _, err := c.plans(ctx, v, &t); err != nil {
		return err
	}
	if s.Waiting, err = c.asked(ctx, v); err != nil {
		return err
	}
	if givenUp != 0 {
		if err := c.giveUp(ctx, v, givenUp, true, &t); err != nil {
			return err
		}
	}
	s.Serial, s.Step, s.Since, s.Revoked = v.wanted.Serial, stepPrepare, c.cfg.Now(), v.revoked()
	s.Problem, s.ProblemSerial = "", 0
	_, _, err = c.commit(ctx, v, "begin", t)
	return err
}

// asked are the nodes that have to know something before the generation that is prepared may be sent, with the
// revision of the plan that has it. Of the others nothing is asked but what those before asked of them: they have
// acknowledged that, or it is sent without them already.
func (c *Controller) asked(ctx context.Context, v *view) (map[string]uint64, error) {
	with, err := c.contents(ctx, v, true)
	if err != nil {
		return nil, err
	}
	without, err := c.contents(ctx, v, false)
	if err != nil {
		return nil, err
	}
	asked := map[string]uint64{}
	for name, content := range with {
		if had, ok := without[name]; (!ok || had != content) && !v.nodes[name].Revoked {
			asked[name] = v.plans[name].Revision
		}
	}
	return asked, nil
}

// contents are digests of what nodes hold of all generations, with the one that is prepared or without it.
func (c *Controller) contents(ctx context.Context, v *view, next bool) (map[string]string, error) {
	l, err := c.live(ctx, v)
	if err != nil {
		return nil, err
	}
	if !next {
		l.Next = nil
	}
	nodes, err := l.Nodes()
	if err != nil {
		return nil, err
	}
	out := map[string]string{}
	for _, n := range nodes {
		if out[n.Name], err = c.known.digest(n, sorted, func(p *knownPlan) *string { return &p.sorted }); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// sorted is a node's plan, without a revision and with what has no order in an order.
func sorted(n plan.Node) ([]byte, error) {
	n.Revision = 0
	n.Endpoints, n.Egresses = slices.Clone(n.Endpoints), slices.Clone(n.Egresses)
	slices.SortStableFunc(n.Endpoints, func(a, b plan.Endpoint) int {
		return cmp.Or(a.SID.Compare(b.SID), cmp.Compare(a.Path, b.Path), cmp.Compare(a.Epoch, b.Epoch))
	})
	slices.SortStableFunc(n.Egresses, func(a, b plan.Egress) int {
		return cmp.Or(a.SID.Compare(b.SID), cmp.Compare(a.Path, b.Path), cmp.Compare(a.Epoch, b.Epoch))
	})
	return plan.EncodeNode(n)
}

// owed are the chains whose fresh secrets were asked for and that have not got them, with the nodes on their way
// that refuse their plan or have no connection: a file that goes over a change leaves out what would wait for those.
func (c *Controller) owed(v *view, now *generation) map[string][]string {
	owed := map[string][]string{}
	var all []string // that are stuck; nil: nobody has looked
	for i := range now.domain.Paths {
		p := &now.domain.Paths[i]
		if v.wanted.Rotate[p.Chain] <= now.Rotated[p.Chain] || now.Blocked[p.Chain] != "" {
			continue
		}
		if all == nil {
			connected, _ := c.connected()
			all = []string{}
			for _, name := range slices.Sorted(maps.Keys(v.plans)) {
				if c.stuck(v, name, connected) {
					all = append(all, name)
				}
			}
		}
		stuck := owed[p.Chain]
		for _, name := range all {
			if on(*p, name) && !slices.Contains(stuck, name) {
				stuck = append(stuck, name)
			}
		}
		slices.Sort(stuck)
		owed[p.Chain] = stuck
	}
	return owed
}

// room is an error if some node could not hold the next generation beside those that drain,
// before and behind its turn.
func (c *Controller) room(ctx context.Context, v *view, next *generation) error {
	l, err := c.live(ctx, v)
	if err != nil {
		return err
	}
	was := l.Now
	l.Next = next.domain
	if err := c.known.check(l); err != nil {
		return err
	}
	return c.known.check(plan.Live{Old: append(l.Old, was), Now: next.domain, Checked: l.Checked})
}

// problem notes why a request is not begun, once.
func (c *Controller) problem(ctx context.Context, v *view, why error) (bool, error) {
	s := &v.state
	if s.Problem == why.Error() && s.ProblemSerial == v.wanted.Serial {
		return false, nil
	}
	s.Problem, s.ProblemSerial = why.Error(), v.wanted.Serial
	_, _, err := c.commit(ctx, v, "problem", store.Txn{})
	return err == nil, err
}

// turn lets headends send the epochs that all others know.
func (c *Controller) turn(ctx context.Context, v *view) (bool, time.Time, error) {
	s := &v.state
	if s.Now != 0 {
		s.Old = append(slices.Clone(s.Old), oldRecord{Generation: s.Now})
	}
	since := s.Since
	s.Now, s.Next, s.Step, s.Since = s.Next, 0, stepTurn, c.cfg.Now()
	var t store.Txn
	var err error
	if s.Waiting, err = c.plans(ctx, v, &t); err != nil {
		return false, time.Time{}, err
	}
	return c.ended(ctx, v, "turn", t, stepPrepare, since)
}

// settle begins the time in which packets of the old epochs may still come.
func (c *Controller) settle(ctx context.Context, v *view) (bool, time.Time, error) {
	s := &v.state
	if err := c.drain(ctx, v, func(oldRecord) bool { return true }); err != nil {
		return false, time.Time{}, err
	}
	since := s.Since
	s.Step, s.Since, s.Waiting = stepNone, c.cfg.Now(), nil
	return c.ended(ctx, v, "settle", store.Txn{}, stepTurn, since)
}

// drain begins that time of the generations, of those that are due, that no headend sends any more.
func (c *Controller) drain(ctx context.Context, v *view, due func(oldRecord) bool) error {
	s := &v.state
	s.Old = slices.Clone(s.Old)
	for i, o := range s.Old {
		if !v.turnedFrom(o) || !due(o) {
			continue
		}
		g, err := c.generation(ctx, v, o.Generation)
		if err != nil {
			return err
		}
		s.Old[i].Until, s.Old[i].Waiting = c.cfg.Now().Add(g.Drain), nil
	}
	return nil
}

// erase takes out generations that have drained.
func (c *Controller) erase(ctx context.Context, v *view) (bool, time.Time, error) {
	s := &v.state
	var due, rest []oldRecord
	how := map[string]int{}
	for _, o := range s.Old {
		if is, by, _ := c.drained(o); is {
			due = append(due, o)
			how[by]++
		} else {
			rest = append(rest, o)
		}
	}
	s.Old = rest
	var t store.Txn
	if _, err := c.plans(ctx, v, &t); err != nil {
		return false, time.Time{}, err
	}
	for _, o := range due {
		if err := c.giveUp(ctx, v, o.Generation, false, &t); err != nil {
			return false, time.Time{}, err
		}
	}
	if s.Next != 0 { // plans with what is erased may be known beside those of the change
		defer c.known.clear()
	}
	v.note = ", old epochs have drained by " + strings.Join(slices.Sorted(maps.Keys(how)), " and ")
	did, wake, err := c.commit(ctx, v, "erase", t)
	if err == nil {
		for by, n := range how {
			c.counted.Add(metricDrained, uint64(n), by)
		}
	}
	return did, wake, err
}

// giveUp takes a generation out of the store, once its plans are in the transaction. unsent: no headend
// was sent its epochs.
func (c *Controller) giveUp(ctx context.Context, v *view, number uint64, unsent bool, t *store.Txn) error {
	gone, err := c.generation(ctx, v, number)
	if err != nil {
		return err
	}
	others, err := c.others(ctx, v, number)
	if err != nil {
		return err
	}
	gone.unstore(number, others, t)
	live := map[pathEpoch]bool{}
	for _, n := range v.state.live() {
		g, err := c.generation(ctx, v, n)
		if err != nil {
			return err
		}
		for _, p := range g.domain.Paths {
			live[pathEpoch{p.Path, p.Epoch}] = true
		}
	}
	e := erasingRecord{Nodes: map[string]uint64{}, Unsent: unsent}
	for _, p := range gone.domain.Paths {
		if id := (pathEpoch{p.Path, p.Epoch}); !live[id] {
			e.Epochs = append(e.Epochs, id)
		}
	}
	for i := range gone.domain.Paths {
		p := &gone.domain.Paths[i]
		if live[pathEpoch{p.Path, p.Epoch}] {
			continue
		}
		hold := func(name string) {
			if r, ok := v.plans[name]; ok { // as the transaction makes it
				e.Nodes[name] = r.Revision
			}
		}
		for _, in := range p.Ingress {
			hold(in.Node)
		}
		for _, h := range p.Hops {
			hold(h.Node)
		}
	}
	if len(e.Epochs) == 0 {
		return nil
	}
	v.state.Erasing = slices.Clone(v.state.Erasing)
	for i, x := range v.state.Erasing { // one record for the same nodes, which the last to be erased ends
		if x.Unsent == e.Unsent && maps.EqualFunc(x.Nodes, e.Nodes, func(_, _ uint64) bool { return true }) {
			have := make(map[pathEpoch]bool, len(x.Epochs))
			for _, id := range x.Epochs {
				have[id] = true
			}
			e.Epochs = slices.Concat(x.Epochs, slices.DeleteFunc(e.Epochs, func(id pathEpoch) bool { return have[id] }))
			v.state.Erasing[i] = e // no plan's revision goes down
			return nil
		}
	}
	v.state.Erasing = append(v.state.Erasing, e)
	return nil
}

// live are the numbers of all generations that nodes hold.
func (s stateRecord) live() (numbers []uint64) {
	for _, o := range s.Old {
		numbers = append(numbers, o.Generation)
	}
	for _, n := range []uint64{s.Now, s.Next} {
		if n != 0 {
			numbers = append(numbers, n)
		}
	}
	return numbers
}

// exclude gives the chains that revoked nodes were on fresh secrets, in one step: whatever is
// under way under the old ones is refused from now on. It begins from the generations that
// nodes hold, each of which gets such chains anew and is otherwise as it was: a change that is
// under way goes on, and waits for whom it waited.
func (c *Controller) exclude(ctx context.Context, v *view) (bool, time.Time, error) {
	s := &v.state
	given, unsent := s.live(), s.Next
	out := slices.DeleteFunc(v.revoked(), func(n string) bool { return slices.Contains(s.Revoked, n) })
	t := store.Txn{Put: map[string][]byte{}}
	before, err := c.contents(ctx, v, false)
	if err != nil {
		return false, time.Time{}, err
	}
	if err := c.replace(ctx, v, out, &t); err != nil {
		return false, time.Time{}, fmt.Errorf("exclude %s: %w", strings.Join(out, ", "), err)
	}
	s.Revoked = v.revoked()
	for _, name := range v.revoked() {
		t.Delete = append(t.Delete, keyNode(name, partPlan), keyNode(name, partAck), keyPlans+name)
		delete(v.plans, name)
		delete(v.acks, name)
		t.If = append(t.If, v.at(keyNode(name, partID)))
	}
	changed, err := c.plans(ctx, v, &t)
	if err != nil {
		return false, time.Time{}, err
	}
	switch s.Step {
	case stepNone:
		s.Step, s.Since, s.Waiting = stepTurn, c.cfg.Now(), nil
	case stepPrepare: // the fresh secrets are sent at once, whatever becomes of what is prepared
		after, err := c.contents(ctx, v, false)
		if err != nil {
			return false, time.Time{}, err
		}
		anew := maps.Clone(changed)
		maps.DeleteFunc(anew, func(name string, _ uint64) bool { return before[name] == after[name] })
		v.leave(anew, c.cfg.Now())
	}
	waiting := maps.Clone(changed)
	for name, revision := range s.Waiting {
		if _, anew := changed[name]; !anew && !v.nodes[name].Revoked {
			waiting[name] = revision
		}
	}
	s.Waiting = waiting
	live := s.live()
	for _, n := range given {
		if slices.Contains(live, n) {
			continue
		}
		if err := c.giveUp(ctx, v, n, n == unsent, &t); err != nil {
			return false, time.Time{}, err
		}
	}
	return c.commit(ctx, v, "exclude", t)
}

// replace puts others in the place of the generations that have chains on the nodes that are
// out. Secrets that these nodes know are in none of them.
func (c *Controller) replace(ctx context.Context, v *view, out []string, t *store.Txn) error {
	s := &v.state
	now, err := c.generation(ctx, v, s.Now)
	if err != nil {
		return err
	}
	is := *s // as the compilations need to see it
	fresh := chainsOn(now.domain.Paths, out)
	paths := now.domain.Paths
	if len(fresh) > 0 {
		again, err := c.compileAgain(ctx, v, now, paths, fresh)
		if err != nil {
			return err
		}
		paths = again.domain.Paths
		if is.Now, err = c.add(ctx, v, again, t); err != nil {
			return err
		}
	}
	if s.Next != 0 {
		next, err := c.generation(ctx, v, s.Next)
		if err != nil {
			return err
		}
		// Fresh secrets of Now serve here, too, but for paths that Now has not.
		var last []plan.Path
		anew, only := map[uint32]bool{}, map[string]bool{}
		for _, p := range paths {
			if fresh[p.Chain] {
				last, anew[p.Path] = append(last, p), true
			}
		}
		for _, p := range next.domain.Paths {
			if !anew[p.Path] {
				last, only[p.Chain] = append(last, p), true
			}
		}
		also := chainsOn(next.domain.Paths, out)
		maps.DeleteFunc(also, func(chain string, _ bool) bool { return fresh[chain] && !only[chain] })
		if len(fresh) > 0 || len(also) > 0 {
			again, err := c.compileAgain(ctx, v, next, last, also, paths...)
			if err != nil {
				return err
			}
			if is.Next, err = c.add(ctx, v, again, t); err != nil {
				return err
			}
		}
	}
	is.Old = nil
	for _, o := range s.Old {
		g, err := c.generation(ctx, v, o.Generation)
		if err != nil {
			return err
		}
		if gone := chainsOn(g.domain.Paths, out); len(gone) > 0 {
			rest := &generation{generationRecord: g.generationRecord, domain: g.domain.Drop(func(chain string) bool { return gone[chain] })}
			if o.Generation, err = c.add(ctx, v, rest, t); err != nil {
				return err
			}
		}
		is.Old = append(is.Old, o)
	}
	is.Generation = s.Generation
	*s = is
	return nil
}

// compileAgain compiles what a generation was made from, without the nodes that are out, and
// with fresh secrets for some chains. last are the paths that it goes on from, and more those
// of another generation that is being made.
func (c *Controller) compileAgain(ctx context.Context, v *view, g *generation, last []plan.Path, fresh map[string]bool, more ...plan.Path) (*generation, error) {
	from := &generation{generationRecord: g.generationRecord, domain: &plan.Domain{Paths: last}}
	w := wantedRecord{Serial: g.Serial, File: g.File, Deleted: g.Deleted, Rotate: g.Rotated}
	d, err := c.domainOf(ctx, w)
	if err != nil {
		return nil, err
	}
	again, err := c.compileDomain(ctx, v, from, w, d, fresh, more...)
	return again, err
}

// add puts a generation into the transaction, and returns its number.
func (c *Controller) add(ctx context.Context, v *view, g *generation, t *store.Txn) (uint64, error) {
	others, err := c.others(ctx, v, 0)
	if err != nil {
		return 0, err
	}
	n := v.state.Generation + 1
	if err := g.store(n, others, t); err != nil {
		return 0, err
	}
	v.state.Generation = n
	v.made[n] = g
	return n, nil
}

// chainsOn are the chains of which some path passes one of the nodes.
func chainsOn(paths []plan.Path, nodes []string) map[string]bool {
	chains := map[string]bool{}
	for _, p := range paths {
		if slices.ContainsFunc(nodes, func(n string) bool { return on(p, n) }) {
			chains[p.Chain] = true
		}
	}
	return chains
}

// keep has generations in memory that were committed. Before that their numbers are nobody's.
func (c *Controller) keep(made map[uint64]*generation) {
	c.cache.Lock()
	defer c.cache.Unlock()
	maps.Copy(c.cache.generations, made)
}

// live are the generations that nodes hold.
func (c *Controller) live(ctx context.Context, v *view) (l plan.Live, err error) {
	s := v.state
	l.Checked = c.known.checked
	for _, o := range s.Old {
		g, err := c.generation(ctx, v, o.Generation)
		if err != nil {
			return l, err
		}
		l.Old = append(l.Old, g.domain)
	}
	now, err := c.generation(ctx, v, s.Now)
	if err != nil {
		return l, err
	}
	l.Now = now.domain
	if s.Next != 0 {
		next, err := c.generation(ctx, v, s.Next)
		if err != nil {
			return l, err
		}
		l.Next = next.domain
	}
	return l, nil
}

// plans puts into the transaction what each node shall hold from now on, where that
// differs from what it shall hold already. It returns the nodes that get another plan, with its
// revision.
func (c *Controller) plans(ctx context.Context, v *view, t *store.Txn) (changed map[string]uint64, err error) {
	s := &v.state
	l, err := c.live(ctx, v)
	if err != nil {
		return nil, err
	}
	nodes, err := l.Nodes()
	if err != nil {
		return nil, err
	}
	if t.Put == nil {
		t.Put = map[string][]byte{}
	}
	in := map[string]bool{}
	for _, n := range nodes {
		in[n.Name] = true
	}
	for _, name := range slices.Sorted(maps.Keys(v.plans)) {
		if in[name] {
			continue
		}
		if v.nodes[name].Key == "" { // it has never joined, so it holds nothing
			t.If = append(t.If, v.at(keyNode(name, partID)))
			t.Delete = append(t.Delete, keyNode(name, partPlan), keyPlans+name)
			delete(v.plans, name)
			continue
		}
		n, err := c.left(ctx, name)
		if err != nil {
			return nil, err
		}
		nodes = append(nodes, n)
	}
	changed = map[string]uint64{}
	revision := s.Revision + 1
	for _, n := range nodes {
		if v.nodes[n.Name].Revoked {
			continue
		}
		content, err := c.known.digest(n, plan.EncodeNode, func(p *knownPlan) *string { return &p.content })
		if err != nil {
			return nil, err
		}
		if v.plans[n.Name].Content == content {
			continue
		}
		n.Revision = revision
		b, err := plan.EncodeNode(n)
		if err != nil {
			return nil, err
		}
		r := planRecord{Revision: revision, Digest: digest(b), Content: content}
		v.plans[n.Name] = r
		t.Put[keyNode(n.Name, partPlan)] = encode(r)
		t.Put[keyPlans+n.Name] = b
		changed[n.Name] = revision
	}
	c.known.forgetBut(nodes, s.Next != 0)
	if len(changed) > 0 {
		s.Revision = revision
	}
	return changed, nil
}

// left is the plan of a node that no generation has any more: nothing.
func (c *Controller) left(ctx context.Context, name string) (plan.Node, error) {
	snap, err := c.store.Snapshot(ctx, keyPlans+name)
	if err != nil {
		return plan.Node{}, err
	}
	n, err := plan.DecodeNode(snap.Records[keyPlans+name].Value)
	if err != nil {
		return plan.Node{}, fmt.Errorf("the plan of node %s, which has left: %w", name, err)
	}
	return plan.Node{Name: n.Name, Block: n.Block, Address: n.Address, Locator: n.Locator}, nil
}

func digest(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

// errWait means that a request has to wait until other epochs are gone.
var errWait = errors.New("it waits")

// compile makes the next generation from the one before and what is wanted.
func (c *Controller) compile(ctx context.Context, v *view, last *generation, w wantedRecord) (*generation, error) {
	d, err := c.domainOf(ctx, w)
	if err != nil {
		return nil, err
	}
	g, err := c.compileDomain(ctx, v, last, w, d, nil)
	if err != nil {
		return nil, err
	}
	turning, lossy := last.domain.Turning(g.domain)
	held, err := c.heldOf(ctx, v, turning, lossy)
	if err != nil {
		return nil, err
	}
	return g, mayHave(g.domain, turning, lossy, v.state, held)
}

// domainOf is what the file of a request says.
func (c *Controller) domainOf(ctx context.Context, w wantedRecord) (model.Domain, error) {
	var file fileRecord
	if err := c.record(ctx, keyFile(w.File), &file); err != nil {
		return model.Domain{}, err
	}
	m, err := parse(file)
	return m.Domain, err
}

// compileDomain compiles a domain behind another generation. Chains in fresh get other
// secrets though nothing else changes, as those do that a request rotates. Epochs and SIDs that nodes hold, and
// those of more, are not given out again.
func (c *Controller) compileDomain(ctx context.Context, v *view, last *generation, w wantedRecord, d model.Domain, fresh map[string]bool, more ...plan.Path) (*generation, error) {
	d.Chains = slices.DeleteFunc(slices.Clone(d.Chains), func(ch model.Chain) bool { return slices.Contains(w.Deleted, ch.Name) })
	blocked := block(&d, v.revoked())
	beyond, sids := [][]plan.Path{more}, [][]plan.Path{more}
	for _, n := range v.state.live() {
		g, err := c.generation(ctx, v, n)
		if err != nil {
			return nil, err
		}
		beyond = append(beyond, g.domain.Paths)
		if g.domain != last.domain { // whose SIDs the keyring keeps anyway
			sids = append(sids, g.domain.Paths)
		}
	}
	var unsent []plan.Path
	for _, e := range v.state.Erasing {
		if e.Unsent {
			for _, id := range e.Epochs {
				unsent = append(unsent, plan.Path{PathID: plan.PathID{Path: id.Path, Epoch: id.Epoch}})
			}
		}
	}
	beyond = append(beyond, unsent)
	keys := plan.NewKeyring(rand.Reader, last.domain.Paths)
	keys.KeepSIDs(sids...)
	keys.Beyond(beyond...)
	keys.Certify(c.ca().TrustDomain(), v.revocations())
	keys.Rotate(func(chain string) bool { return fresh[chain] || w.Rotate[chain] > last.Rotated[chain] })
	var was model.Domain
	if last.from != nil {
		was = *last.from
	}
	out, err := plan.CompileAfter(was, last.domain, d, keys)
	if err != nil {
		return nil, err
	}
	g := &generation{domain: out}
	if len(blocked) == 0 {
		g.from = &d
	} else {
		g.domain = out.Without(func(chain string) bool { return blocked[chain] != "" })
	}
	g.generationRecord = generationRecord{
		Serial: w.Serial, File: w.File, Deleted: w.Deleted, Rotated: w.Rotate, Blocked: blocked, Drain: c.cfg.Drain + longestLifetime(d),
	}
	return g, nil
}

// heldOf are the epochs of some paths that some node may hold; false: but no headend has sent them.
func (c *Controller) heldOf(ctx context.Context, v *view, paths ...[]plan.Path) (map[pathEpoch]bool, error) {
	of := map[uint32]bool{}
	for _, list := range paths {
		for i := range list {
			of[list[i].Path] = true
		}
	}
	held := map[pathEpoch]bool{}
	if len(of) == 0 {
		return held, nil
	}
	for _, n := range v.state.live() {
		g, err := c.generation(ctx, v, n)
		if err != nil {
			return nil, err
		}
		for i := range g.domain.Paths {
			if p := &g.domain.Paths[i]; of[p.Path] {
				held[idOf(p)] = held[idOf(p)] || n != v.state.Next
			}
		}
	}
	for _, e := range v.state.Erasing {
		for _, id := range e.Epochs {
			if of[id.Path] {
				held[id] = held[id] || !e.Unsent
			}
		}
	}
	return held, nil
}

// mayHave is errWait if some node may hold an epoch under other secrets, or too much drains. held are the epochs of the paths that turn or are lossy.
func mayHave(next *plan.Domain, turning, lossy []plan.Path, s stateRecord, held map[pathEpoch]bool) error {
	comes := map[pathEpoch]bool{}
	if len(lossy) > 0 {
		for i := range next.Paths {
			comes[idOf(&next.Paths[i])] = true
		}
	}
	// A node takes no epoch that is new to it and not later than all that it holds of the path.
	holds := map[uint32][]pathEpoch{}
	for id := range held {
		holds[id.Path] = append(holds[id.Path], id)
	}
	for _, p := range turning {
		for _, id := range holds[p.Path] {
			if int8(p.Epoch-id.Epoch) <= 0 { // after 255 comes 0
				return fmt.Errorf("%w: %s would get epoch %d, and some node may still hold %d", errWait, p.PathID, p.Epoch, id.Epoch)
			}
		}
	}
	for _, p := range lossy {
		if !comes[idOf(&p)] {
			continue
		}
		// Its epochs begin anew, but for those that nobody has sent.
		for _, id := range holds[p.Path] {
			if held[id] || int8(p.Epoch-id.Epoch) <= 0 {
				return fmt.Errorf("%w: %s was there before, and some node may still hold its epoch %d", errWait, p.PathID, id.Epoch)
			}
		}
	}
	if len(turning) > 0 && len(s.Old) >= OldMax {
		return fmt.Errorf("%w: %d generations drain already", errWait, len(s.Old))
	}
	var sent int
	for _, o := range s.Old {
		if o.Until.IsZero() {
			sent++
		}
	}
	if sent >= OldMax {
		return fmt.Errorf("%w: there are %d generations already that headends have to turn from", errWait, sent)
	}
	return nil
}

func idOf(p *plan.Path) pathEpoch { return pathEpoch{p.Path, p.Epoch} }

// on tells whether a path passes a node.
func on(p plan.Path, node string) bool {
	return slices.ContainsFunc(p.Hops, func(h plan.Hop) bool { return h.Node == node }) ||
		slices.ContainsFunc(p.Ingress, func(i plan.Ingress) bool { return i.Node == node })
}

// block takes revoked nodes off the chains that can be without them, and says why others
// cannot.
func block(d *model.Domain, revoked []string) map[string]string {
	out := map[string]bool{}
	for _, name := range revoked {
		out[name] = true
	}
	at := map[string]string{}
	for _, f := range d.Functions {
		at[f.Name] = f.Node
	}
	blocked := map[string]string{}
	if len(out) == 0 {
		return blocked
	}
	for i, ch := range d.Chains {
		left := slices.DeleteFunc(slices.Clone(ch.Ingress), func(n string) bool { return out[n] })
		functions := ch.AllFunctions()
		switch f := slices.IndexFunc(functions, func(f string) bool { return out[at[f]] }); {
		case out[ch.Egress]:
			blocked[ch.Name] = fmt.Sprintf("its egress %s was revoked", ch.Egress)
		case f >= 0:
			blocked[ch.Name] = fmt.Sprintf("its function %s is on node %s, which was revoked", functions[f], at[functions[f]])
		case len(left) == 0:
			blocked[ch.Name] = fmt.Sprintf("its headend %s was revoked", strings.Join(ch.Ingress, ", "))
		default:
			d.Chains[i].Ingress = left
		}
	}
	return blocked
}

// longestLifetime is how long a function may hold a packet.
func longestLifetime(d model.Domain) (longest time.Duration) {
	for _, f := range d.Functions {
		longest = max(longest, f.Proxy.Lifetime)
	}
	return longest
}

// putRules puts the rules into a domain's functions that came beside its file.
func putRules(m *manifest.Manifest, f fileRecord) error {
	for i := range m.Domain.Functions {
		fn := &m.Domain.Functions[i]
		if fn.Netfilter.RulesFile == "" {
			continue
		}
		rules, ok := f.Rules[fn.Name]
		if !ok {
			return fmt.Errorf("%s: the rules-file %s of function %s did not come with it", f.Name, fn.Netfilter.RulesFile, fn.Name)
		}
		if len(rules) > model.RulesMax {
			return fmt.Errorf("%s: the rules of function %s have more than %d bytes", f.Name, fn.Name, model.RulesMax)
		}
		fn.Netfilter.Rules, fn.Netfilter.RulesAt = rules, model.Source{File: fn.Netfilter.RulesFile, Line: 1, Column: 1}
	}
	return nil
}
