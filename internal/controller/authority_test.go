package controller

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/json"
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/waystamp/waystamp/internal/identity"
	"github.com/waystamp/waystamp/internal/member"
	v1 "github.com/waystamp/waystamp/internal/rpc/waystampv1"
	"github.com/waystamp/waystamp/internal/store"
)

// roots are the states of all roots, with whom they wait for.
func roots(s *v1.State) (out []string) {
	for _, r := range s.Roots {
		out = append(out, strings.Join(append([]string{r.State}, r.WaitingFor...), " "))
	}
	return out
}

func rootsAre(want ...string) func(*v1.State) bool {
	return func(s *v1.State) bool { return slices.Equal(roots(s), want) }
}

// trustedBy are the pins of an agent's roots on disk. It is an error if its certificate is not of the first.
func (f *fake) trustedBy() (pins []string) {
	f.w.Helper()
	var on struct {
		Certificate []byte
		Roots       [][]byte
	}
	f.w.must(json.Unmarshal(readFile(f.w.T, filepath.Join(f.dir, "identity.json")), &on))
	for _, r := range on.Roots {
		pins = append(pins, pinOf(r))
	}
	first, err := x509.ParseCertificate(on.Roots[0])
	f.w.must(err)
	if p, err := identity.VerifyRaw(on.Certificate, []*x509.Certificate{first}, time.Now()); err != nil || p.Node != f.name {
		f.w.Errorf("the certificate of %s is of %q, by its first root: %v", f.name, p.Node, err)
	}
	return pins
}

// All nodes trust the new root before it signs, and have certificates of it before the old one is dropped. Two nodes
// are away in turns, and the controller is started anew; nobody joins again, and secrets rotate all the while.
func TestTheCAIsReplacedWhileNodesAreAway(t *testing.T) {
	w := newWorld(t)
	w.start()
	agents := map[string]*fake{}
	for _, name := range []string{"r1", "r2", "r3"} {
		agents[name] = w.join(name)
	}
	w.until("the first file", settled(w.apply(file)))
	before := w.state().Roots
	if len(before) != 1 || before[0].State != rootSigns || before[0].Pin != agents["r1"].trustedBy()[0] {
		t.Fatalf("the roots are %v", before)
	}
	old := readFile(t, filepath.Join(agents["r1"].dir, "identity.json"))
	token := w.token("r4")

	agents["r2"].stop()
	agents["r3"].stop()
	if _, err := w.admin.RotateCA(t.Context(), connect.NewRequest(&v1.RotateCARequest{})); err != nil {
		t.Fatal(err)
	}
	s := w.until("r1 trusts both", rootsAre("signs", "coming r2 r3"))
	coming := s.Roots[1].Pin
	if got, want := agents["r1"].trustedBy(), []string{before[0].Pin, coming}; !slices.Equal(got, want) {
		t.Errorf("r1 trusts %q, want %q", got, want)
	}
	if _, err := w.admin.RotateCA(t.Context(), connect.NewRequest(&v1.RotateCARequest{})); code(err) != connect.CodeFailedPrecondition || !strings.Contains(err.Error(), "r2, r3") {
		t.Errorf("a second one meanwhile: %v", err)
	}
	agents["r3"].run("")
	w.until("r3 does", rootsAre("signs", "coming r2"))
	agents["r3"].stop()
	w.stop()
	w.start()
	agents["r2"].run("")
	w.until("the new one signs, and r3 is away", rootsAre("signs", "going r3"))
	if got, want := agents["r1"].trustedBy(), []string{coming, before[0].Pin}; !slices.Equal(got, want) {
		t.Errorf("r1 trusts %q, want %q", got, want)
	}
	agents["r3"].run("")
	s = w.until("the old one is dropped", rootsAre("signs"))
	if s.Roots[0].Pin != coming {
		t.Errorf("the root is %s, want %s", s.Roots[0].Pin, coming)
	}
	w.until("a rotation", settled(w.rotate()))
	for name, a := range agents {
		ctx := t.Context()
		for !slices.Equal(a.trustedBy(), []string{coming}) { // it is told, and nobody waits for it any more
			select {
			case <-ctx.Done():
				t.Fatalf("%s trusts %q", name, a.trustedBy())
			case <-time.After(10 * time.Millisecond):
			}
		}
	}
	w.until("all are connected", drained)

	// What the old root has signed is worth nothing.
	dir := t.TempDir()
	writeFile(t, filepath.Join(dir, "identity.json"), old)
	m, err := member.Open(member.Config{Controllers: w.listens(), Dir: dir, Node: "r1"})
	w.must(err)
	if err := m.Call(t.Context()); err == nil || !strings.Contains(err.Error(), "unknown authority") {
		t.Errorf("a node that trusts the old root alone: %v", err)
	}
	if _, err := identity.VerifyRaw(certificateOf(t, old), w.ctl.rootsNow(), time.Now()); err == nil {
		t.Error("the controller takes a certificate of the old root")
	}
	f := &fake{w: w, name: "r4", dir: t.TempDir()}
	if err := f.try(token, "r4"); err == nil || !strings.Contains(err.Error(), "another pin") {
		t.Errorf("with a token of before: %v", err)
	}
	w.must(f.try(w.token("r4"), "r4"))
	if v, err := readView(t.Context(), w.store); err != nil || len(v.trusts) != 0 {
		t.Errorf("%d records of what nodes trust are left; %v", len(v.trusts), err)
	}
	r, err := readAuthority(t.Context(), w.store)
	if err != nil || r.record.Next != nil || r.record.Old != nil {
		t.Errorf("the record of the CA: %v", err)
	}
}

func certificateOf(t *testing.T, b []byte) []byte {
	t.Helper()
	var on struct{ Certificate []byte }
	if err := json.Unmarshal(b, &on); err != nil {
		t.Fatal(err)
	}
	return on.Certificate
}

// A node that is lost does not keep the old root: it is revoked. A root that is about to end is replaced without being asked.
func TestTheCAIsReplacedBeforeItEndsAndWithoutWhomWasRevoked(t *testing.T) {
	w := newWorld(t)
	w.start()
	names := []string{"r1", "r2", "r9"} // whose machines are gone since
	for _, name := range names {
		w.must((&fake{w: w, dir: t.TempDir()}).try(w.token(name), name))
	}
	first := w.state().Roots[0]
	w.stop()
	w.now = func() time.Time { return time.Now().Add(identity.CAValid - caRenewBefore + 24*time.Hour) }
	w.start()
	if s := w.until("a root is to come", rootsAre("signs", "coming r1 r2 r9")); s.Roots[0].Pin != first.Pin {
		t.Errorf("the roots are %v", s.Roots)
	}
	for _, name := range names {
		if _, err := w.admin.Revoke(t.Context(), connect.NewRequest(&v1.RevokeRequest{Node: name})); err != nil {
			t.Fatal(err)
		}
	}
	if s := w.until("it has replaced the other", rootsAre("signs")); s.Roots[0].Pin == first.Pin {
		t.Error("the root is the same")
	}
}

// The controller tells three months before a root ends, once, and does nothing yet.
func TestTheEndOfARootIsToldBefore(t *testing.T) {
	w := newWorld(t)
	w.start()
	tells := func() []*v1.Event {
		events, _ := w.ctl.journal.about(func(e *v1.Event) bool { return e.Kind == aboutChange && e.Name == "root" })
		return events
	}
	at := func(before time.Duration) {
		w.stop()
		w.now = func() time.Time { return time.Now().Add(identity.CAValid - before) }
		w.start()
		w.must((&fake{w: w, dir: t.TempDir()}).try(w.token("r1"), "r1")) // the loop looks at all after each change
	}
	at(caWarnBefore + time.Hour)
	w.until("one root", rootsAre("signs"))
	if e := tells(); len(e) != 0 {
		t.Errorf("it tells %v", e)
	}
	at(caWarnBefore - time.Hour)
	events := w.event(aboutChange, "root", "waystamp controller rotate-ca")
	w.must((&fake{w: w, dir: t.TempDir()}).try(w.token("r1"), "r1"))
	w.must((&fake{w: w, dir: t.TempDir()}).try(w.token("r2"), "r2"))
	w.until("one root", rootsAre("signs"))
	if e := tells(); len(e) != 1 || len(events) == 0 {
		t.Errorf("it tells %v", e)
	}
}

// A root that ends while a node is away takes no other node along: those who trust the next one go on.
func TestARootThatEndsWaitsForNobody(t *testing.T) {
	w := newWorld(t)
	w.start()
	w.must((&fake{w: w, dir: t.TempDir()}).try(w.token("r9"), "r9"))
	at := func(beyond time.Duration) {
		w.stop()
		w.now = func() time.Time { return time.Now().Add(identity.CAValid + beyond) }
		w.start()
	}
	at(-time.Hour)
	coming := w.until("a root is to come", rootsAre("signs", "coming r9")).Roots[1].Pin
	at(time.Hour)
	if s := w.until("it signs", rootsAre("signs", "going r9")); s.Roots[0].Pin != coming {
		t.Errorf("the roots are %v", s.Roots)
	}
}

// Of several controllers the one that leads dies while the CA changes. The next one carries that on, and the others take
// nodes with certificates of either root meanwhile, and of the new one alone in the end.
func TestTheNextControllerCarriesAChangeOfTheCAOn(t *testing.T) {
	w, seats, _ := cluster(t, 3, nil)
	agents := map[string]*fake{}
	names := []string{"r1", "r2", "r3"}
	for _, name := range names {
		agents[name] = w.join(name)
	}
	w.until("the first file", settled(w.apply(file)))
	agents["r3"].stop()
	if _, err := w.admin.RotateCA(t.Context(), connect.NewRequest(&v1.RotateCARequest{})); err != nil {
		t.Fatal(err)
	}
	s := w.until("r3 is away", rootsAre("signs", "coming r3"))
	coming := s.Roots[1].Pin
	seats[0].kill(t)
	w.until("another one leads", rootsAre("signs", "coming r3"))
	agents["r3"].run("")
	s = w.until("the old one is dropped", rootsAre("signs"))
	if s.Roots[0].Pin != coming {
		t.Errorf("the root is %s, want %s", s.Roots[0].Pin, coming)
	}
	for _, s := range seats[1:] {
		for len(s.ctl.rootsNow()) != 1 { // it hears of it a moment later
			select {
			case <-t.Context().Done():
				t.Fatalf("controller %d trusts %d roots", s.number, len(s.ctl.rootsNow()))
			case <-time.After(10 * time.Millisecond):
			}
		}
	}
	w.until("all are connected", func(s *v1.State) bool {
		return !slices.ContainsFunc(s.Nodes, func(n *v1.NodeState) bool { return n.State != nodeReady })
	})
	for _, name := range names {
		agents[name].stop()
		for _, at := range w.seats[1:] { // through a controller that leads, and one that does not
			m, err := member.Open(member.Config{Controllers: []string{at}, Dir: agents[name].dir, Node: name})
			w.must(err)
			if err := m.Renew(t.Context()); err != nil {
				t.Errorf("%s at %s: %v", name, at, err)
			}
		}
		if got := agents[name].trustedBy(); !slices.Equal(got, []string{coming}) {
			t.Errorf("%s trusts %q, want %s", name, got, coming)
		}
	}
}

// two are controllers on one new store, which do nothing by themselves, and hear of each other's changes only when they ask.
func two(t *testing.T) (s store.Store, a, b *Controller) {
	t.Helper()
	s, err := store.OpenBolt(filepath.Join(t.TempDir(), "store"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	for _, c := range []**Controller{&a, &b} {
		if *c, err = New(t.Context(), Config{Store: s}); err != nil {
			t.Fatal(err)
		}
	}
	return s, a, b
}

// joined writes the record of a node, and gives a context in which it calls.
func joined(t *testing.T, s store.Store, name string) context.Context {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	id, err := identity.KeyID(key.Public())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Commit(t.Context(), store.Txn{Put: map[string][]byte{keyNode(name, partID): encode(nodeRecord{Key: id})}}); err != nil {
		t.Fatal(err)
	}
	return context.WithValue(t.Context(), callerKey{}, caller{peer: identity.Peer{ID: identity.ID{Node: name}, KeyID: id, Key: key.Public()}})
}

// A controller that has not heard of a change of the CA does not tell a node the roots of before: the node has told
// another one that it trusts the new root, perhaps, and would trust it no more when it signs.
func TestARenewalHasTheRootsOfTheRecords(t *testing.T) {
	s, a, late := two(t)
	r1 := joined(t, s, "r1")
	if err := a.beginCA(t.Context(), a.authority.Load()); err != nil {
		t.Fatal(err)
	}
	want := a.authority.Load().der()
	answer, err := node{late}.Renew(r1, connect.NewRequest(&v1.RenewRequest{}))
	if err != nil || len(want) != 2 || !slices.EqualFunc(answer.Msg.Roots, want, bytes.Equal) {
		t.Errorf("r1 is told other roots than the two of the records; %v", err)
	}
}

// Nor does it leave unrecorded what a node says.
func TestWhatANodeTrustsIsRecordedByAControllerThatIsLate(t *testing.T) {
	s, a, late := two(t)
	joined(t, s, "r1")
	if err := a.beginCA(t.Context(), a.authority.Load()); err != nil {
		t.Fatal(err)
	}
	if err := late.trusted(t.Context(), "r1", a.authority.Load().pins()); err != nil {
		t.Fatal(err)
	}
	v, err := readView(t.Context(), s)
	if waits := a.authority.Load().waitsFor(v); err != nil || len(waits) != 0 {
		t.Errorf("it waits for %q; %v", waits, err)
	}
}

// Nor does it try in vain to go over the change, again and again, until it hears of it.
func TestAControllerThatIsLateWithTheCAReadsItAgain(t *testing.T) {
	_, a, late := two(t)
	if err := a.beginCA(t.Context(), a.authority.Load()); err != nil {
		t.Fatal(err)
	}
	if err := late.beginCA(t.Context(), late.authority.Load()); !errors.Is(err, store.ErrConflict) {
		t.Errorf("over the change: %v", err)
	}
	if got, want := late.authority.Load().pins(), a.authority.Load().pins(); !slices.Equal(got, want) {
		t.Errorf("it trusts %q, want %q", got, want)
	}
}

// Who joined after the records were read, and before the change began, trusts the root of before alone, and is waited for.
func TestAChangeOfTheCAWaitsForWhoJoinedJustBefore(t *testing.T) {
	s, c, _ := two(t)
	before, err := readView(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	joined(t, s, "r1")
	if err := c.beginCA(t.Context(), c.authority.Load()); err != nil {
		t.Fatal(err)
	}
	if did, _, err := c.advanceCA(t.Context(), before); !did || err != nil {
		t.Errorf("it is not looked at again: %v, %v", did, err)
	}
	if c.authority.Load().record.Next == nil {
		t.Fatal("the new root signs, and r1 does not trust it")
	}
	now, err := readView(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	if did, _, err := c.advanceCA(t.Context(), now); did || err != nil || c.authority.Load().record.Next == nil {
		t.Errorf("it does not wait for r1: %v, %v", did, err)
	}
}

// A CA is made for a new store alone: one whose record was taken away is not replaced, least of all in clear among
// records that are sealed.
func TestACAThatIsGoneIsNotMadeAnew(t *testing.T) {
	bolt, err := store.OpenBolt(filepath.Join(t.TempDir(), "store"))
	if err != nil {
		t.Fatal(err)
	}
	defer bolt.Close()
	sealed := store.Seal(bolt, store.SealKey{1})
	if _, err := New(t.Context(), Config{Store: sealed}); err != nil {
		t.Fatal(err)
	}
	joined(t, sealed, "r1")
	if _, err := bolt.Commit(t.Context(), store.Txn{Delete: []string{keyCA}}); err != nil {
		t.Fatal(err)
	}
	if _, err := New(t.Context(), Config{Store: sealed}); !errors.Is(err, errNoCA) {
		t.Errorf("with the key: %v", err)
	}
	if _, err := New(t.Context(), Config{Store: bolt}); !errors.Is(err, store.ErrSealed) {
		t.Errorf("without it: %v", err)
	}
	if snap, err := bolt.Snapshot(t.Context(), keyCA); err != nil || len(snap.Records) != 0 {
		t.Errorf("a CA was made; %v", err)
	}
}
