package e2e

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"testing"

	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/event"
)

// connections are those of a function that its node's agent lists.
func (w *world) connections(node, function string, limit int) (api.Connections, error) {
	c := w.client(node)
	defer c.Close()
	return c.Connections(soon(w.t), function, limit)
}

// Each connection is listed on both nodes, with its ends, the bytes of both sides and the four paths, and not any more once it has ended. One
// above the limit of a function is a line of waystamp watch.
func TestConnectionsOfStreamFunctionsAreSeen(t *testing.T) {
	t.Parallel()
	const count = 3
	w := build(t, strings.Replace(example(t, "streams.yaml"), "run: [{gzip: {level: 1}}]}", fmt.Sprintf("run: [{gzip: {level: 1}}], limits: {connections: %d}}", count), 1))
	echo := w.echoTCP("h2", false)
	defer echo.Close()
	const text = "All work and no play makes Jack a dull boy.\n"
	var open []net.Conn
	dial := func() (c net.Conn, err error) {
		err = w.Do("h1", func() error {
			c, err = net.DialTimeout("tcp", echo.Addr().String(), settleTime)
			return err
		})
		return c, err
	}
	for range count {
		c, err := dial()
		must(t, err)
		defer c.Close()
		_, err = io.WriteString(c, text)
		must(t, err)
		_, err = io.ReadFull(c, make([]byte, len(text)))
		must(t, err)
		open = append(open, c)
	}
	server := netip.MustParseAddrPort(echo.Addr().String())
	way := func(p *api.ConnectionPath) string {
		if p == nil {
			return "none"
		}
		return p.Direction + " " + p.From + " " + p.To
	}
	list, err := w.connections("r2", "zip", 100)
	must(t, err)
	if list.All != count || len(list.Connections) != count {
		t.Fatalf("r2 lists %d of %d connections; want %d", len(list.Connections), list.All, count)
	}
	clients := map[string]bool{}
	for _, c := range open {
		clients[c.LocalAddr().String()] = true
	}
	for i, c := range list.Connections {
		if i > 0 && list.Connections[i-1].Client.Compare(c.Client) >= 0 {
			t.Errorf("%s is behind %s", c.Client, list.Connections[i-1].Client)
		}
		ways := []string{way(c.ClientSide.Comes), way(c.ClientSide.Goes), way(c.ServerSide.Comes), way(c.ServerSide.Goes)}
		want := []string{"forward  zip", "reverse zip ", "reverse unzip zip", "forward zip unzip"}
		if c.Function != "zip" || !clients[c.Client.String()] || c.Server != server || c.Chain != "web" || c.State != "open" || strings.Join(ways, ", ") != strings.Join(want, ", ") {
			t.Errorf("r2 has %+v by %q; want one of ours, open, by %q", c, ways, want)
		}
		// Between r2 and r3 the bytes are compressed: a header of gzip is there, too.
		if c.ClientSide.State != "established" || c.ServerSide.State != "established" || c.ClientSide.Received != uint64(len(text)) || c.ClientSide.Sent != uint64(len(text)) ||
			c.ServerSide.Sent == 0 || c.ServerSide.Sent == uint64(len(text)) || c.ServerSide.Received == 0 {
			t.Errorf("the sides of a connection are %+v and %+v; want %d bytes at the client's, and others at the server's", c.ClientSide, c.ServerSide, len(text))
		}
	}
	if first, err := w.connections("r2", "zip", 1); err != nil || first.All != count || len(first.Connections) != 1 || first.Connections[0].Client != list.Connections[0].Client {
		t.Errorf("the first connection is %+v, %v; want that of the whole list", first, err)
	}
	behind, err := w.connections("r3", "", 100)
	if err != nil || behind.All != count || behind.Connections[0].Function != "unzip" || behind.Connections[0].Server != server {
		t.Errorf("r3 lists %+v, %v; want the same connections, of unzip", behind, err)
	}

	// One above the limit is refused, and seen.
	if c, err := dial(); err == nil {
		c.Close()
		t.Error("one connection above the limit was let through")
	}
	eventually(t, func() error {
		c := w.client("r2")
		defer c.Close()
		var seen []event.Event
		if err := c.Events(soon(t), false, func(e event.Event) error {
			if e.Reason == "worker-limit" {
				seen = append(seen, e)
			}
			return nil
		}); err != nil {
			return err
		}
		if len(seen) == 0 {
			return errors.New("r2 has no event of the connection above the limit")
		}
		e := seen[0]
		if e.Node != "r2" || e.Interface != "wss-zip" || e.Hook != event.HookWorker || !strings.HasSuffix(e.Text, " to "+server.String()) || !strings.Contains(e.Text, "function zip, ["+w.addr("h1").String()+"]:") {
			t.Errorf("the event is %+v", e)
		}
		return nil
	})

	for _, c := range open {
		must(t, c.Close())
	}
	eventually(t, func() error {
		list, err := w.connections("r2", "", 100)
		if err == nil && list.All > 0 {
			err = fmt.Errorf("r2 lists %d connections that have ended: %+v", list.All, list.Connections)
		}
		return err
	})
}

// What a chain refuses to do with one function it does with two: a second visit of a node, and two kinds of operations there in a row. The connections of both visits have
// the same addresses and ports on one node, and do not meet.
func TestAChainComesBackToTheNodeOfAStreamFunction(t *testing.T) {
	t.Parallel()
	domain := strings.NewReplacer(
		"run: [{gzip: {level: 1}}]}", "run: [count, {gzip: {level: 1}}]}\n  - {name: again, node: r2, kind: stream, run: [count, {xor: {passes: 0}}]}",
		"functions: [zip, unzip]", "functions: [zip, unzip, again]",
	).Replace(example(t, "streams.yaml"))
	w := build(t, domain)
	const size = 1 << 20
	for _, chain := range []string{"web", "web4"} {
		w.ipv4 = chain == "web4"
		var since []func() flow
		for _, way := range []string{"forward, up to zip", "forward, from zip to unzip", "forward, from unzip to again", "forward, from again on", "reverse, up to again", "reverse, from again to unzip", "reverse, from unzip to zip", "reverse, from zip on"} {
			since = append(since, w.counting(w.part(chain, way)))
		}
		stream := func(function string) *api.Stream {
			t.Helper()
			f, err := w.function("r2", function)
			must(t, err)
			return f.Stream
		}
		before, later := stream("zip"), stream("again")
		text := strings.Repeat("All work and no play makes Jack.", size/32)
		must(t, w.echoed(text))
		for i, f := range since {
			if n := f().frames(); n == 0 {
				t.Errorf("%s: part %d was not taken", chain, i)
			}
		}
		first, second := stream("zip"), stream("again")
		if n := first.Opened - before.Opened; n != 1 {
			t.Errorf("%s: zip opened %d connections; want one", chain, n)
		}
		if n := second.Opened - later.Opened; n != 1 {
			t.Errorf("%s: again opened %d connections; want one", chain, n)
		}
		for what, n := range map[string]uint64{
			"from the client at zip":   first.ToServer.In - before.ToServer.In,
			"to the client at zip":     first.ToClient.Out - before.ToClient.Out,
			"from the client at again": second.ToServer.In - later.ToServer.In,
			"to the server at again":   second.ToServer.Out - later.ToServer.Out,
			"from the server at again": second.ToClient.In - later.ToClient.In,
		} {
			if n != size {
				t.Errorf("%s: %d bytes %s; want %d", chain, n, what, size)
			}
		}
		if n := first.ToServer.Out - before.ToServer.Out; n > size/10 {
			t.Errorf("%s: zip made %d bytes of %d", chain, n, size)
		}
		// Operations in a row see what the one before gives.
		if in := first.Run[1].In - before.Run[1].In; first.Run[0].Name != "count" || first.Run[1].Name != "gzip" || in != size {
			t.Errorf("%s: the operations of zip are %+v; want count, and gzip of %d bytes", chain, first.Run, size)
		}
	}
}
