package seal

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"unicode"
)

// messageMax bounds what ends say to each other before the bytes of a service, in bytes.
// Messages are JSON behind their length, 16 bits in network order.
const messageMax = 4096

// Hello is the first that the end says that dials.
type Hello struct {
	Chain    string `json:"chain"`
	Path     uint32 `json:"path"`     // of the part
	Epoch    uint32 `json:"epoch"`    // whose key it has shown
	Service  string `json:"service"`  // whose origin the bytes are for
	Protocol string `json:"protocol"` // HTTP1, HTTP2 or Opaque, of the bytes
}

// Answer is the first that the other end says.
type Answer struct {
	Open    bool    `json:"open"`              // send sets it: without a Failure
	Failure Failure `json:"failure,omitempty"` // "": the way onward is open
	Text    string  `json:"text,omitempty"`    // for the gateway's log
}

// Failure is why the way onward is not open.
type Failure string

// Failures. Words are for logs, and no client sees them.
const (
	FailureCertificate Failure = "origin-certificate" // not for the name, or of another authority
	FailureTLS         Failure = "origin-tls"         // the origin, or the next end, did not shake hands
	FailureProtocol    Failure = "origin-protocol"    // it does not speak that protocol
	FailureService     Failure = "service"            // no service of the chain's
	FailurePart        Failure = "part"               // the next part is not open
)

var failures = []Failure{FailureCertificate, FailureTLS, FailureProtocol, FailureService, FailurePart}

// textMax bounds texts in messages, in bytes.
const textMax = 512

// checkText refuses what would forge lines of a log.
func checkText(what, text string) error {
	if len(text) > textMax {
		return fmt.Errorf("%w: %s has %d bytes; at most %d are read", ErrMismatch, what, len(text), textMax)
	}
	if strings.ContainsFunc(text, unicode.IsControl) {
		return fmt.Errorf("%w: %s has control characters", ErrMismatch, what)
	}
	return nil
}

func (h *Hello) check() error {
	return errors.Join(checkText("the chain", h.Chain), checkText("the service", h.Service), checkText("the protocol", h.Protocol))
}

func (a *Answer) check() error {
	switch {
	case a.Open != (a.Failure == ""):
		return fmt.Errorf("%w: an answer says neither that the way onward is open nor why not", ErrMismatch)
	case !a.Open && !slices.Contains(failures, a.Failure):
		return fmt.Errorf("%w: an answer has an unknown failure", ErrMismatch)
	}
	return checkText("the text", a.Text)
}

// Refusal is an answer that says that the way onward is not open.
type Refusal struct{ Answer }

func (r *Refusal) Error() string {
	return fmt.Sprintf("the way onward is refused (%s): %s", r.Failure, r.Text)
}

// Why ends refuse each other.
var (
	ErrPeer      = errors.New("the other end is not the one that the plan names")
	ErrMismatch  = errors.New("not of this part")
	ErrTruncated = errors.New("the connection ended without a close_notify")
	errKey       = errors.New("a key is missing")
)

func send(w io.Writer, message any) error {
	if a, ok := message.(Answer); ok {
		a.Open = a.Failure == ""
		a.Text = strings.Map(func(r rune) rune {
			if unicode.IsControl(r) {
				return ' '
			}
			return r
		}, a.Text)
		a.Text = strings.ToValidUTF8(a.Text[:min(len(a.Text), textMax)], "")
		message = a
	}
	text, err := json.Marshal(message)
	if err != nil {
		return err
	}
	if len(text) > messageMax {
		return fmt.Errorf("a message to the other end has %d bytes; at most %d are sent", len(text), messageMax)
	}
	_, err = w.Write(append(binary.BigEndian.AppendUint16(make([]byte, 0, 2+len(text)), uint16(len(text))), text...))
	return err
}

// receive reads a message and checks it.
func receive(r io.Reader, into interface{ check() error }) error {
	var head [2]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return cut(err)
	}
	n := binary.BigEndian.Uint16(head[:])
	if n > messageMax {
		return fmt.Errorf("%w: a message has %d bytes; at most %d are read", ErrMismatch, n, messageMax)
	}
	text := make([]byte, n)
	if _, err := io.ReadFull(r, text); err != nil {
		return cut(err)
	}
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(into); err != nil {
		return fmt.Errorf("%w: a message cannot be read: %w", ErrMismatch, err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return fmt.Errorf("%w: a message has something behind its object", ErrMismatch)
	}
	return into.check()
}

// cut says that an end in the midst of a message is not an end.
func cut(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return ErrTruncated
	}
	return err
}
