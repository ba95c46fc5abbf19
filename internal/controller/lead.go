package controller

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/netip"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"

	"github.com/waystamp/waystamp/internal/identity"
	"github.com/waystamp/waystamp/internal/store"
)

// Of several controllers that share their records one leads. It alone changes the domain and answers calls; the
// others pass calls on to it, streams too, with a certificate of a controller.

// CheckAddress holds the rule for what a controller says of itself to the others.
func CheckAddress(address string) error {
	if path, ok := strings.CutPrefix(address, "tls+unix:"); ok && filepath.IsAbs(path) {
		return nil
	}
	at, ok := strings.CutPrefix(address, "tcp:")
	host, port, err := net.SplitHostPort(at)
	ip, _ := netip.ParseAddr(host) // else it is a name
	switch {
	case !ok || err != nil:
		return fmt.Errorf("%q is no address of a controller; expect tcp:HOST:PORT", address)
	case port == "" || port == "0":
		return fmt.Errorf("%q has no port at which others could reach this controller; expect tcp:HOST:PORT", address)
	case host == "" || ip.IsUnspecified():
		return fmt.Errorf("%q is every address of this machine; name one that the other controllers reach", address)
	}
	return nil
}

// errLeadsNoMore ends calls and streams: whoever called asks again, and gets to the next one.
var errLeadsNoMore = refuse(connect.CodeUnavailable, "this controller ends, or leads no more; try again")

// govern carries changes out whenever this controller leads: always, if nobody shares its
// records.
func (c *Controller) govern(ctx context.Context) error {
	shared, ok := c.store.(store.Shared)
	if !ok {
		return c.reign(ctx)
	}
	for {
		lead, err := shared.Lead(ctx, c.cfg.Advertise)
		if err == nil {
			c.cfg.Log.Info("this controller leads")
			err = c.term(ctx, lead)
			if ctx.Err() == nil {
				c.cfg.Log.Warn("this controller leads no more", "err", err)
			}
		} else if ctx.Err() == nil {
			c.cfg.Log.Error("this controller cannot lead", "err", err)
		}
		if errors.Is(err, store.ErrClosed) {
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(failurePause):
		}
	}
}

// term leads until the lead is lost, or a commit says that another one has it.
func (c *Controller) term(ctx context.Context, lead store.Leadership) error {
	ctx, cancel := context.WithCancelCause(ctx)
	var waits sync.WaitGroup
	waits.Go(func() {
		select {
		case <-lead.Lost:
			cancel(store.ErrDeposed)
		case <-ctx.Done():
		}
	})
	err := c.reign(ctx)
	cancel(nil)
	waits.Wait()
	return errors.Join(err, lead.Resign())
}

// reign does what only the one that leads does. It knows nothing but the records: another one has written
// them meanwhile.
func (c *Controller) reign(ctx context.Context) error {
	c.forget()
	c.failed = ""
	c.journal.begin(c.cfg.Now())
	c.refusals.begin()
	c.drains.begin()
	c.inTrouble(nil)
	leading, cancel := context.WithCancel(ctx)
	c.setLeading(leading)
	defer func() {
		c.setLeading(nil)
		cancel()
		c.forget() // whoever leads now erases secrets, and nobody tells of it
		c.known.clear()
	}()
	return c.carry(leading)
}

func (c *Controller) setLeading(ctx context.Context) {
	c.leading.Lock()
	defer c.leading.Unlock()
	c.leading.ctx = ctx
}

// leads is a context that lasts as long as this controller leads; nil: it does not.
func (c *Controller) leads() context.Context {
	c.leading.Lock()
	defer c.leading.Unlock()
	return c.leading.ctx
}

// headerPassed has what a controller says of the caller whose call it passes on. It counts on
// connections of controllers alone.
const headerPassed = "Waystamp-Passed-On"

// passed is in that header, as JSON in base64.
type passed struct {
	Remote      string `json:"remote"`
	UID         uint32 `json:"uid,omitempty"`
	Operator    bool   `json:"operator,omitempty"`    // UID may call Admin, by the rules of who passes it on
	Certificate []byte `json:"certificate,omitempty"` // DER; that the caller has its key, TLS has shown
}

// takePassed is the caller of a call that another controller passes on.
func (c *Controller) takePassed(from caller, header string) (caller, error) {
	who := caller{via: from.remote}
	if from.peer.Expired {
		return who, errors.New("the certificate of the controller that passes the call on has expired")
	}
	var p passed
	b, err := base64.StdEncoding.DecodeString(header)
	if err == nil {
		err = json.Unmarshal(b, &p)
	}
	if err != nil {
		return who, fmt.Errorf("the header %s: %w", headerPassed, err)
	}
	who.remote, who.uid, who.known = p.Remote, p.UID, p.Operator
	if !p.Operator {
		who.certificate = p.Certificate
		who.peer, who.err = identity.VerifyRaw(p.Certificate, c.rootsNow(), c.cfg.Now())
	}
	return who, nil
}

// passOn gives a call to the controller that leads.
func (c *Controller) passOn(w http.ResponseWriter, r *http.Request, who caller) {
	address, transport, err := c.toLeader(r.Context())
	if err != nil {
		refuseCall(w, r, failed(err))
		return
	}
	header := base64.StdEncoding.EncodeToString(encode(passed{Remote: who.remote, UID: who.uid, Operator: who.known, Certificate: who.certificate}))
	r.Body = http.MaxBytesReader(w, r.Body, adminReadMax+nodeReadMax)
	(&httputil.ReverseProxy{
		Transport:     transport,
		FlushInterval: -1,
		ErrorLog:      log.New(io.Discard, "", 0),
		Rewrite: func(p *httputil.ProxyRequest) {
			p.Out.URL.Scheme, p.Out.URL.Host, p.Out.Host = "https", "controller", ""
			p.Out.Header.Set(headerPassed, header)
		},
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) {
			refuseCall(w, r, refuse(connect.CodeUnavailable, "the controller that leads, %s, does not answer: %w; try again", address, err))
		},
	}).ServeHTTP(w, r)
}

// refuseCall answers in the caller's protocol.
func refuseCall(w http.ResponseWriter, r *http.Request, err error) {
	// The caller may be gone; nobody else is to be told.
	_ = connect.NewErrorWriter().Write(w, r, err)
}

// toLeader is the way to the controller that leads.
func (c *Controller) toLeader(ctx context.Context) (string, *http.Transport, error) {
	shared, ok := c.store.(store.Shared)
	if !ok { // it is about to end
		return "", nil, errLeadsNoMore
	}
	address, err := shared.Leader(ctx)
	if err != nil {
		return "", nil, err
	}
	certificate, err := c.certificate()
	if err != nil {
		return "", nil, err
	}
	c.passing.Lock()
	defer c.passing.Unlock()
	// A connection is good for as long as the certificate that opened it, and streams may keep it open for longer.
	if c.passing.address == address && c.passing.certificate == certificate {
		return address, c.passing.transport, nil
	}
	if c.passing.transport != nil {
		c.passing.transport.CloseIdleConnections()
	}
	network, at := "tcp", strings.TrimPrefix(address, "tcp:")
	if path, ok := strings.CutPrefix(address, "tls+unix:"); ok {
		network, at = "unix", path
	}
	t := identity.ClientTLS(c.rootsNow, c.certificate, c.cfg.Now)
	t.NextProtos = []string{"h2", "http/1.1"}
	c.passing.address, c.passing.certificate = address, certificate
	c.passing.transport = &http.Transport{
		TLSClientConfig:     t,
		ForceAttemptHTTP2:   true,
		TLSHandshakeTimeout: passPatience,
		IdleConnTimeout:     2 * time.Minute,
		DisableCompression:  true, // as the caller asks
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{Timeout: passPatience}).DialContext(ctx, network, at)
		},
		// Streams through this controller end soon when the other one is gone.
		HTTP2: &http.HTTP2Config{SendPingTimeout: passPatience, PingTimeout: passPatience, WriteByteTimeout: 30 * time.Second},
	}
	return address, c.passing.transport, nil
}

// passPatience is how long the controller that leads may take to answer at all.
const passPatience = 4 * time.Second

func (c *Controller) closePassing() {
	c.passing.Lock()
	defer c.passing.Unlock()
	if c.passing.transport != nil {
		c.passing.transport.CloseIdleConnections()
	}
}
