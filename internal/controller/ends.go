package controller

import (
	"context"
	"fmt"

	"connectrpc.com/connect"

	"github.com/waystamp/waystamp/internal/identity"
	"github.com/waystamp/waystamp/internal/plan"
	v1 "github.com/waystamp/waystamp/internal/rpc/waystampv1"
	"github.com/waystamp/waystamp/internal/rpc/waystampv1/waystampv1connect"
)

// certifyMost is how many ends one call may name.
const certifyMost = 256

// Certify implements the service. The plan that this controller has made for the calling node, which may be one that is
// being prepared, has the ends that it may name.
func (s node) Certify(ctx context.Context, r *connect.Request[v1.CertifyRequest]) (*connect.Response[v1.CertifyResponse], error) {
	name, err := s.authenticate(ctx, false)
	if err != nil {
		return nil, err
	}
	if n := len(r.Msg.Ends); n > certifyMost {
		return nil, refuse(connect.CodeInvalidArgument, "the call names %d ends of sealed parts; expect %d at most", n, certifyMost)
	}
	if !s.c.limits.mayCertify(s.c.cfg.Now(), name) {
		return nil, refuse(connect.CodeResourceExhausted, "node %s has had certificates for its ends of sealed parts %d times within minutes; it gets them again each %s", name, renewMost, renewEvery)
	}
	ends, err := s.c.endsOf(ctx, name)
	if err != nil {
		return nil, failed(err)
	}
	authority, err := s.c.currentCA(ctx)
	if err != nil {
		return nil, failed(err)
	}
	is, err := s.c.node(ctx, name)
	if err != nil {
		return nil, failed(err)
	}
	answer := &v1.CertifyResponse{Roots: authority.der()}
	for _, end := range r.Msg.Ends {
		certificate, keyID, err := s.certify(authority.ca, name, is.revocations(), end, ends)
		signed := &v1.EndCertificate{Certificate: certificate}
		who := callerOf(ctx)
		line := auditLine{Who: who.String(), From: who.remote, Via: who.via, Call: waystampv1connect.NodeCertifyProcedure, About: "function " + short(end.Function) + " of " + name, Result: "signed"}
		if keyID != "" {
			line.About += " with key " + keyID
		}
		if err != nil {
			signed.Error, line.Result = err.Error(), "refused: "+short(err.Error())
		}
		s.c.note(line, true)
		answer.Ends = append(answer.Ends, signed)
	}
	return connect.NewResponse(answer), nil
}

// certify signs the key of one end.
func (s node) certify(ca *identity.CA, name string, revocations uint32, r *v1.EndRequest, ends map[string]string) (certificate []byte, keyID string, err error) {
	is, ok := ends[r.Function]
	if !ok {
		return nil, "", fmt.Errorf("the plan of node %s has no end of a sealed part at function %q that needs a certificate", name, short(r.Function))
	}
	// The plan's name and the certificate's have to be one: peers compare them.
	if would, err := ca.EndName(name, r.Function); err != nil || would != is {
		return nil, "", fmt.Errorf("the plan of node %s calls its end %s, and a certificate would be of %q", name, is, would)
	}
	key, err := identity.RequestedEndKey(r.CertificateRequest)
	if err != nil {
		return nil, "", err
	}
	if keyID, err = identity.KeyID(key); err != nil {
		return nil, "", err
	}
	certificate, err = ca.IssueEnd(name, r.Function, revocations, key, s.c.cfg.Now())
	return certificate, keyID, err
}

// endsOf are the names of the ends that a node's plan has, by function.
func (c *Controller) endsOf(ctx context.Context, name string) (map[string]string, error) {
	p, content, err := c.planOf(ctx, name)
	if err != nil || p.Revision == 0 {
		return nil, err
	}
	n, err := plan.DecodeNode(content)
	if err != nil {
		return nil, err
	}
	return n.CertifiedEnds(), nil
}
