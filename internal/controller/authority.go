package controller

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/waystamp/waystamp/internal/identity"
	v1 "github.com/waystamp/waystamp/internal/rpc/waystampv1"
	"github.com/waystamp/waystamp/internal/store"
)

// The CA changes by three commits. Between them nodes are told to renew their certificates, and say with each session
// which roots they trust:
//
//	a new root is made, and is trusted beside the one that signs
//	all nodes trust it: it signs from now on, also the controller's own certificate; the other one is still trusted
//	all nodes have certificates of it: the other one is dropped
const (
	rootSigns  = "signs"
	rootComing = "coming" // trusted, once all nodes have it it signs
	rootGoing  = "going"  // trusted, until all nodes have certificates of the one that signs
)

const (
	// caWarnBefore is how long before a root ends the controller tells of it.
	caWarnBefore = 90 * 24 * time.Hour
	// caRenewBefore is how long before a root ends the controller begins to replace it by itself.
	caRenewBefore = 30 * 24 * time.Hour
	// renewPerSecond is how many nodes are told to renew in a second.
	renewPerSecond = 50
	// rootsMax is how many roots a node may say that it trusts.
	rootsMax = 4
)

// authority is the CA, and who is trusted beside it, as one revision of the record has it.
type authority struct {
	ca       *identity.CA
	roots    []*x509.Certificate // the one that signs first
	record   caRecord
	revision uint64
	replaced chan struct{} // closed when there is a later one
}

// pins are the roots as nodes tell them, in their order.
func (a *authority) pins() (pins []string) {
	for _, r := range a.roots {
		pins = append(pins, pinOf(r.Raw))
	}
	return pins
}

// der are the roots as nodes are given them.
func (a *authority) der() (out [][]byte) {
	for _, r := range a.roots {
		out = append(out, r.Raw)
	}
	return out
}

func pinOf(root []byte) string {
	sum := sha256.Sum256(root)
	return hex.EncodeToString(sum[:])
}

// done tells whether a node that trusts these roots, in this order, has done its part of the change under way.
func (a *authority) done(pins []string) bool {
	switch {
	case a.record.Next != nil:
		return slices.Contains(pins, pinOf(a.record.Next.Root))
	case a.record.Old != nil:
		return len(pins) > 0 && pins[0] == pinOf(a.record.Root)
	}
	return true
}

// readAuthority reads who the CA is; nil: there is none yet.
func readAuthority(ctx context.Context, s store.Store) (*authority, error) {
	snap, err := s.Snapshot(ctx, keyCA)
	if err != nil {
		return nil, err
	}
	r, ok := snap.Records[keyCA]
	if !ok {
		return nil, nil
	}
	if store.IsSealed(r.Value) {
		return nil, store.ErrSealed
	}
	a := &authority{revision: r.Revision, replaced: make(chan struct{})}
	if err := json.Unmarshal(r.Value, &a.record); err != nil {
		return nil, fmt.Errorf("the record of the CA is damaged: %w", err)
	}
	if a.ca, err = identity.LoadCA(a.record.Root, a.record.Key); err != nil {
		return nil, err
	}
	trusted := [][]byte{a.record.Root}
	if a.record.Next != nil {
		trusted = append(trusted, a.record.Next.Root)
	}
	if a.record.Old != nil {
		trusted = append(trusted, a.record.Old)
	}
	for _, der := range trusted {
		root, err := x509.ParseCertificate(der)
		if err != nil {
			return nil, fmt.Errorf("read a root: %w", err)
		}
		a.roots = append(a.roots, root)
	}
	return a, nil
}

// ca is the one that signs.
func (c *Controller) ca() *identity.CA { return c.authority.Load().ca }

// reloadCA takes the CA of the records, if it is a later one.
func (c *Controller) reloadCA(ctx context.Context) error {
	a, err := readAuthority(ctx, c.store)
	if err != nil {
		return err
	}
	if a == nil {
		return errors.New("the record of the CA is gone")
	}
	c.replacing.Lock()
	defer c.replacing.Unlock()
	was := c.authority.Load()
	if a.revision <= was.revision {
		return nil
	}
	c.authority.Store(a)
	if !bytes.Equal(a.record.Root, was.record.Root) {
		c.own.Lock()
		c.own.certificate = nil
		c.own.Unlock()
	}
	close(was.replaced)
	return nil
}

// followCA does so whenever some controller has changed it.
func (c *Controller) followCA(ctx context.Context) error {
	return c.watch(ctx, keyCA, func() {
		if err := c.reloadCA(ctx); err != nil && ctx.Err() == nil {
			c.cfg.Log.Error("the CA of the records cannot be taken", "err", err)
		}
	})
}

// currentCA is the CA as the records have it now. What is told to a node must not be older than what it has said
// that it trusts, whichever controller it said it to.
func (c *Controller) currentCA(ctx context.Context) (*authority, error) {
	if err := c.reloadCA(ctx); err != nil {
		return nil, err
	}
	return c.authority.Load(), nil
}

// commitCA replaces the record of the CA as it was seen.
func (c *Controller) commitCA(ctx context.Context, a *authority, r caRecord, what string, t store.Txn) error {
	r.Since = c.cfg.Now()
	t.If = append(t.If, store.Condition{Key: keyCA, Revision: a.revision})
	t.Put = map[string][]byte{keyCA: encode(r)}
	if _, err := c.store.Commit(ctx, t); errors.Is(err, store.ErrConflict) {
		return errors.Join(err, c.reloadCA(ctx)) // else it would be tried in vain until the change is heard of
	} else if err != nil {
		return err
	}
	c.cfg.Log.Info("the CA changes", "commit", what)
	return c.reloadCA(ctx)
}

// beginCA makes the root that is to come.
func (c *Controller) beginCA(ctx context.Context, a *authority) error {
	next, err := identity.NewCA(a.ca.TrustDomain(), c.cfg.Now())
	if err != nil {
		return err
	}
	key, err := next.Key()
	if err != nil {
		return err
	}
	r := a.record
	r.Next = &caKey{Root: next.Root(), Key: key}
	return c.commitCA(ctx, a, r, "trust", store.Txn{})
}

// advanceCA does the commit that is due, if there is one, and else says when one may be.
func (c *Controller) advanceCA(ctx context.Context, v *view) (did bool, wake time.Time, err error) {
	a := c.authority.Load()
	if v.revision < a.revision {
		// It lacks whoever joined before the change began, and trusts the root of before alone.
		return true, time.Time{}, nil
	}
	if a.record.Next == nil && a.record.Old == nil {
		ends := a.roots[0].NotAfter
		if wake = ends.Add(-caWarnBefore); c.cfg.Now().Before(wake) {
			return false, wake, nil
		}
		wake = ends.Add(-caRenewBefore)
		if c.warnedOf != a.revision {
			c.warnedOf = a.revision
			text := fmt.Sprintf("the root ends on %s, and is replaced by itself from %s on; operators need new files then, and nodes that are away until it ends have to join anew: replace it while all are there, with waystamp controller rotate-ca",
				ends.UTC().Format(time.DateOnly), wake.UTC().Format(time.DateOnly))
			c.cfg.Log.Warn(text)
			c.journal.add(c.cfg.Now(), aboutChange, "root", text)
		}
		if c.cfg.Now().Before(wake) || !v.state.Restored.IsZero() {
			return false, wake, nil
		}
		return true, time.Time{}, c.beginCA(ctx, a)
	}
	if len(a.waitsFor(v)) > 0 {
		if a.record.Next == nil {
			return false, time.Time{}, nil
		}
		// When the one that signs ends, nobody believes this controller any more: those who trust the other one will.
		if end := a.roots[0].NotAfter; !c.cfg.Now().After(end) {
			return false, end.Add(time.Second), nil
		}
		c.cfg.Log.Warn("the root that signs has ended; nodes that do not trust the next one have to join anew", "nodes", a.waitsFor(v))
	}
	r, what := a.record, "drop"
	var t store.Txn
	if r.Next != nil {
		what = "sign"
		r = caRecord{Root: r.Next.Root, Key: r.Next.Key, Old: r.Root}
		for hash := range v.tokens { // they pin the other root, which the controller does not show any more
			t.Delete = append(t.Delete, keyTokens+hash)
		}
	} else {
		r.Old = nil
		for name := range v.trusts {
			t.Delete = append(t.Delete, keyNode(name, partRoots))
		}
	}
	return true, time.Time{}, c.commitCA(ctx, a, r, what, t)
}

// waitsFor are the nodes that have not done their part of the change under way, sorted: of those that have joined and
// were not revoked.
func (a *authority) waitsFor(v *view) (names []string) {
	for name, n := range v.nodes {
		if n.Key != "" && !n.Revoked && !a.done(v.trusts[name].Pins) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// trusted notes which roots a node trusts, while they change.
func (c *Controller) trusted(ctx context.Context, name string, pins []string) error {
	for {
		a, err := c.currentCA(ctx)
		if err != nil || a.record.Next == nil && a.record.Old == nil {
			return err
		}
		if len(pins) > rootsMax {
			return fmt.Errorf("node %s says that it trusts %d roots, which cannot be", name, len(pins))
		}
		v, err := c.view(ctx)
		if err != nil || slices.Equal(v.trusts[name].Pins, pins) {
			return err
		}
		_, err = c.store.Commit(ctx, store.Txn{
			If: []store.Condition{
				{Key: keyCA, Revision: a.revision}, // else nobody would remove it
				v.at(keyNode(name, partID)), v.at(keyNode(name, partRoots)),
			},
			Put: map[string][]byte{keyNode(name, partRoots): encode(rootsRecord{Pins: pins})},
		})
		if !errors.Is(err, store.ErrConflict) {
			return err
		}
	}
}

// renewal is what a node is told whose roots are not those of the CA; nil: nothing.
func (c *Controller) renewal(a *authority, pins []string) *v1.PlansResponse {
	if len(pins) == 0 || slices.Equal(pins, a.pins()) {
		return nil
	}
	nodes, _ := c.connected()
	return &v1.PlansResponse{Renew: true, RenewWithinMilliseconds: uint32(len(nodes) * 1000 / renewPerSecond)}
}

// RotateCA implements the service.
func (s admin) RotateCA(ctx context.Context, _ *connect.Request[v1.RotateCARequest]) (*connect.Response[v1.RotateCAResponse], error) {
	v, err := s.c.view(ctx)
	if err != nil {
		return nil, failed(err)
	}
	a := s.c.authority.Load()
	switch {
	case !v.state.Restored.IsZero():
		return nil, refuse(connect.CodeFailedPrecondition, "the records are of a backup, and nodes have not said yet what they hold; try again when they have")
	case a.record.Next != nil || a.record.Old != nil:
		return nil, refuse(connect.CodeFailedPrecondition, "the CA is being replaced already, and waits for %s; waystamp get roots shows how far it is", strings.Join(a.waitsFor(v), ", "))
	}
	if err := s.c.beginCA(ctx, a); err != nil {
		return nil, failed(err)
	}
	answer := &v1.RotateCAResponse{}
	for name := range v.operators {
		answer.Operators = append(answer.Operators, name)
	}
	slices.Sort(answer.Operators)
	return connect.NewResponse(answer), nil
}

// describeRoots says who signs and who is trusted, and for whom a change waits.
func (a *authority) describe(v *view) (out []*v1.RootState) {
	for i, r := range a.roots {
		s := &v1.RootState{Pin: pinOf(r.Raw), State: rootSigns, Ends: timestamppb.New(r.NotAfter)}
		if i > 0 {
			s.State = rootComing
			if a.record.Old != nil {
				s.State = rootGoing
			}
			s.WaitingFor, s.Since = a.waitsFor(v), timestamppb.New(a.record.Since)
		}
		out = append(out, s)
	}
	return out
}
