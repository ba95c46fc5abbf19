package gateway

import (
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// noDestination refuses what a proxy's service does not name.
func noDestination(name string) error {
	return refuse(DestinationUnknown, "%q is none of the destinations", shorten(name, 300))
}

// asksFor is the destination that a client of a proxy names, in small letters. It need not be there.
func asksFor(r *http.Request) (name string, err error) {
	if r.Method != http.MethodConnect {
		return "", refuse(MethodRefused, "a proxy takes CONNECT alone, and not %s", shorten(r.Method, 64))
	}
	// The target as it came is a host and a port (RFC 9112 section 3.2.3): net/url would take more apart, such as what stands
	// before an @.
	host, port, err := net.SplitHostPort(r.RequestURI)
	n, perr := strconv.ParseUint(port, 10, 16)
	if err != nil || perr != nil || host == "" || strconv.FormatUint(n, 10) != port || r.Host != r.RequestURI {
		return "", refuse(RequestMalformed, "%q is not a host with a port", shorten(r.RequestURI, 300))
	}
	// A CONNECT has no content (RFC 9110 section 9.3.6): what follows it would be the tunnel's for one reader, and a body for
	// another.
	if r.ContentLength != 0 || len(r.TransferEncoding) > 0 || len(r.Header["Content-Length"]) > 0 {
		return "", refuse(RequestMalformed, "a CONNECT with content")
	}
	return strings.ToLower(r.RequestURI), nil
}

// connect takes the bytes of a client that has named a destination there, if a rule lets it. The client hears by the status what
// has become of it: 400, 403, 405, 502 or 503, without more; the log has the reason.
func (g *Gateway) connect(w http.ResponseWriter, r *http.Request, s *session) {
	about := Record{Session: s.id, Service: s.service, Client: s.client.String(), Identity: s.identity, Serial: s.serial,
		Method: shorten(r.Method, 64), Host: shorten(r.RequestURI, 300)}
	name, err := asksFor(r)
	if err == nil {
		about.Host = shorten(name, 300)
		err = g.carryTo(r.Context(), s, about, "", func() (halfCloser, error) { return hijack(w, s) })
	}
	switch {
	case err == nil:
	case errors.Is(err, errOver):
		panic(http.ErrAbortHandler) // its connection is closed
	default:
		g.note(about, err)
		if reasonOf(err, RuleNone) == MethodRefused {
			w.Header().Set("Allow", http.MethodConnect) // RFC 9110 section 15.5.6
		}
		deny(w, r, reasonOf(err, RuleNone))
	}
}

// hijack says that the tunnel is open, and gives the client's side of it: with what the client has sent ahead.
func hijack(w http.ResponseWriter, s *session) (halfCloser, error) {
	c, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return nil, err
	}
	secured := c.(*tls.Conn)
	leg := &clientLeg{Conn: secured, under: s.conn.(*conn)}
	leg.ahead = make([]byte, buffered.Reader.Buffered())
	if _, err := io.ReadFull(buffered.Reader, leg.ahead); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	if err := errors.Join(c.SetDeadline(time.Time{}), answered(secured)); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return leg, nil
}

// answered writes the answer, which has no content and no field that would say so (RFC 9110 section 9.3.6).
func answered(c *tls.Conn) error {
	_, err := io.WriteString(c, "HTTP/1.1 200 Connection established\r\n\r\n")
	return err
}
