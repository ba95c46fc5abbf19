package controller

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/waystamp/waystamp/internal/await"
	"github.com/waystamp/waystamp/internal/identity"
	"github.com/waystamp/waystamp/internal/manifest"
	"github.com/waystamp/waystamp/internal/member"
	"github.com/waystamp/waystamp/internal/plan"
	v1 "github.com/waystamp/waystamp/internal/rpc/waystampv1"
	"github.com/waystamp/waystamp/internal/rpc/waystampv1/waystampv1connect"
	"github.com/waystamp/waystamp/internal/seal"
)

// sealedFile has a gateway on r1, and functions that read payload on r3 (av) and r4 (ids).
func sealedFile(t *testing.T) string {
	t.Helper()
	return string(readFile(t, "../../examples/zerotrust.yaml"))
}

var sealedNodes = []string{"r1", "r2", "r3", "r4", "r6"}

// sealedEnds are the node and the function of each end.
var sealedEnds = [][2]string{{"r1", "gateway"}, {"r3", "av"}, {"r4", "ids"}}

// seeds are the private keys of the node's ends, as its disk has them.
func (f *fake) seeds() map[string][]byte {
	f.w.Helper()
	var on struct {
		Ends []struct {
			Function string
			Key      []byte
		}
	}
	name := filepath.Join(f.dir, "ends.json")
	info, err := os.Stat(name)
	f.w.must(err)
	if info.Mode().Perm() != 0o600 {
		f.w.Errorf("%s has mode %o", name, info.Mode().Perm())
	}
	f.w.must(json.Unmarshal(readFile(f.w.T, name), &on))
	out := map[string][]byte{}
	for _, e := range on.Ends {
		out[e.Function] = e.Key
	}
	return out
}

// holds says in which form some bytes have a key.
func holds(b, key []byte) string {
	for form, k := range map[string][]byte{"raw": key, "hexadecimal": []byte(hex.EncodeToString(key)), "base64": []byte(base64.StdEncoding.EncodeToString(key)[:40])} {
		if bytes.Contains(b, k) {
			return form
		}
	}
	return ""
}

func (w *world) joinSealed() map[string]*fake {
	agents := map[string]*fake{}
	for _, name := range sealedNodes {
		agents[name] = w.join(name)
	}
	return agents
}

// endName is what an end is called.
func endName(node, function string) string {
	return "spiffe://waystamp/node/" + node + "/function/" + function
}

// partOf is what a node's plan and its own certificate make of one end of a part; is stands for the certificate, nil: the node's own.
func (f *fake) partOf(function, peer string, is *seal.Identity) *seal.Part {
	f.w.Helper()
	name := endName(f.name, function)
	n := f.now()
	if want := n.CertifiedEnds()[function]; want != name {
		f.w.Fatalf("the plan of %s calls its end %q; want %s", f.name, want, name)
	}
	if is == nil {
		own, err := f.member.End(name)
		f.w.must(err)
		is = &own
	}
	e := seal.Epoch{Number: 1, Key: is.Key, Certificate: is.Certificate, Roots: is.Roots}
	found := false
	of := func(s *plan.Seal) {
		if s != nil && s.Name == name && s.Peer == peer {
			e.PeerRevocations, found = max(e.PeerRevocations, s.PeerRevocations), true
		}
	}
	for _, h := range n.Headends {
		of(h.Seal)
	}
	for _, e := range n.Egresses {
		of(e.Seal)
	}
	if !found {
		f.w.Fatalf("the plan of %s has no part between %s and %s", f.name, name, peer)
	}
	return &seal.Part{Chain: "c", Path: 1, Name: name, Other: peer, Epochs: []seal.Epoch{e}}
}

// talks says whether a chain's first part opens between two nodes, with what they have now.
func talks(t *testing.T, from, to *fake, function string) error {
	t.Helper()
	a := from.partOf("gateway", endName(to.name, function), nil)
	dialled, accepted := shakeHands(t, a, to.partOf(function, a.Name, nil))
	return errors.Join(dialled, accepted)
}

// shakeHands opens a part by a connection, and says why who dials and who accepts did not go on.
func shakeHands(t *testing.T, a, b *seal.Part) (dialled, accepted error) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	ctx, stop := context.WithTimeout(t.Context(), await.Limit(20*time.Second))
	defer stop()
	taken := make(chan error, 1)
	go func() {
		c, err := l.Accept()
		if err != nil {
			taken <- err
			return
		}
		defer c.Close()
		s, _, err := b.Accept(ctx, c)
		if err == nil {
			err = s.Answer(ctx, seal.Answer{})
		}
		taken <- err
	}()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	_, dialled = a.Dial(ctx, c, "shop", seal.HTTP1)
	c.Close()
	return dialled, <-taken
}

// Nothing but a node's own disk has the private key of an end: neither the controller's records, nor what is sent, nor plans.
func TestEndsMakeTheirOwnKeys(t *testing.T) {
	w := newWorld(t)
	w.start()
	agents := w.joinSealed()
	w.until("a sealed chain", settled(w.apply(sealedFile(t))))
	w.until("secrets rotate", settled(w.rotate()))
	records, err := w.store.Snapshot(t.Context(), "")
	w.must(err)
	var all bytes.Buffer
	for name, r := range records.Records {
		all.WriteString(name)
		all.Write(r.Value)
	}
	for name, f := range agents {
		f.mu.Lock()
		all.Write(f.wire.Bytes())
		all.Write(f.sent.Bytes())
		f.mu.Unlock()
		b, err := plan.EncodeNode(f.now())
		w.must(err)
		all.Write(b)
		for _, h := range f.now().Headends {
			if s := h.Seal; s != nil && (!s.Certified || s.Key != plan.SealKey{} || s.PeerKey != plan.SealPublic{}) {
				t.Errorf("%s: %s has a key of the plan", name, h.PathID)
			}
		}
		for _, e := range f.now().Egresses {
			if s := e.Seal; s != nil && (!s.Certified || s.Key != plan.SealKey{} || s.PeerKey != plan.SealPublic{}) {
				t.Errorf("%s: %s has a key of the plan", name, e.PathID)
			}
		}
	}
	keys := 0
	for _, at := range sealedEnds {
		seed := agents[at[0]].seeds()[at[1]]
		if len(seed) != ed25519.SeedSize {
			t.Fatalf("%s has no key of %s", at[0], at[1])
		}
		keys++
		if form := holds(all.Bytes(), seed); form != "" {
			t.Errorf("the key of %s on %s is elsewhere, %s", at[1], at[0], form)
		}
		// The search finds what is there: the public key, in the request and in the certificate.
		if public := ed25519.NewKeyFromSeed(seed).Public().(ed25519.PublicKey); holds(all.Bytes(), public) != "raw" {
			t.Errorf("the public key of %s on %s was not found; the search shows nothing", at[1], at[0])
		}
		if own := readFile(t, filepath.Join(agents[at[0]].dir, "ends.json")); holds(own, seed) != "base64" {
			t.Errorf("the key of %s was not found on its own node; the search shows nothing", at[1])
		}
	}
	// Plans as files have the keys, which the same search finds.
	m, err := manifest.Parse("zerotrust.yaml", []byte(sealedFile(t)))
	w.must(err)
	d, err := plan.Compile(m.Domain, plan.NewKeyring(rand.Reader, nil))
	w.must(err)
	file, err := plan.EncodePaths(d.Paths)
	w.must(err)
	for _, p := range d.Paths {
		if p.Seal != nil && holds(file, p.Seal.From[:]) != "hexadecimal" {
			t.Errorf("the key in the plan file of %s was not found; the search shows nothing", p.PathID)
		}
	}
	for _, to := range sealedEnds[1:] {
		w.must(talks(t, agents["r1"], agents[to[0]], to[1]))
	}
}

// certify calls as a node does.
func (f *fake) certify(ends ...*v1.EndRequest) (*v1.CertifyResponse, error) {
	f.w.Helper()
	var on struct {
		Key, Certificate []byte
		Roots            [][]byte
	}
	f.w.must(json.Unmarshal(readFile(f.w.T, filepath.Join(f.dir, "identity.json")), &on))
	key, err := x509.ParseECPrivateKey(on.Key)
	f.w.must(err)
	var roots []*x509.Certificate
	for _, der := range on.Roots {
		root, err := x509.ParseCertificate(der)
		f.w.must(err)
		roots = append(roots, root)
	}
	transport := &http.Transport{ForceAttemptHTTP2: true, TLSClientConfig: identity.ClientTLS(func() []*x509.Certificate { return roots }, func() (*tls.Certificate, error) {
		return &tls.Certificate{Certificate: [][]byte{on.Certificate}, PrivateKey: key}, nil
	}, time.Now)}
	defer transport.CloseIdleConnections()
	c := waystampv1connect.NewNodeClient(&http.Client{Transport: transport}, "https://"+f.w.listen)
	r, err := c.Certify(f.w.Context(), connect.NewRequest(&v1.CertifyRequest{Ends: ends}))
	if err != nil {
		return nil, err
	}
	return r.Msg, nil
}

func endRequest(t *testing.T, function string) *v1.EndRequest {
	t.Helper()
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	r, err := identity.EndRequest(key)
	if err != nil {
		t.Fatal(err)
	}
	return &v1.EndRequest{Function: function, CertificateRequest: r}
}

// A node gets certificates for the ends that its own plan has, and for nothing else.
func TestANodeIsCertifiedForItsOwnEndsAlone(t *testing.T) {
	w := newWorld(t)
	audit, err := OpenAudit(filepath.Join(w.T.TempDir(), "audit"))
	w.must(err)
	w.audit = audit
	w.start()
	agents := w.joinSealed()
	w.until("a sealed chain", settled(w.apply(sealedFile(t))))
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	w.must(err)
	node, err := identity.Request(key)
	w.must(err)
	damaged := endRequest(t, "av")
	damaged.CertificateRequest[len(damaged.CertificateRequest)-1] ^= 1
	for name, c := range map[string]struct {
		node string
		end  *v1.EndRequest
		says string // "": it is signed
	}{
		"its own function":           {"r3", endRequest(t, "av"), ""},
		"another node's function":    {"r4", endRequest(t, "av"), `node r4 has no end of a sealed part at function "av"`},
		"another node's gateway":     {"r3", endRequest(t, "gateway"), "has no end of a sealed part"},
		"a function that reads none": {"r2", endRequest(t, "fw2"), "has no end of a sealed part"},
		"no function":                {"r3", endRequest(t, ""), "has no end of a sealed part"},
		"a path in a name":           {"r3", endRequest(t, "av/../gateway"), "has no end of a sealed part"},
		"a key of a node's kind":     {"r3", &v1.EndRequest{Function: "av", CertificateRequest: node}, "another kind than Ed25519"},
		"a request of another's key": {"r3", damaged, "not signed by its key"},
		"no request":                 {"r3", &v1.EndRequest{Function: "av"}, "read the certificate request"},
	} {
		r, err := agents[c.node].certify(c.end)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		got := r.Ends[0]
		if (len(got.Certificate) > 0) != (c.says == "") || (got.Error == "") != (c.says == "") || !strings.Contains(got.Error, c.says) {
			t.Errorf("%s: %d bytes of a certificate, and %q; want %q", name, len(got.Certificate), got.Error, c.says)
		}
	}
	lines := string(readFile(t, audit.path))
	for _, want := range []string{`"about":"function av of r3 with key`, `"result":"signed"`, `"about":"function av of r4","result":"refused: the plan of node r4`} {
		if !strings.Contains(lines, want) {
			t.Errorf("the audit trail has no %s:\n%s", want, lines)
		}
	}
	if _, err := agents["r6"].certify(make([]*v1.EndRequest, certifyMost+1)...); code(err) != connect.CodeInvalidArgument {
		t.Errorf("a call with %d ends: %v", certifyMost+1, err)
	}
	// More than some calls in a row wait, of this node alone.
	for i := 0; ; i++ {
		if _, err = agents["r2"].certify(); err != nil {
			break
		}
		if i > 2*renewMost {
			t.Fatal("a node may call as often as it likes")
		}
	}
	if code(err) != connect.CodeResourceExhausted {
		t.Errorf("too many calls: %v", err)
	}
	if _, err := agents["r1"].certify(endRequest(t, "gateway")); err != nil {
		t.Errorf("another node waits, too: %v", err)
	}
	// Whoever was revoked gets none.
	if _, err := w.admin.Revoke(t.Context(), connect.NewRequest(&v1.RevokeRequest{Node: "r4"})); err != nil {
		t.Fatal(err)
	}
	if _, err := agents["r4"].certify(endRequest(t, "ids")); code(err) != connect.CodePermissionDenied || !strings.Contains(err.Error(), "was revoked") {
		t.Errorf("a node that was revoked: %v", err)
	}
	w.until("the domain without it", func(s *v1.State) bool { return s.Settled })
	// What it had is no good: nobody's plan names its end any more.
	for _, name := range []string{"r1", "r3", "r6"} {
		n := agents[name].now()
		for _, h := range n.Headends {
			if h.Seal != nil && strings.Contains(h.Seal.Peer, "/r4/") {
				t.Errorf("%s still dials %s", name, h.Seal.Peer)
			}
		}
	}
}

// A node that was revoked joins again, with another machine or on the same disk: others take its new certificates, and refuse those
// that were stolen of it before, whether they dial or accept.
func TestStolenCertificatesOfARevokedNodeAreRefusedWhenItJoinsAgain(t *testing.T) {
	const gateway, av = "gateway", "av" // of r1, which dials, and of r3, which accepts
	for node, function := range map[string]string{"r1": gateway, "r3": av} {
		t.Run(node, func(t *testing.T) {
			w := newWorld(t)
			w.start()
			agents := w.joinSealed()
			w.until("a sealed chain", settled(w.apply(sealedFile(t))))
			// show is what the other end says of a certificate; nil: of the node's own.
			show := func(is *seal.Identity) error {
				t.Helper()
				of := map[string]*seal.Identity{node: is}
				dialled, accepted := shakeHands(t, agents["r1"].partOf(gateway, endName("r3", av), of["r1"]), agents["r3"].partOf(av, endName("r1", gateway), of["r3"]))
				if node == "r1" {
					return accepted
				}
				return dialled
			}
			var stolen []seal.Identity
			for revocation := range 2 {
				own, err := agents[node].member.End(endName(node, function))
				w.must(err)
				stolen = append(stolen, own)
				w.must(show(&own))
				if _, err := w.admin.Revoke(t.Context(), connect.NewRequest(&v1.RevokeRequest{Node: node})); err != nil {
					t.Fatal(err)
				}
				w.until("the domain without it", func(s *v1.State) bool { return s.Settled })
				agents[node].stop()
				token, err := w.admin.CreateToken(t.Context(), connect.NewRequest(&v1.CreateTokenRequest{Node: node, Reinstate: true}))
				w.must(err)
				if revocation == 0 { // the disk of before, without the key that was revoked
					w.must(os.Remove(filepath.Join(agents[node].dir, "identity.json")))
				} else {
					agents[node] = &fake{w: w, name: node, dir: filepath.Join(w.T.TempDir(), node)}
				}
				agents[node].run(token.Msg.Token)
				w.until("the domain with it", func(s *v1.State) bool {
					return s.Settled && slices.ContainsFunc(s.Nodes, func(n *v1.NodeState) bool { return n.Name == node && n.State == nodeReady })
				})
				w.must(show(nil))
				for i := range stolen {
					if err := show(&stolen[i]); err == nil || seal.ReasonOf(err) != seal.Revoked {
						t.Errorf("after revocation %d the other end says of certificate %d of before: %v; want %s", revocation+1, i, err, seal.Revoked)
					}
				}
			}
		})
	}
}

// A plan whose ends have no certificates is not taken: the change waits for the node, and says why.
func TestAPlanWaitsForCertificatesOfItsEnds(t *testing.T) {
	w := newWorld(t)
	var later atomic.Int64
	w.now = func() time.Time { return time.Now().Add(time.Duration(later.Load())) }
	w.start()
	agents := w.joinSealed()
	w.until("r3 has joined", func(s *v1.State) bool {
		_, err := os.Stat(filepath.Join(agents["r3"].dir, "identity.json"))
		return err == nil
	})
	// The node has had so many that it gets no more for a while.
	for {
		if _, err := agents["r3"].certify(); err != nil {
			break
		}
	}
	w.apply(sealedFile(t))
	s := w.until("r3 refuses", func(s *v1.State) bool {
		return slices.ContainsFunc(s.Nodes, func(n *v1.NodeState) bool {
			return n.Name == "r3" && strings.Contains(n.Reason, "certificates for ends of sealed parts")
		})
	})
	if s.Settled || !slices.Contains(s.WaitingFor, "r3") {
		t.Errorf("the change does not wait for r3: %v", s.WaitingFor)
	}
	for _, p := range agents["r3"].plans() {
		if len(p.CertifiedEnds()) > 0 {
			t.Error("r3 has taken a plan without certificates for it")
		}
	}
	later.Store(int64(2 * renewEvery))
	w.until("r3 gets them later", func(s *v1.State) bool { return s.Settled })
	w.must(talks(t, agents["r1"], agents["r3"], "av"))
}

// An agent starts without its controller, and its ends go on with what is on its disk.
func TestEndsGoOnWithoutAController(t *testing.T) {
	w := newWorld(t)
	w.start()
	agents := w.joinSealed()
	w.until("a sealed chain", settled(w.apply(sealedFile(t))))
	w.stop()
	for _, name := range []string{"r1", "r3"} {
		agents[name].stop()
		agents[name].run("")
	}
	w.must(talks(t, agents["r1"], agents["r3"], "av"))
	// Until their certificates end.
	late, err := member.Open(member.Config{Controllers: []string{w.listen}, Dir: agents["r3"].dir, Node: "r3", Now: func() time.Time { return time.Now().Add(identity.EndValid + time.Minute) }})
	w.must(err)
	name := "spiffe://waystamp/node/r3/function/av"
	if _, err := late.End(name); err == nil || !strings.Contains(err.Error(), "ended at") {
		t.Errorf("a day later: %v", err)
	}
	if _, err := late.End("spiffe://waystamp/node/r3/function/fw"); err == nil || !strings.Contains(err.Error(), "no certificate") {
		t.Errorf("an end that it has not: %v", err)
	}
}

// Ends have certificates of the new root before the old one is dropped, and take each other all the while.
func TestEndsTakeEachOtherWhileTheCAIsReplaced(t *testing.T) {
	w := newWorld(t)
	w.start()
	agents := w.joinSealed()
	w.until("a sealed chain", settled(w.apply(sealedFile(t))))
	was := agents["r3"].seeds()["av"]
	before := w.state().Roots[0].Pin
	agents["r4"].stop()
	if _, err := w.admin.RotateCA(t.Context(), connect.NewRequest(&v1.RotateCARequest{})); err != nil {
		t.Fatal(err)
	}
	w.until("all but r4 trust both", rootsAre("signs", "coming r4"))
	w.must(talks(t, agents["r1"], agents["r3"], "av"))
	agents["r4"].run("")
	w.until("the new one signs, and the old one is dropped", func(s *v1.State) bool { return len(s.Roots) == 1 && s.Roots[0].Pin != before })
	for _, to := range sealedEnds[1:] {
		w.must(talks(t, agents["r1"], agents[to[0]], to[1]))
	}
	if slices.Equal(agents["r3"].seeds()["av"], was) {
		t.Error("r3 has the certificate of the old root")
	}
}

// An agent of before, which knows no certificates of ends, is told: the change waits for it.
func TestAnAgentOfBeforeIsIncompatibleWithCertifiedEnds(t *testing.T) {
	w := newWorld(t)
	w.start()
	for _, name := range sealedNodes {
		f := &fake{w: w, name: name, dir: filepath.Join(w.T.TempDir(), name)}
		if name == "r3" {
			f.knows = slices.DeleteFunc(plan.Features(), func(s string) bool { return s == "seal certificates" })
		}
		f.run(w.token(name))
	}
	w.apply(sealedFile(t))
	w.until("r3 is incompatible", func(s *v1.State) bool {
		return !s.Settled && slices.ContainsFunc(s.Nodes, func(n *v1.NodeState) bool {
			return n.Name == "r3" && n.State == nodeIncompatible && strings.Contains(n.Reason, "seal certificates")
		})
	})
}
