package gateway

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/waystamp/waystamp/internal/await"
	"github.com/waystamp/waystamp/internal/identity"
)

// signing is an audit log that is signed, and its clock.
type signing struct {
	t    *testing.T
	name string
	at   time.Time
	key  *AuditKey
	err  error // of the key
	said strings.Builder
	log  *Audit
	s    *Signatures
}

func newSigning(t *testing.T, key *AuditKey) *signing {
	t.Helper()
	s := &signing{t: t, name: filepath.Join(t.TempDir(), "audit.log"), at: time.Now(), key: key}
	s.open()
	t.Cleanup(s.close)
	return s
}

func (s *signing) now() time.Time { return s.at }

func (s *signing) open() {
	s.t.Helper()
	if err := s.tryOpen(); err != nil {
		s.t.Fatal(err)
	}
}

func (s *signing) tryOpen() error {
	f, err := OpenAuditFile(s.name)
	if err != nil {
		return err
	}
	if s.s, err = OpenSignatures(f, func() (*AuditKey, error) { return s.key, s.err }, slog.New(slog.NewTextHandler(&s.said, nil)), s.now); err != nil {
		return errors.Join(err, f.Close())
	}
	s.log, err = GoOnAudit(f, s.name, s.now)
	return err
}

func (s *signing) close() {
	s.t.Helper()
	if s.s == nil {
		return
	}
	if err := errors.Join(s.s.Close(), s.log.Close()); err != nil {
		s.t.Fatal(err)
	}
	s.s = nil
}

func (s *signing) write(lines int) {
	s.t.Helper()
	for range lines {
		if err := s.log.Write(Record{Event: EventDecided, Identity: "spiffe://staff.example/x", Path: "/a\n\x00<b>", Chain: "deep"}); err != nil {
			s.t.Fatal(err)
		}
	}
}

// sign writes lines, and signs them.
func (s *signing) sign(lines int) {
	s.t.Helper()
	s.write(lines)
	if err := s.s.Read(); err != nil {
		s.t.Fatal(err)
	}
	s.s.Sign()
}

func (s *signing) files() (log, signatures []byte) {
	s.t.Helper()
	log, err := os.ReadFile(s.name)
	if err != nil {
		s.t.Fatal(err)
	}
	signatures, err = os.ReadFile(SignaturesOf(s.name))
	if err != nil {
		s.t.Fatal(err)
	}
	return log, signatures
}

func (s *signing) verify(trust Trust) (Verified, error) {
	log, signatures := s.files()
	return VerifySigned(bytes.NewReader(log), bytes.NewReader(signatures), trust)
}

// nodeKey is the key of a node, with a certificate.
func nodeKey(t *testing.T, ca *identity.CA, node string, at time.Time) *AuditKey {
	t.Helper()
	key := newKey(t)
	der, err := ca.Issue(identity.ID{Node: node}, key.Public(), at)
	if err != nil {
		t.Fatal(err)
	}
	return &AuditKey{Signer: key, Certificate: der}
}

func newCA(t *testing.T) (*identity.CA, Trust) {
	t.Helper()
	ca, err := identity.NewCA("lab.example", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	root, err := x509.ParseCertificate(ca.Root())
	if err != nil {
		t.Fatal(err)
	}
	return ca, Trust{Roots: []*x509.Certificate{root}}
}

func TestASignedLogVerifies(t *testing.T) {
	ca, trust := newCA(t)
	s := newSigning(t, nodeKey(t, ca, "r1", time.Now()))
	s.sign(7)
	s.sign(5)
	s.write(3)
	for name, trust := range map[string]Trust{
		"by its certificate": trust, "by its certificate and node": {Roots: trust.Roots, Node: "r1"}, "by its key": {Keys: []crypto.PublicKey{s.key.Signer.Public()}},
	} {
		v, err := s.verify(trust)
		if err != nil || v.Lines != 15 || v.Signed.Lines != 12 || v.Signed.Count != 2 || !v.Signed.Trusted || (len(trust.Roots) > 0) != (v.Signed.Node == "r1") {
			t.Errorf("%s: %+v, %+v, %v; want 12 of 15 lines", name, v, v.Signed, err)
		}
	}
	if v, err := s.verify(Trust{}); err != nil || v.Signed.Trusted {
		t.Errorf("held against nothing: %+v, %v", v.Signed, err)
	}
}

func TestWhatWasChangedInASignedLogIsFound(t *testing.T) {
	ca, trust := newCA(t)
	otherCA, _ := newCA(t)
	s := newSigning(t, nodeKey(t, ca, "r1", time.Now()))
	for range 4 {
		s.sign(5)
	}
	s.write(2)
	log, signatures := s.files()
	lines, signed := strings.SplitAfter(string(log), "\n"), strings.SplitAfter(string(signatures), "\n")
	join := func(l ...[]string) (text string) {
		for _, part := range l {
			text += strings.Join(part, "")
		}
		return text
	}
	// rewritten is the log with another line 8, and all behind it written anew so that each follows from the one before.
	rewritten := func() string {
		at := newSigning(t, s.key)
		at.at = s.at
		for i := range 22 {
			r := Record{Event: EventDecided, Identity: "spiffe://staff.example/x", Path: "/a\n\x00<b>", Chain: "deep"}
			if i == 7 {
				r.Identity = "spiffe://staff.example/y"
			}
			if err := at.log.Write(r); err != nil {
				t.Fatal(err)
			}
		}
		text, _ := at.files()
		return string(text)
	}()
	others := func(key *AuditKey) string {
		at := newSigning(t, key)
		at.at = s.at.Add(time.Second)
		for range 4 {
			at.sign(5)
		}
		_, text := at.files()
		return string(text)
	}
	for name, test := range map[string]struct{ log, signatures, says string }{
		"a line changed":                    {join(lines[:4]) + strings.Replace(lines[4], "deep", "light", 1) + join(lines[5:]), string(signatures), "one of lines 1 to 5 was changed"},
		"a line less":                       {join(lines[:4], lines[5:]), string(signatures), "line 5 has number 6"},
		"two exchanged":                     {join(lines[:4]) + lines[5] + lines[4] + join(lines[6:]), string(signatures), "line 5 has number 6"},
		"the last signed line changed":      {join(lines[:19]) + strings.Replace(lines[19], "deep", "dark", 1), string(signatures), "line 20 is not the one that was signed"},
		"all behind a line written anew":    {rewritten, string(signatures), "line 10 is not the one that was signed"},
		"its end cut":                       {join(lines[:17]), string(signatures), "ends with line 17, and line 20 was signed"},
		"cut behind a signature":            {join(lines[:15]), string(signatures), "ends with line 15, and line 20 was signed"},
		"empty":                             {"", string(signatures), "ends with line 0, and line 5 was signed"},
		"no key":                            {string(log), join(signed[1:]), "by key"},
		"signatures exchanged":              {string(log), signed[0] + signed[2] + signed[1] + join(signed[3:]), "line 3 of the signatures: it is for line 5, which comes before"},
		"a signature twice":                 {string(log), join(signed[:2], signed[1:]), "line 3 of the signatures: it is for line 5, which comes before"},
		"half a signature":                  {string(log), string(signatures[:len(signatures)-9]), "line 5 of the signatures: it is not whole"},
		"a signature of other lines":        {string(log), join(signed[:1]) + strings.Replace(signed[1], `"lines":5`, `"lines":6`, 1), "it is not signed by key"},
		"another time":                      {string(log), join(signed[:1]) + strings.Replace(signed[1], `"time":"2`, `"time":"3`, 1), "it is not signed by key"},
		"another node of the same root":     {string(log), others(nodeKey(t, ca, "r2", time.Now())), "that of node r2; expect r1"},
		"of another log":                    {string(log), others(s.key), "it is for another log"},
		"a node of another root":            {string(log), others(nodeKey(t, otherCA, "r1", time.Now())), "the key's certificate"},
		"a key without a certificate":       {string(log), others(&AuditKey{Signer: newKey(t)}), "no certificate"},
		"the controller's certificate":      {string(log), others(controllersKey(t, ca)), "is that of the controller"},
		"a certificate of another key":      {string(log), others(&AuditKey{Signer: newKey(t), Certificate: s.key.Certificate}), "that of another key"},
		"a line of signatures that is none": {string(log), "hello\n" + string(signatures), "line 1 of the signatures: it is not understood"},
		"a line of 1 MB":                    {string(log), strings.Repeat("x", 1<<20), "line 1 of the signatures: it has more than"},
		"an unknown event":                  {string(log), strings.Replace(string(signatures), `"signed"`, `"sealed"`, 1), `is about "sealed"`},
	} {
		node := trust
		node.Node = "r1"
		if _, err := VerifySigned(strings.NewReader(test.log), strings.NewReader(test.signatures), node); err == nil || !strings.Contains(err.Error(), test.says) {
			t.Errorf("%s: %v; want %q", name, err, test.says)
		}
	}
	// A signature that is missing in between, or at the end, changes nothing of what the others say.
	for _, signatures := range []string{join(signed[:2], signed[3:]), join(signed[:4])} {
		if _, err := VerifySigned(bytes.NewReader(log), strings.NewReader(signatures), trust); err != nil {
			t.Error(err)
		}
	}
	// Every byte of a signature counts.
	whole, err := readSignature([]byte(signed[1]))
	if err != nil {
		t.Fatal(err)
	}
	for i := range len(signed[1]) - 1 {
		changed := []byte(signed[1])
		changed[i] ^= 1
		if e, err := readSignature(changed); err == nil && reflect.DeepEqual(e, whole) {
			continue // base64 has bits that mean nothing
		}
		if v, err := VerifySigned(bytes.NewReader(log), strings.NewReader(signed[0]+string(changed)), trust); err == nil && v.Signed.Count > 0 {
			t.Fatalf("byte %d of a signature may be changed: %s", i, changed)
		}
	}
}

func controllersKey(t *testing.T, ca *identity.CA) *AuditKey {
	t.Helper()
	key := newKey(t)
	der, err := ca.Issue(identity.ID{Controller: true}, key.Public(), time.Now())
	if err != nil {
		t.Fatal(err)
	}
	return &AuditKey{Signer: key, Certificate: der}
}

// A key signs for the one that follows it, and a new certificate for the same key is taken.
func TestTheKeyOfALogMayChange(t *testing.T) {
	ca, trust := newCA(t)
	first := nodeKey(t, ca, "r1", time.Now())
	s := newSigning(t, first)
	s.sign(3)
	again, err := ca.Issue(identity.ID{Node: "r1"}, first.Signer.Public(), time.Now().Add(time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	s.at = s.at.Add(time.Hour)
	s.key = &AuditKey{Signer: first.Signer, Certificate: again}
	s.sign(3)
	_, edKey, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	s.key = &AuditKey{Signer: edKey}
	s.sign(3)
	// One that cannot be read leaves the one before.
	s.err = errors.New("it is not there")
	s.sign(3)
	s.err = nil
	keys := func(k ...crypto.PublicKey) Trust { return Trust{Keys: k} }
	if v, err := s.verify(keys(first.Signer.Public())); err != nil || v.Signed.Lines != 12 || v.Signed.Count != 4 {
		t.Errorf("by the first key: %+v, %v", v.Signed, err)
	}
	if !strings.Contains(s.said.String(), "it is not there") {
		t.Errorf("it said %q", s.said.String())
	}
	// By roots, a key without a certificate counts if one that has one has signed it.
	if v, err := s.verify(trust); err != nil || v.Signed.Lines != 12 || v.Signed.Node != "" {
		t.Errorf("by the root: %+v, %v", v.Signed, err)
	}
	// Who trusts the last key alone does not trust what came before it.
	if _, err := s.verify(keys(edKey.Public())); err == nil || !strings.Contains(err.Error(), "none that is trusted") {
		t.Errorf("by the last key: %v", err)
	}
	_, signatures := s.files()
	log, _ := s.files()
	forged := bytes.Replace(signatures, []byte(`"by":"`), []byte(`"by":"0`), 1)
	if _, err := VerifySigned(bytes.NewReader(log), bytes.NewReader(forged), keys(first.Signer.Public())); err == nil || !strings.Contains(err.Error(), "which no line before names") {
		t.Errorf("a key by nobody: %v", err)
	}
	// One that says that the first key has signed it, and that has not; and another one under the name of one that it has signed.
	for says, change := range map[string]func(*signature){
		"is not signed by key": func(e *signature) { e.Signature[len(e.Signature)-1] ^= 1 },
		"and is named": func(e *signature) {
			var err error
			if e.Public, err = x509.MarshalPKIXPublicKey(newKey(t).Public()); err != nil {
				t.Fatal(err)
			}
		},
	} {
		forged := signatures
		for line := range bytes.Lines(signatures) {
			e, err := readSignature(line)
			if err != nil {
				t.Fatal(err)
			}
			if e.By == "" {
				continue
			}
			change(e)
			bad, err := json.Marshal(e)
			if err != nil {
				t.Fatal(err)
			}
			forged = bytes.Replace(forged, line, append(bad, '\n'), 1)
		}
		if _, err := VerifySigned(bytes.NewReader(log), bytes.NewReader(forged), keys(first.Signer.Public())); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("a forged key: %v; want %q", err, says)
		}
	}
	// A key that comes with a restart has nobody to sign it: a root knows it, a key does not.
	s.close()
	s.key = nodeKey(t, ca, "r1", time.Now())
	s.open()
	s.sign(3)
	if _, err := s.verify(keys(first.Signer.Public())); err == nil || !strings.Contains(err.Error(), "none that is trusted has signed it") {
		t.Errorf("a key of a later start: %v", err)
	}
	if v, err := s.verify(trust); err != nil || v.Signed.Lines != 15 || v.Signed.Node != "r1" {
		t.Errorf("by the root, after a start: %+v, %v", v.Signed, err)
	}
}

func TestSignaturesBehindTheirCertificatesEndAreCounted(t *testing.T) {
	ca, trust := newCA(t)
	s := newSigning(t, nodeKey(t, ca, "r1", time.Now()))
	s.sign(3)
	s.at = s.at.Add(2 * identity.CertificateValid)
	s.sign(3)
	if v, err := s.verify(trust); err != nil || v.Signed.Late != 1 {
		t.Errorf("%+v, %v; want one that is late", v.Signed, err)
	}
	early := newSigning(t, nodeKey(t, ca, "r1", time.Now().Add(24*time.Hour)))
	early.sign(3)
	if _, err := early.verify(trust); err == nil || !strings.Contains(err.Error(), "before the certificate of its key") {
		t.Errorf("before its certificate: %v", err)
	}
}

// Lines are signed when they are many, when they are old, and when nobody writes any more.
func TestWhenLinesAreSigned(t *testing.T) {
	s := newSigning(t, &AuditKey{Signer: newKey(t)})
	signed := func() uint64 {
		v, err := s.verify(Trust{})
		if err != nil {
			t.Fatal(err)
		}
		return v.Signed.Lines
	}
	step := func() {
		if err := s.s.step(false); err != nil {
			t.Fatal(err)
		}
	}
	s.write(signLines - 1)
	if step(); signed() != 0 {
		t.Errorf("%d lines are signed of %d", signed(), signLines-1)
	}
	s.write(1)
	if step(); signed() != signLines {
		t.Errorf("%d lines are signed of %d", signed(), signLines)
	}
	s.write(2)
	step()
	s.at = s.at.Add(signTime - time.Second)
	if step(); signed() != signLines {
		t.Errorf("%d lines are signed, and the last are %s old", signed(), signTime-time.Second)
	}
	s.at = s.at.Add(time.Second)
	if step(); signed() != signLines+2 {
		t.Errorf("%d lines are signed, and the last are %s old", signed(), signTime)
	}
	s.write(1)
	ctx, stop := context.WithCancel(t.Context())
	stop()
	if err := s.s.Run(ctx); err != nil || signed() != signLines+3 {
		t.Errorf("%d lines are signed at the end, %v", signed(), err)
	}
}

// What was signed is there at the next start, or the log is not gone on with.
func TestALogWithoutItsSignedLinesIsNotGoneOnWith(t *testing.T) {
	ca, trust := newCA(t)
	s := newSigning(t, nodeKey(t, ca, "r1", time.Now()))
	s.sign(5)
	s.sign(5)
	s.write(2)
	s.close()
	whole, signatures := s.files()
	lines := strings.SplitAfter(string(whole), "\n")
	for name, test := range map[string]struct{ log, says string }{
		"cut":                {strings.Join(lines[:8], ""), "lines are missing at its end"},
		"empty":              {"", "it is empty"},
		"changed":            {strings.Replace(string(whole), `"n":10,"prev":"`, `"n":10,"prev":"0`, 1), "was changed"},
		"of another":         {strings.Replace(string(whole), "deep", "dark", 1), "another log"},
		"longer than a line": {strings.Repeat("x", len(whole)), "is not whole"},
	} {
		if err := os.WriteFile(s.name, []byte(test.log), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := s.tryOpen(); err == nil || !strings.Contains(err.Error(), test.says) || !strings.Contains(err.Error(), "move it away") {
			t.Errorf("%s: %v; want %q", name, err, test.says)
		}
		s.s = nil
	}
	// With its end it goes on, also where a signature was not written to its end.
	for name, signatures := range map[string]string{"whole": string(signatures), "half a signature": string(signatures) + `{"event":"sig`} {
		for file, text := range map[string]string{s.name: string(whole), SignaturesOf(s.name): signatures} {
			if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		s.open()
		s.sign(1)
		s.close()
		if v, err := s.verify(trust); err != nil || v.Lines != 13 || v.Signed.Lines != 13 {
			t.Errorf("%s: %+v, %+v, %v; want 13 lines", name, v, v.Signed, err)
		}
	}
	if !strings.Contains(s.said.String(), "was not written to its end") {
		t.Errorf("it said %q", s.said.String())
	}
}

// Whoever writes the log, and has become somebody else's, cannot change what was signed, nor have it signed again.
func TestAWriterThatChangesTheLogIsFound(t *testing.T) {
	for name, change := range map[string]func(f *os.File, text string) error{
		"cuts it": func(f *os.File, text string) error { return f.Truncate(int64(len(text)) / 2) },
		"writes it anew": func(f *os.File, text string) error {
			return errors.Join(f.Truncate(0), func() error {
				_, err := f.WriteString(strings.Replace(text, "deep", "dark", 1) + `{"n":6,"prev":"00","time":"2026-01-01T00:00:00Z","event":"refused"}` + "\n")
				return err
			}())
		},
		"writes a line that does not follow": func(f *os.File, _ string) error { _, err := f.WriteString("{}\n"); return err },
		"writes without an end": func(f *os.File, _ string) error {
			_, err := f.WriteString(strings.Repeat("x", auditLineMax+2))
			return err
		},
	} {
		s := newSigning(t, &AuditKey{Signer: newKey(t)})
		s.sign(5)
		text, before := s.files()
		if err := change(s.log.file, string(text)); err != nil {
			t.Fatal(err)
		}
		ctx, stop := context.WithTimeout(t.Context(), await.Limit(20*time.Second))
		if err := s.s.Run(ctx); err == nil {
			t.Errorf("%s: nothing is said", name)
		}
		stop()
		if _, after := s.files(); !bytes.Equal(before, after) {
			t.Errorf("%s: it was signed again", name)
		}
	}
}

func TestALogWithoutAKeyIsNotSigned(t *testing.T) {
	name := filepath.Join(t.TempDir(), "audit.log")
	f, err := OpenAuditFile(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if s, err := OpenSignatures(f, nil, slog.New(slog.DiscardHandler), time.Now); s != nil || err != nil || exists(SignaturesOf(name)) {
		t.Errorf("%v, %v", s, err)
	}
	// One that had a key before is held against what that has signed.
	s := newSigning(t, &AuditKey{Signer: newKey(t)})
	s.sign(3)
	s.close()
	if err := os.Truncate(s.name, 10); err != nil {
		t.Fatal(err)
	}
	if f, err = os.OpenFile(s.name, os.O_RDWR, 0); err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := OpenSignatures(f, nil, slog.New(slog.DiscardHandler), time.Now); err == nil || !strings.Contains(err.Error(), "lines are missing") {
		t.Errorf("without the key: %v", err)
	}
}

func TestBadKeysOfALogAreRefused(t *testing.T) {
	p224, err := ecdsa.GenerateKey(elliptic.P224(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	ca, _ := newCA(t)
	of := func(key any) []byte {
		der, err := x509.MarshalPKCS8PrivateKey(key)
		if err != nil {
			t.Fatal(err)
		}
		return pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})
	}
	good := nodeKey(t, ca, "r1", time.Now())
	cert := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: good.Certificate})
	name := filepath.Join(t.TempDir(), "key.pem")
	for what, test := range map[string]struct {
		text []byte
		mode os.FileMode
		says string
	}{
		"good": {append(of(good.Signer), cert...), 0o600, ""}, "nothing": {nil, 0o600, "no private key"}, "a certificate": {cert, 0o600, "no private key"},
		"others may read it": {of(good.Signer), 0o640, "chmod 600"}, "a certificate of another": {append(of(newKey(t)), cert...), 0o600, "another key"},
		"P-224": {of(p224), 0o600, "P-256"},
	} {
		os.Remove(name)
		if err := os.WriteFile(name, test.text, test.mode); err != nil {
			t.Fatal(err)
		}
		_, err := ReadAuditKey(name)
		if (err == nil) != (test.says == "") || err != nil && !strings.Contains(err.Error(), test.says) {
			t.Errorf("%s: %v; want %q", what, err, test.says)
		}
	}
	if _, err := ReadAuditKey(name + ".not"); err == nil || !strings.Contains(err.Error(), "is not there") {
		t.Errorf("a file that is not there: %v", err)
	}
}

// What is signed is text, and OpenSSL agrees that it is signed.
func TestOpenSSLVerifiesSignatures(t *testing.T) {
	key := newKey(t)
	s := newSigning(t, &AuditKey{Signer: key})
	s.sign(7)
	log, signatures := s.files()
	var e struct {
		First, Last, Time string
		Lines, Bytes      int
		Signature         []byte
	}
	if err := json.Unmarshal(bytes.Split(signatures, []byte("\n"))[1], &e); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	write := func(name string, text []byte) string {
		name = filepath.Join(dir, name)
		if err := os.WriteFile(name, text, 0o600); err != nil {
			t.Fatal(err)
		}
		return name
	}
	der, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		t.Fatal(err)
	}
	sum := func(text []byte) string {
		return strings.Fields(run(t, string(text), "openssl", "dgst", "-sha256", "-r"))[0]
	}
	lines := bytes.Split(bytes.TrimSuffix(log, []byte("\n")), []byte("\n"))
	text := fmt.Sprintf("waystamp audit log\nfirst %s\nlines %d\nlast %s\nbytes %d\ntime %s\n", sum(lines[0]), len(lines), sum(lines[6]), len(log), e.Time)
	verify := func(text string) string {
		return run(t, text, "openssl", "dgst", "-sha256", "-verify", write("key.pem", pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der})),
			"-signature", write("signature", e.Signature))
	}
	if got := verify(text); !strings.Contains(got, "Verified OK") {
		t.Errorf("openssl says %s", got)
	}
	if got := verify(strings.Replace(text, "lines 7", "lines 8", 1)); strings.Contains(got, "Verified OK") {
		t.Errorf("of another text openssl says %s", got)
	}
}
