package stream

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"regexp"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/await"
)

// testKeys are the keys of workers in tests.
var testKeys = map[string]string{"7": "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="}

func TestBytesThatNoFunctionWantsAreSpliced(t *testing.T) {
	bothVersions(t, settings{"run": listOf(`count|match {"literals": ["nothing"], "bytes": 1000}`)}, func(t *testing.T, w *world, p *process, l *net.TCPListener, to netip.AddrPort) {
		before := p.statistics()
		c, s := w.pair(t, l, to)
		const size = 16 << 20
		go func() {
			c.Write(make([]byte, size))
			c.CloseWrite()
		}()
		n, err := io.Copy(io.Discard, s)
		if err != nil || n != size {
			t.Fatalf("%d bytes came, want %d: %v", n, size, err)
		}
		now := p.statistics()
		in, out, spliced := now.ToServer.In-before.ToServer.In, now.ToServer.Out-before.ToServer.Out, now.ToServer.Spliced-before.ToServer.Spliced
		if in != size || out != size || spliced < size*9/10 {
			t.Errorf("%d bytes in, %d out, %d of them spliced; want %d, %d and nine tenths", in, out, spliced, size, size)
		}
		for i, step := range now.Run {
			if step.In-before.Run[i].In != size || step.Out-before.Run[i].Out != size {
				t.Errorf("function %s: %d bytes in, %d out; want %d", step.Name, step.In-before.Run[i].In, step.Out-before.Run[i].Out, size)
			}
		}
	})
}

func TestGzipReachesTheServer(t *testing.T) {
	bothVersions(t, settings{"run": listOf("gzip")}, func(t *testing.T, w *world, p *process, l *net.TCPListener, to netip.AddrPort) {
		c, s := w.pair(t, l, to)
		want := bytes.Repeat([]byte("compress me "), 50_000)
		go func() {
			c.Write(want)
			c.CloseWrite()
		}()
		file, err := io.ReadAll(s)
		must(t, err)
		r, err := gzip.NewReader(bytes.NewReader(file))
		must(t, err)
		if got, err := io.ReadAll(r); err != nil || !bytes.Equal(got, want) || len(file) > len(want)/10 {
			t.Fatalf("of %d bytes the server got %d, which are %d: %v", len(want), len(file), len(got), err)
		}
		// The other way, the worker decompresses what the server has compressed.
		var answer bytes.Buffer
		z := gzip.NewWriter(&answer)
		z.Write(want)
		z.Close()
		go func() {
			s.Write(answer.Bytes())
			s.CloseWrite()
		}()
		if got, err := io.ReadAll(c); err != nil || !bytes.Equal(got, want) {
			t.Errorf("the client got %d bytes, want %d: %v", len(got), len(want), err)
		}
	})
}

func TestMatchResetsBothSides(t *testing.T) {
	bothVersions(t, settings{"run": listOf(`match {"literals": ["forbidden"]}`)}, func(t *testing.T, w *world, p *process, l *net.TCPListener, to netip.AddrPort) {
		before := p.statistics()
		c, s := w.pair(t, l, to)
		_, err := c.Write([]byte("what is forb"))
		must(t, err)
		b := make([]byte, 100)
		n, err := io.ReadFull(s, b[:12])
		if err != nil || string(b[:n]) != "what is forb" {
			t.Fatalf("the server got %q: %v", b[:n], err)
		}
		_, err = c.Write([]byte("idden"))
		must(t, err)
		if n, err := s.Read(b); !isReset(err) {
			t.Errorf("the server got %q: %v; want a reset", b[:n], err)
		}
		if _, err := c.Read(b); !isReset(err) {
			t.Errorf("the client saw %v, want a reset", err)
		}
		now := p.statistics()
		if now.ResetByFunction != before.ResetByFunction+1 || now.Run[0].Events != before.Run[0].Events+1 {
			t.Errorf("statistics are %+v; want one reset by a function, and one match, more", now)
		}
	})
}

func TestDamagedInputOfGunzipResets(t *testing.T) {
	w := once(t)
	w.startWorker(t, settings{"run": listOf("gunzip")})
	l := w.listen(t, towards["IPv6"])
	c, s := w.pair(t, l, towards["IPv6"])
	_, err := c.Write([]byte("this is no gzip file"))
	must(t, err)
	for name, conn := range map[string]net.Conn{"client": c, "server": s} {
		if n, err := conn.Read(make([]byte, 1)); !isReset(err) {
			t.Errorf("the %s got %d bytes and %v, want a reset", name, n, err)
		}
	}
}

// What is cut off on its way to open ends in a reset, although TCP ended in order.
func TestASealedStreamThatIsCutResets(t *testing.T) {
	w := once(t)
	w.startWorker(t, settings{"run": listOf(`seal {"key": 7}`), "keys": testKeys})
	l := w.listen(t, towards["IPv6"])
	c, s := w.pair(t, l, towards["IPv6"])
	_, err := c.Write([]byte("secret"))
	must(t, err)
	sealed := make([]byte, 40+2+6+16)
	_, err = io.ReadFull(s, sealed)
	must(t, err)
	if bytes.Contains(sealed, []byte("secret")) {
		t.Fatalf("the server got %q", sealed)
	}
	must(t, s.CloseWrite()) // without a final record
	if n, err := c.Read(make([]byte, 1)); !isReset(err) {
		t.Errorf("the client got %d bytes and %v, want a reset", n, err)
	}
}

func TestALimitedStreamIsWhole(t *testing.T) {
	bothVersions(t, settings{"run": listOf(`limit {"connection": 2000000, "all": 3000000}|xor|xor`)}, func(t *testing.T, w *world, p *process, l *net.TCPListener, to netip.AddrPort) {
		var ends []io.Reader
		want := make([]byte, 600_000)
		pattern(want, 0, true)
		for range 3 {
			c, s := w.pair(t, l, to)
			go func() {
				c.Write(want)
				c.CloseWrite()
			}()
			ends = append(ends, s)
		}
		for _, s := range ends {
			if got, err := io.ReadAll(s); err != nil || !bytes.Equal(got, want) {
				t.Errorf("%d bytes came, want %d: %v", len(got), len(want), err)
			}
		}
	})
}

// Downloads and uploads by HTTP, over connections that are kept and that are not.
func TestHTTPGoesThrough(t *testing.T) {
	for _, run := range []string{"count", `gzip|seal {"key": 7}|open {"key": 7}|gunzip`} {
		t.Run(run, func(t *testing.T) {
			bothVersions(t, settings{"run": listOf(run), "keys": testKeys}, func(t *testing.T, w *world, p *process, l *net.TCPListener, to netip.AddrPort) {
				server := &http.Server{Handler: http.HandlerFunc(func(out http.ResponseWriter, r *http.Request) {
					body, err := io.ReadAll(r.Body)
					if err != nil {
						http.Error(out, err.Error(), http.StatusBadRequest)
						return
					}
					n, _ := strconv.Atoi(r.URL.Query().Get("bytes"))
					answer := make([]byte, n)
					pattern(answer, len(body), false)
					out.Write(answer)
				})}
				go server.Serve(l)
				defer server.Close()
				for _, keep := range []bool{true, false} {
					transport := &http.Transport{DisableKeepAlives: !keep, DialContext: func(context.Context, string, string) (net.Conn, error) { return w.dial(to) }}
					defer transport.CloseIdleConnections()
					client := http.Client{Transport: transport, Timeout: await.Limit(time.Minute)}
					for i, n := range []int{0, 1, 1000, 3_000_000, 17, 200_000} {
						url := fmt.Sprintf("http://%s/?bytes=%d", to, n)
						r, err := client.Post(url, "application/octet-stream", bytes.NewReader(make([]byte, i*100_000)))
						must(t, err)
						got, err := io.ReadAll(r.Body)
						r.Body.Close()
						want := make([]byte, n)
						pattern(want, i*100_000, false)
						if err != nil || !bytes.Equal(got, want) {
							t.Fatalf("%s gave %d bytes: %v", url, len(got), err)
						}
					}
				}
			})
		})
	}
}

// anonymous is the memory of a process that is its own, in bytes.
func (p *process) anonymous(t *testing.T) int {
	t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
	must(t, err)
	m := regexp.MustCompile(`(?m)^RssAnon:\s+(\d+) kB$`).FindSubmatch(status)
	if m == nil {
		t.Fatalf("the kernel says nothing of RssAnon:\n%s", status)
	}
	kib, err := strconv.Atoi(string(m[1]))
	must(t, err)
	return kib << 10
}

// Idle connections cost a worker some hundred bytes each. Two workers share the port, since
// one process may have no more than 20 000 descriptors where nobody has raised that.
func TestIdleConnectionsAreSmall(t *testing.T) {
	const connections = 10_100
	w := once(t)
	var limit unix.Rlimit
	must(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &limit))
	if limit.Cur < connections+1000 {
		t.Fatalf("this test needs %d descriptors, and may have %d; raise the limit (ulimit -n)", connections+1000, limit.Cur)
	}
	must(t, w.server.SetSysctl("net/core/somaxconn", "65535"))
	// The server does not accept: its connections take no descriptors.
	var listener int
	must(t, w.server.NetNS().Do(func() (err error) {
		if listener, err = unix.Socket(unix.AF_INET6, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP); err != nil {
			return err
		}
		return errors.Join(unix.Bind(listener, &unix.SockaddrInet6{Port: port}), unix.Listen(listener, 65535))
	}))
	defer unix.Close(listener)
	workers := []*process{w.startWorker(t, settings{"run": listOf(`count`)}), w.startWorker(t, settings{"run": listOf("count")})}
	var clients []net.Conn
	defer func() {
		for _, c := range clients {
			c.(*net.TCPConn).SetLinger(0)
			c.Close()
		}
	}()
	open := func(n int) {
		for len(clients) < n {
			c, err := w.dial(towards["IPv6"])
			must(t, err)
			clients = append(clients, c)
			_, err = c.Write([]byte("x")) // each has carried a byte
			must(t, err)
		}
		eventually(t, "all connections have carried their byte", func() bool {
			return workers[0].statistics().ToServer.Out+workers[1].statistics().ToServer.Out == uint64(n)
		})
	}
	open(100)
	before := workers[0].anonymous(t) + workers[1].anonymous(t)
	open(connections)
	each := (workers[0].anonymous(t) + workers[1].anonymous(t) - before) / (connections - 100)
	t.Logf("%d bytes of memory per idle connection; connections of each worker: %d, %d", each, workers[0].statistics().Now, workers[1].statistics().Now)
	if each > 1024 {
		t.Errorf("an idle connection takes %d bytes, more than 1024", each)
	}
}
