package member

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"errors"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/waystamp/waystamp/internal/identity"
	"github.com/waystamp/waystamp/internal/plan"
	v1 "github.com/waystamp/waystamp/internal/rpc/waystampv1"
)

// What goes over the connection is tried in internal/controller, with a controller.

// joined is a directory as a node leaves it that has joined.
func joined(t *testing.T, node string) Config {
	t.Helper()
	ca, err := identity.NewCA("example.org", time.Now())
	must(t, err)
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)
	cert, err := ca.Issue(identity.ID{Node: node}, key.Public(), time.Now())
	must(t, err)
	der, err := x509.MarshalECPrivateKey(key)
	must(t, err)
	token, err := identity.NewToken(ca.Pin())
	must(t, err)
	cfg := Config{Controllers: []string{"[::1]:1"}, Dir: filepath.Join(t.TempDir(), "member"), Token: token.Text()}
	m, err := Open(cfg)
	must(t, err)
	_, err = m.take([][]byte{cert}, [][]byte{ca.Root()}, identityFile{Key: der, Token: identity.HashToken(token.Secret)})
	must(t, err)
	cfg.Token = ""
	return cfg
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func planOf(t *testing.T, name string, revision uint64) *v1.PlansResponse {
	t.Helper()
	n := plan.Node{
		Name: name, Revision: revision, Block: netip.MustParsePrefix("fc00::/48"), Address: netip.MustParseAddr("fc00:1::1"),
		Locator: netip.MustParsePrefix("fc00:0:0:100::/56"),
	}
	b, err := plan.EncodeNode(n)
	must(t, err)
	return &v1.PlansResponse{Revision: revision, Digest: digest(b), Plan: b}
}

func TestAPlanIsTakenIfItIsTheNodesAndNotOlder(t *testing.T) {
	cfg := joined(t, "r1")
	m, err := Open(cfg)
	must(t, err)
	must(t, m.receive(planOf(t, "r1", 5), "r1", withoutEnds))
	<-m.Planned()
	before := read(t, m.PlanFile())
	for name, c := range map[string]struct {
		plan  func() *v1.PlansResponse
		says  string
		older bool
	}{
		"older":             {func() *v1.PlansResponse { return planOf(t, "r1", 4) }, "revision 4, and that has 5", true},
		"another node's":    {func() *v1.PlansResponse { return planOf(t, "r2", 6) }, "it is for node r2", false},
		"without revision":  {func() *v1.PlansResponse { return planOf(t, "r1", 0) }, "its revision is 0", false},
		"another revision":  {func() *v1.PlansResponse { p := planOf(t, "r1", 6); p.Revision = 7; return p }, "it came as 7", false},
		"bytes that differ": {func() *v1.PlansResponse { p := planOf(t, "r1", 6); p.Plan[9]++; return p }, "digest", false},
		"no plan":           {func() *v1.PlansResponse { return &v1.PlansResponse{Revision: 6, Digest: digest(nil)} }, "not JSON", false},
	} {
		t.Run(name, func(t *testing.T) {
			err := m.receive(c.plan(), "r1", withoutEnds)
			if err == nil || !strings.Contains(err.Error(), c.says) || errors.Is(err, ErrOlder) != c.older {
				t.Errorf("got %v, want %q", err, c.says)
			}
			if string(read(t, m.PlanFile())) != string(before) {
				t.Error("the plan on disk has changed")
			}
		})
	}
	// After a restart, too.
	m, err = Open(cfg)
	must(t, err)
	select {
	case <-m.Planned():
	default:
		t.Error("the plan on disk is not known")
	}
	if err := m.receive(planOf(t, "r1", 4), "r1", withoutEnds); !errors.Is(err, ErrOlder) {
		t.Errorf("got %v", err)
	}
	other := planOf(t, "r1", 5)
	other.Plan = append(other.Plan, '\n')
	other.Digest = digest(other.Plan)
	if err := m.receive(other, "r1", withoutEnds); err == nil || !strings.Contains(err.Error(), "of the same revision 5") {
		t.Errorf("another plan of a revision that is on disk: %v", err)
	}
	must(t, m.receive(planOf(t, "r1", 6), "r1", withoutEnds))
	for _, name := range []string{m.PlanFile(), m.identityPath()} {
		if info, err := os.Stat(name); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s: mode %v, %v", name, info.Mode(), err)
		}
	}
}

func read(t *testing.T, name string) []byte {
	t.Helper()
	b, err := os.ReadFile(name)
	must(t, err)
	return b
}

func TestAnIdentityOnDiskIsCheckedBeforeItIsUsed(t *testing.T) {
	for name, c := range map[string]struct {
		spoil func(cfg *Config, file string)
		says  string
	}{
		"as it was left":  {func(*Config, string) {}, ""},
		"readable by all": {func(_ *Config, f string) { must(t, os.Chmod(f, 0o644)) }, "chmod 600"},
		"damaged":         {func(_ *Config, f string) { must(t, os.WriteFile(f, []byte("{}"), 0o600)) }, "remove it, and join"},
		"gone":            {func(_ *Config, f string) { must(t, os.Remove(f)) }, "has not joined yet"},
		"no token":        {func(cfg *Config, f string) { cfg.Token = "secret"; must(t, os.Remove(f)) }, "it is not a token"},
		"no token needed": {func(cfg *Config, _ string) { cfg.Token = "" }, ""},
		"a broken token":  {func(cfg *Config, _ string) { cfg.Token = "secret" }, ""}, // nothing asks for it
	} {
		t.Run(name, func(t *testing.T) {
			cfg := joined(t, "r1")
			c.spoil(&cfg, filepath.Join(cfg.Dir, "identity.json"))
			m, err := Open(cfg)
			if err == nil {
				if left := time.Until(m.CertificateEnds()); left > identity.CertificateValid || left < identity.CertificateValid-time.Hour {
					t.Errorf("the certificate ends in %s", left)
				}
				// Both or none: one that has not joined yet signs nothing.
				key, der := m.Key()
				if cert, err := x509.ParseCertificate(der); (key == nil) != (err != nil) || key != nil && !cert.PublicKey.(*ecdsa.PublicKey).Equal(key.Public()) {
					t.Errorf("key %v, and its certificate: %v", key, err)
				}
			}
			if c.says == "" && err != nil || c.says != "" && (err == nil || !strings.Contains(err.Error(), c.says)) {
				t.Errorf("got %v, want %q", err, c.says)
			}
		})
	}
}

func TestACertificateForAnotherNodeIsNotKept(t *testing.T) {
	cfg := joined(t, "r1")
	m, err := Open(cfg)
	must(t, err)
	before := read(t, m.identityPath())
	m.cfg.Node = "r2"
	id := m.id.get()
	if _, err := m.take([][]byte{id.file.Certificate}, id.file.Roots, id.file); err == nil || !strings.Contains(err.Error(), "takes this node for r1") {
		t.Errorf("got %v", err)
	}
	if string(read(t, m.identityPath())) != string(before) {
		t.Error("it was kept")
	}
}

func TestPausesAreSpread(t *testing.T) {
	seen := map[time.Duration]bool{}
	for range 100 {
		d := jitter(pauseMax)
		if d < pauseMax/2 || d > pauseMax {
			t.Fatalf("%s is not between half and all of %s", d, pauseMax)
		}
		seen[d] = true
	}
	if len(seen) < 90 {
		t.Errorf("of 100 pauses %d differ", len(seen))
	}
}

// revisionAt is that of a plan file; 0: it is not there.
func revisionAt(t *testing.T, name string) uint64 {
	t.Helper()
	b, err := os.ReadFile(name)
	if errors.Is(err, fs.ErrNotExist) {
		return 0
	}
	must(t, err)
	n, err := plan.DecodeNode(b)
	must(t, err)
	return n.Revision
}

// Until a plan is in force, the last one that was stays on disk; then its secrets are void.
func TestThePlanBeforeStaysUntilTheNextIsInForce(t *testing.T) {
	cfg := joined(t, "r1")
	m, err := Open(cfg)
	must(t, err)
	receive := func(revision, before uint64) {
		t.Helper()
		must(t, m.receive(planOf(t, "r1", revision), "r1", withoutEnds))
		if now, have := revisionAt(t, m.PlanFile()), revisionAt(t, m.FallbackFile()); now != revision || have != before {
			t.Errorf("received %d: the plan on disk is %d, the one before %d, want %d", revision, now, have, before)
		}
	}
	report := func(r Report, before uint64) {
		t.Helper()
		m.Report(r)
		if have := revisionAt(t, m.FallbackFile()); have != before {
			t.Errorf("reported %+v: the plan before is %d, want %d", r, have, before)
		}
	}
	inForce := func(revision uint64) Report {
		return Report{Revision: revision, Digest: planOf(t, "r1", revision).Digest}
	}
	receive(5, 0)
	report(inForce(5), 0)
	receive(6, 5)
	refused := inForce(5)
	refused.Refused, refused.Error = 6, "no room"
	report(refused, 5)
	receive(7, 5) // and not 6, which was never in force
	m, err = Open(cfg)
	must(t, err)
	report(inForce(5), 5) // the agent has started from it
	receive(8, 5)
	report(Report{Revision: 8, Digest: "another file's"}, 5)
	report(inForce(8), 0)
	receive(9, 8)
	if info, err := os.Stat(m.FallbackFile()); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	// Another plan comes while the agent puts one in force: whoever is told of that one counts on it.
	receive(10, 8)
	receive(11, 8)
	report(inForce(10), 10)
	refused = inForce(10)
	refused.Refused = 11
	report(refused, 10)
	m, err = Open(cfg)
	must(t, err)
	report(inForce(10), 10)
	report(inForce(11), 0)
	receive(12, 11)
	// An agent that was killed before it said anything: 12 may be in force.
	m, err = Open(cfg)
	must(t, err)
	must(t, os.Remove(m.FallbackFile()))
	receive(13, 12)
}

// withoutEnds is for plans that have none.
func withoutEnds(plan.Node) error { return nil }
