package agent

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/event"
)

// Client sends requests to an agent over its socket.
type Client struct {
	socket string
	http   *http.Client
}

// NewClient returns a client for an agent's socket. It connects at the first request.
func NewClient(socket string) *Client {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", socket)
	}
	return &Client{socket, &http.Client{Transport: &http.Transport{DialContext: dial}}}
}

// Close lets go of idle connections.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// Status returns the agent's status.
func (c *Client) Status(ctx context.Context) (v api.Status, err error) {
	return v, c.getJSON(ctx, api.PathStatus, &v, &v.Version)
}

// Counters returns the programs' counters.
func (c *Client) Counters(ctx context.Context) (v api.Counters, err error) {
	return v, c.getJSON(ctx, api.PathCounters, &v, &v.Version)
}

// Functions returns the counters and kept headers of functions' proxies.
func (c *Client) Functions(ctx context.Context) (v api.Functions, err error) {
	return v, c.getJSON(ctx, api.PathFunctions, &v, &v.Version)
}

// Connections returns the first connections of the node's functions of kind stream, at most limit; function "": of all functions.
func (c *Client) Connections(ctx context.Context, function string, limit int) (v api.Connections, err error) {
	q := url.Values{"limit": {strconv.Itoa(limit)}}
	if function != "" {
		q.Set("function", function)
	}
	return v, c.getJSON(ctx, api.PathConnections+"?"+q.Encode(), &v, &v.Version)
}

// Function returns the counters of one function's proxy.
func (c *Client) Function(ctx context.Context, name string) (api.Function, error) {
	v, err := c.Functions(ctx)
	if err != nil {
		return api.Function{}, err
	}
	for _, f := range v.Functions {
		if f.Function == name {
			return f, nil
		}
	}
	return api.Function{}, fmt.Errorf("the agent has no function %s; waystamp get functions lists its functions", name)
}

// Services returns the services of the node's gateway.
func (c *Client) Services(ctx context.Context) (v api.Services, err error) {
	return v, c.getJSON(ctx, api.PathServices, &v, &v.Version)
}

// Sessions returns the open sessions of the node's gateway.
func (c *Client) Sessions(ctx context.Context) (v api.Sessions, err error) {
	return v, c.getJSON(ctx, api.PathSessions, &v, &v.Version)
}

// Session returns a session of the node's gateway with its requests. It may have ended.
func (c *Client) Session(ctx context.Context, id uint64) (v api.SessionDetail, err error) {
	return v, c.getJSON(ctx, fmt.Sprintf("%s/%d", api.PathSessions, id), &v, &v.Version)
}

// Readers returns the ends on the node that hold payload of sealed chains in clear.
func (c *Client) Readers(ctx context.Context) (v api.HeldReaders, err error) {
	return v, c.getJSON(ctx, api.PathReaders, &v, &v.Version)
}

// Revoked returns the identities that were revoked at the node's gateway.
func (c *Client) Revoked(ctx context.Context) (v api.Revoked, err error) {
	return v, c.getJSON(ctx, api.PathRevoked, &v, &v.Version)
}

// EndSession ends a session of the node's gateway.
func (c *Client) EndSession(ctx context.Context, id uint64) error {
	resp, err := c.send(ctx, http.MethodDelete, fmt.Sprintf("%s/%d", api.PathSessions, id), nil)
	if err != nil {
		return err
	}
	return resp.Body.Close()
}

// ErrNoGateway means that the node has no gateway.
var ErrNoGateway = errors.New("this node has no gateway")

// Revoke changes the list of revoked identities of the node's gateway, or fails with ErrNoGateway.
func (c *Client) Revoke(ctx context.Context, q api.RevokeRequest) (v api.RevokeAnswer, err error) {
	text, err := json.Marshal(q)
	if err != nil {
		return v, err
	}
	resp, err := c.send(ctx, http.MethodPost, api.PathRevoked, bytes.NewReader(text))
	if err != nil {
		return v, err
	}
	return v, c.read(resp, &v, &v.Version)
}

// ErrDropped means that the agent has dropped a reader of its events, since that took
// none for a while.
var ErrDropped = errors.New("the agent has dropped this reader of events")

// Events calls f for past events and, if follow is set, for new ones until ctx ends (with its
// cause) or the agent stops (with io.EOF), or f fails. If f takes so long that the agent
// disconnects, the error is ErrDropped.
func (c *Client) Events(ctx context.Context, follow bool, f func(event.Event) error) error {
	return c.Watch(ctx, follow, func(int) error { return nil }, f)
}

// Watch is Events; it calls begin first, with the number of past events.
func (c *Client) Watch(ctx context.Context, follow bool, begin func(past int) error, f func(event.Event) error) error {
	resp, err := c.do(ctx, fmt.Sprintf("%s?follow=%t", api.PathEvents, follow))
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	past, _ := strconv.Atoi(resp.Header.Get(pastHeader)) // none: it is not known
	if err := begin(past); err != nil {
		return err
	}
	body := &cutReader{r: resp.Body}
	for e, err := range event.Read(body) {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err != nil && body.cut { // also in the middle of a line
			return c.whyCut(ctx, resp.Header.Get(readerHeader))
		}
		if err != nil {
			return fmt.Errorf("read events of the agent at %s: %w", c.socket, err)
		}
		if err := f(e); err != nil {
			return err
		}
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if follow {
		return io.EOF
	}
	return nil
}

// cutReader notes that its stream ended early.
type cutReader struct {
	r   io.Reader
	cut bool
}

func (r *cutReader) Read(b []byte) (int, error) {
	n, err := r.r.Read(b)
	if err != nil && err != io.EOF {
		r.cut = true
	}
	return n, err
}

// whyCut returns the reason why a stream has ended: the agent names the readers that it has
// disconnected. Without an answer the agent has stopped.
func (c *Client) whyCut(ctx context.Context, reader string) error {
	s, err := c.Status(ctx)
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err != nil || reader == "" || !slices.Contains(s.Readers.LastDropped, reader) {
		return io.EOF
	}
	return fmt.Errorf("%w, at %s, because it did not read pending events: read faster, and connect again (%d readers were dropped for this since the agent started)",
		ErrDropped, c.socket, s.Readers.Dropped)
}

// getJSON reads an answer; version points into it.
func (c *Client) getJSON(ctx context.Context, path string, into any, version *int) error {
	resp, err := c.do(ctx, path)
	if err != nil {
		return err
	}
	return c.read(resp, into, version)
}

func (c *Client) read(resp *http.Response, into any, version *int) error {
	defer resp.Body.Close()
	if err := json.NewDecoder(resp.Body).Decode(into); err != nil {
		return fmt.Errorf("read the answer of the agent at %s: %w", c.socket, err)
	}
	if *version != api.Version {
		return fmt.Errorf("the agent at %s answers in version %d of the interface, and this program reads version %d: run both from the same release", c.socket, *version, api.Version)
	}
	return nil
}

// do asks for a path. The caller closes the body of the answer.
func (c *Client) do(ctx context.Context, path string) (*http.Response, error) {
	return c.send(ctx, http.MethodGet, path, nil)
}

// send sends a request. The caller closes the body of the answer.
func (c *Client) send(ctx context.Context, method, path string, body io.Reader) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, "http://agent"+path, body)
	if err != nil {
		return nil, err
	}
	resp, err := c.http.Do(req)
	if err != nil {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		return nil, c.unreachable(err)
	}
	if resp.StatusCode != http.StatusOK {
		said, _ := io.ReadAll(io.LimitReader(resp.Body, 4096))
		resp.Body.Close()
		if resp.StatusCode == http.StatusConflict {
			return nil, fmt.Errorf("the agent at %s says: %w", c.socket, ErrNoGateway)
		}
		return nil, fmt.Errorf("the agent at %s says: %s", c.socket, strings.TrimSpace(string(said)))
	}
	return resp, nil
}

// unreachable has the reason why there is no answer, and the remedy.
func (c *Client) unreachable(err error) error {
	if errors.Is(err, fs.ErrPermission) {
		return fmt.Errorf("ask the agent at %s: %w; run as root", c.socket, unwrapURL(err))
	}
	return fmt.Errorf("ask the agent at %s: %w; is it running?", c.socket, unwrapURL(err))
}

// unwrapURL leaves out the address that was made up for HTTP.
func unwrapURL(err error) error {
	var op *net.OpError
	if errors.As(err, &op) {
		return op.Err
	}
	return err
}
