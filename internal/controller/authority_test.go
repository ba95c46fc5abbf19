package controller

import (
	"crypto/x509"
	"encoding/json"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/waystamp/waystamp/internal/identity"
	"github.com/waystamp/waystamp/internal/member"
	v1 "github.com/waystamp/waystamp/internal/rpc/waystampv1"
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
