package controller

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"

	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	v1 "github.com/waystamp/waystamp/internal/rpc/waystampv1"
)

const (
	// drainSeen is how long an egress must have seen nothing new once it has seen all numbers of an epoch: a number may be of several frames, of
	// which one was seen.
	drainSeen = time.Second
	// drainsMost are the epochs of whose numbers one node is asked at once; others drain by time.
	drainsMost = 1024
)

// How a generation has drained.
const (
	drainedByNumbers = "numbers"
	drainedByTime    = "time"
)

// drains are the generations that drain, with what nodes have told of numbers, in the memory of the controller that leads alone. Who leads next is told anew.
type drains struct {
	mu       sync.Mutex
	of       map[uint64]*draining // by number
	reorders chan struct{}        // closed when a node may be asked for others
	news     chan struct{}        // has a value when a generation may have drained
	told     chan struct{}        // closed when an epoch waits for something else
}

// draining is a generation that no headend sends any more.
type draining struct {
	drain time.Duration // how long its packets may be under way
	paths map[pathEpoch]*drainingPath
	at    map[string][]pathEpoch // of these, those that start or end at a node, in order
	left  int                    // that have not drained by numbers
}

// drainingPath is an epoch that only draining generations have.
type drainingPath struct {
	lanes   map[string]plan.Ingress // by headend
	egress  string
	given   map[string][]*v1.LaneNumber // by headend that has told
	seen    *v1.SeenNumbers             // nil: the egress has not told
	heard   time.Time                   // of seen
	drained bool
}

func (d *drains) init() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.of, d.news, d.told = map[uint64]*draining{}, make(chan struct{}, 1), make(chan struct{})
	d.changedLocked()
}

// begin forgets what was told to a leader before.
func (d *drains) begin() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.of = map[uint64]*draining{}
	d.changedLocked()
}

func (d *drains) changedLocked() {
	if d.reorders != nil {
		close(d.reorders)
	}
	d.reorders = make(chan struct{})
}

// follow brings the generations to those of the records that drain.
func (c *Controller) follow(ctx context.Context, v *view) error {
	d := &c.drains
	d.mu.Lock()
	defer d.mu.Unlock()
	is, changed := map[uint64]bool{}, false
	for i, o := range v.state.Old {
		if o.Until.IsZero() {
			continue
		}
		is[o.Generation] = true
		if d.of[o.Generation] != nil {
			continue
		}
		// What a later one has, too, is for that one to measure.
		later := map[pathEpoch]bool{}
		numbers := []uint64{v.state.Now, v.state.Next}
		for _, x := range v.state.Old[i+1:] {
			numbers = append(numbers, x.Generation)
		}
		for _, n := range numbers {
			g, err := c.generation(ctx, v, n)
			if err != nil {
				return err
			}
			for i := range g.domain.Paths {
				later[idOf(&g.domain.Paths[i])] = true
			}
		}
		g, err := c.generation(ctx, v, o.Generation)
		if err != nil {
			return err
		}
		x := &draining{drain: g.Drain, paths: map[pathEpoch]*drainingPath{}}
		for i := range g.domain.Paths {
			p := &g.domain.Paths[i]
			if later[idOf(p)] || g.Blocked[p.Chain] != "" || len(p.Hops) == 0 {
				continue
			}
			path := &drainingPath{lanes: map[string]plan.Ingress{}, egress: p.Hops[len(p.Hops)-1].Node, given: map[string][]*v1.LaneNumber{}}
			for _, in := range p.Ingress {
				path.lanes[in.Node] = in
			}
			x.paths[idOf(p)] = path
		}
		x.left, x.at, changed = len(x.paths), byNode(x.paths), true
		d.of[o.Generation] = x
	}
	for n := range d.of {
		if !is[n] {
			delete(d.of, n)
			changed = true
		}
	}
	if changed {
		d.changedLocked()
		d.toldLocked()
	}
	return nil
}

// byNode are the epochs that nodes are asked about.
func byNode(paths map[pathEpoch]*drainingPath) map[string][]pathEpoch {
	at := map[string][]pathEpoch{}
	for _, id := range slices.SortedFunc(maps.Keys(paths), func(a, b pathEpoch) int {
		return cmp.Or(cmp.Compare(a.Path, b.Path), cmp.Compare(a.Epoch, b.Epoch))
	}) {
		p := paths[id]
		for name := range p.lanes {
			at[name] = append(at[name], id)
		}
		if _, both := p.lanes[p.egress]; !both {
			at[p.egress] = append(at[p.egress], id)
		}
	}
	return at
}

// orders are the epochs of whose numbers a node is asked, and a channel that is closed when that may have changed.
func (d *drains) orders(node string) (out []*v1.HeldEpoch, changed <-chan struct{}) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.reorders == nil {
		d.changedLocked()
	}
	for _, n := range slices.Sorted(maps.Keys(d.of)) { // the earliest first
		x := d.of[n]
		for _, id := range x.at[node] {
			if len(out) < drainsMost && !x.paths[id].drained {
				out = append(out, &v1.HeldEpoch{Path: id.Path, Epoch: uint32(id.Epoch)})
			}
		}
	}
	return out, d.reorders
}

// take notes what a node tells: of epochs that drain, as a headend or as the egress that it is.
func (d *drains) take(node string, m *v1.NumbersRequest, now time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	changed := false
	each := func(path, epoch uint32, f func(*drainingPath)) {
		for _, x := range d.of {
			if p := x.paths[pathEpoch{path, uint8(epoch)}]; p != nil && epoch <= 255 && !p.drained {
				was := p.text(x.drain)
				f(p)
				if p.isDrained(x.drain) {
					p.drained = true
					if x.left--; x.left == 0 {
						notify(d.news)
					}
				}
				changed = changed || p.text(x.drain) != was
			}
		}
	}
	for _, g := range m.Given {
		each(g.GetPath(), g.GetEpoch(), func(p *drainingPath) {
			in, gives := p.lanes[node]
			own := func(l *v1.LaneNumber) bool { // else a node would say what another has given out
				return l.GetLane() >= uint32(in.Lane) && l.GetLane() < uint32(in.Lane)+uint32(in.Lanes)
			}
			if gives && !slices.ContainsFunc(g.Lanes, func(l *v1.LaneNumber) bool { return !own(l) }) {
				p.given[node] = g.Lanes
			}
		})
	}
	for _, s := range m.Seen {
		each(s.GetPath(), s.GetEpoch(), func(p *drainingPath) {
			if p.egress == node && len(s.Lanes) <= model.LanesMax {
				p.seen, p.heard = s, now
			}
		})
	}
	if changed {
		d.toldLocked()
	}
}

func (d *drains) toldLocked() {
	close(d.told)
	d.told = make(chan struct{})
}

// changes is a channel that is closed when an epoch waits for something else.
func (d *drains) changes() <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.told
}

// behind are the lanes of which the egress has not seen the last number.
func (p *drainingPath) behind() (lanes int) {
	seen := map[uint32]uint64{}
	for _, l := range p.seen.GetLanes() {
		seen[l.GetLane()] = max(seen[l.GetLane()], l.GetNumber())
	}
	for _, given := range p.given {
		for _, l := range given {
			if seen[l.GetLane()] < l.GetNumber() {
				lanes++
			}
		}
	}
	return lanes
}

func (p *drainingPath) quiet() time.Duration {
	return time.Duration(min(p.seen.GetQuietMilliseconds(), uint64(time.Hour/time.Millisecond))) * time.Millisecond
}

// isDrained tells whether no packet of the epoch can come any more that would be taken, as far as numbers say. drain is how long a packet may be under way.
func (p *drainingPath) isDrained(drain time.Duration) bool {
	switch {
	case p.seen == nil || len(p.given) < len(p.lanes) || p.behind() > 0:
		return false
	case p.seen.Missing == 0:
		return p.quiet() >= drainSeen
	}
	// Those that are missing were given out before the last one, which has been there for so long.
	return p.quiet() >= drain
}

// text says what an epoch waits for until it is erased.
func (p *drainingPath) text(drain time.Duration) string {
	var silent []string
	for _, name := range slices.Sorted(maps.Keys(p.lanes)) {
		if _, told := p.given[name]; !told {
			silent = append(silent, name)
		}
	}
	switch behind := p.behind(); {
	case p.drained:
		return "its packets have drained; other epochs of that change have not"
	case len(silent) > 0:
		return fmt.Sprintf("time: headend %s has not said which numbers it gave out", strings.Join(silent, ", "))
	case p.seen == nil:
		return fmt.Sprintf("time: egress %s has not said which numbers it has seen", p.egress)
	case behind > 0:
		return fmt.Sprintf("egress %s to see the last numbers of %d lanes, or time if they are lost", p.egress, behind)
	case p.seen.Missing > 0:
		return fmt.Sprintf("egress %s to see %d numbers, or %s without any, since they may be lost", p.egress, p.seen.Missing, drain)
	}
	return fmt.Sprintf("%s without packets at egress %s, which has seen all numbers", drainSeen, p.egress)
}

// drained tells whether a generation may be erased, how it has drained, and else when time says so.
func (c *Controller) drained(o oldRecord) (is bool, by string, until time.Time) {
	if o.Until.IsZero() {
		return false, "", time.Time{}
	}
	c.drains.mu.Lock()
	defer c.drains.mu.Unlock()
	until = o.Until
	x := c.drains.of[o.Generation]
	if x != nil && x.left == 0 {
		return true, drainedByNumbers, until
	}
	if x != nil { // packets are late that still come: whoever is behind them may be, too, but not for ever
		most := o.Until.Add(x.drain)
		for _, p := range x.paths {
			if p.drained || p.seen == nil || !p.seen.Moved {
				continue
			}
			if at := p.heard.Add(x.drain - p.quiet()); at.After(until) {
				until = at
			}
		}
		if until.After(most) {
			until = most
		}
	}
	return !c.cfg.Now().Before(until), drainedByTime, until
}

// drainText says what an epoch of a generation waits for; "": nothing is known of it.
func (d *drains) drainText(generation uint64, id pathEpoch) string {
	d.mu.Lock()
	defer d.mu.Unlock()
	x := d.of[generation]
	if x == nil || x.paths[id] == nil {
		return ""
	}
	return x.paths[id].text(x.drain)
}

// Numbers implements the service.
func (s node) Numbers(ctx context.Context, r *connect.Request[v1.NumbersRequest]) (*connect.Response[v1.NumbersResponse], error) {
	name, err := s.authenticate(ctx, false)
	if err != nil {
		return nil, err
	}
	if !s.c.limits.mayNumber(s.c.cfg.Now(), name) {
		return nil, refuse(connect.CodeResourceExhausted, "node %s tells of numbers too often; once a second is enough", name)
	}
	s.c.drains.take(name, r.Msg, s.c.cfg.Now())
	return connect.NewResponse(&v1.NumbersResponse{}), nil
}
