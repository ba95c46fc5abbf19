package gateway

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"
)

// auditLineMax is the length in bytes of the longest line of an audit log.
const auditLineMax = 64 << 10

// Record is a line of the audit log. Fields that say nothing are left out.
type Record struct {
	Number   uint64    `json:"n"`    // from 1, one more than in the line before
	Previous string    `json:"prev"` // SHA-256 of the line before, without its end; zeros in the first
	Time     time.Time `json:"time"`
	Event    Event     `json:"event"`

	Session  uint64 `json:"session,omitempty"`
	Request  uint64 `json:"request,omitempty"`
	Service  string `json:"service,omitempty"`
	Client   string `json:"client,omitempty"` // address and port
	Identity string `json:"identity,omitempty"`
	Serial   string `json:"serial,omitempty"` // of the certificate, hexadecimal
	Resumed  bool   `json:"resumed,omitempty"`

	Method string `json:"method,omitempty"`
	Host   string `json:"host,omitempty"`
	Path   string `json:"path,omitempty"` // without the query, shortened
	Rule   int    `json:"rule,omitempty"` // from 1
	Chain  string `json:"chain,omitempty"`
	Status int    `json:"status,omitempty"`
	Bytes  int64  `json:"bytes,omitempty"` // of the answer's body, or to the client on a connection that is not HTTP
	// Received are bytes from the client on a connection that is not HTTP.
	Received int64 `json:"received,omitempty"`

	Reason  Reason `json:"reason,omitempty"`
	Text    string `json:"text,omitempty"`
	Omitted uint64 `json:"omitted,omitempty"` // refusals before that have no line of their own: with an identity, if this one has one, or without
}

// Event is what a line is about.
type Event string

// The events.
const (
	EventOpened  Event = "session-opened"
	EventClosed  Event = "session-closed"
	EventDecided Event = "request-decided" // let in
	EventEnded   Event = "request-ended"
	EventRefused Event = "refused"
	EventChanged Event = "configuration-changed"
	EventRevoked Event = "identity-revoked"  // by an operator
	EventTrusted Event = "identity-restored" // its revocation was taken back
)

// Audit writes the audit log. What it could not write has not happened: who asks for it is
// refused.
type Audit struct {
	mu     sync.Mutex
	file   *os.File
	size   int64
	number uint64
	last   [sha256.Size]byte
	err    error // that the file is not whole, and could not be made so
	now    func() time.Time
}

// OpenAudit goes on with a file, which is made if it is not there. The file is the log's from then on.
func OpenAudit(name string, now func() time.Time) (*Audit, error) {
	f, err := OpenAuditFile(name)
	if err != nil {
		return nil, err
	}
	a, err := GoOnAudit(f, name, now)
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return a, nil
}

// OpenAuditFile opens a file for GoOnAudit, and makes it if it is not there.
func OpenAuditFile(name string) (*os.File, error) {
	f, err := os.OpenFile(name, os.O_RDWR|os.O_APPEND|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open the audit log: %w", err)
	}
	return f, nil
}

// GoOnAudit goes on with a file of OpenAuditFile, which may have come from another process. The file is the log's from then on, if
// there is no error.
func GoOnAudit(f *os.File, name string, now func() time.Time) (*Audit, error) {
	a, err := newAudit(f, now)
	if err != nil {
		return nil, fmt.Errorf("audit log %s: %w; move the file away, and look at it with waystamp audit verify", name, err)
	}
	return a, nil
}

func newAudit(f *os.File, now func() time.Time) (*Audit, error) {
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return nil, err
	}
	v, err := VerifyAudit(f)
	if err != nil {
		return nil, err
	}
	size, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return nil, err
	}
	return &Audit{file: f, size: size, number: v.Lines, last: v.Last, now: now}, nil
}

// Write writes a line. On an error nothing of it stays.
func (a *Audit) Write(r Record) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.err != nil {
		if a.err = a.file.Truncate(a.size); a.err != nil {
			return fmt.Errorf("write the audit log: %w", a.err)
		}
	}
	r.Number, r.Previous, r.Time = a.number+1, hex.EncodeToString(a.last[:]), a.now().UTC()
	line, err := json.Marshal(r)
	if err != nil {
		return fmt.Errorf("write the audit log: %w", err)
	}
	if len(line) > auditLineMax {
		return fmt.Errorf("write the audit log: a line has %d bytes; at most %d are written", len(line), auditLineMax)
	}
	n, err := a.file.Write(append(line, '\n'))
	if err != nil {
		if n > 0 {
			a.err = a.file.Truncate(a.size)
		}
		return fmt.Errorf("write the audit log: %w", err)
	}
	a.size += int64(n)
	a.number, a.last = r.Number, sha256.Sum256(line)
	return nil
}

// Close closes the file.
func (a *Audit) Close() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	return errors.Join(a.file.Sync(), a.file.Close())
}

// Verified is what VerifyAudit has found.
type Verified struct {
	Lines  uint64
	Last   [sha256.Size]byte // of the last line; zeros if there is none
	Signed *Signed           // nil: there was nothing that signs
}

// VerifyAudit reads a log to its end. The error says which line is the first that does not follow from the one before.
func VerifyAudit(r io.Reader) (Verified, error) { return verifyAudit(r, nil) }

func verifyAudit(r io.Reader, each func(line *auditLine) error) (Verified, error) {
	var v Verified
	var l auditLine
	b := bufio.NewReaderSize(r, auditLineMax+1)
	for {
		line, err := b.ReadSlice('\n')
		if errors.Is(err, io.EOF) && len(line) == 0 {
			return v, nil
		}
		at := v.Lines + 1
		switch {
		case errors.Is(err, io.EOF):
			return v, fmt.Errorf("line %d is not whole: its end is missing", at)
		case errors.Is(err, bufio.ErrBufferFull):
			return v, fmt.Errorf("line %d has more than %d bytes", at, auditLineMax)
		case err != nil:
			return v, fmt.Errorf("read line %d: %w", at, err)
		}
		l.bytes += int64(len(line))
		line = line[:len(line)-1]
		var rec Record
		d := json.NewDecoder(bytes.NewReader(line))
		d.DisallowUnknownFields()
		if err := d.Decode(&rec); err != nil || d.More() {
			return v, fmt.Errorf("line %d is not a record: %v", at, err)
		}
		if rec.Number != at {
			return v, fmt.Errorf("line %d has number %d: lines are missing, or in another order", at, rec.Number)
		}
		if rec.Previous != hex.EncodeToString(v.Last[:]) {
			if at == 1 {
				return v, errors.New("line 1 follows another line: the beginning is missing")
			}
			return v, fmt.Errorf("line %d does not follow from line %d as it is now: line %d was changed, or line %d is of another log", at, at-1, at-1, at)
		}
		v.Lines, v.Last = at, sha256.Sum256(line)
		if at == 1 {
			l.first = v.Last
		}
		if l.number, l.hash = at, v.Last; each != nil {
			if err := each(&l); err != nil {
				return v, err
			}
		}
	}
}

// auditLine is a place in a log, behind one of its lines.
type auditLine struct {
	number uint64            // of the line
	bytes  int64             // up to its end
	first  [sha256.Size]byte // of line 1
	hash   [sha256.Size]byte // of the line
}
