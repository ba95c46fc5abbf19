package cli

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"strings"
	"sync"
	"testing"

	"github.com/waystamp/waystamp/internal/agent"
	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/command"
	"github.com/waystamp/waystamp/internal/event"
)

// fakeClient is an agent without a socket. Each Watch takes the next of its streams.
type fakeClient struct {
	mu        sync.Mutex
	status    api.Status
	counters  []api.Counters // one for each call, the last again and again
	functions api.Functions
	connected api.Connections
	services  api.Services
	sessions  api.Sessions
	revoked   api.Revoked
	session   api.SessionDetail
	readers   api.HeldReaders
	asked     []string // what was to be changed
	streams   []fakeStream
	fails     error
	closed    int
}

// fakeStream is a connection to the agent's events.
type fakeStream struct {
	refused error // the agent is not there
	past    int
	events  []event.Event
	end     error // nil: until ctx ends
}

func (c *fakeClient) Status(context.Context) (api.Status, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.status, c.fails
}

func (c *fakeClient) Counters(context.Context) (api.Counters, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	v := c.counters[0]
	if len(c.counters) > 1 {
		c.counters = c.counters[1:]
	}
	return v, c.fails
}

func (c *fakeClient) Functions(context.Context) (api.Functions, error) { return c.functions, c.fails }

func (c *fakeClient) Connections(_ context.Context, function string, limit int) (api.Connections, error) {
	c.asked = append(c.asked, fmt.Sprintf("connections %q %d", function, limit))
	return c.connected, c.fails
}

func (c *fakeClient) Services(context.Context) (api.Services, error) { return c.services, c.fails }
func (c *fakeClient) Sessions(context.Context) (api.Sessions, error) { return c.sessions, c.fails }
func (c *fakeClient) Revoked(context.Context) (api.Revoked, error)   { return c.revoked, c.fails }

func (c *fakeClient) Readers(context.Context) (api.HeldReaders, error) { return c.readers, c.fails }

func (c *fakeClient) Session(_ context.Context, id uint64) (api.SessionDetail, error) {
	c.asked = append(c.asked, fmt.Sprintf("describe %d", id))
	return c.session, c.fails
}

func (c *fakeClient) EndSession(_ context.Context, id uint64) error {
	c.asked = append(c.asked, fmt.Sprintf("end %d", id))
	return c.fails
}

func (c *fakeClient) Revoke(_ context.Context, q api.RevokeRequest) (api.RevokeAnswer, error) {
	if len(c.services.Services) == 0 {
		return api.RevokeAnswer{}, agent.ErrNoGateway
	}
	c.asked = append(c.asked, fmt.Sprintf("revoke %s %t", q.Identity, q.Undo))
	return api.RevokeAnswer{Node: c.services.Node, Identity: q.Identity, Changed: true, Ended: len(c.sessions.Sessions), Running: c.services.Error == ""}, c.fails
}

func (c *fakeClient) Watch(ctx context.Context, _ bool, begin func(int) error, f func(event.Event) error) error {
	c.mu.Lock()
	if len(c.streams) == 0 {
		c.mu.Unlock()
		return fmt.Errorf("more connections than the test has")
	}
	s := c.streams[0]
	c.streams = c.streams[1:]
	c.mu.Unlock()
	if s.refused != nil {
		return s.refused
	}
	if err := begin(s.past); err != nil {
		return err
	}
	for _, e := range s.events {
		if err := f(e); err != nil {
			return err
		}
	}
	if s.end == nil {
		<-ctx.Done()
		return context.Cause(ctx)
	}
	return s.end
}

func (c *fakeClient) Close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed++
}

// fakeAgents are by their sockets.
type fakeAgents map[string]*fakeClient

func (f fakeAgents) in(t *testing.T) surroundings {
	return surroundings{
		connect: func(socket string) client {
			c, ok := f[socket]
			if !ok {
				t.Errorf("nobody should ask %s", socket)
				return &fakeClient{fails: io.ErrUnexpectedEOF}
			}
			return c
		},
		runDir: t.TempDir(), labs: t.TempDir(),
	}
}

// run runs a command line with these agents.
func (f fakeAgents) run(t *testing.T, ctx context.Context, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	var out, errs bytes.Buffer
	code = command.Run(ctx, newRoot(f.in(t)), args, strings.NewReader(""), &out, &errs)
	return out.String(), errs.String(), code
}
