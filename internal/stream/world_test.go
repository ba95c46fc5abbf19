package stream

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/await"
	"github.com/waystamp/waystamp/internal/host"
)

// These tests move bytes over real TCP. There are four namespaces without names, which
// end with the process:
//
//	client c ---- node n ---- server s
//	                 |
//	                 w, the place of a worker
//
// The node has packets from c and s go to w, whatever their destination, and routes
// packets from w.

// asWorker, in the environment, has the test's binary run as a worker's process does.
const asWorker = "WAYSTAMP_TEST_WORKER"

func TestMain(m *testing.M) {
	if os.Getenv(asWorker) != "" {
		ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
		eat := make(chan os.Signal, 1)
		signal.Notify(eat, syscall.SIGUSR1)
		go func() {
			<-eat
			var kept [][]byte
			for {
				b := make([]byte, 1<<20)
				for i := range b {
					b[i] = 1
				}
				kept = append(kept, b)
			}
		}()
		var parent, at, link *os.File
		if len(os.Args) > 1 { // of Start
			parent = os.NewFile(4, "parent")
		}
		if slices.Contains(os.Args, "--stay-fd") { // of Begin
			at, link = os.NewFile(5, "at"), os.NewFile(6, "link")
		}
		var err error
		if raced && parent == nil {
			err = unconfined(ctx)
		} else {
			err = Serve(ctx, os.Stdin, os.NewFile(3, "statistics"), parent, nil, at, link, 0)
		}
		stop()
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	if err := host.Require(host.FeatureNetAdmin, host.FeatureNamespaces, host.FeatureIPv6, host.FeatureVeth); err != nil {
		fmt.Fprintln(os.Stderr, "internal/stream:", err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// unconfined is Serve, of a program with the race detector: such a one cannot be confined.
func unconfined(ctx context.Context) error {
	c, err := ReadConfig(os.Stdin)
	if err != nil {
		return err
	}
	memory, err := host.OpenSharedWords(os.NewFile(3, "statistics"))
	if err != nil {
		return err
	}
	defer memory.Close()
	w, err := New(c, memory, nil)
	if err != nil {
		return err
	}
	return w.Run(ctx)
}

const port = 8080

var (
	client4, client6 = netip.MustParseAddr("192.0.2.2"), netip.MustParseAddr("2001:db8:1::2")
	server4, server6 = netip.MustParseAddr("198.51.100.2"), netip.MustParseAddr("2001:db8:2::2")
	towards          = map[string]netip.AddrPort{
		"IPv4": netip.AddrPortFrom(server4, port),
		"IPv6": netip.AddrPortFrom(server6, port),
	}
)

type world struct {
	client, node, server, place *host.Net

	descriptors int // that the process of a worker that stays may have; 0: as many as the test
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// newWorld makes the namespaces, and takes packets through the worker's place if through
// is set.
func newWorld(t testing.TB, through bool) *world {
	t.Helper()
	scratch := func() *host.Net {
		ns, err := host.Anonymous()
		must(t, err)
		n, err := host.Open(ns)
		must(t, err)
		must(t, ns.Close())
		t.Cleanup(func() {
			if err := n.Close(); err != nil {
				t.Error(err)
			}
		})
		must(t, n.SetUp("lo"))
		return n
	}
	w := &world{client: scratch(), node: scratch(), server: scratch(), place: scratch()}
	for _, key := range []string{"net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"} {
		must(t, w.node.SetSysctl(key, "1"))
	}
	for _, key := range []string{"all", "default"} {
		must(t, w.node.SetSysctl("net/ipv4/conf/"+key+"/rp_filter", "0"))
	}
	any4, any6 := netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")
	for i, end := range []struct {
		n      *host.Net
		name   string
		a4, a6 netip.Addr
	}{
		{w.client, "c", client4, client6},
		{w.server, "s", server4, server6},
		{w.place, "w", netip.Addr{}, netip.MustParseAddr("fe80::2")},
	} {
		mac, far := [6]byte{2, 0, 0, 0, byte(i), 1}, [6]byte{2, 0, 0, 0, byte(i), 2}
		out := "n-" + end.name
		must(t, end.n.AddVeth(host.Veth{Name: end.name, PeerName: out, Peer: w.node.NetNS(), MAC: far, PeerMAC: mac, Queues: 1}))
		must(t, end.n.SetUp(end.name))
		must(t, w.node.SetUp(out))
		must(t, w.node.AddAddress(out, netip.MustParsePrefix("fe80::1/64")))
		if end.name == "w" {
			must(t, w.node.AddNeighbour(out, end.a6, far))
			must(t, Place{Link: "w", Gateway: netip.MustParseAddr("fe80::1"), GatewayMAC: mac}.Prepare(w.place))
			continue
		}
		must(t, end.n.AddAddress(end.name, netip.PrefixFrom(end.a4, 24)))
		must(t, end.n.AddAddress(end.name, netip.PrefixFrom(end.a6, 64)))
		must(t, end.n.AddNeighbour(end.name, netip.MustParseAddr("fe80::1"), mac))
		must(t, w.node.AddNeighbour(out, end.a4, far))
		must(t, w.node.AddNeighbour(out, end.a6, far))
		for _, any := range []netip.Prefix{any4, any6} {
			must(t, end.n.AddRoute(host.Route{Destination: any, Device: end.name, Via: netip.MustParseAddr("fe80::1")}))
		}
		must(t, w.node.AddRoute(host.Route{Destination: netip.PrefixFrom(end.a4, 32), Device: out}))
		must(t, w.node.AddRoute(host.Route{Destination: netip.PrefixFrom(end.a6, 128), Device: out}))
		if through {
			for _, ipv4 := range []bool{true, false} {
				must(t, w.node.AddRule(host.Rule{IPv4: ipv4, Priority: 100, Input: out, Table: 100}))
			}
		}
	}
	if through {
		for _, any := range []netip.Prefix{any4, any6} {
			must(t, w.node.AddRoute(host.Route{Destination: any, Device: "n-w", Via: netip.MustParseAddr("fe80::2"), Table: 100}))
		}
	}
	soon, cancel := context.WithTimeout(t.Context(), await.Limit(time.Minute))
	defer cancel()
	must(t, w.node.WaitUp(soon, "n-c", "n-s", "n-w"))
	must(t, w.client.WaitUp(soon, "c"))
	must(t, w.server.WaitUp(soon, "s"))
	return w
}

// process is a worker in a process of its own.
type process struct {
	cmd    *host.Cmd
	config *Config
	memory *host.SharedWords
	stderr bytes.Buffer
	ended  chan struct{} // closed when the process is gone
	err    error
}

// settings are what tests set in a configuration; the rest is the same for all.
type settings map[string]any

// startWorker runs a worker in its place, and waits until it listens.
func (w *world) startWorker(t testing.TB, s settings) *process {
	t.Helper()
	all := settings{"name": "test", "port": port, "loops": 2}
	for k, v := range s {
		all[k] = v
	}
	descriptors := all["descriptors"] // that the process may have; nil: as many as the test
	delete(all, "descriptors")
	text, err := json.Marshal(all)
	must(t, err)
	p := &process{ended: make(chan struct{})}
	p.config, err = ReadConfig(bytes.NewReader(text))
	must(t, err)
	p.memory, err = NewStatistics()
	must(t, err)
	self, err := os.Executable()
	must(t, err)
	p.cmd = host.Command(context.Background(), w.place.NetNS(), self)
	if descriptors != nil {
		p.cmd = host.Command(context.Background(), w.place.NetNS(), "sh", "-c", fmt.Sprintf(`ulimit -n %d && exec "$0"`, descriptors), self)
	}
	p.cmd.Env = append(os.Environ(), asWorker+"=1")
	p.cmd.Stdin, p.cmd.Stderr, p.cmd.ExtraFiles = bytes.NewReader(text), &p.stderr, []*os.File{p.memory.File()}
	must(t, p.cmd.Start())
	go func() {
		p.err = p.cmd.Wait()
		close(p.ended)
	}()
	t.Cleanup(func() {
		p.stop(t)
		must(t, p.memory.Close())
	})
	// All loops have come round: they listen, and nothing is left to prepare.
	eventually(t, "the worker serves", func() bool {
		select {
		case <-p.ended:
			t.Fatalf("the worker ended: %v\n%s", p.err, p.stderr.String())
		default:
		}
		return !slices.Contains(p.statistics().Rounds, 0)
	})
	return p
}

func (p *process) statistics() Statistics { return ReadStatistics(p.memory, p.config) }

func (p *process) stop(t testing.TB) {
	t.Helper()
	p.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-p.ended:
	case <-time.After(await.Limit(10 * time.Second)):
		p.cmd.Process.Kill()
		<-p.ended
		t.Error("the worker did not end when it was told to")
	}
	var exit *exec.ExitError
	if p.err != nil && !(errors.As(p.err, &exit) && exit.Sys().(syscall.WaitStatus).Signal() == syscall.SIGKILL) {
		t.Errorf("the worker: %v\n%s", p.err, p.stderr.String())
	}
}

// eventually waits until something that gives no event is true.
func eventually(t testing.TB, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(await.Limit(30 * time.Second)); !is(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within 30 s: %s", what)
		}
	}
}

// listen listens in the server's namespace, for any address.
func (w *world) listen(t testing.TB, to netip.AddrPort) *net.TCPListener {
	t.Helper()
	var l net.Listener
	must(t, w.server.NetNS().Do(func() error {
		var err error
		config := net.ListenConfig{}
		config.SetMultipathTCP(false)
		l, err = config.Listen(context.Background(), "tcp", to.String())
		return err
	}))
	t.Cleanup(func() { l.Close() })
	return l.(*net.TCPListener)
}

func (w *world) dial(to netip.AddrPort) (c *net.TCPConn, err error) {
	err = w.client.NetNS().Do(func() error {
		c, err = net.DialTCP("tcp", nil, net.TCPAddrFromAddrPort(to))
		return err
	})
	return c, err
}

// firstError is what a client learns that opens a connection and reads: the reset of a
// connection may come before the call that opens it has returned.
func (w *world) firstError(to netip.AddrPort) error {
	c, err := w.dial(to)
	if err != nil {
		return err
	}
	defer c.Close()
	soon(c)
	_, err = c.Read(make([]byte, 1))
	return err
}

// pair opens a connection through the worker and returns both ends of it.
func (w *world) pair(t testing.TB, l *net.TCPListener, to netip.AddrPort) (client, server *net.TCPConn) {
	t.Helper()
	c, err := w.dial(to)
	must(t, err)
	soon(c)
	t.Cleanup(func() { c.Close() })
	l.SetDeadline(time.Now().Add(await.Limit(30 * time.Second)))
	s, err := l.AcceptTCP()
	must(t, err)
	soon(s)
	t.Cleanup(func() { s.Close() })
	return c, s
}

// soon ends a connection's reads and writes that hang.
func soon(c net.Conn) { c.SetDeadline(time.Now().Add(await.Limit(60 * time.Second))) }

func isReset(err error) bool {
	return errors.Is(err, unix.ECONNRESET) || errors.Is(err, unix.EPIPE)
}

// once makes a world that the tests of a package's run share.
func once(t *testing.T) *world {
	t.Helper()
	return newWorld(t, true)
}

// bothVersions runs a test over IPv4 and IPv6, in one world with one worker.
func bothVersions(t *testing.T, s settings, f func(t *testing.T, w *world, p *process, l *net.TCPListener, to netip.AddrPort)) {
	w := once(t)
	p := w.startWorker(t, s)
	for _, version := range []string{"IPv4", "IPv6"} {
		t.Run(version, func(t *testing.T) {
			f(t, w, p, w.listen(t, towards[version]), towards[version])
		})
	}
}

// inBackground runs f beside the test, which waits for it.
func inBackground(t testing.TB, wait *sync.WaitGroup, f func() error) {
	wait.Go(func() {
		if err := f(); err != nil {
			t.Error(err)
		}
	})
}

func listOf(names string) []any {
	var list []any
	for n := range strings.SplitSeq(names, "|") {
		if name, settings, ok := strings.Cut(n, " "); ok {
			list = append(list, map[string]any{name: json.RawMessage(settings)})
		} else if n != "" {
			list = append(list, n)
		}
	}
	return list
}
