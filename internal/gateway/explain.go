package gateway

import (
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/waystamp/waystamp/internal/gateway/policy"
	"github.com/waystamp/waystamp/internal/model"
)

// Question is a request that nobody has sent.
type Question struct {
	Shown  []*x509.Certificate // the client's own first; nil: it shows none
	Host   string              // that TLS and the request name
	Method string
	Target string // a path, with a query or without
	Header http.Header
}

// Explanation is what would become of a request.
type Explanation struct {
	Identity string   // "": the certificate is refused
	Path     string   // as rules look at it; "": none did
	Rule     int      // index of the rule that lets it in; -1: none
	Misses   []string // by rule: the part that the request does not match; "" for one that it does
	Refusal  *Refusal // nil: it is let in
	Unasked  bool     // the gateway would ask responders of OCSP, and nobody was asked
}

// Explain says what a gateway would decide about a request to a service, by the code that decides.
// The error is one of a file, or of the question.
func Explain(s model.Service, c model.Clients, files Files, q Question, now time.Time) (Explanation, error) {
	out := Explanation{Rule: -1}
	clients, err := loadClients(c, files, now)
	if err != nil {
		return out, err
	}
	out.Unasked, clients.statuses = clients.statuses != nil, nil
	rules, err := policy.Compile(s, c.Kind)
	if err != nil {
		return out, fmt.Errorf("service %s: %w", s.Name, err)
	}
	if s.Opaque.On {
		q.Method, q.Target = http.MethodGet, "/" // there is no request
	}
	target, err := url.ParseRequestURI(q.Target)
	if err != nil || strings.ContainsFunc(q.Method, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return out, fmt.Errorf("%s %q is no request", q.Method, q.Target)
	}
	refused := func(err error) (Explanation, error) {
		r, ok := errors.AsType[*Refusal](err)
		if !ok {
			return out, err
		}
		out.Refusal = r
		return out, nil
	}
	if out.Identity, err = clients.Verify(q.Shown, now); err != nil {
		return refused(err)
	}
	in := Service{Name: s.Name, Hosts: s.Hosts, Port: s.Address.Port(), Rules: rules, Headers: s.Headers}
	host, _, _ := strings.Cut(strings.ToLower(q.Host), ":")
	if s.Mode == model.ModeConnect {
		host = strings.ToLower(q.Host)
		if _, ok := s.Destination(host); !ok {
			return refused(noDestination(q.Host))
		}
	}
	if s.Opaque.On {
		asked := opaque(out.Identity, host)
		for _, r := range rules {
			out.Misses = append(out.Misses, r.Misses(asked))
		}
		if out.Rule, err = decideOpaque(rules, out.Identity, host); err != nil {
			return refused(err)
		}
		return out, nil
	}
	asked, _, err := in.asked(out.Identity, host, &http.Request{Method: q.Method, Host: q.Host, URL: target, Header: q.Header})
	if err != nil {
		return refused(err)
	}
	out.Path = asked.Path
	for _, r := range rules {
		out.Misses = append(out.Misses, r.Misses(asked))
	}
	if out.Rule, err = decide(rules, asked); err != nil {
		return refused(err)
	}
	return out, nil
}

// ReadCertificates reads a file of certificates in PEM; there is at least one.
func ReadCertificates(files Files, name string) ([]*x509.Certificate, error) {
	return readCertificates(files, name)
}

// FileError is a file of clients or of a service that cannot be right.
type FileError struct {
	At  model.Source // that names the file
	Err error
}

func (e *FileError) Error() string {
	return fmt.Sprintf("%s:%d:%d: %v", e.At.File, e.At.Line, e.At.Column, e.Err)
}

// Unwrap gives the cause.
func (e *FileError) Unwrap() error { return e.Err }

// CheckFiles looks at the files of clients and services as far as they are there and can be read: a
// gateway's files are on its node, which need not be this one.
func CheckFiles(clients []model.Clients, services []model.Service, files Files, now time.Time) (errs []error) {
	note := func(at model.Source, err error) {
		if err != nil {
			errs = append(errs, &FileError{at, err})
		}
	}
	can := func(names ...string) bool {
		for _, name := range names {
			if _, _, err := files.Read(name, listMax); errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) {
				return false
			}
		}
		return true
	}
	for _, c := range clients {
		if !can(c.CA) {
			continue
		}
		alone := c
		alone.CRL, alone.OCSP, alone.OlderThan, alone.Lifetime = "", false, 0, max(c.Lifetime, time.Hour)
		if _, err := loadClients(alone, files, now); err != nil {
			note(c.At, err)
		} else if c.CRL != "" && can(c.CRL) {
			_, err := loadClients(c, files, now)
			note(c.CRLAt, err)
		}
	}
	for _, s := range services {
		if can(s.Certificate) && (s.Signer != "" || can(s.Key)) {
			_, err := loadCertificate(s, files, now)
			note(s.CertificateAt, err)
		}
		if s.Mode != model.ModeConnect && can(s.Origin.CA) {
			_, err := loadOrigin(s, files)
			note(s.Origin.CAAt, err)
		}
	}
	return errs
}
