package controller

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/waystamp/waystamp/internal/model"
	v1 "github.com/waystamp/waystamp/internal/rpc/waystampv1"
)

const aboutFunction = "function"

// Describe implements the service.
func (s admin) Describe(ctx context.Context, r *connect.Request[v1.DescribeRequest]) (*connect.Response[v1.DescribeResponse], error) {
	var out *v1.DescribeResponse
	err := s.c.consistent(ctx, func(v *view) error {
		d, err := s.c.wantedDomain(ctx, v)
		if err != nil {
			return err
		}
		state, err := s.c.describeView(ctx, v)
		if err != nil {
			return failed(err)
		}
		if r.Msg.Name == "" {
			out, err = namesOf(d, state, r.Msg.Kind)
			return err
		}
		out, err = s.c.about(d, state, r.Msg.Kind, r.Msg.Name)
		return err
	})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(out), nil
}

// namesOf are the names that Describe takes.
func namesOf(d model.Domain, s *v1.State, kind string) (*v1.DescribeResponse, error) {
	names := map[string]bool{}
	switch kind {
	case aboutNode:
		for _, n := range d.Nodes {
			names[n.Name] = true
		}
		for _, n := range s.Nodes {
			names[n.Name] = true
		}
	case aboutChain:
		for _, ch := range d.Chains {
			names[ch.Name] = true
		}
		for _, ch := range s.Chains {
			names[ch.Name] = true
		}
	case aboutFunction:
		for _, f := range d.Functions {
			names[f.Name] = true
		}
	default:
		return nil, refuse(connect.CodeInvalidArgument, "%q cannot be described; expect node, chain or function", short(kind))
	}
	return &v1.DescribeResponse{Names: slices.Sorted(maps.Keys(names))}, nil
}

// about is all that is known of one node, chain or function.
func (c *Controller) about(d model.Domain, s *v1.State, kind, name string) (*v1.DescribeResponse, error) {
	if p, err := model.ReadInstance(name); kind == aboutFunction && err == nil {
		name = p.Function // of which it is an instance
	}
	all, err := namesOf(d, s, kind)
	if err != nil {
		return nil, err
	}
	if !slices.Contains(all.Names, name) {
		return nil, refuse(connect.CodeNotFound, "there is no %s %s", kind, short(name))
	}
	out := &v1.DescribeResponse{Step: s.Step, Since: s.Since, Problem: s.Problem}
	at := map[string]string{} // by function: its node
	for _, f := range d.Functions {
		at[f.Name] = f.Node
	}
	passes := func(ch model.Chain, node string) bool {
		return ch.Egress == node || slices.Contains(ch.Ingress, node) || slices.ContainsFunc(ch.Functions, func(f string) bool { return at[f] == node })
	}
	nodes, chains := map[string]bool{}, map[string]bool{}
	switch kind {
	case aboutNode:
		nodes[name] = true
		for _, n := range d.Nodes {
			if n.Name == name {
				out.Facts = nodeFacts(d, n)
			}
		}
		for _, ch := range d.Chains {
			if passes(ch, name) {
				chains[ch.Name] = true
			}
		}
	case aboutChain:
		chains[name] = true
		for _, ch := range d.Chains {
			if ch.Name != name {
				continue
			}
			out.Facts = chainFacts(ch, at)
			for _, n := range d.Nodes {
				if passes(ch, n.Name) {
					nodes[n.Name] = true
				}
			}
		}
	case aboutFunction:
		for _, f := range d.Functions {
			if f.Name == name {
				nodes[f.Node] = true
				out.Facts = functionFacts(f)
			}
		}
		for _, ch := range d.Chains {
			if slices.Contains(ch.Functions, name) {
				chains[ch.Name] = true
			}
		}
	}
	for _, n := range s.Nodes {
		if nodes[n.Name] {
			out.Nodes = append(out.Nodes, n)
			delete(nodes, n.Name)
		}
	}
	for _, n := range slices.Sorted(maps.Keys(nodes)) { // it is in the file alone
		out.Nodes = append(out.Nodes, &v1.NodeState{Name: n, State: nodeExpected, Reason: notJoined(n)})
	}
	for _, ch := range s.Chains {
		if chains[ch.Name] {
			out.Chains = append(out.Chains, ch)
		}
	}
	for _, ch := range d.Chains {
		if chains[ch.Name] && !slices.ContainsFunc(out.Chains, func(x *v1.ChainState) bool { return x.Name == ch.Name }) {
			out.Chains = append(out.Chains, &v1.ChainState{Name: ch.Name, State: chainPreparing, Reason: "its change has not begun yet"})
		}
	}
	for _, e := range s.Epochs {
		if chains[e.Chain] {
			out.Epochs = append(out.Epochs, e)
		}
	}
	isNode := map[string]bool{}
	for _, n := range out.Nodes {
		isNode[n.Name] = true
	}
	for _, w := range s.Waiting {
		if isNode[w.Node] {
			out.Waiting = append(out.Waiting, w)
		}
	}
	out.Refusals = c.refusals.counted(func(node, chain string) bool {
		if kind == aboutNode {
			return node == name
		}
		return chains[chain]
	})
	out.Events, _ = c.journal.about(func(e *v1.Event) bool {
		switch e.Kind {
		case aboutNode:
			return isNode[e.Name] && kind != aboutChain
		case aboutChain:
			return chains[e.Name] && kind != aboutNode
		}
		return false
	})
	return out, nil
}

func fact(name, format string, args ...any) *v1.Fact {
	return &v1.Fact{Name: name, Value: fmt.Sprintf(format, args...)}
}

func nodeFacts(d model.Domain, n model.Node) (out []*v1.Fact) {
	out = append(out, fact("address", "%s", n.Address), fact("locator", "%s", n.Locator))
	var functions []string
	for _, f := range d.Functions {
		if f.Node == n.Name {
			functions = append(functions, f.Name)
		}
	}
	if len(functions) > 0 {
		out = append(out, fact("functions", "%s", strings.Join(functions, ", ")))
	}
	return out
}

func chainFacts(ch model.Chain, at map[string]string) (out []*v1.Fact) {
	way := []string{strings.Join(ch.Ingress, " or ")}
	for _, f := range ch.Functions {
		name, _ := ch.InstanceOf(f)
		way = append(way, fmt.Sprintf("%s (%s)", name, at[f]))
	}
	direction := "forward"
	if ch.Both {
		direction = "both"
	}
	return []*v1.Fact{
		fact("match", "%s", ch.Match), fact("way", "%s", strings.Join(append(way, ch.Egress), " -> ")), fact("direction", "%s", direction),
		fact("scheme", "%s", ch.Proof.Scheme), fact("encapsulation", "%s, SIDs %s", ch.Encapsulation.Type, ch.Encapsulation.SIDs),
		fact("on violation", "%s", ch.Proof.OnViolation), fact("guard", "%s", ch.Guard),
	}
}

func functionFacts(f model.Function) []*v1.Fact {
	return []*v1.Fact{fact("kind", "%s", f.Kind), fact("node", "%s", f.Node)}
}

// Events implements the service.
func (s admin) Events(_ context.Context, r *connect.Request[v1.EventsRequest]) (*connect.Response[v1.EventsResponse], error) {
	events, since := s.c.journal.about(func(e *v1.Event) bool { return r.Msg.About == "" || e.Name == r.Msg.About })
	return connect.NewResponse(&v1.EventsResponse{Events: events, Since: timestamppb.New(since)}), nil
}
