// Package signer has handshakes of a service signed by a process that has the service's key: the gateway asks for each full handshake,
// over a unix socket, by one question and one answer (docs/protocol/signer.md). It has both sides; the command "waystamp signer" serves.
// What is signed is a CertificateVerify of a server of TLS 1.3, and nothing else.
package signer

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strings"
	"sync"
	"time"
)

const (
	version    = 1
	messageMax = 8 << 10 // bytes of a question or an answer
	// Time bounds how long a question takes, from the connection to its answer.
	Time = 3 * time.Second
	// asksMax bounds the questions that are served at once.
	asksMax = 64
)

// Question is what is to be signed.
type Question struct {
	Version   int    `json:"version"`
	Service   string `json:"service"`
	Algorithm string `json:"algorithm"` // as RFC 8446 section 4.2.3 names it
	Message   []byte `json:"message"`   // not hashed
}

// Failure is why there is no signature.
type Failure uint8

// The failures.
const (
	Unreachable Failure = iota + 1 // nobody listens, or there was no answer in time
	Refused                        // the signer says that it does not sign
	Invalid                        // its answer is none
)

// Error is a question that has no signature.
type Error struct {
	Why Failure
	Err error
}

func (e *Error) Error() string { return e.Err.Error() }

func (e *Error) Unwrap() error { return e.Err }

// Answer has a signature, or why there is none.
type Answer struct {
	Signature []byte `json:"signature,omitempty"`
	Error     string `json:"error,omitempty"`
}

// algorithm is one of RFC 8446 section 4.2.3 that certificates of servers have.
type algorithm struct {
	name string
	x509 x509.SignatureAlgorithm
	opts crypto.SignerOpts
}

func pss(h crypto.Hash) crypto.SignerOpts {
	return &rsa.PSSOptions{SaltLength: rsa.PSSSaltLengthEqualsHash, Hash: h}
}

// algorithmsOf are those of a key.
func algorithmsOf(public crypto.PublicKey) []algorithm {
	switch k := public.(type) {
	case *ecdsa.PublicKey:
		switch k.Curve {
		case elliptic.P256():
			return []algorithm{{"ecdsa_secp256r1_sha256", x509.ECDSAWithSHA256, crypto.SHA256}}
		case elliptic.P384():
			return []algorithm{{"ecdsa_secp384r1_sha384", x509.ECDSAWithSHA384, crypto.SHA384}}
		case elliptic.P521():
			return []algorithm{{"ecdsa_secp521r1_sha512", x509.ECDSAWithSHA512, crypto.SHA512}}
		}
	case ed25519.PublicKey:
		return []algorithm{{"ed25519", x509.PureEd25519, crypto.Hash(0)}}
	case *rsa.PublicKey:
		return []algorithm{
			{"rsa_pss_rsae_sha256", x509.SHA256WithRSAPSS, pss(crypto.SHA256)},
			{"rsa_pss_rsae_sha384", x509.SHA384WithRSAPSS, pss(crypto.SHA384)},
			{"rsa_pss_rsae_sha512", x509.SHA512WithRSAPSS, pss(crypto.SHA512)},
		}
	}
	return nil
}

// CheckKey holds that a key is one that servers of TLS 1.3 can have.
func CheckKey(public crypto.PublicKey) error {
	if algorithmsOf(public) == nil {
		return errors.New("the key is of no kind that TLS 1.3 signs with; expect ECDSA on P-256, P-384 or P-521, Ed25519, or RSA")
	}
	return nil
}

// AlgorithmOf names what a key signs by with options of crypto/tls.
func AlgorithmOf(public crypto.PublicKey, opts crypto.SignerOpts) (string, error) {
	for _, a := range algorithmsOf(public) {
		if a.opts.HashFunc() == opts.HashFunc() {
			return a.name, nil
		}
	}
	return "", fmt.Errorf("a key of this kind does not sign by hash %v", opts.HashFunc())
}

// Verify holds that a signature is the certificate's key's.
func Verify(c *x509.Certificate, algorithm string, message, signature []byte) error {
	for _, a := range algorithmsOf(c.PublicKey) {
		if a.name == algorithm {
			return c.CheckSignature(a.x509, message, signature)
		}
	}
	return fmt.Errorf("%q is no algorithm of the certificate's key", algorithm)
}

// serverContext is what a server of TLS 1.3 signs, up to the hash of the handshake (RFC 8446 section 4.4.3).
var serverContext = append(bytes.Repeat([]byte{' '}, 64), "TLS 1.3, server CertificateVerify\x00"...)

// CheckMessage holds that a message is a CertificateVerify of a server of TLS 1.3: who may ask for signatures has no certificate signed, nor
// anything of another protocol.
func CheckMessage(m []byte) error {
	hash, is := bytes.CutPrefix(m, serverContext)
	if !is || len(hash) != crypto.SHA256.Size() && len(hash) != crypto.SHA384.Size() {
		return errors.New("what is to be signed is no CertificateVerify of a server of TLS 1.3")
	}
	return nil
}

func send(w io.Writer, m any) error {
	text, err := json.Marshal(m)
	if err != nil {
		return err
	}
	if len(text) > messageMax {
		return fmt.Errorf("a message has %d bytes; at most %d are sent", len(text), messageMax)
	}
	_, err = w.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(text))), text...))
	return err
}

func receive(r io.Reader, into any) error {
	var head [4]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return err
	}
	n := binary.BigEndian.Uint32(head[:])
	if n > messageMax {
		return fmt.Errorf("a message has %d bytes; at most %d are read", n, messageMax)
	}
	text := make([]byte, n)
	if _, err := io.ReadFull(r, text); err != nil {
		return err
	}
	return json.Unmarshal(text, into)
}

// Ask has a message signed by who listens at a path. The error is an *Error.
func Ask(ctx context.Context, path, service, algorithm string, message []byte) ([]byte, error) {
	ctx, stop := context.WithTimeout(ctx, Time)
	defer stop()
	c, err := (&net.Dialer{}).DialContext(ctx, "unix", path)
	failed := func(why Failure, err error) ([]byte, error) {
		if ctx.Err() != nil {
			why, err = Unreachable, fmt.Errorf("it has not answered in %s", Time)
		}
		return nil, &Error{why, fmt.Errorf("signer %s: %w", path, err)}
	}
	if err != nil {
		return failed(Unreachable, err)
	}
	defer c.Close()
	defer context.AfterFunc(ctx, func() { c.SetDeadline(time.Unix(1, 0)) })()
	if err := send(c, Question{version, service, algorithm, message}); err != nil {
		return failed(Unreachable, err)
	}
	var a Answer
	if err := receive(c, &a); err != nil {
		return failed(Invalid, fmt.Errorf("its answer cannot be read: %w", err))
	}
	switch {
	case a.Error != "":
		return failed(Refused, errors.New(strings.ToValidUTF8(a.Error[:min(len(a.Error), 300)], "?")))
	case len(a.Signature) == 0:
		return failed(Invalid, errors.New("its answer has no signature"))
	}
	return a.Signature, nil
}

// Serve signs with a key for whoever can connect, until the context ends.
func Serve(ctx context.Context, l net.Listener, key crypto.Signer, log *slog.Logger) error {
	if err := CheckKey(key.Public()); err != nil {
		return errors.Join(err, l.Close())
	}
	ctx, stop := context.WithCancel(ctx)
	var wait sync.WaitGroup
	defer wait.Wait()
	defer stop()
	defer context.AfterFunc(ctx, func() { l.Close() })()
	places := make(chan struct{}, asksMax)
	for {
		select {
		case places <- struct{}{}:
		case <-ctx.Done():
			return nil
		}
		c, err := l.Accept()
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return fmt.Errorf("accept questions: %w", err)
		}
		wait.Go(func() {
			defer func() { <-places }()
			defer c.Close()
			defer context.AfterFunc(ctx, func() { c.Close() })()
			c.SetDeadline(time.Now().Add(Time))
			var q Question
			if err := receive(c, &q); err != nil {
				if !errors.Is(err, io.EOF) {
					log.Warn("a question cannot be read", "err", err)
				}
				return
			}
			signature, err := answer(key, q)
			a := Answer{Signature: signature}
			if err != nil {
				a.Error = err.Error()
				log.Warn("a question is refused", "service", q.Service, "err", err)
			}
			if err := send(c, a); err != nil {
				log.Warn("an answer cannot be sent", "err", err)
			}
		})
	}
}

// Sign signs a message with a key, by one of its algorithms.
func Sign(key crypto.Signer, algorithm string, message []byte) ([]byte, error) {
	for _, a := range algorithmsOf(key.Public()) {
		if a.name == algorithm {
			return crypto.SignMessage(key, rand.Reader, message, a.opts)
		}
	}
	return nil, fmt.Errorf("the key does not sign by %q", algorithm)
}

func answer(key crypto.Signer, q Question) ([]byte, error) {
	if q.Version != version {
		return nil, fmt.Errorf("the question has version %d; this signer knows %d", q.Version, version)
	}
	if err := CheckMessage(q.Message); err != nil {
		return nil, err
	}
	return Sign(key, q.Algorithm, q.Message)
}
