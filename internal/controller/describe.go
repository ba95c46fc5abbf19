package controller

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/waystamp/waystamp/internal/plan"
	v1 "github.com/waystamp/waystamp/internal/rpc/waystampv1"
)

// States of nodes, chains and epochs as Get tells them.
const (
	nodeReady    = "ready"    // its kernel holds the plan that it shall hold
	nodeBehind   = "behind"   // it has not acknowledged that yet
	nodeRefusing = "refusing" // it could not put it in force
	nodeAway     = "away"     // it has no connection

	nodeIncompatible = "incompatible" // its agent does not know what its plan asks for, and is not sent it

	nodeExpected = "expected" // it has not joined
	nodeRevoked  = "revoked"

	chainActive    = "active"
	chainPreparing = "preparing" // not all of its nodes hold it yet
	chainDegraded  = "degraded"  // it carries packets as far as is known, and one of its nodes is in trouble
	chainBlocked   = "blocked"   // it carries nothing

	epochPreparing = "preparing"
	epochActive    = "active"
	epochDraining  = "draining"
)

// describe is how things are, for operators. It holds no secret.
func (c *Controller) describe(ctx context.Context) (out *v1.State, err error) {
	err = c.consistent(ctx, func(v *view) error {
		out, err = c.describeView(ctx, v)
		return err
	})
	return out, err
}

// progress is describe without chains and epochs, of which there are many.
func (c *Controller) progress(ctx context.Context) (out *v1.State, err error) {
	err = c.consistent(ctx, func(v *view) error {
		if out, err = c.describeNodes(ctx, v); err == nil {
			c.journal.stamp(c.cfg.Now(), out)
		}
		return err
	})
	return out, err
}

func (c *Controller) describeView(ctx context.Context, v *view) (*v1.State, error) {
	out, err := c.describeNodes(ctx, v)
	if err != nil {
		return nil, err
	}
	if err := c.describeChains(ctx, v, out); err != nil {
		return nil, err
	}
	c.journal.stamp(c.cfg.Now(), out)
	return out, nil
}

// describeNodes is how far a change is, and how nodes are.
func (c *Controller) describeNodes(ctx context.Context, v *view) (*v1.State, error) {
	s := v.state
	connected, _ := c.connected()
	out := &v1.State{
		WantedSerial: v.wanted.Serial, Serial: s.Serial, Step: string(s.Step), WaitingFor: v.waitingFor(), Problem: s.Problem,
		TrustDomain: c.ca().TrustDomain(), Roots: c.authority.Load().describe(v),
	}
	if s.Step != stepNone {
		out.Since = timestamppb.New(s.Since)
	}
	late := v.late()
	if s.Step == stepNone && len(late) > 0 { // another change went over it, and it is not through
		out.Step = string(stepTurn)
		first := slices.MinFunc(late, func(a, b string) int { return s.Late[a].Since.Compare(s.Late[b].Since) })
		out.Since = timestamppb.New(s.Late[first].Since)
	}
	if s.ProblemSerial != v.wanted.Serial {
		out.Problem = ""
	}
	if !s.Restored.IsZero() {
		out.Problem = fmt.Sprintf("it waits: the records are of a backup of %s, and these nodes have not said yet what they hold since: %s; waystamp node revoke NAME goes on without one",
			s.Restored.UTC().Format(time.RFC3339), strings.Join(v.unheard(), ", "))
	}
	c.trouble.Lock()
	if c.trouble.text != "" && out.Problem == "" {
		out.Problem = "it waits: the next step is not done, and is tried again each second: " + c.trouble.text
	}
	c.trouble.Unlock()
	out.Settled = s.Restored.IsZero() && s.Step == stepNone && s.Serial == v.wanted.Serial && slices.Equal(s.Revoked, v.revoked()) && len(v.late()) == 0

	if at, _, err := c.nextRotation(ctx, v); err != nil {
		return nil, err
	} else if !at.IsZero() && s.Restored.IsZero() {
		out.NextRotation = timestamppb.New(at)
	}

	now, err := c.generation(ctx, v, s.Now)
	if err != nil {
		return nil, err
	}
	if s.Restored.IsZero() && s.Step == stepNone && s.Serial == v.wanted.Serial {
		owed := c.owed(v, now)
		out.Settled = out.Settled && len(owed) == 0
		for _, chain := range slices.Sorted(maps.Keys(owed)) {
			if stuck := owed[chain]; len(stuck) > 0 && out.Problem == "" {
				out.Problem = fmt.Sprintf("it waits: chain %s gets fresh secrets as soon as %s can take them", chain, strings.Join(stuck, ", "))
			}
		}
	}
	names := map[string]bool{}
	for name := range v.nodes {
		names[name] = true
	}
	for name := range v.plans {
		names[name] = true
	}
	for _, name := range slices.Sorted(maps.Keys(names)) {
		out.Nodes = append(out.Nodes, c.describeNode(v, name, connected[name]))
	}

	for _, name := range out.WaitingFor {
		out.Waiting = append(out.Waiting, c.waiting(v, name, s.Step, s.Since, connected[name]))
	}
	for _, name := range late {
		if !slices.Contains(out.WaitingFor, name) {
			out.WaitingFor = append(out.WaitingFor, name)
			out.Waiting = append(out.Waiting, c.waiting(v, name, stepTurn, s.Late[name].Since, connected[name]))
		}
	}
	return out, nil
}

// describeChains adds chains and epochs to what describeNodes says.
func (c *Controller) describeChains(ctx context.Context, v *view, out *v1.State) error {
	s := v.state
	now, err := c.generation(ctx, v, s.Now)
	if err != nil {
		return err
	}
	next, err := c.generation(ctx, v, s.Next)
	if err != nil {
		return err
	}
	ofStep := slices.Clone(out.Waiting[:min(len(out.Waiting), len(v.waitingFor()))])
	connected, _ := c.connected()
	behind := map[string]*v1.WaitingState{}
	for _, name := range v.late() {
		behind[name] = c.waiting(v, name, stepTurn, s.Late[name].Since, connected[name])
	}

	lacking, err := c.lacking(ctx, v, now)
	if err != nil {
		return err
	}
	trouble := map[string]string{} // by node
	for _, n := range out.Nodes {
		if why := troubleOf(n, v.acks[n.Name].Problems); why != "" {
			trouble[n.Name] = why
		}
	}
	degraded := troubled(now.domain.Paths, trouble)
	seen := map[string]bool{}
	for _, g := range []*generation{now, next} {
		for _, p := range g.domain.Paths {
			if seen[p.Chain] {
				continue
			}
			seen[p.Chain] = true
			ch := &v1.ChainState{Name: p.Chain, State: chainActive}
			why, blocked := g.Blocked[p.Chain]
			switch {
			case blocked:
				ch.State, ch.Reason = chainBlocked, why
			case g == next || s.Step == stepTurn && s.Next == 0 && len(s.Old) == 0:
				ch.State = chainPreparing
				ch.Reason = waitsFor(ofStep)
			case len(lacking[p.Chain]) > 0:
				ch.State = chainPreparing
				var all []*v1.WaitingState
				for _, name := range lacking[p.Chain] {
					all = append(all, behind[name])
				}
				ch.Reason = waitsFor(all)
			case degraded[p.Chain] != "":
				ch.State, ch.Reason = chainDegraded, degraded[p.Chain]
			}
			out.Chains = append(out.Chains, ch)
		}
	}

	held := map[pathEpoch]bool{}
	epochs := func(g *generation, state string, until *timestamppb.Timestamp, waiting []string, drain func(pathEpoch) string) {
		for _, p := range g.domain.Paths {
			if id := (pathEpoch{p.Path, p.Epoch}); !held[id] {
				held[id] = true
				out.Epochs = append(out.Epochs, &v1.EpochState{
					Chain: p.Chain, Direction: p.Direction.String(), From: p.From, Path: p.Path, Epoch: uint32(p.Epoch), State: state, Until: until,
					WaitingFor: among(p, waiting), Drain: drain(id),
				})
			}
		}
	}
	var preparing, turning []string
	switch s.Step {
	case stepPrepare:
		preparing = v.waitingFor()
	case stepTurn:
		turning = v.waitingFor()
	}
	none := func(pathEpoch) string { return "" }
	epochs(now, epochActive, nil, turning, none)
	epochs(next, epochPreparing, nil, preparing, none)
	for _, o := range s.Old {
		g, err := c.generation(ctx, v, o.Generation)
		if err != nil {
			return err
		}
		var until *timestamppb.Timestamp
		drain := func(pathEpoch) string { return "headends to turn" }
		if _, _, at := c.drained(o); !at.IsZero() {
			until = timestamppb.New(at)
			drain = func(id pathEpoch) string { return c.drains.drainText(o.Generation, id) }
		}
		from := turning // headends that may still send it
		switch {
		case until != nil:
			from = nil
		case o.Waiting != nil:
			from = v.without(o.Waiting)
		}
		epochs(g, epochDraining, until, from, drain)
	}
	return nil
}

// waiting is a node that a step waits for.
func (c *Controller) waiting(v *view, name string, in step, since time.Time, connected bool) *v1.WaitingState {
	n := c.describeNode(v, name, connected)
	w := &v1.WaitingState{Node: name, State: n.State, Reason: n.Reason, Since: timestamppb.New(since), Step: string(in)}
	if n.State == nodeRefusing {
		w.Since = n.Since
	}
	return w
}

// troubleOf is why chains that pass a node may not be as they shall; "": they are. parts are those of its plan that its kernel does not hold.
func troubleOf(n *v1.NodeState, parts []string) string {
	switch {
	case n.State == nodeAway || n.State == nodeRefusing || n.State == nodeIncompatible:
		return fmt.Sprintf("node %s is %s: %s", n.Name, n.State, n.Reason)
	case n.State != nodeRevoked && len(parts) > 0:
		return fmt.Sprintf("node %s holds not all of its plan: %s", n.Name, parts[0])
	}
	return ""
}

// troubled are the chains that pass such nodes, with the trouble of the first one.
func troubled(paths []plan.Path, trouble map[string]string) map[string]string {
	if len(trouble) == 0 {
		return nil
	}
	out := map[string]string{}
	for i := range paths {
		p := &paths[i]
		if out[p.Chain] != "" {
			continue
		}
		for _, in := range p.Ingress {
			out[p.Chain] = cmp.Or(out[p.Chain], trouble[in.Node])
		}
		for _, h := range p.Hops {
			out[p.Chain] = cmp.Or(out[p.Chain], trouble[h.Node])
		}
	}
	return out
}

// among are those of some nodes that a path passes.
func among(p plan.Path, nodes []string) (out []string) {
	for _, name := range nodes {
		if on(p, name) {
			out = append(out, name)
		}
	}
	return out
}

// waitsFor says so of nodes; "" if there are none.
func waitsFor(nodes []*v1.WaitingState) string {
	var waits []string
	for _, w := range nodes {
		text := w.Node
		if w.State == nodeRefusing {
			text += ", which refuses its plan: " + w.Reason
		}
		waits = append(waits, text)
	}
	if len(waits) == 0 {
		return ""
	}
	return "waits for " + strings.Join(waits, ", ")
}

func notJoined(node string) string {
	return "it has not joined; make a token: waystamp node token " + node
}

// lacking are the nodes, by chain, that have not turned to what all others hold of it, because they
// have not ended a turn that another change went over.
func (c *Controller) lacking(ctx context.Context, v *view, now *generation) (map[string][]string, error) {
	nodes := map[string][]string{}
	for _, name := range v.late() {
		has := map[pathEpoch]bool{} // of the oldest generation that it may still send
		for _, o := range v.state.Old {
			if revision, ok := o.Waiting[name]; !ok || v.holds(name, revision) {
				continue
			}
			g, err := c.generation(ctx, v, o.Generation)
			if err != nil {
				return nil, err
			}
			for _, p := range g.domain.Paths {
				has[pathEpoch{p.Path, p.Epoch}] = true
			}
			break
		}
		for _, p := range now.domain.Paths {
			if on(p, name) && !has[pathEpoch{p.Path, p.Epoch}] && !slices.Contains(nodes[p.Chain], name) {
				nodes[p.Chain] = append(nodes[p.Chain], name)
			}
		}
	}
	return nodes, nil
}

func (c *Controller) describeNode(v *view, name string, connected bool) *v1.NodeState {
	n, p, a := v.nodes[name], v.plans[name], v.acks[name]
	out := &v1.NodeState{Name: name, WantedRevision: p.Revision, Revision: a.Revision, Problems: slices.Concat(a.Problems, a.Warnings)}
	if !a.At.IsZero() {
		out.Since = timestamppb.New(a.At)
	}
	switch {
	case n.Revoked:
		out.State = nodeRevoked
	case n.Key == "":
		out.State, out.Reason = nodeExpected, notJoined(name)
	case v.refuses(name):
		out.State, out.Reason = nodeRefusing, a.Error
	case !connected:
		out.State, out.Reason = nodeAway, "its agent has no connection"
	case len(c.incompatible(name)) > 0:
		out.State, out.Reason = nodeIncompatible, fmt.Sprintf("its agent does not know what its plan of revision %d asks for (%s), and goes on with revision %d; install a later version there, or apply a file without it",
			p.Revision, strings.Join(c.incompatible(name), ", "), a.Revision)
	case a.Revision < p.Revision:
		out.State, out.Reason = nodeBehind, fmt.Sprintf("it holds revision %d of %d", a.Revision, p.Revision)
	default:
		out.State, out.Reason = nodeReady, a.Error
	}
	return out
}
