package controller

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"time"
	"unicode"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/waystamp/waystamp/internal/identity"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	v1 "github.com/waystamp/waystamp/internal/rpc/waystampv1"
	"github.com/waystamp/waystamp/internal/rpc/waystampv1/waystampv1connect"
	"github.com/waystamp/waystamp/internal/store"
)

// node is the service for agents. Who calls is in the certificate of the connection, and
// nowhere else.
type node struct{ c *Controller }

func refuse(code connect.Code, format string, args ...any) error {
	return connect.NewError(code, fmt.Errorf(format, args...))
}

// failed is an error of the store, which is not the caller's fault.
func failed(err error) error {
	if errors.Is(err, store.ErrConflict) {
		return connect.NewError(connect.CodeAborted, err)
	}
	return connect.NewError(connect.CodeUnavailable, err)
}

// authenticate returns the node that calls. late: also with a certificate that has expired.
func (s node) authenticate(ctx context.Context, late bool) (string, error) {
	who := callerOf(ctx)
	if who.err != nil {
		return "", connect.NewError(connect.CodeUnauthenticated, who.err)
	}
	if who.peer.Node == "" {
		return "", refuse(connect.CodePermissionDenied, "the certificate is of %s; only nodes call here", who.peer.ID)
	}
	r, err := s.c.node(ctx, who.peer.Node)
	if err != nil {
		return "", err
	}
	if err := r.takes(who.peer, late); err != nil {
		return "", connect.NewError(connect.CodePermissionDenied, err)
	}
	return who.peer.Node, nil
}

// takes is an error if a node's certificate is no good any more.
func (r nodeRecord) takes(p identity.Peer, late bool) error {
	switch {
	case r.Revoked || slices.Contains(r.RevokedKeys, p.KeyID):
		return fmt.Errorf("node %s was revoked", p.Node)
	case r.Key == "":
		return fmt.Errorf("node %s has not joined", p.Node)
	case r.Key != p.KeyID:
		return fmt.Errorf("node %s has joined with another key since", p.Node)
	case p.TooLate:
		return fmt.Errorf("the certificate of node %s has expired more than %d days ago, and is not renewed any more; join with a token: waystamp node token %[1]s", p.Node, identity.LateMax/(24*time.Hour))
	case p.Expired && !late:
		return fmt.Errorf("the certificate of node %s has expired; renew it", p.Node)
	}
	return nil
}

// node reads who a node is; a new one is nobody.
func (c *Controller) node(ctx context.Context, name string) (r nodeRecord, err error) {
	key := keyNode(name, partID)
	snap, err := c.store.Snapshot(ctx, key)
	if err != nil {
		return r, failed(err)
	}
	if have, ok := snap.Records[key]; ok {
		err = json.Unmarshal(have.Value, &r)
	}
	return r, err
}

// errToken says no more: whoever has no token learns nothing about others'.
var errToken = errors.New("the token is not valid: it was used, has expired, or was never made; make a new one on the controller: waystamp node token NAME")

// Join implements the service.
func (s node) Join(ctx context.Context, r *connect.Request[v1.JoinRequest]) (*connect.Response[v1.JoinResponse], error) {
	// First what costs least: anybody may call.
	from := callerOf(ctx).remote
	if !s.c.limits.mayJoin(s.c.cfg.Now(), from) {
		return nil, refuse(connect.CodeResourceExhausted, "too many tokens that are not valid have come from there; wait some seconds before the next one")
	}
	hash := identity.HashToken(r.Msg.Token)
	if have, err := s.c.store.Snapshot(ctx, keyTokens+hash); err != nil {
		return nil, failed(err)
	} else if len(have.Records) == 0 {
		answer, err := s.joinAgain(ctx, hash, r.Msg)
		if errors.Is(err, errToken) {
			s.c.limits.failedJoin(s.c.cfg.Now(), from)
		}
		return answer, err
	}
	key, err := identity.RequestedKey(r.Msg.CertificateRequest)
	if err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, err)
	}
	keyID, err := identity.KeyID(key)
	if err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, err)
	}
	v, err := s.c.view(ctx)
	if err != nil {
		return nil, failed(err)
	}
	token, ok := v.tokens[hash]
	now := s.c.cfg.Now()
	if !ok || now.After(token.Expires) {
		return nil, connect.NewError(connect.CodePermissionDenied, errToken)
	}
	if r.Msg.Node != "" && r.Msg.Node != token.Node {
		return nil, refuse(connect.CodePermissionDenied, "the token is for another node than %s", r.Msg.Node)
	}
	n := v.nodes[token.Node]
	if n.Revoked && !token.Reinstate {
		return nil, refuse(connect.CodePermissionDenied, "node %s was revoked", token.Node)
	}
	// Else the fresh secrets that it gives to all others would never be made.
	if n.Revoked && (v.state.Now != 0 || v.state.Next != 0) && !slices.Contains(v.state.Revoked, token.Node) {
		return nil, refuse(connect.CodeAborted, "the revocation of node %s is not carried out yet; try again", token.Node)
	}
	if slices.Contains(n.RevokedKeys, keyID) {
		return nil, refuse(connect.CodePermissionDenied, "the key was revoked; join with another one: remove the node's identity")
	}
	authority := s.c.authority.Load()
	der, err := authority.ca.Issue(identity.ID{Node: token.Node}, key, now)
	if err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, err)
	}
	n.Key, n.Joined, n.Revoked = keyID, now, false
	// What the machine before acknowledged says nothing about this one.
	if _, err := s.c.store.Commit(ctx, store.Txn{
		// Not with the roots of before, of which nobody would know that it has them alone.
		If: []store.Condition{v.at(keyTokens + hash), v.at(keyNode(token.Node, partID)), {Key: keyCA, Revision: authority.revision}},
		Put: map[string][]byte{
			keyNode(token.Node, partID): encode(n),
			keyJoined + hash:            encode(joinedRecord{Node: token.Node, Key: keyID, Expires: token.Expires}),
		},
		Delete: []string{keyTokens + hash, keyNode(token.Node, partAck), keyNode(token.Node, partRoots)},
	}); errors.Is(err, store.ErrConflict) {
		if err := s.c.reloadCA(ctx); err != nil {
			return nil, failed(err)
		}
		if s.c.authority.Load() != authority {
			return nil, refuse(connect.CodeAborted, "the CA was replaced meanwhile; try again")
		}
		return nil, connect.NewError(connect.CodePermissionDenied, errToken)
	} else if err != nil {
		return nil, failed(err)
	}
	s.c.journal.add(now, aboutCall, "Join", token.Node)
	s.c.note(auditLine{Who: "a token", From: callerOf(ctx).remote, Via: callerOf(ctx).via, Call: waystampv1connect.NodeJoinProcedure, About: token.Node + " with key " + keyID, Result: "joined"}, true)
	return connect.NewResponse(&v1.JoinResponse{Certificates: [][]byte{der}, Roots: authority.der()}), nil
}

// joinAgain answers a node that has joined with this token, and asks again with the same key: the answer may have been lost. For anybody else the token was used.
func (s node) joinAgain(ctx context.Context, hash string, r *v1.JoinRequest) (*connect.Response[v1.JoinResponse], error) {
	used := connect.NewError(connect.CodePermissionDenied, errToken)
	snap, err := s.c.store.Snapshot(ctx, keyJoined+hash)
	if err != nil {
		return nil, failed(err)
	}
	have, ok := snap.Records[keyJoined+hash]
	if !ok {
		return nil, used
	}
	var joined joinedRecord
	if err := json.Unmarshal(have.Value, &joined); err != nil {
		return nil, connect.NewError(connect.CodeInternal, fmt.Errorf("the record of a token that was used is damaged: %w", err))
	}
	key, err := identity.RequestedKey(r.CertificateRequest)
	if err != nil {
		return nil, used
	}
	keyID, err := identity.KeyID(key)
	now := s.c.cfg.Now()
	if err != nil || keyID != joined.Key || now.After(joined.Expires) || r.Node != "" && r.Node != joined.Node {
		return nil, used
	}
	n, err := s.c.node(ctx, joined.Node)
	if err != nil {
		return nil, err
	}
	if n.Key != keyID || n.Revoked { // it has joined with another token since, or is out
		return nil, used
	}
	if !s.c.limits.mayRenew(now, joined.Node) {
		return nil, refuse(connect.CodeResourceExhausted, "node %s has had %d certificates within minutes; it gets another one each %s", joined.Node, renewMost, renewEvery)
	}
	authority, err := s.c.currentCA(ctx)
	if err != nil {
		return nil, failed(err)
	}
	der, err := authority.ca.Issue(identity.ID{Node: joined.Node}, key, now)
	if err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, err)
	}
	s.c.note(auditLine{Who: "a token", From: callerOf(ctx).remote, Via: callerOf(ctx).via, Call: waystampv1connect.NodeJoinProcedure, About: joined.Node + " with key " + keyID, Result: "joined again"}, true)
	return connect.NewResponse(&v1.JoinResponse{Certificates: [][]byte{der}, Roots: authority.der()}), nil
}

// Renew implements the service.
func (s node) Renew(ctx context.Context, _ *connect.Request[v1.RenewRequest]) (*connect.Response[v1.RenewResponse], error) {
	name, err := s.authenticate(ctx, true)
	if err != nil {
		return nil, err
	}
	if !s.c.limits.mayRenew(s.c.cfg.Now(), name) {
		return nil, refuse(connect.CodeResourceExhausted, "node %s has had %d certificates within minutes; it gets another one each %s", name, renewMost, renewEvery)
	}
	authority, err := s.c.currentCA(ctx)
	if err != nil {
		return nil, failed(err)
	}
	der, err := authority.ca.Issue(identity.ID{Node: name}, callerOf(ctx).peer.Key, s.c.cfg.Now())
	if err != nil {
		return nil, connect.NewError(connect.CodeInternal, err)
	}
	return connect.NewResponse(&v1.RenewResponse{Certificates: [][]byte{der}, Roots: authority.der()}), nil
}

// Plans implements the service.
func (s node) Plans(ctx context.Context, r *connect.Request[v1.PlansRequest], stream *connect.ServerStream[v1.PlansResponse]) error {
	name, err := s.authenticate(ctx, false)
	if err != nil {
		return err
	}
	opened := sessionOf(ctx)
	opened.traces, opened.flows = r.Msg.Traces, r.Msg.Traces && r.Msg.TraceFlows
	opened.stream = new(int)
	s.c.session(name, 1, opened)
	defer s.c.session(name, -1, session{})
	knows := r.Msg.Knows
	if len(knows) == 0 {
		knows = plan.FirstFeatures
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	changed := make(chan struct{}, 1)
	watched := make(chan error, 1)
	go func() { watched <- s.c.watch(ctx, keyNode(name, ""), func() { notify(changed) }) }()
	defer func() {
		cancel()
		<-watched
	}()
	if err := s.c.hear(ctx, name, r.Msg); err != nil {
		return failed(err)
	}
	if err := s.c.trusted(ctx, name, r.Msg.Roots); err != nil {
		return failed(err)
	}
	sent, have := uint64(0), r.Msg
	told := uint64(0) // the revision of the CA for which it was told to renew
	authority := s.c.authority.Load()
	var ordered []*v1.TraceOrder
	var drains []*v1.HeldEpoch
	for {
		wanted, redrained := s.c.drains.orders(name)
		if r.Msg.Drains && !slices.EqualFunc(wanted, drains, func(a, b *v1.HeldEpoch) bool { return a.Path == b.Path && a.Epoch == b.Epoch }) {
			if err := stream.Send(&v1.PlansResponse{Drains: &v1.Drains{Epochs: wanted}}); err != nil {
				return err
			}
			drains = wanted
		}
		orders, reordered := s.c.traces.orders(name, r.Msg.TraceFlows)
		if r.Msg.Traces && !slices.EqualFunc(orders, ordered, func(a, b *v1.TraceOrder) bool { return proto.Equal(a, b) }) {
			if err := stream.Send(&v1.PlansResponse{Traces: &v1.Traces{Orders: orders}}); err != nil {
				return err
			}
			ordered = orders
		}
		if renew := s.c.renewal(authority, r.Msg.Roots); renew != nil && told != authority.revision {
			if err := stream.Send(renew); err != nil {
				return err
			}
			told = authority.revision
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-authority.replaced:
			authority = s.c.authority.Load()
			continue
		case <-reordered:
			continue
		case <-redrained:
			continue
		case err := <-watched:
			watched <- err
			return failed(err)
		case <-changed:
		}
		if _, err := s.authenticate(ctx, true); err != nil { // it may have been revoked
			return err
		}
		p, content, err := s.c.planOf(ctx, name)
		if err != nil {
			return failed(err)
		}
		if p.Revision <= sent || sent == 0 && p.Revision == have.Revision && p.Digest == have.Digest {
			continue
		}
		lacks, err := lacking(content, knows)
		if err != nil {
			return connect.NewError(connect.CodeInternal, err)
		}
		if s.c.lacks(name, opened.stream, lacks); len(lacks) > 0 {
			continue // it would refuse the plan without knowing why
		}
		if err := stream.Send(&v1.PlansResponse{Revision: p.Revision, Digest: p.Digest, Plan: content}); err != nil {
			return err
		}
		sent = p.Revision
	}
}

// sessionOf is where the connection of a call is from and to. Of a call that another controller has passed on, that
// one is where it is to.
func sessionOf(ctx context.Context) (s session) {
	who := callerOf(ctx)
	s.remote, _ = netip.ParseAddrPort(who.remote)
	if at, ok := ctx.Value(http.LocalAddrContextKey).(net.Addr); ok {
		s.local, _ = netip.ParseAddrPort(at.String())
	}
	if via, err := netip.ParseAddrPort(who.via); who.via != "" && err == nil {
		s.local = netip.AddrPortFrom(via.Addr(), 0) // its port is that of the connection between the two
	}
	return s
}

// lacking is what a plan asks for that an agent does not know.
func lacking(content []byte, knows []string) ([]string, error) {
	out := func(name string) bool { return !slices.Contains(knows, name) }
	if !slices.ContainsFunc(plan.Features(), out) { // it knows all that a plan can have
		return nil, nil
	}
	n, err := plan.DecodeNode(content)
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(n.Features(), func(name string) bool { return !out(name) }), nil
}

// planOf is what a node shall hold; revision 0: nothing yet.
func (c *Controller) planOf(ctx context.Context, name string) (p planRecord, content []byte, err error) {
	for {
		v, err := c.viewOf(ctx, name)
		if err != nil {
			return p, nil, err
		}
		p = v.plans[name]
		if !v.state.Restored.IsZero() { // what the records have is older than what nodes hold
			p.Revision = 0
		}
		if p.Revision == 0 {
			return p, nil, nil
		}
		snap, err := c.store.Snapshot(ctx, keyPlans+name)
		if err != nil {
			return p, nil, err
		}
		// Of another commit than the record: read again.
		if content = snap.Records[keyPlans+name].Value; digest(content) == p.Digest {
			return p, content, nil
		}
	}
}

// Acknowledge implements the service.
func (s node) Acknowledge(ctx context.Context, r *connect.Request[v1.AcknowledgeRequest]) (*connect.Response[v1.AcknowledgeResponse], error) {
	name, err := s.authenticate(ctx, false)
	if err != nil {
		return nil, err
	}
	v, err := s.c.viewOf(ctx, name)
	if err != nil {
		return nil, failed(err)
	}
	if !v.state.Restored.IsZero() { // what it holds, it says when it asks for plans
		return connect.NewResponse(&v1.AcknowledgeResponse{}), nil
	}
	m := r.Msg
	a := ackRecord{Revision: m.Revision, Digest: m.Digest, Refused: m.Refused, Error: short(m.Error), Problems: shortAll(m.Problems), Warnings: shortAll(m.Warnings)}
	p := v.plans[name]
	a.Refused = min(a.Refused, p.Revision) // it says so of a plan that this controller has not made
	// Neither counts as a step done: it holds what this controller has not made.
	switch {
	case a.Revision > p.Revision:
		a.Error = fmt.Sprintf("it holds revision %d, and %d is the last that this controller made for it", a.Revision, p.Revision)
		a.Revision, a.Refused = 0, p.Revision
	case a.Revision == p.Revision && a.Revision != 0 && a.Digest != p.Digest:
		a.Error = fmt.Sprintf("it holds another plan of revision %d than this controller made for it", a.Revision)
		a.Revision, a.Refused = 0, p.Revision
	}
	was := v.acks[name]
	// An earlier call may arrive behind a later one, through a controller that was cut off meanwhile. What a
	// node holds, and what it has tried, only grows: one that joins anew has no such record.
	if max(a.Revision, a.Refused) < max(was.Revision, was.Refused) {
		return connect.NewResponse(&v1.AcknowledgeResponse{}), nil
	}
	a.At = was.At
	if slices.Equal(encode(was), encode(a)) {
		return connect.NewResponse(&v1.AcknowledgeResponse{}), nil
	}
	a.At = s.c.cfg.Now()
	if !s.c.limits.mayAcknowledge(a.At, name) { // each is written to the store
		return nil, refuse(connect.CodeResourceExhausted, "node %s acknowledges too often; it may again in a second", name)
	}
	if _, err := s.c.store.Commit(ctx, store.Txn{
		// Not of a node that was revoked, nor of one that joined anew, meanwhile.
		If:  []store.Condition{v.at(keyNode(name, partID)), v.at(keyNode(name, partAck))},
		Put: map[string][]byte{keyNode(name, partAck): encode(a)},
	}); err != nil {
		return nil, failed(err)
	}
	return connect.NewResponse(&v1.AcknowledgeResponse{}), nil
}

// What a node says is kept to a length.
const (
	textMax  = 2000
	textsMax = 20
)

func short(s string) string {
	// An operator's terminal shows it.
	s = strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(s, "?"))
	if len(s) > textMax {
		s = strings.ToValidUTF8(s[:textMax], "") + " …"
	}
	return s
}

func shortAll(list []string) (out []string) {
	for _, s := range list[:min(len(list), textsMax)] {
		out = append(out, short(s))
	}
	return out
}

// checkName holds the rule for names of nodes and operators.
func checkName(what, name string) error {
	if err := model.CheckName(name); err != nil {
		return refuse(connect.CodeInvalidArgument, "%s %q %w", what, name, err)
	}
	return nil
}
