package controller

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"slices"
	"sync"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/waystamp/waystamp/internal/event"
	"github.com/waystamp/waystamp/internal/explain"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	v1 "github.com/waystamp/waystamp/internal/rpc/waystampv1"
	"github.com/waystamp/waystamp/internal/rpc/waystampv1/waystampv1connect"
)

const (
	// refusalsMax is how many refusals are kept, of all chains together.
	refusalsMax = 10_000
	// countsMax is how many counts of node, chain and reason there are, and one more for each node: a node may say what it likes.
	// A node has countsOfNode at most, so that one alone does not have others' counted together.
	countsMax    = 20_000
	countsOfNode = 1_000
	otherReasons = "others"
	// refusalsBatch is how many a reader is sent before it is looked whether he may still read.
	refusalsBatch = 64

	// RefusedMax is how many refusals a node may tell of in one call, and refusedBytes how long each is at most.
	RefusedMax   = 64
	refusedBytes = 8 << 10
	// refusedPause is how long a node waits between two calls.
	refusedPause = time.Second

	// explainPaths are how many paths a packet is held against, its own first; endPaths of those that end where it was
	// refused, if it has no proof: that is no search.
	explainPaths = 256
	endPaths     = 16 * explainPaths
	// explainShare is how much of one CPU's time explanations take, of all nodes together, and explainAhead how much of it
	// may be taken at once: some take a search of many milliseconds, and whoever sends packets chooses which.
	explainShare = 0.2
	explainAhead = 5 * time.Second
)

// refusals are the packets that nodes have refused since this controller leads, in memory alone.
type refusals struct {
	mu     sync.Mutex
	kept   []numbered // the earliest first
	n      uint64     // so many have come
	chains map[string]int
	counts map[refusalKey]*v1.RefusalCount
	kinds  map[string]int    // of counts, by node
	lost   map[string]uint64 // by node: since the last one that was kept
	more   chan struct{}     // closed with the next one

	explaining sync.Mutex // one at a time
	spent      budget
	live       [][]plan.Path       // as they were read last
	paths      map[uint32]pathName // of live, by number
}

// pathName is whose a path's number is.
type pathName struct {
	Chain     string
	Direction model.Direction
}

type numbered struct {
	n       uint64 // the first has 1
	refusal *v1.Refusal
}

type refusalKey struct{ node, chain, reason string }

// begin forgets what another term knew.
func (r *refusals) begin() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.kept, r.chains, r.counts, r.kinds, r.lost = nil, map[string]int{}, map[refusalKey]*v1.RefusalCount{}, map[string]int{}, map[string]uint64{}
	r.newsLocked()
}

func (r *refusals) newsLocked() {
	if r.more != nil {
		close(r.more)
	}
	r.more = make(chan struct{})
}

// lose counts refusals of a node that are not kept.
func (r *refusals) lose(node string, n uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lost[node] += n
}

// add keeps one. When there are too many, the chain with the most of them loses its earliest: one chain under attack
// does not push out what others have.
func (r *refusals) add(node string, e event.Event, x *v1.Refusal) {
	r.mu.Lock()
	defer r.mu.Unlock()
	x.Dropped, r.lost[node] = r.lost[node], 0
	key := refusalKey{node, x.Chain, e.Reason}
	if _, ok := r.counts[key]; !ok && (len(r.counts) >= countsMax || r.kinds[node] >= countsOfNode) {
		key.chain, key.reason = "", otherReasons
	}
	count, ok := r.counts[key]
	if !ok {
		count = &v1.RefusalCount{}
		r.counts[key] = count
		r.kinds[node]++
	}
	count.Packets += 1 + uint64(e.Suppressed)
	count.Last = timestamppb.New(e.Time)
	if x.Sentence != "" {
		count.Sentence = x.Sentence
	}
	if len(r.kept) == refusalsMax {
		most := x.Chain
		for chain, n := range r.chains {
			if n > r.chains[most] {
				most = chain
			}
		}
		i := slices.IndexFunc(r.kept, func(k numbered) bool { return k.refusal.Chain == most })
		r.kept = slices.Delete(r.kept, i, i+1)
		if r.chains[most]--; r.chains[most] == 0 {
			delete(r.chains, most)
		}
	}
	r.n++
	r.kept = append(r.kept, numbered{r.n, x})
	r.chains[x.Chain]++
	r.newsLocked()
}

// after are those behind a number, and the number to go on from; without any, more is closed when there are.
func (r *refusals) after(n uint64, chain string) (out []*v1.Refusal, next uint64, more <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	i, _ := slices.BinarySearchFunc(r.kept, n+1, func(k numbered, n uint64) int { return cmp.Compare(k.n, n) })
	for ; i < len(r.kept) && len(out) < refusalsBatch; i++ {
		n = r.kept[i].n
		if chain == "" || r.kept[i].refusal.Chain == chain {
			out = append(out, r.kept[i].refusal)
		}
	}
	if i == len(r.kept) {
		n = r.n
	}
	return out, n, r.more
}

// counted are the counts of some nodes and chains, the latest first.
func (r *refusals) counted(keep func(node, chain string) bool) (out []*v1.RefusalCount) {
	r.mu.Lock()
	defer r.mu.Unlock()
	sums := map[refusalKey]*v1.RefusalCount{}
	for key, c := range r.counts {
		if !keep(key.node, key.chain) {
			continue
		}
		sum, ok := sums[refusalKey{node: key.node, reason: key.reason}]
		if !ok {
			sum = &v1.RefusalCount{Node: key.node, Reason: key.reason}
			sums[refusalKey{node: key.node, reason: key.reason}] = sum
			out = append(out, sum)
		}
		sum.Packets += c.Packets
		if sum.Last == nil || c.Last.AsTime().After(sum.Last.AsTime()) {
			sum.Last, sum.Sentence = c.Last, c.Sentence
		}
	}
	slices.SortFunc(out, func(a, b *v1.RefusalCount) int {
		return cmp.Or(b.Last.AsTime().Compare(a.Last.AsTime()), cmp.Compare(a.Node, b.Node), cmp.Compare(a.Reason, b.Reason))
	})
	return out
}

// Refused implements the service.
func (s node) Refused(ctx context.Context, r *connect.Request[v1.RefusedRequest]) (*connect.Response[v1.RefusedResponse], error) {
	name, err := s.authenticate(ctx, false)
	if err != nil {
		return nil, err
	}
	if len(r.Msg.Events) > RefusedMax {
		return nil, refuse(connect.CodeInvalidArgument, "%d refusals came in one call; %d are the most", len(r.Msg.Events), RefusedMax)
	}
	var events []event.Event
	for _, b := range r.Msg.Events {
		e, err := readRefusal(name, b)
		if err != nil {
			return nil, connect.NewError(connect.CodeInvalidArgument, err)
		}
		events = append(events, e)
	}
	take := s.c.limits.mayTell(s.c.cfg.Now(), name, len(events))
	s.c.refusals.lose(name, r.Msg.Dropped)
	var live [][]plan.Path
	for _, e := range events[:take] {
		x, err := s.c.explained(ctx, &live, e)
		if err != nil {
			return nil, failed(err)
		}
		s.c.refusals.add(name, e, x)
		s.c.traces.refused(e)
	}
	s.c.refusals.lose(name, uint64(len(events)-take))
	return connect.NewResponse(&v1.RefusedResponse{PauseMilliseconds: uint32(refusedPause / time.Millisecond)}), nil
}

// readRefusal reads what a node says. An agent of a later version may say more than this program knows. Operators'
// terminals show it.
func readRefusal(node string, b []byte) (e event.Event, err error) {
	if len(b) > refusedBytes {
		return e, errors.New("the event is too long")
	}
	if err := json.Unmarshal(b, &e); err != nil {
		return e, err
	}
	if e.Reason == "" {
		return e, errors.New("the event has no reason")
	}
	e.Node, e.Missed = node, 0
	for _, s := range []*string{&e.Interface, &e.Hook, &e.Reason, &e.Text, &e.Place} {
		*s = short(*s)
	}
	return e, nil
}

// livePaths are the paths of all generations that nodes hold, with their secrets: those in force first, then the
// latest.
func (c *Controller) livePaths(ctx context.Context) (out [][]plan.Path, err error) {
	err = c.consistent(ctx, func(v *view) error {
		out = nil
		numbers := v.state.live()
		slices.Reverse(numbers)
		if i := slices.Index(numbers, v.state.Now); i > 0 {
			numbers = append([]uint64{v.state.Now}, slices.Delete(numbers, i, i+1)...)
		}
		for _, n := range numbers {
			g, err := c.generation(ctx, v, n)
			if err != nil {
				return err
			}
			out = append(out, g.domain.Paths)
		}
		return nil
	})
	return out, err
}

// explained is a refusal with what it shows. No secret is in it: a sentence, and not the values that led to it. What that takes, to find the paths
// too, is within explainShare; without time left, the path's number tells the chain. live is read when it is needed first.
func (c *Controller) explained(ctx context.Context, live *[][]plan.Path, e event.Event) (*v1.Refusal, error) {
	line, err := event.Append(nil, e)
	if err != nil {
		return nil, err
	}
	out := &v1.Refusal{Event: line[:len(line)-1]}
	number, _ := explain.PathOf(e)
	c.refusals.explaining.Lock()
	defer c.refusals.explaining.Unlock()
	began := time.Now()
	if !c.refusals.spent.mayBegin(began) {
		if id, ok := c.refusals.paths[number]; ok {
			out.Chain, out.Direction = id.Chain, id.Direction.String()
		}
		return out, nil
	}
	defer func() { c.refusals.spent.took(time.Since(began)) }()
	if *live == nil {
		if *live, err = c.livePaths(ctx); err != nil {
			return nil, err
		}
		c.refusals.know(*live)
	}
	paths := candidates(*live, number, e.Node)
	if len(paths) > 0 && paths[0].Path == number {
		out.Chain, out.Direction = paths[0].Chain, paths[0].Direction.String()
	}
	x := explain.Explain(e, paths, nil)
	out.Sentence = x.Sentence
	if x.Proof != nil && x.Proof.Chain != "" { // labels need the paths to be read
		out.Chain, out.Direction = x.Proof.Chain, x.Proof.Direction.String()
	} else if out.Chain == "" {
		out.Chain = x.Requires
	}
	return out, nil
}

// know remembers whose numbers paths are. It is the explanations' time, too.
func (r *refusals) know(live [][]plan.Path) {
	same := func(a, b []plan.Path) bool { return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0]) }
	if slices.EqualFunc(r.live, live, same) {
		return
	}
	r.live, r.paths = live, map[uint32]pathName{}
	for _, paths := range live {
		for i := range paths {
			p := &paths[i]
			if _, ok := r.paths[p.Path]; !ok {
				r.paths[p.Path] = pathName{p.Chain, p.Direction}
			}
		}
	}
}

// candidates are the paths that a packet is held against, each epoch of a path for itself: those of its number, and then others, as
// many as there may be. number 0: it has no proof; then first those that end at the node, one of which may require the packet.
func candidates(live [][]plan.Path, number uint32, node string) (out []plan.Path) {
	seen := map[pathEpoch]bool{}
	add := func(most int, which func(*plan.Path) bool) {
		for _, paths := range live {
			for i := range paths {
				p := &paths[i]
				if id := (pathEpoch{p.Path, p.Epoch}); which(p) && !seen[id] {
					if len(out) >= most {
						return
					}
					seen[id] = true
					out = append(out, *p)
				}
			}
		}
	}
	if number == 0 {
		add(endPaths, func(p *plan.Path) bool { return len(p.Hops) > 0 && p.Hops[len(p.Hops)-1].Node == node })
	} else {
		add(explainPaths, func(p *plan.Path) bool { return p.Path == number })
	}
	add(explainPaths, func(*plan.Path) bool { return true })
	return out
}

// Refusals implements the service.
func (s admin) Refusals(ctx context.Context, r *connect.Request[v1.RefusalsRequest], stream *connect.ServerStream[v1.RefusalsResponse]) error {
	var at uint64
	present := false
	for {
		if err := s.c.authorize(ctx, waystampv1connect.AdminRefusalsProcedure); err != nil { // he may have been removed
			return err
		}
		batch, next, more := s.c.refusals.after(at, r.Msg.Chain)
		for _, x := range batch {
			if err := stream.Send(&v1.RefusalsResponse{Refusal: x}); err != nil {
				return err
			}
		}
		if next != at {
			at = next
			continue
		}
		if !present {
			if err := stream.Send(&v1.RefusalsResponse{Present: true}); err != nil {
				return err
			}
			present = true
		}
		if !r.Msg.Follow {
			return nil
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-more:
		}
	}
}
