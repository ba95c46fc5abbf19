package gateway

import (
	"bytes"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"mime"
	"net"
	"net/http"
	"slices"
	"time"

	"github.com/waystamp/waystamp/internal/model"
)

// Responders asks responders of OCSP by HTTP (RFC 6960 appendix A). It reads no answer, and is for who may open connections: a gateway's
// process may not.
type Responders struct{ client http.Client }

// NewResponders asks nobody by itself. Close closes what is kept open.
func NewResponders() *Responders {
	return &Responders{http.Client{
		// Answers are signed, so that nobody on the way can change them. A proxy of the environment would be one more that has to be there.
		Transport: &http.Transport{
			DialContext: (&net.Dialer{Timeout: statusTime}).DialContext, ResponseHeaderTimeout: statusTime, MaxResponseHeaderBytes: 16 << 10,
			MaxIdleConnsPerHost: 4, MaxIdleConns: 16, MaxConnsPerHost: 32, IdleConnTimeout: time.Minute, DisableCompression: true,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		Timeout:       statusTime,
	}}
}

// Close closes connections that nobody uses.
func (r *Responders) Close() { r.client.CloseIdleConnections() }

// Ask sends a question to a responder, and gives what it answers.
func (r *Responders) Ask(ctx context.Context, url string, request []byte) ([]byte, error) {
	q, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(request))
	if err != nil {
		return nil, err
	}
	q.Header.Set("Content-Type", "application/ocsp-request")
	q.Header.Set("Accept", "application/ocsp-response")
	a, err := r.client.Do(q)
	if err != nil {
		return nil, err
	}
	defer a.Body.Close()
	kind, _, _ := mime.ParseMediaType(a.Header.Get("Content-Type"))
	switch {
	case a.StatusCode != http.StatusOK:
		return nil, fmt.Errorf("%s answers with status %d; expect 200", url, a.StatusCode)
	case kind != "application/ocsp-response":
		return nil, fmt.Errorf("%s answers with %q; expect application/ocsp-response", url, shorten(kind, 100))
	}
	der, err := io.ReadAll(io.LimitReader(a.Body, statusBytesMax+1))
	switch {
	case err != nil:
		return nil, fmt.Errorf("%s: %w", url, err)
	case len(der) > statusBytesMax:
		return nil, fmt.Errorf("%s answers with more than %d bytes", url, statusBytesMax)
	}
	return der, nil
}

// ResponderOf says where the responder for a certificate is: where the clients' setting says, or else the certificate, which one of the
// clients' authorities has to have signed. certificates are as StatusQuestion has them.
func ResponderOf(c model.Clients, files Files, certificates [][]byte, now time.Time) (string, error) {
	switch {
	case !c.OCSP:
		return "", fmt.Errorf("responders are not asked about clients %s", c.Name)
	case c.Responder != "":
		return c.Responder, nil
	case len(certificates) == 0 || len(certificates) > chainMax+1:
		return "", fmt.Errorf("%d certificates are none and those up to its root", len(certificates))
	}
	var list []*x509.Certificate
	for _, der := range certificates {
		in, err := x509.ParseCertificate(der)
		if err != nil {
			return "", err
		}
		list = append(list, in)
	}
	c.CRL = "" // lists say nothing of where a responder is
	its, err := loadClients(c, files, now)
	if err != nil {
		return "", err
	}
	pool := its.intermediates.Clone()
	for _, in := range list[1:] {
		pool.AddCert(in)
	}
	if _, err := list[0].Verify(x509.VerifyOptions{Roots: its.roots, Intermediates: pool, CurrentTime: now, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}}); err != nil {
		return "", fmt.Errorf("who signed the certificate is none of the authorities of clients %s: %w", c.Name, err)
	}
	i := slices.IndexFunc(list[0].OCSPServer, func(url string) bool { return model.CheckResponder(url) == nil })
	if i < 0 {
		return "", errors.New("the certificate names no responder with a URL of http; name one in the domain file (responder)")
	}
	return list[0].OCSPServer[i], nil
}
