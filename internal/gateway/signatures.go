package gateway

import (
	"bufio"
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/identity"
)

// The audit log's signatures are in a file beside it. The process that writes the log, which speaks with strangers, has neither the
// key nor that file: its parent reads the log as it grows, holds each line against the one before, and signs the number and the
// hash of the last line. What was signed once can only be changed by who has the key.

const (
	// signLines and signTime are when lines are signed: so many, or the first of them is so old.
	signLines = 1000
	signTime  = 10 * time.Second
	// readTime is how often the log is looked at.
	readTime = 250 * time.Millisecond
	// signatureMax is the length in bytes of the longest line of a file of signatures.
	signatureMax = 16 << 10
)

// SignaturesOf is the name of a log's file of signatures.
func SignaturesOf(log string) string { return log + ".sig" }

// AuditKey signs a log.
type AuditKey struct {
	Signer      crypto.Signer // ECDSA, or Ed25519
	Certificate []byte        // of the node, in DER; nil: there is none
}

// CheckAuditKey refuses a kind of key that signs no audit log.
func CheckAuditKey(key crypto.PublicKey) error {
	switch k := key.(type) {
	case ed25519.PublicKey:
		return nil
	case *ecdsa.PublicKey:
		if k.Curve.Params().BitSize < 256 {
			return fmt.Errorf("a key on curve %s does not sign audit logs; expect P-256 or more", k.Curve.Params().Name)
		}
		return nil
	}
	return fmt.Errorf("a key of kind %T does not sign audit logs; give one of ECDSA or Ed25519", key)
}

// signature is a line of the file. Times are as they are signed.
type signature struct {
	Event string `json:"event"` // "key": Key signs from here on; "signed": the log up to a line
	Time  string `json:"time"`  // RFC 3339
	Key   string `json:"key"`   // SHA-256 of its SubjectPublicKeyInfo, hexadecimal

	// Of a key.
	Public      []byte `json:"public,omitempty"`      // SubjectPublicKeyInfo
	Certificate []byte `json:"certificate,omitempty"` // of the node that has it
	By          string `json:"by,omitempty"`          // the key before it, which has signed this line

	// Of a signature.
	First string `json:"first,omitempty"` // SHA-256 of line 1: which log it is
	Lines uint64 `json:"lines,omitempty"` // the number of the last line
	Last  string `json:"last,omitempty"`  // SHA-256 of it
	Bytes int64  `json:"bytes,omitempty"` // up to its end

	Signature []byte `json:"signature,omitempty"`
}

const (
	signatureKey    = "key"
	signatureSigned = "signed"
)

// text is what is signed. Nothing else that a node's key signs begins so.
func (s *signature) text() []byte {
	if s.Event == signatureKey {
		return fmt.Appendf(nil, "waystamp audit key\nkey %s\ntime %s\n", s.Key, s.Time)
	}
	return fmt.Appendf(nil, "waystamp audit log\nfirst %s\nlines %d\nlast %s\nbytes %d\ntime %s\n", s.First, s.Lines, s.Last, s.Bytes, s.Time)
}

func signText(key crypto.Signer, text []byte) ([]byte, error) {
	if _, ok := key.Public().(ed25519.PublicKey); ok {
		return key.Sign(rand.Reader, text, crypto.Hash(0))
	}
	sum := sha256.Sum256(text)
	return key.Sign(rand.Reader, sum[:], crypto.SHA256)
}

func signedText(key crypto.PublicKey, text, signature []byte) bool {
	switch k := key.(type) {
	case ed25519.PublicKey:
		return ed25519.Verify(k, text, signature)
	case *ecdsa.PublicKey:
		sum := sha256.Sum256(text)
		return ecdsa.VerifyASN1(k, sum[:], signature)
	}
	return false
}

// ReadAuditKey reads a key in PEM that signs audit logs, with the certificate behind it, if there is one. Others must not be able to
// read it.
func ReadAuditKey(name string) (*AuditKey, error) {
	text, mode, err := Folder("").Read(name, fileMax)
	if err != nil {
		return nil, fmt.Errorf("key of the audit log: %w", err)
	}
	if mode.Perm()&0o077 != 0 {
		return nil, fmt.Errorf("key of the audit log %s: others may read it (mode %04o); chmod 600 it", name, mode.Perm())
	}
	k := &AuditKey{}
	for {
		var block *pem.Block
		if block, text = pem.Decode(text); block == nil {
			break
		}
		switch {
		case block.Type == "CERTIFICATE" && k.Certificate == nil:
			k.Certificate = block.Bytes
		case strings.HasSuffix(block.Type, "PRIVATE KEY") && k.Signer == nil:
			var key any
			if key, err = x509.ParsePKCS8PrivateKey(block.Bytes); err != nil {
				key, err = x509.ParseECPrivateKey(block.Bytes)
			}
			if err == nil {
				k.Signer, _ = key.(crypto.Signer)
			}
		}
	}
	if k.Signer == nil {
		return nil, fmt.Errorf("key of the audit log %s: there is no private key in PEM that could be read", name) // the cause could quote it
	}
	if err := CheckAuditKey(k.Signer.Public()); err != nil {
		return nil, fmt.Errorf("key of the audit log %s: %w", name, err)
	}
	if k.Certificate != nil {
		c, err := x509.ParseCertificate(k.Certificate)
		if err == nil && !sameKey(c.PublicKey, k.Signer.Public()) {
			err = errors.New("its certificate is that of another key")
		}
		if err != nil {
			return nil, fmt.Errorf("key of the audit log %s: %w", name, err)
		}
	}
	return k, nil
}

func sameKey(a, b crypto.PublicKey) bool {
	k, ok := a.(interface{ Equal(crypto.PublicKey) bool })
	return ok && k.Equal(b)
}

// Signatures signs an audit log that another process writes.
type Signatures struct {
	log  *os.File
	name string // of the log
	out  *os.File
	size int64 // of out
	key  func() (*AuditKey, error)
	now  func() time.Time
	said *slog.Logger

	at     auditLine // read so far
	signed uint64    // lines
	since  time.Time // when the first line was read that is not signed
	with   *AuditKey // that the file named last
	id     string    // of it
	failed string    // why there is no other key; it has been said
}

// OpenSignatures opens the file of signatures of a log, which the caller has open and may close behind it, and makes it if it is not
// there. It refuses a log that does not have the line that was signed last. key says which key signs now; without key nothing is
// signed, and it gives nil if nothing ever was.
func OpenSignatures(log *os.File, key func() (*AuditKey, error), said *slog.Logger, now func() time.Time) (_ *Signatures, err error) {
	s := &Signatures{name: log.Name(), key: key, now: now, said: said}
	create := os.O_CREATE
	if key == nil {
		if create = 0; !exists(SignaturesOf(s.name)) {
			return nil, nil
		}
		s.key = func() (*AuditKey, error) { return nil, nil }
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.Close())
		}
	}()
	fd, err := unix.FcntlInt(log.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("fcntl F_DUPFD_CLOEXEC", err)
	}
	s.log = os.NewFile(uintptr(fd), s.name)
	if s.out, err = os.OpenFile(SignaturesOf(s.name), os.O_RDWR|os.O_APPEND|create, 0o600); err != nil {
		return nil, fmt.Errorf("open the signatures of the audit log: %w", err)
	}
	last, err := s.lastSigned()
	if err != nil {
		return nil, fmt.Errorf("signatures %s: %w; move them away with their log, and look at both with waystamp audit verify", s.out.Name(), err)
	}
	if last == nil {
		return s, nil
	}
	if err := s.goOn(last); err != nil {
		return nil, fmt.Errorf("audit log %s: %w; move it away with %s, and look at both with waystamp audit verify", s.name, err, s.out.Name())
	}
	return s, nil
}

func exists(name string) bool {
	_, err := os.Lstat(name)
	return !errors.Is(err, fs.ErrNotExist)
}

// lastSigned finds the last signature; nil: there is none. A line that was not written to its end is removed: there was no room
// for it, or the machine stopped.
func (s *Signatures) lastSigned() (*signature, error) {
	size, err := s.out.Seek(0, io.SeekEnd)
	if err != nil {
		return nil, err
	}
	s.size = size
	// Behind the last signature there is one key at most, and a line that is not whole.
	tail := make([]byte, min(size, 4*signatureMax))
	if _, err := s.out.ReadAt(tail, size-int64(len(tail))); err != nil {
		return nil, err
	}
	whole := bytes.LastIndexByte(tail, '\n') + 1
	if cut := len(tail) - whole; cut > 0 {
		s.size -= int64(cut)
		if err := s.out.Truncate(s.size); err != nil {
			return nil, err
		}
		s.said.Warn("the last signature of the audit log was not written to its end, and is removed", "file", s.out.Name())
	}
	lines := bytes.Split(tail[:whole], []byte{'\n'})
	if int64(len(tail)) < size {
		lines = lines[1:]
	}
	for _, line := range slices.Backward(lines) {
		if len(line) == 0 {
			continue
		}
		e, err := readSignature(line)
		if err != nil {
			return nil, fmt.Errorf("one of the last lines: %w", err)
		}
		if e.Event == signatureSigned {
			return e, nil
		}
	}
	if int64(len(tail)) < size {
		return nil, errors.New("none of the last lines is a signature")
	}
	return nil, nil
}

func readSignature(line []byte) (*signature, error) {
	e := &signature{}
	d := json.NewDecoder(bytes.NewReader(line))
	d.DisallowUnknownFields()
	if err := d.Decode(e); err != nil || d.More() {
		return nil, fmt.Errorf("it is not understood: %v", err)
	}
	if e.Event != signatureKey && e.Event != signatureSigned {
		return nil, fmt.Errorf("it is about %q; expect %s or %s", e.Event, signatureKey, signatureSigned)
	}
	return e, nil
}

// goOn goes on behind the line that was signed last, if the log has it.
func (s *Signatures) goOn(e *signature) error {
	info, err := s.log.Stat()
	if err != nil {
		return err
	}
	if info.Size() == 0 {
		return fmt.Errorf("it is empty, and line %d of it was signed at %s", e.Lines, e.Time)
	}
	if info.Size() < e.Bytes {
		return fmt.Errorf("it has %d bytes, and line %d, which ends at byte %d, was signed at %s: lines are missing at its end", info.Size(), e.Lines, e.Bytes, e.Time)
	}
	first, err := s.lineAt(0)
	if err != nil {
		return err
	}
	s.at = auditLine{number: e.Lines, bytes: e.Bytes, first: sha256.Sum256(first)}
	// Backwards from the end of the line.
	from := max(0, e.Bytes-auditLineMax-2)
	text := make([]byte, e.Bytes-from)
	if _, err := s.log.ReadAt(text, from); err != nil {
		return err
	}
	line, ended := bytes.CutSuffix(text, []byte{'\n'})
	s.at.hash = sha256.Sum256(line[bytes.LastIndexByte(line, '\n')+1:])
	switch {
	case hex.EncodeToString(s.at.first[:]) != e.First:
		return fmt.Errorf("it is another log than the one whose line %d was signed at %s", e.Lines, e.Time)
	case !ended || hex.EncodeToString(s.at.hash[:]) != e.Last:
		return fmt.Errorf("its line %d is not the one that was signed at %s: the log was changed", e.Lines, e.Time)
	}
	s.signed = e.Lines
	return nil
}

// lineAt is the line that begins at an offset, without its end.
func (s *Signatures) lineAt(from int64) ([]byte, error) {
	b := bufio.NewReaderSize(io.NewSectionReader(s.log, from, auditLineMax+1), auditLineMax+1)
	line, err := b.ReadSlice('\n')
	if err != nil {
		return nil, fmt.Errorf("the line at byte %d is not whole, or has more than %d bytes", from, auditLineMax)
	}
	return line[:len(line)-1], nil
}

// Run signs until the context ends, and once more then, since nothing is written any more. An error other than of the file of
// signatures says that lines do not follow from each other: whoever writes them is not to go on.
func (s *Signatures) Run(ctx context.Context) error {
	t := time.NewTicker(readTime)
	defer t.Stop()
	for {
		over := false
		select {
		case <-t.C:
		case <-ctx.Done():
			over = true
		}
		if err := s.step(over); err != nil || over {
			return err
		}
	}
}

// step reads, and signs if it is time, or if nothing more comes.
func (s *Signatures) step(over bool) error {
	if err := s.Read(); err != nil {
		return fmt.Errorf("audit log %s: %w", s.name, err)
	}
	if n := s.at.number - s.signed; n > 0 && (over || n >= signLines || s.now().Sub(s.since) >= signTime) {
		s.Sign()
	}
	return nil
}

// Read reads what the log has got since, and holds each line against the one before. What has no end yet comes with the next call.
func (s *Signatures) Read() error {
	info, err := s.log.Stat()
	if err != nil {
		return err
	}
	if info.Size() < s.at.bytes {
		return fmt.Errorf("it has %d bytes, and had %d: lines were removed", info.Size(), s.at.bytes)
	}
	b := bufio.NewReaderSize(io.NewSectionReader(s.log, s.at.bytes, info.Size()-s.at.bytes), auditLineMax+1)
	for {
		line, err := b.ReadSlice('\n')
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case errors.Is(err, bufio.ErrBufferFull):
			return fmt.Errorf("line %d has more than %d bytes", s.at.number+1, auditLineMax)
		case err != nil:
			return err
		}
		// As Write begins a line: what is behind it, waystamp audit verify reads.
		begin := fmt.Sprintf(`{"n":%d,"prev":"%x",`, s.at.number+1, s.at.hash)
		if !bytes.HasPrefix(line, []byte(begin)) {
			return fmt.Errorf("line %d does not follow from line %d", s.at.number+1, s.at.number)
		}
		s.at.number++
		s.at.bytes += int64(len(line))
		s.at.hash = sha256.Sum256(line[:len(line)-1])
		if s.at.number == 1 {
			s.at.first = s.at.hash
		}
		if s.at.number == s.signed+1 {
			s.since = s.now()
		}
	}
}

// Sign signs what was read. If it cannot, it says so, and the lines are signed with later ones.
func (s *Signatures) Sign() {
	s.since = s.now() // the next try is not at once
	err := s.takeKey()
	if err == nil && s.with == nil {
		return // said at the start
	}
	if err == nil {
		// A signed line is on the disk: else one that a machine loses with its power would look removed.
		err = s.log.Sync()
	}
	e := &signature{
		Event: signatureSigned, Time: s.now().UTC().Format(time.RFC3339), Key: s.id,
		First: hex.EncodeToString(s.at.first[:]), Lines: s.at.number, Last: hex.EncodeToString(s.at.hash[:]), Bytes: s.at.bytes,
	}
	if err == nil {
		e.Signature, err = signText(s.with.Signer, e.text())
	}
	if err == nil {
		err = s.write(e)
	}
	if err != nil {
		s.said.Error("the audit log cannot be signed; it is tried again", "log", s.name, "unsigned_lines", s.at.number-s.signed, "err", err)
		return
	}
	s.signed = s.at.number
}

// takeKey writes into the file which key signs from now on, if it is another one, or has another certificate.
func (s *Signatures) takeKey() error {
	k, err := s.key()
	if err != nil {
		if text := err.Error(); s.with != nil && s.failed != text {
			s.failed = text
			s.said.Error("the key of the audit log cannot be read; the one before signs", "err", err)
		}
		if s.with != nil {
			return nil
		}
		return err
	}
	if s.failed = ""; k == nil || s.with != nil && sameKey(s.with.Signer.Public(), k.Signer.Public()) && bytes.Equal(k.Certificate, s.with.Certificate) {
		return nil
	}
	e := &signature{Event: signatureKey, Time: s.now().UTC().Format(time.RFC3339), Certificate: k.Certificate}
	if e.Public, err = x509.MarshalPKIXPublicKey(k.Signer.Public()); err != nil {
		return err
	}
	if e.Key, err = identity.KeyID(k.Signer.Public()); err != nil {
		return err
	}
	if s.with != nil && e.Key != s.id {
		e.By = s.id
		if e.Signature, err = signText(s.with.Signer, e.text()); err != nil {
			return err
		}
	}
	if err := s.write(e); err != nil {
		return err
	}
	s.with, s.id = k, e.Key
	return nil
}

// write writes a line. On an error nothing of it stays.
func (s *Signatures) write(e *signature) error {
	line, err := json.Marshal(e)
	if err != nil {
		return err
	}
	if len(line) > signatureMax {
		return fmt.Errorf("a line has %d bytes; at most %d are written", len(line), signatureMax)
	}
	if err := s.out.Truncate(s.size); err != nil { // of a line before that could not be written
		return err
	}
	n, err := s.out.Write(append(line, '\n'))
	if err != nil {
		return errors.Join(err, s.out.Truncate(s.size))
	}
	s.size += int64(n)
	return s.out.Sync()
}

// Close closes the files.
func (s *Signatures) Close() (err error) {
	for _, f := range []*os.File{s.log, s.out} {
		if f != nil {
			err = errors.Join(err, f.Close())
		}
	}
	return err
}

// Trust is what signatures are held against. Without keys and roots they are held against the keys that their file names.
type Trust struct {
	Keys  []crypto.PublicKey  // that sign, and sign for the keys that follow them
	Roots []*x509.Certificate // that have signed the certificates of nodes
	Node  string              // whose certificate it must be; "": of any, but all of one
}

// Signed is what signatures say of a log.
type Signed struct {
	Lines   uint64    // up to which it is signed; 0: there is no signature
	Time    time.Time // of the last signature
	Count   int
	Key     string // the last one's
	Node    string // that has it, by its certificate; "": a key alone was trusted
	Trusted bool   // Trust had something to hold them against
	Late    int    // signatures of a key whose certificate had ended
}

// VerifySigned is VerifyAudit of a log with its signatures. The error says which line, or which signature, is the first that is wrong.
func VerifySigned(log, signatures io.Reader, t Trust) (Verified, error) {
	c := &signatureCheck{
		in: bufio.NewReaderSize(signatures, signatureMax+1), trust: t, keys: map[string]*signingKey{},
		result: Signed{Trusted: len(t.Keys) > 0 || len(t.Roots) > 0},
	}
	for _, k := range t.Keys {
		id, err := identity.KeyID(k)
		if err != nil {
			return Verified{}, err
		}
		c.keys[id] = &signingKey{public: k, trusted: true}
	}
	if err := c.next(); err != nil {
		return Verified{}, err
	}
	v, err := verifyAudit(log, c.line)
	if err != nil {
		return v, err
	}
	if e := c.now; e != nil {
		return v, fmt.Errorf("the log ends with line %d, and line %d was signed at %s: lines are missing at its end", v.Lines, e.Lines, e.Time)
	}
	v.Signed = &c.result
	return v, nil
}

type signingKey struct {
	public  crypto.PublicKey
	trusted bool
	node    string
	from    time.Time // that its certificate counts; zero: there is none
	until   time.Time
}

// signatureCheck reads a file of signatures beside its log.
type signatureCheck struct {
	in     *bufio.Reader
	trust  Trust
	keys   map[string]*signingKey
	node   string
	number int        // of the line of signatures
	now    *signature // that is checked next; nil: there is none
	result Signed
}

// next reads up to the next signature.
func (c *signatureCheck) next() error {
	before := c.now
	c.now = nil
	for {
		line, err := c.in.ReadSlice('\n')
		if errors.Is(err, io.EOF) && len(line) == 0 {
			return nil
		}
		c.number++
		if err != nil {
			if errors.Is(err, io.EOF) {
				err = errors.New("it is not whole: its end is missing")
			} else if errors.Is(err, bufio.ErrBufferFull) {
				err = fmt.Errorf("it has more than %d bytes", signatureMax)
			}
			return c.wrong(err)
		}
		e, err := readSignature(line[:len(line)-1])
		if err == nil && e.Event == signatureKey {
			err = c.key(e)
		}
		if err != nil {
			return c.wrong(err)
		}
		if e.Event == signatureKey {
			continue
		}
		if e.Lines == 0 || before != nil && e.Lines <= before.Lines {
			return c.wrong(fmt.Errorf("it is for line %d, which comes before that of the signature before", e.Lines))
		}
		c.now = e
		return nil
	}
}

func (c *signatureCheck) wrong(err error) error {
	return fmt.Errorf("line %d of the signatures: %w", c.number, err)
}

// key takes a key that signs from now on, if it is trusted.
func (c *signatureCheck) key(e *signature) error {
	public, err := x509.ParsePKIXPublicKey(e.Public)
	if err == nil {
		err = CheckAuditKey(public)
	}
	if err != nil {
		return fmt.Errorf("the key: %w", err)
	}
	id, err := identity.KeyID(public)
	if err != nil {
		return err
	}
	if id != e.Key {
		return fmt.Errorf("the key is %s, and is named %s", id, e.Key)
	}
	if _, err := time.Parse(time.RFC3339, e.Time); err != nil {
		return err
	}
	k := c.keys[id]
	if k == nil {
		k = &signingKey{public: public}
	}
	if e.By != "" {
		by := c.keys[e.By]
		if by == nil {
			return fmt.Errorf("key %s is signed by key %s, which no line before names", id, e.By)
		}
		if !signedText(by.public, e.text(), e.Signature) {
			return fmt.Errorf("key %s is not signed by key %s", id, e.By)
		}
		k.trusted = k.trusted || by.trusted
	}
	if err := c.certificate(k, e.Certificate); err != nil {
		return err
	}
	if c.result.Trusted && !k.trusted {
		return fmt.Errorf("key %s is none that is trusted, and none that is trusted has signed it", id)
	}
	c.keys[id] = k
	return nil
}

// certificate says whose a key is, if there are roots.
func (c *signatureCheck) certificate(k *signingKey, der []byte) error {
	if len(c.trust.Roots) == 0 {
		return nil
	}
	if len(der) == 0 {
		if k.trusted {
			return nil
		}
		return errors.New("the key has no certificate; give the public key itself")
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return err
	}
	// When signatures were made, they say themselves.
	p, err := identity.Verify(cert, c.trust.Roots, cert.NotBefore)
	if err != nil {
		return fmt.Errorf("the key's certificate: %w", err)
	}
	switch {
	case !sameKey(k.public, p.Key):
		return errors.New("the certificate is that of another key")
	case p.Node == "":
		return fmt.Errorf("the certificate is that of %s, and not that of a node", p.ID)
	case c.trust.Node != "" && p.Node != c.trust.Node:
		return fmt.Errorf("the certificate is that of node %s; expect %s", p.Node, c.trust.Node)
	case c.node != "" && p.Node != c.node:
		return fmt.Errorf("the certificate is that of node %s, and the one before that of node %s", p.Node, c.node)
	}
	c.node = p.Node
	k.trusted, k.node, k.from, k.until = true, p.Node, cert.NotBefore, cert.NotAfter
	return nil
}

// line holds a line of the log against the signature that is next.
func (c *signatureCheck) line(l *auditLine) error {
	e := c.now
	if e == nil || l.number < e.Lines {
		return nil
	}
	k := c.keys[e.Key]
	at, err := time.Parse(time.RFC3339, e.Time)
	switch {
	case err != nil:
		return c.wrong(err)
	case k == nil:
		return c.wrong(fmt.Errorf("it is by key %s, which no line before names", e.Key))
	case !signedText(k.public, e.text(), e.Signature):
		return c.wrong(fmt.Errorf("it is not signed by key %s", e.Key))
	case c.result.Trusted && !k.trusted:
		return c.wrong(fmt.Errorf("it is by key %s, which is not trusted", e.Key))
	case e.First != hex.EncodeToString(l.first[:]):
		return c.wrong(errors.New("it is for another log, which begins with another line"))
	case e.Last != hex.EncodeToString(l.hash[:]) || e.Bytes != l.bytes:
		return fmt.Errorf("line %d is not the one that was signed at %s: one of lines %d to %d was changed, and those behind it were written anew", l.number, e.Time, c.result.Lines+1, l.number)
	case !k.from.IsZero() && at.Before(k.from):
		return c.wrong(fmt.Errorf("it was made at %s, before the certificate of its key, %s", e.Time, k.from.UTC().Format(time.RFC3339)))
	}
	if !k.until.IsZero() && at.After(k.until) {
		c.result.Late++
	}
	c.result.Lines, c.result.Time, c.result.Key, c.result.Node = e.Lines, at, e.Key, k.node
	c.result.Count++
	return c.next()
}
