package e2e

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/lab"
	"github.com/waystamp/waystamp/internal/plan"
)

// Functions on byte streams, from examples/streams.yaml: h1 - r1 - r2 (zip) - r3 (unzip) -
// r6 - h2.

// part is a part of a chain, by what it is called.
func (w *world) part(chain, way string) plan.Path {
	w.t.Helper()
	for _, p := range w.plan.Paths {
		if p.Chain == chain && p.Way() == way {
			return p
		}
	}
	w.t.Fatalf("chain %s has no part %s", chain, way)
	panic("unreachable")
}

// worker is the process of a node's worker.
func (w *world) worker(node string) (int, error) {
	m, err := w.Member(node)
	if err != nil {
		return 0, err
	}
	list, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%[1]d/children", m.Agent.PID))
	if err != nil {
		return 0, err
	}
	all, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", m.Agent.PID))
	if err != nil {
		return 0, err
	}
	for _, task := range all {
		b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/children", m.Agent.PID, task.Name()))
		list = append(append(list, ' '), b...)
	}
	for _, pid := range strings.Fields(string(list)) {
		line, _ := os.ReadFile("/proc/" + pid + "/cmdline")
		if strings.Contains(string(line), "\x00worker\x00") {
			return strconv.Atoi(pid)
		}
	}
	return 0, fmt.Errorf("the agent of %s has no worker", node)
}

// text moves a text from one host to another, which asks for it, and checks it.
func (w *world) text(from, to, text string) {
	w.t.Helper()
	var l net.Listener
	must(w.t, w.Do(from, func() (err error) {
		l, err = net.Listen("tcp", net.JoinHostPort(w.addr(from).String(), "0"))
		return err
	}))
	defer l.Close()
	sent := make(chan error, 1)
	go func() {
		c, err := l.Accept()
		if err == nil {
			_, err = io.WriteString(c, text)
			err = errors.Join(err, c.Close())
		}
		sent <- err
	}()
	must(w.t, w.Do(to, func() error {
		c, err := net.DialTimeout("tcp", l.Addr().String(), settleTime)
		if err != nil {
			return err
		}
		defer c.Close()
		got, err := io.ReadAll(c)
		if err == nil && string(got) != text {
			err = fmt.Errorf("%d bytes came, and are not the %d that were sent", len(got), len(text))
		}
		return err
	}))
	must(w.t, <-sent)
}

// A download is compressed between r2 and r3 and comes out as it went in, over both
// versions of IP; each part stamps and verifies.
func TestStreamFunctionsCompressADownload(t *testing.T) {
	t.Parallel()
	w := borrow(t, example(t, "streams.yaml"))
	for _, chain := range []string{"web", "web4"} {
		w.ipv4 = chain == "web4"
		first, middle, last := w.part(chain, "forward, up to zip"), w.part(chain, "forward, from zip to unzip"), w.part(chain, "forward, from unzip on")
		back := w.part(chain, "reverse, from unzip to zip")
		var since []func() flow
		for _, p := range []plan.Path{first, middle, last, back} {
			since = append(since, w.counting(p))
		}
		r := w.download("h2", "h1", 20_000_000) // which no compressor makes smaller
		t.Logf("%s: %.2f Gb/s", chain, gigabits(r))
		before, err := w.function("r2", "zip")
		must(t, err)
		w.text("h2", "h1", strings.Repeat("All work and no play makes Jack a dull boy.\n", 100_000))
		after, err := w.function("r2", "zip")
		must(t, err)
		in, out := after.Stream.ToClient.In-before.Stream.ToClient.In, after.Stream.ToClient.Out-before.Stream.ToClient.Out
		t.Logf("%s: %d bytes came to r2 as %d", chain, out, in)
		if out < 4_400_000 || in > out/10 {
			t.Errorf("%s: %d bytes became %d at r2; want 4400000 or more, of a tenth at most", chain, in, out)
		}
		for i, f := range since {
			if n := f().frames(); n == 0 {
				t.Errorf("%s: part %d was not taken", chain, i)
			}
		}
	}
}

// What no verified SYN has opened is refused, wherever it comes from.
func TestStreamFunctionsRefuseWhatIsNotTheirs(t *testing.T) {
	t.Parallel()
	w := borrow(t, example(t, "streams.yaml"))
	w.download("h2", "h1", 100_000)
	// Not TCP.
	w.isCutOff("h1", "h2", 3)
	w.refused("r2", "stream-not-tcp", 3)
	// Without a proof: r1's own packets take no chain, and r2 asks for one.
	if got := w.ping("r1", "h2", lab.PingConfig{Count: 2, Timeout: lostTime}); got != 0 {
		t.Errorf("%d of 2 echo requests without a proof were answered", got)
	}
	w.refused("r2", "unproven", 2)
}

// A worker that is killed resets its connections: a truncated stream does not look
// complete. The agent starts another one, and connections pass again.
func TestAKilledWorkerResetsItsConnections(t *testing.T) {
	t.Parallel()
	w := build(t, example(t, "streams.yaml"))
	s := w.stream("h2", "h1")
	s.more(1 << 20)
	old, err := w.worker("r2")
	must(t, err)
	must(t, unix.Kill(old, unix.SIGKILL))
	if err := <-s.ended; !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("the receiver's stream ended with %v; want a reset", err)
	}
	if err := <-s.sent; !errors.Is(err, unix.ECONNRESET) && !errors.Is(err, unix.EPIPE) {
		t.Errorf("the sender's stream ended with %v; want a reset", err)
	}
	eventually(t, func() error {
		now, err := w.worker("r2")
		if err == nil && now == old {
			err = errors.New("the worker is the one that was killed")
		}
		return err
	})
	w.download("h2", "h1", 1_000_000)
	f, err := w.function("r2", "zip")
	must(t, err)
	if s := f.Stream; s == nil || s.Restarts != 1 || s.Opened == 0 || s.ToClient.Out < 1_000_000 {
		t.Errorf("zip says %+v; want a worker that was started again and has passed a download", s)
	}
	// While there was no worker, packets of the old connection came.
	w.mayRefuse("r2", "stream-down")
	w.mayRefuse("r2", "stream-unknown")
}

// A client learns from its server what it would learn without the function: that nobody
// listens, or nothing at all. It is not answered before.
func TestAClientIsAnsweredWhenItsServerIs(t *testing.T) {
	t.Parallel()
	w := build(t, example(t, "streams.yaml"))
	for _, w.ipv4 = range []bool{false, true} {
		closed := net.JoinHostPort(w.addr("h2").String(), "9")
		must(t, w.Do("h1", func() error {
			c, err := net.DialTimeout("tcp", closed, settleTime)
			if err == nil {
				c.Close()
			}
			if !errors.Is(err, unix.ECONNREFUSED) {
				return fmt.Errorf("a connection to %s, where nobody listens: %v; want it refused", closed, err)
			}
			return nil
		}))
	}
	// Whoever filters before the server says so by ICMP, about the SYN of the last function's worker:
	// each worker tells its own client.
	ns, err := w.NetNS("h2")
	must(t, err)
	defer ns.Close()
	const filtered = "10"
	cmd := host.Command(t.Context(), ns, "nft", "-f", "-")
	cmd.Stdin = strings.NewReader("table inet e2e { chain in { type filter hook input priority 0; tcp dport " + filtered + " reject with icmpx type admin-prohibited; }; }\n")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("nft: %v: %s", err, out)
	}
	for _, w.ipv4 = range []bool{false, true} {
		want := unix.EACCES
		if w.ipv4 {
			want = unix.EHOSTUNREACH
		}
		to := net.JoinHostPort(w.addr("h2").String(), filtered)
		must(t, w.Do("h1", func() error {
			c, err := net.DialTimeout("tcp", to, settleTime)
			if err == nil {
				c.Close()
			}
			if !errors.Is(err, want) {
				return fmt.Errorf("a connection to %s, which is filtered: %v; want %v", to, err, want)
			}
			return nil
		}))
	}
	// An address that nobody has: SYNs go there, and nothing comes back.
	w.ipv4 = false
	before, err := w.function("r2", "zip")
	must(t, err)
	nobody := w.addr("h2").As16()
	nobody[15] ^= 0x80
	silent := netip.AddrPortFrom(netip.AddrFrom16(nobody), 80)
	must(t, w.Do("h1", func() error {
		c, err := net.DialTimeout("tcp", silent.String(), lostTime)
		if err == nil {
			c.Close()
		}
		if e, ok := errors.AsType[net.Error](err); !ok || !e.Timeout() {
			return fmt.Errorf("a connection to %s, where nobody is: %v; want no answer", silent, err)
		}
		return nil
	}))
	after, err := w.function("r2", "zip")
	must(t, err)
	if n := after.Stream.Opened - before.Stream.Opened; n != 1 {
		t.Errorf("zip has begun %d connections to %s; want one that waits", n, silent)
	}
	w.download("h2", "h1", 100_000)
}

// An agent that is killed leaves its function's interface. The next one takes the function up
// again; detaching removes what is left.
func TestNothingIsLeftOfAStreamFunction(t *testing.T) {
	t.Parallel()
	w := build(t, example(t, "streams.yaml"))
	w.download("h2", "h1", 100_000)
	there := func() bool {
		_, err := w.net("r2").Link("wss-zip")
		if err != nil && !errors.Is(err, host.ErrNoLink) {
			t.Fatal(err)
		}
		return err == nil
	}
	w.kill("r2")
	must(t, w.StartAgent(soon(t), "r2"))
	w.download("h2", "h1", 100_000)
	w.kill("r2")
	if r := w.detach("r2", "--yes"); r.code != 0 {
		t.Fatal(r)
	}
	if there() {
		t.Error("wss-zip is there after detaching")
	}
	must(t, w.StartAgent(soon(t), "r2"))
	w.download("h2", "h1", 100_000)
	w.kill("r2")
	// The place ends with the agent. What comes for the function is refused for that meanwhile.
	eventually(t, func() error {
		if there() {
			return errors.New("wss-zip is there without an agent")
		}
		return nil
	})
	must(t, w.Do("h1", func() error {
		c, err := net.DialTimeout("tcp", net.JoinHostPort(w.addr("h2").String(), "9"), lostTime)
		if err == nil {
			return errors.Join(errors.New("a connection without an agent"), c.Close())
		}
		return nil
	}))
	must(t, w.StartAgent(soon(t), "r2"))
	w.refusedSome("r2", "stream-down")
	w.download("h2", "h1", 100_000)
	w.mayRefuse("r2", "stream-down")
	w.mayRefuse("r2", "stream-unknown")
	w.mayRefuse("r3", "stream-unknown")
}

// A program in the worker's place, with all rights there, reaches nobody: with any source address, by TCP or UDP. The same
// packets reach the nodes from the namespace of r2. A connection that is open goes on.
func TestAProgramInTheWorkersPlaceReachesNobody(t *testing.T) {
	t.Parallel()
	w := build(t, example(t, "streams.yaml"))
	s := w.stream("h2", "h1")
	s.more(1 << 20)
	pid, err := w.worker("r2")
	must(t, err)
	place, err := host.OpenProcess(pid)
	must(t, err)
	defer place.Close()
	type target struct {
		at  string
		tcp net.Listener
		udp net.PacketConn
	}
	var targets []target
	for _, k := range []struct {
		at   string
		addr netip.Addr
	}{
		{"r2", netip.MustParseAddr("fc00:2::1")}, {"r3", netip.MustParseAddr("fc00:3::1")},
		{"h1", w.addrs("h1")[0]}, {"h1", w.addrs("h1")[1]}, {"h2", w.addrs("h2")[0]}, {"h2", w.addrs("h2")[1]},
	} {
		x := target{at: k.at}
		must(t, w.Do(k.at, func() (err error) {
			if x.tcp, err = net.Listen("tcp", netip.AddrPortFrom(k.addr, 0).String()); err == nil {
				x.udp, err = net.ListenPacket("udp", x.tcp.Addr().String())
			}
			return err
		}))
		defer x.tcp.Close()
		defer x.udp.Close()
		targets = append(targets, x)
	}
	tries := func(x target, source netip.Addr) error {
		d := net.Dialer{Timeout: lostTime, Control: func(network, _ string, c syscall.RawConn) (err error) {
			level, option := unix.IPPROTO_IPV6, unix.IPV6_FREEBIND // as the worker does
			if strings.HasSuffix(network, "4") {
				level, option = unix.IPPROTO_IP, unix.IP_FREEBIND
			}
			done := c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), level, option, 1) })
			return errors.Join(done, err)
		}}
		u := d
		if source.IsValid() {
			d.LocalAddr, u.LocalAddr = net.TCPAddrFromAddrPort(netip.AddrPortFrom(source, 0)), net.UDPAddrFromAddrPort(netip.AddrPortFrom(source, 0))
		}
		udp, err := u.Dial("udp", x.udp.LocalAddr().String())
		if err != nil {
			return err
		}
		defer udp.Close()
		if _, err := udp.Write([]byte(x.at)); err != nil {
			return err
		}
		c, err := d.Dial("tcp", x.tcp.Addr().String())
		if err == nil {
			c.Close()
		}
		return err
	}
	for i, x := range targets {
		v := i % 2 // of IP
		if x.at[0] == 'r' {
			v = 0
			must(t, w.Do("r2", func() error { return tries(x, netip.Addr{}) }))
			must(t, x.udp.SetReadDeadline(time.Now().Add(settleTime)))
			if n, _, err := x.udp.ReadFrom(make([]byte, 9)); err != nil || n != len(x.at) {
				t.Fatalf("%s has %d bytes from r2: %v", x.at, n, err)
			}
			must(t, x.udp.SetReadDeadline(time.Time{}))
		}
		for _, source := range []netip.Addr{w.addrs("h1")[v], w.addrs("h2")[v]} {
			must(t, place.Do(func() error {
				err := tries(x, source)
				if e, ok := errors.AsType[net.Error](err); !ok || !e.Timeout() {
					return fmt.Errorf("a connection from %s to %s at %s, from the worker's place: %v; want no answer", source, x.tcp.Addr(), x.at, err)
				}
				return nil
			}))
		}
	}
	w.refusedSome("r2", "stream-unknown", "stream-not-tcp")
	for _, x := range targets {
		must(t, x.udp.SetReadDeadline(time.Now())) // what has come is read still
		if n, from, err := x.udp.ReadFrom(make([]byte, 9)); err == nil {
			t.Errorf("%s has %d bytes from %s, out of the worker's place", x.at, n, from)
		}
	}
	s.more(1 << 20)
	s.finish()
	w.mayRefuse("r2", "stream-unknown") // SYNs are sent again until their sockets are closed
}
