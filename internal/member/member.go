// Package member is a node's side of its controller: it joins with a token, keeps the node's
// identity and its last plan on disk, receives each later plan and reports the plan in the
// kernel. It writes the plan where internal/agent reads it, and applies nothing itself. waystamp
// agent --controller calls it.
package member

import (
	"bytes"
	"cmp"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sync/errgroup"

	"github.com/waystamp/waystamp/internal/identity"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/planfile"
	v1 "github.com/waystamp/waystamp/internal/rpc/waystampv1"
	"github.com/waystamp/waystamp/internal/rpc/waystampv1/waystampv1connect"
)

// A connection that fails is tried again after these times, doubled each time, with jitter.
const (
	pauseMin = 200 * time.Millisecond
	pauseMax = 30 * time.Second
)

// connectPatience is how long a controller may take to answer at all.
const connectPatience = 10 * time.Second

// acknowledgePause is how long a node waits whose acknowledgements are too many.
const acknowledgePause = time.Second

// Config has the node's controllers and settings.
type Config struct {
	// Controllers are tcp:HOST:PORT, HOST:PORT or tls+unix:/PATH, one at least. They are tried in turn.
	Controllers []string
	Token       string // as the operator has it; "": the node has joined before
	Dir         string // of identity and plan; made with mode 0700
	Node        string // the name that the controller must give it; "": any
	Log         *slog.Logger

	Now func() time.Time // nil: time.Now
	// Received is called when a plan is on disk; nil: nothing is.
	Received func(n plan.Node, digest string)
	// Transport wraps the transport of all connections; nil: it stays as it is. For tests.
	Transport func(http.RoundTripper) http.RoundTripper
	// Knows is what the agent takes of plans; nil: plan.Features. For tests.
	Knows []string
	// NoDrains: the agent tells nothing of numbers, as one of before. For tests.
	NoDrains bool
	// NoFlows: the agent traces no flows, as one of before. For tests.
	NoFlows bool
}

// Report describes the plan in a node's kernel.
type Report struct {
	Revision uint64 // of the plan in force; 0: none
	Digest   string // of that plan's file
	Refused  uint64 // the revision of a later plan that is not in force
	Error    string // why
	Problems []string
	Warnings []string
}

// Member is a node that has joined, or will.
type Member struct {
	cfg Config
	id  atomicIdentity

	ends ends

	clockOff atomic.Pointer[int64] // nanoseconds; nil: no controller has answered

	mu      sync.Mutex
	at      int // index in Controllers of the one in use
	report  Report
	reports chan struct{} // a report is new
	have    plan.Node     // from the plan file; Revision 0: there is none
	digest  string
	inForce bool          // it is
	planned chan struct{} // closed with the first plan on disk
	first   sync.Once     // closes planned
	arrived chan struct{} // a plan is new on disk

	refusals outbox
	traced   outbox
	orders   orders
	drains   drains

	files  sync.Mutex // of the two plan files and passed; taken before mu
	passed []passed   // the oldest first
}

// identityFile is a node's identity on disk.
type identityFile struct {
	Version     int      `json:"version"`
	Key         []byte   `json:"key"` // RFC 5915
	Certificate []byte   `json:"certificate"`
	Roots       [][]byte `json:"roots"`
	Token       string   `json:"token"` // hash of the one that it joined with
}

// nodeIdentity is the same, read.
type nodeIdentity struct {
	file  identityFile
	key   *ecdsa.PrivateKey
	cert  *x509.Certificate
	roots []*x509.Certificate
	name  string
}

type atomicIdentity struct {
	mu  sync.Mutex
	now *nodeIdentity
}

func (a *atomicIdentity) get() *nodeIdentity {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.now
}

func (a *atomicIdentity) set(id *nodeIdentity) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.now = id
}

// Open reads the node's state on disk. It makes no connection.
func Open(cfg Config) (*Member, error) {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if len(cfg.Controllers) == 0 {
		return nil, errors.New("no controller is named")
	}
	if cfg.Knows == nil {
		cfg.Knows = plan.Features()
	}
	m := &Member{cfg: cfg, refusals: outbox{more: make(chan struct{}, 1)}, traced: outbox{more: make(chan struct{}, 1)}, orders: orders{changed: make(chan struct{}, 1)}, drains: drains{changed: make(chan struct{}, 1), news: make(chan struct{}, 1)}, reports: make(chan struct{}, 1), planned: make(chan struct{}), arrived: make(chan struct{}, 1)}
	if err := os.MkdirAll(cfg.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the directory of the node's identity: %w", err)
	}
	b, err := planfile.Read(m.identityPath())
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return nil, fmt.Errorf("read the node's identity: %w", err)
	default:
		id, err := readIdentity(b, cfg.Now())
		if err != nil {
			return nil, fmt.Errorf("the node's identity %s: %w; remove it, and join with a new token", m.identityPath(), err)
		}
		m.id.set(id)
	}
	if err := m.openEnds(); err != nil {
		return nil, err
	}
	if cfg.Token != "" {
		if _, err := identity.ParseToken(cfg.Token); err != nil && m.id.get() == nil {
			return nil, err
		} else if err != nil {
			cfg.Log.Warn("the token is left aside: this node has joined before", "err", err)
			m.cfg.Token = ""
		}
	}
	if m.id.get() == nil && cfg.Token == "" {
		return nil, errors.New("this node has not joined yet; print a token on the controller (waystamp node token NAME), and give it with --join")
	}
	b, err = planfile.Read(m.PlanFile())
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return nil, fmt.Errorf("read the plan on disk: %w", err)
	default:
		n, err := plan.DecodeNode(b)
		if err != nil {
			return nil, fmt.Errorf("%s: %w; remove it, and the controller sends it again", m.PlanFile(), err)
		}
		m.have, m.digest = n, digest(b)
		m.first.Do(func() { close(m.planned) })
	}
	return m, nil
}

// HasJoined reports whether a directory has the identity of a node that has joined.
func HasJoined(dir string) bool {
	_, err := os.Stat((&Member{cfg: Config{Dir: dir}}).identityPath())
	return err == nil
}

// CertificateEnds is when the node's certificate does; the zero time while it has none.
func (m *Member) CertificateEnds() time.Time {
	if id := m.id.get(); id != nil {
		return id.cert.NotAfter
	}
	return time.Time{}
}

// Key is the node's key and its certificate in DER; nil while it has none.
func (m *Member) Key() (key crypto.Signer, certificate []byte) {
	if id := m.id.get(); id != nil {
		return id.key, id.cert.Raw
	}
	return nil, nil
}

func (m *Member) identityPath() string { return filepath.Join(m.cfg.Dir, "identity.json") }

// PlanFile is where the node's plan is.
func (m *Member) PlanFile() string { return filepath.Join(m.cfg.Dir, "plan.json") }

// FallbackFile is where the plan is that was in force last, while the one in PlanFile has not
// been yet.
func (m *Member) FallbackFile() string { return filepath.Join(m.cfg.Dir, "plan-before.json") }

// Planned is closed when the plan file is there.
func (m *Member) Planned() <-chan struct{} { return m.planned }

func digest(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

func readIdentity(b []byte, now time.Time) (*nodeIdentity, error) {
	id := &nodeIdentity{}
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(&id.file); err != nil {
		return nil, err
	}
	if id.file.Version != 1 {
		return nil, fmt.Errorf("its version is %d; this program reads 1", id.file.Version)
	}
	var err error
	if id.key, err = x509.ParseECPrivateKey(id.file.Key); err != nil {
		return nil, err
	}
	if id.cert, err = x509.ParseCertificate(id.file.Certificate); err != nil {
		return nil, err
	}
	for _, r := range id.file.Roots {
		c, err := x509.ParseCertificate(r)
		if err != nil {
			return nil, err
		}
		id.roots = append(id.roots, c)
	}
	if !id.key.PublicKey.Equal(id.cert.PublicKey) {
		return nil, errors.New("its key is not that of its certificate")
	}
	// Of a clock that is behind, the controller will complain.
	at := now
	if at.Before(id.cert.NotBefore) {
		at = id.cert.NotBefore
	}
	p, err := identity.Verify(id.cert, id.roots, at)
	if err != nil {
		return nil, err
	}
	if p.Node == "" {
		return nil, fmt.Errorf("its certificate is of %s", p.ID)
	}
	id.name = p.Node
	return id, nil
}

// keepIdentity writes an identity to disk, and then uses it.
func (m *Member) keepIdentity(f identityFile) (*nodeIdentity, error) {
	f.Version = 1
	b, err := json.Marshal(f)
	if err != nil {
		return nil, err
	}
	id, err := readIdentity(b, m.cfg.Now())
	if err != nil {
		return nil, fmt.Errorf("the controller's answer: %w", err)
	}
	if m.cfg.Node != "" && id.name != m.cfg.Node {
		return nil, fmt.Errorf("the controller takes this node for %s; this is the agent of %s", id.name, m.cfg.Node)
	}
	if err := replace(m.identityPath(), b); err != nil {
		return nil, fmt.Errorf("keep the node's identity: %w", err)
	}
	m.id.set(id)
	return id, nil
}

// replace writes a file with secrets in one step that lasts.
func replace(name string, b []byte) error {
	dir := filepath.Dir(name)
	tmp, err := os.CreateTemp(dir, "."+filepath.Base(name)+".*") // with mode 0600
	if err != nil {
		return err
	}
	_, err = tmp.Write(b)
	if err == nil {
		err = tmp.Sync()
	}
	if err = errors.Join(err, tmp.Close()); err == nil {
		err = os.Rename(tmp.Name(), name)
	}
	if err != nil {
		return errors.Join(err, os.Remove(tmp.Name()))
	}
	return syncDir(dir)
}

// syncDir makes names in a directory last.
func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// keepPlan puts a plan in the place of the one before. That one is kept beside it if it is in
// force, or if no other is kept: until the new one is in force, the agent can start from it.
func (m *Member) keepPlan(n plan.Node, digest string, b []byte) error {
	m.files.Lock()
	defer m.files.Unlock()
	m.mu.Lock()
	had, inForce := m.have.Revision != 0, m.inForce
	m.mu.Unlock()
	if _, err := os.Lstat(m.FallbackFile()); had && (inForce || errors.Is(err, fs.ErrNotExist)) {
		if err := link(m.PlanFile(), m.FallbackFile()); err != nil {
			return fmt.Errorf("the plan before it: %w", err)
		}
	} else if had {
		// The agent may have read it, and be about to report it as in force.
		was, err := os.ReadFile(m.PlanFile())
		if err != nil {
			return fmt.Errorf("the plan before it: %w", err)
		}
		m.passed = append(m.passed[max(0, len(m.passed)+1-passedMax):], passed{m.have.Revision, m.digest, was})
	}
	if err := replace(m.PlanFile(), b); err != nil { // and this makes both names last
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.have, m.digest, m.inForce = n, digest, false
	return nil
}

// link gives a file a second name and replaces a file of that name; it copies the file if the
// file system has no links.
func link(file, name string) error {
	tmp := name + ".new"
	if err := os.Remove(tmp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := os.Link(file, tmp); err == nil {
		return os.Rename(tmp, name)
	}
	b, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	return replace(name, b)
}

// passed is a plan that is no longer on disk, and that the agent may be putting in force.
type passed struct {
	revision uint64
	digest   string
	content  []byte
}

// passedMax is their highest number: an agent reports the result of a plan in seconds.
const passedMax = 16

// settle makes the plan in force the last one. If the plan on disk is in force, it deletes the
// plan before: its secrets are void. If a plan between these two is in force, that one is the
// plan before from now on: the controller relies on the node never going back behind it. After
// an error the report must not reach the controller.
func (m *Member) settle(r Report) error {
	m.files.Lock()
	defer m.files.Unlock()
	i := slices.IndexFunc(m.passed, func(p passed) bool { return p.revision == r.Revision && p.digest == r.Digest })
	if i >= 0 {
		if err := replace(m.FallbackFile(), m.passed[i].content); err != nil {
			return err
		}
	}
	read := max(r.Revision, r.Refused) // and it reads none before that any more
	m.passed = slices.DeleteFunc(m.passed, func(p passed) bool { return p.revision <= read })
	m.mu.Lock()
	m.inForce = r.Revision != 0 && r.Revision == m.have.Revision && r.Digest == m.digest
	inForce := m.inForce
	m.mu.Unlock()
	if !inForce {
		return nil
	}
	err := os.Remove(m.FallbackFile())
	if err == nil {
		err = syncDir(m.cfg.Dir)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		m.cfg.Log.Error("the plan before, which is void, cannot be removed", "err", err)
	}
	return nil
}

// client calls the controller over one set of connections; close ends them.
type client struct {
	waystampv1connect.NodeClient
	transport *http.Transport
}

func (c client) close() { c.transport.CloseIdleConnections() }

// controller is the address of the controller in use.
func (m *Member) controller() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.cfg.Controllers[m.at]
}

// turn goes on to the next controller.
func (m *Member) turn() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.at = (m.at + 1) % len(m.cfg.Controllers)
}

func (m *Member) client(t *tls.Config) client {
	t.NextProtos = []string{"h2", "http/1.1"}
	transport := &http.Transport{
		TLSClientConfig:     t,
		ForceAttemptHTTP2:   true,
		DialContext:         (&net.Dialer{Timeout: connectPatience}).DialContext,
		TLSHandshakeTimeout: connectPatience,
		IdleConnTimeout:     2 * time.Minute,
		// Finds out within half a minute that the controller is gone.
		HTTP2: &http.HTTP2Config{SendPingTimeout: 15 * time.Second, PingTimeout: 10 * time.Second, WriteByteTimeout: 30 * time.Second},
	}
	host := strings.TrimPrefix(m.controller(), "tcp:")
	if path, ok := strings.CutPrefix(host, "tls+unix:"); ok {
		host = "controller"
		transport.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", path)
		}
	}
	var rt http.RoundTripper = dated{transport, m}
	if m.cfg.Transport != nil {
		rt = m.cfg.Transport(rt)
	}
	return client{waystampv1connect.NewNodeClient(&http.Client{Transport: rt}, "https://"+host,
		// Secrets are not compressed together with data that others may choose.
		connect.WithAcceptCompression("gzip", nil, nil), connect.WithReadMaxBytes(plan.FileMax+1<<20)), transport}
}

// dated compares the time of each answer (RFC 9110 6.6.1) with this machine's.
type dated struct {
	http.RoundTripper
	m *Member
}

func (d dated) RoundTrip(r *http.Request) (*http.Response, error) {
	asked := d.m.cfg.Now()
	answer, err := d.RoundTripper.RoundTrip(r)
	if err == nil {
		if from, err := http.ParseTime(answer.Header.Get("Date")); err == nil {
			off := int64(clockOff(asked, d.m.cfg.Now(), from))
			d.m.clockOff.Store(&off)
		}
	}
	return answer, err
}

// clockOff is how much a clock must be ahead, at the least, that read these times before a request and behind its answer, where the
// answer was written in the second from a time on.
func clockOff(asked, answered, from time.Time) time.Duration {
	switch to := from.Add(time.Second); {
	case asked.After(to):
		return asked.Sub(to)
	case answered.Before(from):
		return answered.Sub(from)
	}
	return 0
}

// ClockOff is how much this machine's clock is ahead of the controller's at the least, as of the last answer.
func (m *Member) ClockOff() (off time.Duration, known bool) {
	if at := m.clockOff.Load(); at != nil {
		return time.Duration(*at), true
	}
	return 0, false
}

// Run is the member's loop until ctx ends; that is no error. After any error of the connection
// it tries again, with the next controller; it pauses between rounds.
func (m *Member) Run(ctx context.Context) error {
	pause, failed := pauseMin, 0
	for {
		began := time.Now()
		err := m.session(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if time.Since(began) > pauseMax {
			pause, failed = pauseMin, 0
		}
		if err != nil {
			again, at := pause.Round(time.Millisecond), m.controller()
			switch renewed := errors.Is(err, errRenewed); {
			case errors.Is(err, errCertify):
				m.cfg.Log.Warn("the controller has signed no certificates for ends of sealed parts; the data path stays as it is", "controller", at, "err", err, "again in", again)
			case errors.Is(err, errKeep):
				m.cfg.Log.Warn("the controller's plan is asked for again, since this node could not keep it", "controller", at, "again in", again)
			case errors.Is(err, errRoots):
				m.cfg.Log.Info("the certificate was renewed, since the controller's roots have changed")
			case renewed && pause == pauseMin:
				pause *= 2
				continue
			case renewed:
				m.cfg.Log.Warn("the certificate is renewed again and again: is this machine's clock right?", "again in", again)
			default:
				m.turn()
				if failed++; failed < len(m.cfg.Controllers) {
					m.cfg.Log.Warn("no connection to this controller; the next one is tried", "controller", at, "err", err)
					continue
				}
				failed = 0
				m.cfg.Log.Warn("no connection to the controller; the data path stays as it is", "controller", at, "err", err, "again in", again)
			}
			select {
			case <-ctx.Done():
				return nil
			case <-time.After(jitter(pause)):
			}
			pause = min(2*pause, pauseMax)
		}
	}
}

// jitter is half to all of a time.
func jitter(d time.Duration) time.Duration {
	var b [8]byte
	if _, err := rand.Read(b[:]); err != nil {
		return d
	}
	return d/2 + time.Duration(binary.BigEndian.Uint64(b[:])%uint64(d/2+1))
}

// renewWithinMax is how many milliseconds a controller may spread renewals over.
const renewWithinMax = 600_000

// draw is none to all of a time.
func draw(d time.Duration) time.Duration { return 2*jitter(d) - d }

// pins are the roots that the node trusts, as the controller is told them.
func (id *nodeIdentity) pins() (pins []string) {
	for _, r := range id.file.Roots {
		pins = append(pins, digest(r))
	}
	return pins
}

// errRoots ends a session whose certificate was renewed because the controller said so.
var errRoots = errors.New("the controller's roots have changed")

// errRenewed ends a session whose certificate has been replaced.
var errRenewed = errors.New("the certificate was renewed")

// Join joins with the token, and follows nothing. Run does it by itself.
func (m *Member) Join(ctx context.Context) error {
	token, err := identity.ParseToken(m.cfg.Token)
	if err != nil {
		return err
	}
	_, err = m.join(ctx, token)
	return err
}

// Renew renews the certificate. Run does it by itself.
func (m *Member) Renew(ctx context.Context) error {
	_, err := m.renew(ctx, m.id.get())
	return err
}

// Call sends the last report to the controller, once.
func (m *Member) Call(ctx context.Context) error {
	c := m.client(m.tls(m.id.get()))
	defer c.close()
	return m.tell(ctx, c, Report{})
}

// session joins if need be, and follows the controller until something fails.
func (m *Member) session(ctx context.Context) error {
	id := m.id.get()
	var err error
	if m.cfg.Token != "" {
		token, err := identity.ParseToken(m.cfg.Token)
		if err != nil {
			return err
		}
		if id == nil || id.file.Token != identity.HashToken(token.Secret) {
			joined, err := m.join(ctx, token)
			switch {
			case err == nil:
				id = joined
				m.cfg.Log.Info("this node has joined", "node", id.name, "controller", m.controller())
			case id == nil || ctx.Err() != nil:
				return fmt.Errorf("join: %w", err)
			default: // the token was used, perhaps; the node has joined before
				m.cfg.Log.Warn("this node cannot join again, and keeps its identity", "node", id.name, "err", err)
			}
		}
	}
	if m.cfg.Now().After(m.renewAt(id, 1, 2)) {
		if id, err = m.renew(ctx, id); err != nil {
			return fmt.Errorf("renew the certificate: %w", err)
		}
	}
	c := m.client(m.tls(id))
	defer c.close()
	// The session says that the node has certificates of the root that signs now: of its ends, too.
	if have, _ := m.onDisk(); len(have.CertifiedEnds()) > 0 {
		if err := m.certify(ctx, c, id, have, false); errors.Is(err, errRoots) || ctx.Err() != nil {
			return err
		} else if err != nil {
			m.cfg.Log.Warn("ends of sealed parts have no new certificates", "err", err)
		}
	}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return m.follow(ctx, c, id) })
	group.Go(func() error { return m.acknowledge(ctx, c) })
	group.Go(func() error { return m.tellRefusals(ctx, c) })
	group.Go(func() error { return m.tellTraced(ctx, c) })
	group.Go(func() error { return m.tellNumbers(ctx, c) })
	group.Go(func() error { return m.keepEnds(ctx, c, id) })
	group.Go(func() error {
		// Between half and three quarters of its life.
		from, to := m.renewAt(id, 1, 2), m.renewAt(id, 3, 4)
		wait := from.Sub(m.cfg.Now()) + jitter(2*to.Sub(from)) - to.Sub(from)
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(wait):
		}
		if _, err := m.renew(ctx, id); err != nil {
			return fmt.Errorf("renew the certificate: %w", err)
		}
		return errRenewed
	})
	return group.Wait()
}

// renewAt is a part of the certificate's life, from when it was issued.
func (m *Member) renewAt(id *nodeIdentity, part, of time.Duration) time.Time {
	life := id.cert.NotAfter.Sub(id.cert.NotBefore)
	return id.cert.NotBefore.Add(life * part / of)
}

func (m *Member) tls(id *nodeIdentity) *tls.Config {
	return identity.ClientTLS(
		func() []*x509.Certificate { return id.roots },
		func() (*tls.Certificate, error) {
			return &tls.Certificate{Certificate: [][]byte{id.cert.Raw}, PrivateKey: id.key}, nil
		}, m.cfg.Now)
}

// joiningFile is the key of a node that has asked for its first certificate. If the answer is lost, it asks again with the same key and token.
type joiningFile struct {
	Token string `json:"token"` // its hash
	Key   []byte `json:"key"`   // RFC 5915
}

func (m *Member) joiningPath() string { return filepath.Join(m.cfg.Dir, "joining.json") }

// joiningKey is the key to join with: that of an earlier attempt with the token, or one that is on disk from now on.
func (m *Member) joiningKey(token identity.Token) (*ecdsa.PrivateKey, error) {
	hash := identity.HashToken(token.Secret)
	if b, err := planfile.Read(m.joiningPath()); err == nil {
		var f joiningFile
		if json.Unmarshal(b, &f) == nil && f.Token == hash {
			if key, err := x509.ParseECPrivateKey(f.Key); err == nil {
				return key, nil
			}
		}
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return nil, err
	}
	b, err := json.Marshal(joiningFile{hash, der})
	if err != nil {
		return nil, err
	}
	if err := replace(m.joiningPath(), b); err != nil {
		return nil, fmt.Errorf("keep the node's key: %w", err)
	}
	return key, nil
}

func (m *Member) join(ctx context.Context, token identity.Token) (*nodeIdentity, error) {
	key, err := m.joiningKey(token)
	if err != nil {
		return nil, err
	}
	request, err := identity.Request(key)
	if err != nil {
		return nil, err
	}
	c := m.client(identity.JoinTLS(token.Pin, m.cfg.Now))
	defer c.close()
	answer, err := c.Join(ctx, connect.NewRequest(&v1.JoinRequest{Token: token.Secret, Node: m.cfg.Node, CertificateRequest: request}))
	if err != nil {
		return nil, err
	}
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return nil, err
	}
	id, err := m.take(answer.Msg.Certificates, answer.Msg.Roots, identityFile{Key: der, Token: identity.HashToken(token.Secret)})
	if err != nil {
		return nil, err
	}
	if err := os.Remove(m.joiningPath()); err != nil {
		m.cfg.Log.Error("the key to join with is kept in two files", "err", err)
	}
	return id, nil
}

func (m *Member) take(certificates, roots [][]byte, f identityFile) (*nodeIdentity, error) {
	if len(certificates) == 0 || len(roots) == 0 {
		return nil, errors.New("the controller's answer has no certificate")
	}
	f.Certificate, f.Roots = certificates[0], roots
	return m.keepIdentity(f)
}

// renew gets another certificate for the same key, over a connection of its own.
func (m *Member) renew(ctx context.Context, id *nodeIdentity) (*nodeIdentity, error) {
	c := m.client(m.tls(id))
	defer c.close()
	answer, err := c.Renew(ctx, connect.NewRequest(&v1.RenewRequest{}))
	if err != nil {
		return nil, err
	}
	return m.take(answer.Msg.Certificates, answer.Msg.Roots, id.file)
}

// follow puts each plan on disk that the controller sends.
func (m *Member) follow(ctx context.Context, c client, id *nodeIdentity) error {
	have, digest := m.onDisk()
	stream, err := c.Plans(ctx, connect.NewRequest(&v1.PlansRequest{Revision: have.Revision, Digest: digest, Held: latest(have), Roots: m.pinsOf(id), Knows: m.cfg.Knows, Traces: true, Drains: !m.cfg.NoDrains, TraceFlows: !m.cfg.NoFlows}))
	if err != nil {
		return err
	}
	defer stream.Close()
	defer m.order(nil)
	defer m.drain(nil)
	for stream.Receive() {
		if t := stream.Msg().Traces; t != nil {
			m.order(t)
			continue
		}
		if d := stream.Msg().Drains; d != nil {
			m.drain(d)
			continue
		}
		if r := stream.Msg(); r.Renew {
			select {
			case <-ctx.Done():
				return context.Cause(ctx)
			case <-time.After(draw(time.Duration(min(r.RenewWithinMilliseconds, renewWithinMax)) * time.Millisecond)):
			}
			if _, err := m.renew(ctx, id); err != nil {
				return fmt.Errorf("renew the certificate, since the controller's roots have changed: %w", err)
			}
			return errRoots
		}
		err := m.receive(stream.Msg(), id.name, func(n plan.Node) error { return m.certify(ctx, c, id, n, true) })
		if errors.Is(err, errRoots) {
			return err
		}
		if err != nil {
			m.cfg.Log.Error("a plan of the controller is refused, and the one before stays in force", "revision", stream.Msg().Revision, "err", err)
			m.refuse(stream.Msg().Revision, err)
			if errors.Is(err, errCertify) || errors.Is(err, errKeep) { // a later session gets the plan again
				return err
			}
		}
	}
	return cmp.Or(stream.Err(), errors.New("the controller has ended the connection"))
}

// latest are the latest epochs of all paths in a plan. A controller with records from a backup
// continues above them.
func latest(n plan.Node) (held []*v1.HeldEpoch) {
	at := map[uint32]*v1.HeldEpoch{}
	for id := range n.PathIDs() {
		have, ok := at[id.Path]
		if !ok {
			have = &v1.HeldEpoch{Path: id.Path, Epoch: uint32(id.Epoch)}
			at[id.Path] = have
			held = append(held, have)
		}
		if int8(id.Epoch-uint8(have.Epoch)) > 0 { // after 255 comes 0
			have.Epoch = uint32(id.Epoch)
		}
	}
	return held
}

func (m *Member) onDisk() (plan.Node, string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.have, m.digest
}

// errKeep ends a session whose plan does not get to disk, for want of room perhaps.
var errKeep = errors.New("this node cannot keep the plan in its state directory")

// ErrOlder means that a plan is older than the one on the node's disk.
var ErrOlder = errors.New("it is older than the plan on this node's disk")

// receive checks a plan, and puts it in the place of the one before. certify gets the certificates of its ends; without them the
// plan is refused, and whoever changes the domain waits.
func (m *Member) receive(r *v1.PlansResponse, name string, certify func(plan.Node) error) error {
	if digest(r.Plan) != r.Digest {
		return errors.New("its digest is not that of its bytes")
	}
	n, err := plan.DecodeNode(r.Plan)
	if err != nil {
		return err
	}
	have, had := m.onDisk()
	switch {
	case n.Name != name:
		return fmt.Errorf("it is for node %s, and this is %s", n.Name, name)
	case n.Revision != r.Revision || n.Revision == 0:
		return fmt.Errorf("its revision is %d, and it came as %d", n.Revision, r.Revision)
	case n.Revision == have.Revision && r.Digest != had:
		return fmt.Errorf("it is another plan than the one on this node's disk, of the same revision %d; records of a backup are to be put back with waystamp controller restore", n.Revision)
	case n.Revision < have.Revision:
		return fmt.Errorf("%w: revision %d, and that has %d; records of a backup are to be put back with waystamp controller restore", ErrOlder, n.Revision, have.Revision)
	}
	if err := certify(n); err != nil {
		return err
	}
	if err := m.keepPlan(n, r.Digest, r.Plan); err != nil {
		return fmt.Errorf("%w: %w", errKeep, err)
	}
	m.first.Do(func() { close(m.planned) })
	select {
	case m.arrived <- struct{}{}:
	default:
	}
	if m.cfg.Received != nil {
		m.cfg.Received(n, r.Digest)
	}
	return nil
}

// refuse notes that a plan did not even get to disk.
func (m *Member) refuse(revision uint64, err error) {
	m.mu.Lock()
	r := m.report
	m.mu.Unlock()
	r.Refused, r.Error = revision, err.Error()
	m.Report(r)
}

// Serve runs the agent from the first plan on, until it ends. If the agent cannot start from the
// plans on disk, as refused reports of its error, Serve reports that to the controller, and runs
// the agent again with the next plan, or later: the machine may have what it lacks by then.
func (m *Member) Serve(ctx context.Context, agent func(context.Context) error, refused func(error) bool) error {
	select {
	case <-m.planned:
	default:
		m.cfg.Log.Info("waiting for the first plan of the controller", "controller", m.controller())
	}
	select {
	case <-m.planned:
	case <-ctx.Done():
		return nil
	}
	for {
		select {
		case <-m.arrived: // the agent reads it
		default:
		}
		have, _ := m.onDisk()
		err := agent(ctx)
		if err == nil || ctx.Err() != nil || !refused(err) {
			return err
		}
		m.cfg.Log.Error("the agent cannot start from its plan; it waits for another one", "revision", have.Revision, "err", err)
		m.Report(Report{Refused: have.Revision, Error: err.Error()})
		select {
		case <-m.arrived:
		case <-time.After(jitter(pauseMax)):
		case <-ctx.Done():
			return nil
		}
	}
}

// Report sets the plan in the kernel; the controller receives it as soon as possible.
func (m *Member) Report(r Report) {
	if err := m.settle(r); err != nil {
		m.cfg.Log.Error("a plan in force cannot be stored, and is not reported to the controller", "revision", r.Revision, "err", err)
		return
	}
	m.mu.Lock()
	m.report = r
	m.mu.Unlock()
	select {
	case m.reports <- struct{}{}:
	default:
	}
}

func (m *Member) tell(ctx context.Context, c client, r Report) error {
	_, err := c.Acknowledge(ctx, connect.NewRequest(&v1.AcknowledgeRequest{
		Revision: r.Revision, Digest: r.Digest, Refused: r.Refused, Error: r.Error, Problems: r.Problems, Warnings: r.Warnings,
	}))
	return err
}

// acknowledge sends each new report to the controller, and at first the last one.
func (m *Member) acknowledge(ctx context.Context, c client) error {
	var told *Report
	for {
		m.mu.Lock()
		r := m.report
		m.mu.Unlock()
		if told == nil || !reflect.DeepEqual(*told, r) {
			err := m.tell(ctx, c, r)
			if connect.CodeOf(err) == connect.CodeAborted { // another controller wrote at the same time
				continue
			}
			if connect.CodeOf(err) == connect.CodeResourceExhausted { // the last report counts
				select {
				case <-ctx.Done():
					return context.Cause(ctx)
				case <-time.After(acknowledgePause):
				}
				continue
			}
			if err != nil {
				return fmt.Errorf("acknowledge: %w", err)
			}
			told = &r
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-m.reports:
		}
	}
}
