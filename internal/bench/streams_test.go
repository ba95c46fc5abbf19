package bench

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/stream"
	"github.com/waystamp/waystamp/internal/stream/sandbox"
)

// The test's binary is also what tracks start: the relay and the worker.
func TestMain(m *testing.M) {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	var err error
	switch args := strings.Join(os.Args[1:], " "); {
	case strings.HasPrefix(args, "bench relay "):
		ctx, cancel := context.WithCancel(ctx)
		go func() {
			os.Stdin.Read(make([]byte, 1))
			cancel()
		}()
		err = Relay(ctx, streamPort, func() error {
			_, err := fmt.Println("ready")
			return err
		})
	case strings.HasPrefix(args, "worker "):
		err = stream.Serve(ctx, os.Stdin, os.NewFile(3, "statistics"), os.NewFile(4, "parent"), nil, nil, nil, sandbox.Nobody)
	default:
		os.Exit(m.Run())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func TestStreamCasesAreDomainsAndHaveTheirBaselines(t *testing.T) {
	for _, s := range streamSections() {
		names := map[string]bool{}
		for _, w := range s.ways {
			names[s.figure(w)] = true
		}
		for _, w := range s.ways {
			if b := s.series(w).Baseline; b != "" && !names[b] {
				t.Errorf("%s is held against %s, which is not measured in the same rounds", s.figure(w), b)
			}
			d, _ := s.of(w).domain()
			p, err := plan.Compile(d, plan.NewKeyring(rand.Reader, nil))
			if err != nil {
				t.Fatalf("%s: %v", w, err)
			}
			want := 2
			if w.stream() {
				want += 2 * len(s.of(w).nodes()) // another part for each function, in both directions
			}
			if len(p.Paths) != want {
				t.Errorf("%s: %d paths; want %d", w, len(p.Paths), want)
			}
		}
	}
}

func TestStreamFiguresAreHeldAgainstBothBaselines(t *testing.T) {
	s := streamSections()[0]
	var series []Series
	tracks := map[streamCase]*streamTrack{}
	for i, w := range s.ways {
		one := s.series(w)
		one.Samples = []float64{float64(10 * (i + 1))}
		series = append(series, one)
		tracks[s.of(w)] = &streamTrack{}
	}
	tracks[s.of(streamCopy)].work = []float64{1, 300} // the first run is not counted
	tracks[s.of(streamWorker)].work = []float64{2, 200}
	figures, err := Figures(series)
	must(t, err)
	more, err := s.beside(figures)
	must(t, err)
	work, err := s.work(figures, tracks)
	must(t, err)
	got := map[string]string{}
	for _, f := range append(append(figures, more...), work...) {
		got[f.Name] = fmt.Sprintf("%.2f %s", f.Ratio, f.Baseline)
	}
	for name, want := range map[string]string{
		"streams/one/worker":            "3.00 streams/one/router",
		"streams/one-to-copy/worker":    "1.50 streams/one/copy",
		"streams/one-to-chain/identity": "1.25 streams/one/chain",
		"streams/one-work/worker":       "1.50 streams/one-work/copy",
	} {
		if got[name] != want {
			t.Errorf("%s: %q; want %q", name, got[name], want)
		}
	}
}

// What is measured is what it says: bytes go through the relay and the worker, whole and with
// the client's address, and not past them.
func TestStreamsGoThroughWhatIsMeasured(t *testing.T) {
	ways := []streamWay{streamRouter, streamCopy, streamWorker}
	if haveHAProxy() {
		ways = append(ways, streamHAProxy)
	} else {
		t.Error("HAProxy is not installed; make deps does")
	}
	for _, w := range ways {
		t.Run(string(w), func(t *testing.T) {
			t.Parallel()
			self, err := os.Executable()
			must(t, err)
			track, err := newStreamTrack(t.Context(), Config{Binary: self, CPU: -1, Log: slog.New(slog.DiscardHandler)}, streamCase{way: w})
			must(t, err)
			defer func() { must(t, track.close()) }()
			for what, f := range map[string]func() (float64, error){
				"transfers": func() (float64, error) { return track.transfers(t.Context(), 2, 50*time.Millisecond) },
				"calls":     func() (float64, error) { return track.calls(t.Context(), 0, 50*time.Millisecond) },
				"answers":   func() (float64, error) { return track.answers(t.Context()) },
				"kept":      func() (float64, error) { return track.kept(t.Context(), 50*time.Millisecond) },
				"sized":     func() (float64, error) { return track.sized(t.Context(), 1, 50*time.Millisecond) },
			} {
				if x, err := f(); err != nil || !(x > 0) || math.IsInf(x, 0) {
					t.Errorf("%s: %v, %v", what, x, err)
				}
			}
			if n := len(track.work); w == streamRouter && n != 0 || w != streamRouter && n != 4 {
				t.Errorf("the work of %d runs is known", n)
			}
			track.ends(t)
		})
	}
}

// ends checks, with a server of its own, that it sees the client's address and port, that an
// end passes as an end and a reset as a reset, and that one that is gone refuses.
func (t *streamTrack) ends(test *testing.T) {
	t.server.close()
	t.server = nil
	var l *net.TCPListener
	must(test, t.lab.Do("h2", func() (err error) {
		l, err = net.ListenTCP("tcp6", net.TCPAddrFromAddrPort(t.to))
		return err
	}))
	defer l.Close()
	pair := func() (client, server *net.TCPConn) {
		must(test, t.lab.Do("h1", func() (err error) {
			// A function refuses where the client's port is that of a connection of before, which
			// the server still remembers: the next try has another port.
			for range 3 {
				client, err = net.DialTCP("tcp6", nil, net.TCPAddrFromAddrPort(t.to))
				if !errors.Is(err, unix.ECONNREFUSED) && !errors.Is(err, unix.ECONNRESET) {
					break
				}
			}
			return err
		}))
		l.SetDeadline(time.Now().Add(streamWait))
		var others []string
		for server == nil {
			c, err := l.AcceptTCP()
			if err != nil {
				test.Fatalf("the server sees no connection from %s, only from %q: %v", client.LocalAddr(), others, err)
			}
			if c.RemoteAddr().String() == client.LocalAddr().String() {
				server = c
				break
			}
			// Of a client of before, which was gone before its function had called the server.
			others = append(others, c.RemoteAddr().String())
			must(test, c.Close())
		}
		for _, c := range []*net.TCPConn{client, server} {
			test.Cleanup(func() { c.Close() })
			c.SetDeadline(time.Now().Add(streamWait))
		}
		return client, server
	}
	client, server := pair()
	// The server reads a byte first: HAProxy gives up a client that ends its direction before the
	// server has answered HAProxy's SYN.
	_, err := client.Write([]byte("q"))
	must(test, err)
	_, err = io.ReadFull(server, make([]byte, 1))
	must(test, err)
	// The client ends its direction; the server answers, and then ends its own.
	must(test, client.CloseWrite())
	if b, err := io.ReadAll(server); err != nil || len(b) != 0 {
		test.Errorf("the server read %q, %v; want the end", b, err)
	}
	_, err = server.Write([]byte("answer"))
	must(test, errors.Join(err, server.CloseWrite()))
	if b, err := io.ReadAll(client); err != nil || string(b) != "answer" {
		test.Errorf("the client read %q, %v; want the answer and the end", b, err)
	}
	if t.way == streamHAProxy { // passes a reset on as an end, and has answered before it calls the server
		return
	}
	client, server = pair()
	must(test, errors.Join(server.SetLinger(0), server.Close()))
	if _, err := client.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
		test.Errorf("behind a reset the client read %v; want ECONNRESET", err)
	}
	must(test, l.Close())
	must(test, t.lab.Do("h1", func() error {
		err := callOnce(t.to, 0, make([]byte, 1))
		if !errors.Is(err, unix.ECONNREFUSED) && !errors.Is(err, unix.ECONNRESET) && !errors.Is(err, unix.EPIPE) {
			return fmt.Errorf("a connection to a server that is gone: %w; want it refused", err)
		}
		return nil
	}))
}

// Connections that stand are all there, and go on when they are asked.
func TestConnectionsStand(t *testing.T) {
	self, err := os.Executable()
	must(t, err)
	track, err := newStreamTrack(t.Context(), Config{Binary: self, CPU: -1, Log: slog.New(slog.DiscardHandler)}, streamCase{way: streamRouter})
	must(t, err)
	defer func() { must(t, track.close()) }()
	s, err := track.stand(t.Context(), 3*standPorts*standPorts)
	if err != nil || s.count != 3*standPorts*standPorts || s.kernel <= 0 || s.memory != 0 || !(s.answer > 0) || s.took <= 0 {
		t.Errorf("%+v, %v", s, err)
	}
}
