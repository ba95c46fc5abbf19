package member

import (
	"bytes"
	"cmp"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"connectrpc.com/connect"

	"github.com/waystamp/waystamp/internal/identity"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/planfile"
	v1 "github.com/waystamp/waystamp/internal/rpc/waystampv1"
	"github.com/waystamp/waystamp/internal/seal"
)

// The node makes the keys of its ends of sealed parts, a new one with each certificate. They are on its disk beside its identity:
// an agent that starts without its controller goes on with them until they end.

// errCertify ends a session whose controller signs no certificates for the node's ends.
var errCertify = errors.New("the controller has not signed certificates for ends of sealed parts")

// endsFile are the ends on disk.
type endsFile struct {
	Version int       `json:"version"`
	Ends    []endFile `json:"ends"`
}

type endFile struct {
	Function    string `json:"function"`
	Key         []byte `json:"key"` // seed (RFC 8032 section 5.1.5)
	Certificate []byte `json:"certificate"`
}

// end is one of them, read.
type end struct {
	file  endFile
	key   ed25519.PrivateKey
	cert  *x509.Certificate
	renew time.Time

	revocations uint32 // of the node before the certificate was issued
}

// ends are all, by name.
type ends struct {
	signing sync.Mutex // one call to the controller at a time; taken before mu
	mu      sync.Mutex
	by      map[string]*end
}

func (m *Member) endsPath() string { return filepath.Join(m.cfg.Dir, "ends.json") }

func (m *Member) openEnds() error {
	m.ends.by = map[string]*end{}
	b, err := planfile.Read(m.endsPath())
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err != nil {
		return fmt.Errorf("read the keys of this node's ends of sealed parts: %w", err)
	}
	damaged := func(err error) error {
		return fmt.Errorf("the keys of this node's ends of sealed parts %s: %w; remove the file, and the node makes new ones with its controller", m.endsPath(), err)
	}
	var f endsFile
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(&f); err != nil {
		return damaged(err)
	}
	if f.Version != 1 {
		return damaged(fmt.Errorf("its version is %d; this program reads 1", f.Version))
	}
	for _, e := range f.Ends {
		name, is, err := readEnd(e)
		if err != nil {
			return damaged(fmt.Errorf("function %s: %w", e.Function, err))
		}
		m.ends.by[name] = is
	}
	return nil
}

// readEnd reads an end, and draws when its certificate is renewed.
func readEnd(f endFile) (name string, e *end, err error) {
	if len(f.Key) != ed25519.SeedSize {
		return "", nil, fmt.Errorf("its key has %d bytes; expect %d", len(f.Key), ed25519.SeedSize)
	}
	e = &end{file: f, key: ed25519.NewKeyFromSeed(f.Key)}
	if e.cert, err = x509.ParseCertificate(f.Certificate); err != nil {
		return "", nil, err
	}
	if of, ok := e.cert.PublicKey.(ed25519.PublicKey); !ok || !of.Equal(e.key.Public()) {
		return "", nil, errors.New("its key is not that of its certificate")
	}
	if len(e.cert.URIs) != 1 {
		return "", nil, fmt.Errorf("its certificate has %d names; expect 1", len(e.cert.URIs))
	}
	if e.revocations, err = seal.Revocations(e.cert); err != nil {
		return "", nil, err
	}
	// Between a quarter and half of its life.
	life := e.cert.NotAfter.Sub(e.cert.NotBefore)
	e.renew = e.cert.NotBefore.Add(life/4 + draw(life/4))
	return e.cert.URIs[0].String(), e, nil
}

// End is what an end of this node has of its own, by its name in the plan.
func (m *Member) End(name string) (seal.Identity, error) {
	id := m.id.get()
	m.ends.mu.Lock()
	e := m.ends.by[name]
	m.ends.mu.Unlock()
	switch {
	case id == nil || e == nil:
		return seal.Identity{}, fmt.Errorf("there is no certificate of the controller for %s", name)
	case m.cfg.Now().After(e.cert.NotAfter):
		return seal.Identity{}, fmt.Errorf("the certificate of %s ended at %s, and the controller has signed no other", name, e.cert.NotAfter.UTC().Format(time.RFC3339))
	}
	return seal.Identity{Key: e.key, Certificate: e.file.Certificate, Roots: id.file.Roots}, nil
}

// EndCertificate is until when an end's certificate is valid; the zero time: it has none.
func (m *Member) EndCertificate(name string) time.Time {
	m.ends.mu.Lock()
	defer m.ends.mu.Unlock()
	if e := m.ends.by[name]; e != nil {
		return e.cert.NotAfter
	}
	return time.Time{}
}

// isBy reports whether a root has signed a certificate.
func isBy(c, root *x509.Certificate) bool { return c.CheckSignatureFrom(root) == nil }

// due are the functions of a plan whose ends have no certificate, one of another root than the one that signs, one of before the
// node was revoked, or one that is to be renewed; missing: only those without one that is valid and of a root that the node trusts.
func (m *Member) due(id *nodeIdentity, n plan.Node, missing bool) (functions []string) {
	m.ends.mu.Lock()
	defer m.ends.mu.Unlock()
	now := m.cfg.Now()
	for function, name := range n.CertifiedEnds() {
		e := m.ends.by[name]
		isBy := func(root *x509.Certificate) bool { return isBy(e.cert, root) }
		if e == nil || now.After(e.cert.NotAfter) || e.revocations < n.EndRevocations(name) || !slices.ContainsFunc(id.roots, isBy) || !missing && (now.After(e.renew) || !isBy(id.roots[0])) {
			functions = append(functions, function)
		}
	}
	slices.Sort(functions)
	return functions
}

// certify gets certificates for ends of a plan, and keeps them on disk.
func (m *Member) certify(ctx context.Context, c client, id *nodeIdentity, n plan.Node, missing bool) error {
	m.ends.signing.Lock()
	defer m.ends.signing.Unlock()
	functions := m.due(id, n, missing)
	if len(functions) == 0 {
		return nil
	}
	var asked []endFile
	request := &v1.CertifyRequest{}
	for _, function := range functions {
		_, key, err := ed25519.GenerateKey(rand.Reader)
		if err != nil {
			return fmt.Errorf("make a key of an end: %w", err)
		}
		r, err := identity.EndRequest(key)
		if err != nil {
			return fmt.Errorf("make a key of an end: %w", err)
		}
		asked = append(asked, endFile{Function: function, Key: key.Seed()})
		request.Ends = append(request.Ends, &v1.EndRequest{Function: function, CertificateRequest: r})
	}
	answer, err := c.Certify(ctx, connect.NewRequest(request))
	if err != nil {
		return fmt.Errorf("%w: %w", errCertify, err)
	}
	if len(answer.Msg.Ends) != len(asked) {
		return fmt.Errorf("%w: it answers for %d of %d", errCertify, len(answer.Msg.Ends), len(asked))
	}
	if !slices.EqualFunc(answer.Msg.Roots, id.file.Roots, bytes.Equal) {
		// Others take the certificates already; this node would not take theirs.
		if _, err := m.renew(ctx, id); err != nil {
			return fmt.Errorf("renew the certificate, since the controller's roots have changed: %w", err)
		}
		return errRoots
	}
	var problems []error
	got := map[string]*end{}
	want := n.CertifiedEnds()
	for i, e := range answer.Msg.Ends {
		if e.Error != "" {
			problems = append(problems, fmt.Errorf("function %s: %s", asked[i].Function, e.Error))
			continue
		}
		asked[i].Certificate = e.Certificate
		name, is, err := readEnd(asked[i])
		switch {
		case err != nil:
		case name != want[asked[i].Function]:
			err = fmt.Errorf("the certificate is of %s; the plan calls the end %s", name, want[asked[i].Function])
		case is.revocations < n.EndRevocations(name):
			err = fmt.Errorf("the certificate is of before a revocation: it says that the node was revoked %d times, and the plan %d", is.revocations, n.EndRevocations(name))
		case !isBy(is.cert, id.roots[0]):
			err = errors.New("the certificate is not signed by the root that the controller says")
		default:
			got[name] = is
			continue
		}
		problems = append(problems, fmt.Errorf("function %s: %w", asked[i].Function, err))
	}
	if err := m.keepCertificates(got, want); err != nil {
		return err
	}
	if err := errors.Join(problems...); err != nil {
		return fmt.Errorf("%w: %w", errCertify, err)
	}
	m.cfg.Log.Info("the controller has signed certificates for ends of sealed parts", "functions", functions)
	return nil
}

// keepCertificates writes ends to disk, and then uses them. If the plan on disk is in force, ends that neither it nor the next plan,
// whose ends are in want, has are removed with their keys.
func (m *Member) keepCertificates(got map[string]*end, want map[string]string) error {
	m.mu.Lock()
	inForce, held := m.inForce, slices.Collect(maps.Values(m.have.CertifiedEnds()))
	m.mu.Unlock()
	held = slices.AppendSeq(held, maps.Values(want))
	m.ends.mu.Lock()
	all := maps.Clone(m.ends.by)
	m.ends.mu.Unlock()
	maps.Copy(all, got)
	if inForce {
		maps.DeleteFunc(all, func(name string, _ *end) bool { return !slices.Contains(held, name) })
	}
	f := endsFile{Version: 1, Ends: []endFile{}}
	for _, name := range slices.Sorted(maps.Keys(all)) {
		f.Ends = append(f.Ends, all[name].file)
	}
	b, err := json.Marshal(f)
	if err != nil {
		return err
	}
	if err := replace(m.endsPath(), b); err != nil {
		return fmt.Errorf("keep the keys of this node's ends of sealed parts: %w", err)
	}
	m.ends.mu.Lock()
	defer m.ends.mu.Unlock()
	m.ends.by = all
	return nil
}

// endsLook is how long at most until the node looks whether certificates of its ends are to be renewed.
const endsLook = time.Minute

// keepEnds renews certificates of ends before half of their life is over. What fails is tried again: there is time.
func (m *Member) keepEnds(ctx context.Context, c client, id *nodeIdentity) error {
	pause := endsLook
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(jitter(pause)):
		}
		have, _ := m.onDisk()
		pause = endsLook
		switch err := m.certify(ctx, c, id, have, false); {
		case err == nil:
		case errors.Is(err, errRoots) || ctx.Err() != nil:
			return cmp.Or(context.Cause(ctx), err)
		default:
			m.cfg.Log.Warn("certificates of ends of sealed parts are not renewed", "err", err)
			pause = 5 * endsLook
		}
	}
}

// pinsOf are the roots that the node trusts. The first is the one that has signed its certificate, and those of its ends: while
// one of these is of another root, that one must not be dropped.
func (m *Member) pinsOf(id *nodeIdentity) []string {
	pins := id.pins()
	have, _ := m.onDisk()
	m.ends.mu.Lock()
	defer m.ends.mu.Unlock()
	for _, name := range have.CertifiedEnds() {
		if e := m.ends.by[name]; e != nil && !isBy(e.cert, id.roots[0]) {
			return append(pins[1:], pins[0])
		}
	}
	return pins
}
