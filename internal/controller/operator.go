package controller

import (
	"context"
	"encoding/json"
	"maps"
	"slices"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/waystamp/waystamp/internal/identity"
	v1 "github.com/waystamp/waystamp/internal/rpc/waystampv1"
	"github.com/waystamp/waystamp/internal/rpc/waystampv1/waystampv1connect"
	"github.com/waystamp/waystamp/internal/store"
)

// Roles of operators who call over TLS. On the unix socket all are admins.
const (
	roleReader = "reader" // sees how things are, and no secret
	roleAdmin  = "admin"
)

// readable are the calls that change nothing and answer no secret.
var readable = []string{
	waystampv1connect.AdminDiffProcedure, waystampv1connect.AdminGetProcedure, waystampv1connect.AdminFollowProcedure, waystampv1connect.AdminOperatorsProcedure,
	waystampv1connect.AdminDescribeProcedure, waystampv1connect.AdminEventsProcedure, waystampv1connect.AdminRefusalsProcedure,
}

func keyOperator(name string) string { return keyOperators + name }

// authorize is an error if the caller is no operator who may call that. What counts is the record, not the
// certificate alone.
func (c *Controller) authorize(ctx context.Context, procedure string) error {
	who := callerOf(ctx)
	if who.known {
		return nil
	}
	if who.err != nil {
		return connect.NewError(connect.CodeUnauthenticated, who.err)
	}
	name := who.peer.Operator
	if name == "" {
		return refuse(connect.CodePermissionDenied, "the certificate is of %s; only operators call here", who.peer.ID)
	}
	snap, err := c.store.Snapshot(ctx, keyOperator(name))
	if err != nil {
		return failed(err)
	}
	have, ok := snap.Records[keyOperator(name)]
	if !ok {
		return refuse(connect.CodePermissionDenied, "operator %s was removed", name)
	}
	var r operatorRecord
	if err := json.Unmarshal(have.Value, &r); err != nil {
		return connect.NewError(connect.CodeInternal, err)
	}
	switch {
	case r.Key != who.peer.KeyID:
		return refuse(connect.CodePermissionDenied, "operator %s was given another key since", name)
	case who.peer.Expired:
		return refuse(connect.CodeUnauthenticated, "the certificate of operator %s has expired; make another one on the controller: waystamp operator add %[1]s", name)
	case r.Role != roleAdmin && !slices.Contains(readable, procedure):
		return refuse(connect.CodePermissionDenied, "operator %s is a %s, and this takes an admin", name, r.Role)
	}
	return nil
}

// AddOperator implements the service.
func (s admin) AddOperator(ctx context.Context, r *connect.Request[v1.AddOperatorRequest]) (*connect.Response[v1.AddOperatorResponse], error) {
	if err := checkName("operator", r.Msg.Name); err != nil {
		return nil, err
	}
	if r.Msg.Role != roleReader && r.Msg.Role != roleAdmin {
		return nil, refuse(connect.CodeInvalidArgument, "role %q is none; expect %s or %s", r.Msg.Role, roleReader, roleAdmin)
	}
	key, err := identity.RequestedKey(r.Msg.CertificateRequest)
	if err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, err)
	}
	keyID, err := identity.KeyID(key)
	if err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, err)
	}
	now := s.c.cfg.Now()
	authority := s.c.authority.Load()
	der, err := authority.ca.Issue(identity.ID{Operator: r.Msg.Name}, key, now)
	if err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, err)
	}
	expires := now.Add(identity.OperatorValid)
	err = again(ctx, s.c, func(v *view) (store.Txn, error) {
		at := keyOperator(r.Msg.Name)
		return store.Txn{If: []store.Condition{v.at(at)}, Put: map[string][]byte{at: encode(operatorRecord{Key: keyID, Role: r.Msg.Role, Expires: expires})}}, nil
	})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&v1.AddOperatorResponse{Certificates: [][]byte{der}, Roots: authority.der(), Expires: timestamppb.New(expires)}), nil
}

// RemoveOperator implements the service.
func (s admin) RemoveOperator(ctx context.Context, r *connect.Request[v1.RemoveOperatorRequest]) (*connect.Response[v1.RemoveOperatorResponse], error) {
	err := again(ctx, s.c, func(v *view) (store.Txn, error) {
		if _, ok := v.operators[r.Msg.Name]; !ok {
			return store.Txn{}, refuse(connect.CodeNotFound, "there is no operator %s", r.Msg.Name)
		}
		at := keyOperator(r.Msg.Name)
		return store.Txn{If: []store.Condition{v.at(at)}, Delete: []string{at}}, nil
	})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&v1.RemoveOperatorResponse{}), nil
}

// Operators implements the service.
func (s admin) Operators(ctx context.Context, _ *connect.Request[v1.OperatorsRequest]) (*connect.Response[v1.OperatorsResponse], error) {
	v, err := s.c.view(ctx)
	if err != nil {
		return nil, failed(err)
	}
	out := &v1.OperatorsResponse{}
	for _, name := range slices.Sorted(maps.Keys(v.operators)) {
		o := v.operators[name]
		out.Operators = append(out.Operators, &v1.OperatorState{Name: name, Role: o.Role, Expires: timestamppb.New(o.Expires)})
	}
	return connect.NewResponse(out), nil
}
