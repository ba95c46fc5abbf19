package controller

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/waystamp/waystamp/internal/identity"
	"github.com/waystamp/waystamp/internal/manifest"
	"github.com/waystamp/waystamp/internal/model"
	v1 "github.com/waystamp/waystamp/internal/rpc/waystampv1"
	"github.com/waystamp/waystamp/internal/rpc/waystampv1/waystampv1connect"
	"github.com/waystamp/waystamp/internal/store"
)

// admin is the service for operators.
type admin struct{ c *Controller }

// again tries a change of the records until nobody else has changed them meanwhile.
func again(ctx context.Context, c *Controller, change func(v *view) (store.Txn, error)) error {
	for {
		var t store.Txn
		err := c.consistent(ctx, func(v *view) (err error) {
			t, err = change(v)
			return err
		})
		if err != nil {
			return err
		}
		if len(t.Put) == 0 && len(t.Delete) == 0 {
			return nil
		}
		if _, err = c.store.Commit(ctx, t); err == nil {
			return nil
		}
		if !errors.Is(err, store.ErrConflict) {
			return failed(err)
		}
	}
}

// Apply implements the service.
func (s admin) Apply(ctx context.Context, r *connect.Request[v1.ApplyRequest]) (*connect.Response[v1.ApplyResponse], error) {
	file, m, err := fileOf(r.Msg.File)
	if err != nil {
		return nil, err
	}
	answer := &v1.ApplyResponse{Warnings: warnings(file.Name, m)}
	err = again(ctx, s.c, func(v *view) (store.Txn, error) {
		if answer.Differences, err = s.c.differences(ctx, v, m.Domain); err != nil {
			return store.Txn{}, err
		}
		w := v.wanted
		w.Serial++
		w.File, w.Deleted = w.Serial, nil
		if v.state.Now == 0 && v.state.Next == 0 { // all secrets will be fresh
			w.Rotated = s.c.cfg.Now()
			w.Clock = w.Rotated
		} else if times, err := s.c.timesOf(ctx, v); err != nil {
			return store.Txn{}, failed(err)
		} else if len(times) == 0 { // nobody has looked at the clock so far
			w.Clock = s.c.cfg.Now()
		}
		if err := s.c.check(ctx, v, w, m.Domain); err != nil {
			return store.Txn{}, connect.NewError(connect.CodeInvalidArgument, err)
		}
		was, err := s.c.wantedDomain(ctx, v)
		if err != nil {
			return store.Txn{}, err
		}
		answer.CutOff = nil
		for _, cut := range cutOff(m.Domain, s.c.connections()) {
			if cut.isNew(was) && !r.Msg.Force {
				return store.Txn{}, refuse(connect.CodeFailedPrecondition, "%s; change its match, or apply with --force if these packets pass none of its headends and do not leave by its egress", cut)
			}
			answer.CutOff = append(answer.CutOff, cut.String())
		}
		answer.Serial = v.wanted.Serial
		if r.Msg.DryRun {
			return store.Txn{}, nil
		}
		answer.Serial = w.Serial
		return store.Txn{
			If:     []store.Condition{v.at(keyWanted)},
			Put:    map[string][]byte{keyWanted: encode(w), keyFile(w.File): encode(file)},
			Delete: s.c.oldFiles(ctx, v),
		}, nil
	})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(answer), nil
}

// oldFiles are those that no generation needs any more.
func (c *Controller) oldFiles(ctx context.Context, v *view) (keys []string) {
	used := map[string]bool{keyFile(v.wanted.File): true}
	for _, n := range v.state.live() {
		g, err := c.generation(ctx, v, n)
		if err != nil {
			return nil // the next time
		}
		used[keyFile(g.File)] = true
	}
	snap, err := c.store.Snapshot(ctx, keyFiles)
	if err != nil {
		return nil
	}
	for _, key := range slices.Sorted(maps.Keys(snap.Records)) {
		if !used[key] {
			keys = append(keys, key)
		}
	}
	return keys
}

// check compiles a domain on top of what is there or on its way, and gives nothing out.
func (c *Controller) check(ctx context.Context, v *view, w wantedRecord, d model.Domain) error {
	last, err := c.generation(ctx, v, cmp.Or(v.state.Next, v.state.Now))
	if err != nil {
		return err
	}
	g, err := c.compileDomain(ctx, v, last, w, d, nil)
	if err != nil || v.state.Next != 0 {
		return err
	}
	return c.room(ctx, v, g)
}

func fileOf(f *v1.File) (fileRecord, manifest.Manifest, error) {
	if f == nil {
		return fileRecord{}, manifest.Manifest{}, refuse(connect.CodeInvalidArgument, "no file came with the request")
	}
	file := fileRecord{Name: f.Name, Source: f.Source, Rules: f.Rules}
	m, err := parse(file)
	if err != nil {
		return file, m, connect.NewError(connect.CodeInvalidArgument, err)
	}
	return file, m, nil
}

func warnings(name string, m manifest.Manifest) (out []string) {
	for _, w := range m.Warnings {
		out = append(out, fmt.Sprintf("%s:%d:%d: %s", name, w.Line, w.Column, w))
	}
	return out
}

// Diff implements the service.
func (s admin) Diff(ctx context.Context, r *connect.Request[v1.DiffRequest]) (*connect.Response[v1.DiffResponse], error) {
	file, m, err := fileOf(r.Msg.File)
	if err != nil {
		return nil, err
	}
	var d []*v1.Difference
	err = s.c.consistent(ctx, func(v *view) error {
		d, err = s.c.differences(ctx, v, m.Domain)
		return err
	})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&v1.DiffResponse{Differences: d, Warnings: warnings(file.Name, m)}), nil
}

// wantedDomain is the domain that operators asked for.
func (c *Controller) wantedDomain(ctx context.Context, v *view) (model.Domain, error) {
	if v.wanted.File == 0 {
		return model.Domain{}, nil
	}
	var file fileRecord
	if err := c.record(ctx, keyFile(v.wanted.File), &file); err != nil {
		return model.Domain{}, failed(err)
	}
	m, err := parse(file)
	if err != nil {
		return model.Domain{}, connect.NewError(connect.CodeInternal, err)
	}
	m.Domain.Chains = slices.DeleteFunc(m.Domain.Chains, func(ch model.Chain) bool { return slices.Contains(v.wanted.Deleted, ch.Name) })
	return m.Domain, nil
}

// differences are what a domain has otherwise than the wanted one.
func (c *Controller) differences(ctx context.Context, v *view, next model.Domain) (out []*v1.Difference, err error) {
	was, err := c.wantedDomain(ctx, v)
	if err != nil {
		return nil, err
	}
	switch {
	case !was.Block.IsValid():
		out = append(out, &v1.Difference{Kind: "domain", Name: next.Block.String(), Change: "added"})
	case was.Block != next.Block:
		out = append(out, &v1.Difference{Kind: "domain", Name: next.Block.String(), Change: "changed"})
	}
	for _, d := range []*model.Domain{&was, &next} {
		d.Functions, d.Clients, d.Services = slices.Clone(d.Functions), slices.Clone(d.Clients), slices.Clone(d.Services)
		for i := range d.Functions { // where a rule stands in a file is no difference
			d.Functions[i].Netfilter.RulesAt = model.Source{}
		}
		for i := range d.Clients {
			d.Clients[i].At, d.Clients[i].CRLAt = model.Source{}, model.Source{}
		}
		for i := range d.Services {
			x := &d.Services[i]
			x.At, x.CertificateAt, x.KeyAt, x.Origin.CAAt = model.Source{}, model.Source{}, model.Source{}, model.Source{}
		}
	}
	out = append(out, compare("node", was.Nodes, next.Nodes, func(n *model.Node) string { return n.Name }, nil)...)
	out = append(out, compare("function", was.Functions, next.Functions, func(f *model.Function) string { return f.Name }, nil)...)
	out = append(out, compare("chain", was.Chains, next.Chains, func(ch *model.Chain) string { return ch.Name }, model.Chain.Equal)...)
	out = append(out, compare("clients", was.Clients, next.Clients, func(cl *model.Clients) string { return cl.Name }, nil)...)
	return append(out, compare("service", was.Services, next.Services, func(x *model.Service) string { return x.Name }, nil)...), nil
}

// compare tells which of the next are new, differ or are gone. equal is nil for all that is in them.
func compare[T any](kind string, was, next []T, name func(*T) string, equal func(T, T) bool) (out []*v1.Difference) {
	before := make(map[string]*T, len(was))
	for i := range was {
		before[name(&was[i])] = &was[i]
	}
	for i := range next {
		x := &next[i]
		have, ok := before[name(x)]
		delete(before, name(x))
		switch {
		case !ok:
			out = append(out, &v1.Difference{Kind: kind, Name: name(x), Change: "added"})
		case equal != nil && !equal(*have, *x) || equal == nil && !reflect.DeepEqual(have, x):
			out = append(out, &v1.Difference{Kind: kind, Name: name(x), Change: "changed"})
		}
	}
	for _, n := range slices.Sorted(maps.Keys(before)) {
		out = append(out, &v1.Difference{Kind: kind, Name: n, Change: "removed"})
	}
	return out
}

// Delete implements the service.
func (s admin) Delete(ctx context.Context, r *connect.Request[v1.DeleteRequest]) (*connect.Response[v1.DeleteResponse], error) {
	err := again(ctx, s.c, func(v *view) (store.Txn, error) {
		d, err := s.c.wantedDomain(ctx, v)
		if err != nil {
			return store.Txn{}, err
		}
		if !hasChain(d, r.Msg.Chain) {
			return store.Txn{}, refuse(connect.CodeNotFound, "there is no chain %s", r.Msg.Chain)
		}
		for _, x := range d.Services {
			if slices.ContainsFunc(x.Rules, func(rule model.ServiceRule) bool { return rule.Chain == r.Msg.Chain }) {
				return store.Txn{}, refuse(connect.CodeFailedPrecondition, "a rule of service %s names chain %s; take the rule out of the domain file first, and apply that", x.Name, r.Msg.Chain)
			}
		}
		w := v.wanted
		w.Serial++
		w.Deleted = append(slices.Clone(w.Deleted), r.Msg.Chain)
		return store.Txn{If: []store.Condition{v.at(keyWanted)}, Put: map[string][]byte{keyWanted: encode(w)}}, nil
	})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&v1.DeleteResponse{}), nil
}

func hasChain(d model.Domain, name string) bool {
	return slices.ContainsFunc(d.Chains, func(ch model.Chain) bool { return ch.Name == name })
}

// Rotate implements the service.
func (s admin) Rotate(ctx context.Context, r *connect.Request[v1.RotateRequest]) (*connect.Response[v1.RotateResponse], error) {
	answer := &v1.RotateResponse{}
	err := again(ctx, s.c, func(v *view) (store.Txn, error) {
		d, err := s.c.wantedDomain(ctx, v)
		if err != nil {
			return store.Txn{}, err
		}
		w := v.wanted
		w.Serial++
		w.Rotate = maps.Clone(w.Rotate)
		if w.Rotate == nil {
			w.Rotate = map[string]uint64{}
		}
		has := make(map[string]bool, len(d.Chains))
		for i := range d.Chains {
			has[d.Chains[i].Name] = true
		}
		maps.DeleteFunc(w.Rotate, func(name string, _ uint64) bool { return !has[name] })
		chains := r.Msg.Chains
		if r.Msg.All {
			chains = nil
			for _, ch := range d.Chains {
				chains = append(chains, ch.Name)
			}
			w.Rotated = s.c.cfg.Now()
			w.Clock = w.Rotated
		}
		if len(chains) == 0 {
			return store.Txn{}, refuse(connect.CodeInvalidArgument, "no chain is named; name one, or all")
		}
		for _, name := range chains {
			if !has[name] {
				return store.Txn{}, refuse(connect.CodeNotFound, "there is no chain %s", name)
			}
			w.Rotate[name] = w.Serial
		}
		answer.Serial = w.Serial
		return store.Txn{If: []store.Condition{v.at(keyWanted)}, Put: map[string][]byte{keyWanted: encode(w)}}, nil
	})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(answer), nil
}

// How long a token is valid.
const (
	tokenValid    = time.Hour
	tokenValidMax = 7 * 24 * time.Hour
)

// CreateToken implements the service.
func (s admin) CreateToken(ctx context.Context, r *connect.Request[v1.CreateTokenRequest]) (*connect.Response[v1.CreateTokenResponse], error) {
	if err := checkName("node", r.Msg.Node); err != nil {
		return nil, err
	}
	valid := tokenValid
	if r.Msg.ValidSeconds != 0 {
		valid = time.Duration(r.Msg.ValidSeconds) * time.Second
	}
	if valid > tokenValidMax {
		return nil, refuse(connect.CodeInvalidArgument, "a token is valid for %s at most", tokenValidMax)
	}
	token, err := identity.NewToken(s.c.ca().Pin())
	if err != nil {
		return nil, connect.NewError(connect.CodeInternal, err)
	}
	now := s.c.cfg.Now()
	expires := now.Add(valid)
	err = again(ctx, s.c, func(v *view) (store.Txn, error) {
		n := v.nodes[r.Msg.Node]
		if n.Revoked && !r.Msg.Reinstate {
			return store.Txn{}, refuse(connect.CodeFailedPrecondition, "node %s was revoked; say --reinstate to let a machine join under its name again", r.Msg.Node)
		}
		t := store.Txn{
			If:  []store.Condition{v.at(keyNode(r.Msg.Node, partID))},
			Put: map[string][]byte{keyTokens + identity.HashToken(token.Secret): encode(tokenRecord{Node: r.Msg.Node, Expires: expires, Reinstate: r.Msg.Reinstate})},
		}
		for hash, old := range v.tokens {
			if now.After(old.Expires) {
				t.Delete = append(t.Delete, keyTokens+hash)
			}
		}
		used, err := s.c.store.Snapshot(ctx, keyJoined)
		if err != nil {
			return store.Txn{}, failed(err)
		}
		for _, key := range slices.Sorted(maps.Keys(used.Records)) {
			var old joinedRecord
			if json.Unmarshal(used.Records[key].Value, &old) != nil || now.After(old.Expires) {
				t.Delete = append(t.Delete, key)
			}
		}
		return t, nil
	})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&v1.CreateTokenResponse{Token: token.Text(), Expires: timestamppb.New(expires)}), nil
}

// Revoke implements the service.
func (s admin) Revoke(ctx context.Context, r *connect.Request[v1.RevokeRequest]) (*connect.Response[v1.RevokeResponse], error) {
	answer := &v1.RevokeResponse{}
	err := again(ctx, s.c, func(v *view) (store.Txn, error) {
		d, err := s.c.wantedDomain(ctx, v)
		if err != nil {
			return store.Txn{}, err
		}
		n, known := v.nodes[r.Msg.Node]
		if _, planned := v.plans[r.Msg.Node]; !known && !planned && !slices.ContainsFunc(d.Nodes, func(n model.Node) bool { return n.Name == r.Msg.Node }) {
			return store.Txn{}, refuse(connect.CodeNotFound, "there is no node %s", r.Msg.Node)
		}
		d.Chains = slices.Clone(d.Chains)
		answer.Blocked = slices.Sorted(maps.Keys(block(&d, append(v.revoked(), r.Msg.Node))))
		if n.Revoked {
			return store.Txn{}, nil
		}
		n.Revoked = true
		if n.Key != "" {
			n.RevokedKeys = append(slices.Clone(n.RevokedKeys), n.Key)
			n.Key = ""
		}
		t := store.Txn{
			If:  []store.Condition{v.at(keyNode(r.Msg.Node, partID))},
			Put: map[string][]byte{keyNode(r.Msg.Node, partID): encode(n)},
		}
		for hash, token := range v.tokens {
			if token.Node == r.Msg.Node {
				t.Delete = append(t.Delete, keyTokens+hash)
			}
		}
		return t, nil
	})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(answer), nil
}

// Get implements the service.
func (s admin) Get(ctx context.Context, _ *connect.Request[v1.GetRequest]) (*connect.Response[v1.GetResponse], error) {
	state, err := s.c.describe(ctx)
	if err != nil {
		return nil, failed(err)
	}
	return connect.NewResponse(&v1.GetResponse{State: state}), nil
}

// Follow implements the service.
func (s admin) Follow(ctx context.Context, r *connect.Request[v1.FollowRequest], stream *connect.ServerStream[v1.FollowResponse]) error {
	describe := s.c.describe
	if r.Msg.Progress {
		describe = s.c.progress
	}
	ctx, cancel := context.WithCancel(ctx)
	changed, watched := make(chan struct{}, 1), make(chan error, 1)
	go func() { watched <- s.c.watch(ctx, keyControl, func() { notify(changed) }) }()
	defer func() {
		cancel()
		<-watched
	}()
	for {
		if err := s.c.authorize(ctx, waystampv1connect.AdminFollowProcedure); err != nil { // he may have been removed
			return err
		}
		_, sessions := s.c.connected()
		replaced := s.c.authority.Load().replaced
		drains := s.c.drains.changes()
		if r.Msg.Progress { // which does not say what epochs wait for
			drains = nil
		}
		state, err := describe(ctx)
		if err != nil {
			return failed(err)
		}
		if err := stream.Send(&v1.FollowResponse{State: state}); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case err := <-watched:
			watched <- err
			return failed(err)
		case <-changed:
		case <-sessions:
		case <-replaced:
		case <-drains:
		}
	}
}
