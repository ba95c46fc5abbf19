package e2e

import (
	"errors"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/waystamp/waystamp/internal/lab"
	"github.com/waystamp/waystamp/internal/plan"
)

// partsOf are the parts of a chain of examples/streams.yaml.
func (w *world) partsOf(chain string) (parts []plan.Path) {
	for _, way := range []string{"forward, up to zip", "forward, from zip to unzip", "forward, from unzip on", "reverse, up to unzip", "reverse, from unzip to zip", "reverse, from zip on"} {
		parts = append(parts, w.part(chain, way))
	}
	return parts
}

// answeredDatagrams asks a host over UDP so many times; it gives the answers that came.
func (w *world) answeredDatagrams(from, to string, n int, wait time.Duration) (answers int) {
	w.t.Helper()
	var server net.PacketConn
	must(w.t, w.Do(to, func() (err error) {
		server, err = net.ListenPacket("udp", netip.AddrPortFrom(w.addr(to), 0).String())
		return err
	}))
	done := make(chan struct{})
	defer func() { must(w.t, server.Close()); <-done }()
	go func() {
		defer close(done)
		b := make([]byte, 9)
		for {
			k, from, err := server.ReadFrom(b)
			if err != nil {
				return
			}
			server.WriteTo(b[:k], from)
		}
	}()
	var client net.Conn
	must(w.t, w.Do(from, func() (err error) {
		client, err = net.Dial("udp", server.LocalAddr().String())
		return err
	}))
	defer client.Close()
	b := make([]byte, 9)
	for range n {
		_, err := client.Write([]byte("echo"))
		must(w.t, errors.Join(err, client.SetReadDeadline(time.Now().Add(wait))))
		if k, err := client.Read(b); err == nil && string(b[:k]) == "echo" {
			answers++
		}
	}
	return answers
}

// Pings and datagrams go by functions on byte streams where the file says so: each part stamps and verifies them, over both versions
// of IP and in both directions. TCP goes through the functions as before, and without a proof nothing goes by.
func TestWhatIsNotTCPGoesByStreamFunctions(t *testing.T) {
	for _, other := range []string{"icmp", "relay"} {
		t.Run(other, func(t *testing.T) {
			t.Parallel()
			const n = 3
			w := build(t, strings.NewReplacer(
				"kind: stream, run: [{gzip", "kind: stream, other: "+other+", run: [{gzip",
				"kind: stream, run: [gunzip", "kind: stream, other: "+other+", run: [gunzip",
			).Replace(example(t, "streams.yaml")))
			for _, chain := range []string{"web", "web4"} {
				w.ipv4 = chain == "web4"
				var since []func() flow
				for _, p := range w.partsOf(chain) {
					since = append(since, w.counting(p))
				}
				if got := w.ping("h1", "h2", lab.PingConfig{Count: n, Timeout: settleTime}); got != n {
					t.Errorf("%s: %d of %d echo requests were answered", chain, got, n)
				}
				want := uint64(n)
				switch got := w.answeredDatagrams("h1", "h2", n, map[string]time.Duration{"icmp": lostTime, "relay": settleTime}[other]); {
				case other == "icmp" && got != 0, other == "relay" && got != n:
					t.Errorf("%s: %d of %d datagrams were answered", chain, got, n)
				case other == "icmp":
					w.refused("r2", "stream-not-tcp", n)
				default:
					want += n
				}
				for i, f := range since {
					parts := want
					if i == 0 && other == "icmp" {
						parts += n // r2 has verified what it refused
					}
					if got := f().frames(); got != parts {
						t.Errorf("%s: part %d has carried %d frames; want %d", chain, i, got, parts)
					}
				}
				before, err := w.function("r2", "zip")
				must(t, err)
				w.text("h2", "h1", strings.Repeat("All work and no play makes Jack a dull boy.\n", 10_000))
				after, err := w.function("r2", "zip")
				must(t, err)
				if n := after.Stream.ToClient.Out - before.Stream.ToClient.Out; n < 440_000 {
					t.Errorf("%s: %d bytes came out of zip; want that TCP goes through it", chain, n)
				}
			}
			w.ipv4 = false
			if got := w.ping("r1", "h2", lab.PingConfig{Count: n, Timeout: lostTime}); got != 0 {
				t.Errorf("%d of %d echo requests without a proof were answered", got, n)
			}
			w.refused("r2", "unproven", n)
		})
	}
}
