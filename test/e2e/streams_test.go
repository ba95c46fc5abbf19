package e2e

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
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

// workerOf is the process of the worker of a function.
func (w *world) workerOf(node, function string) (int, error) {
	f, err := w.function(node, function)
	if err != nil {
		return 0, err
	}
	if f.Stream == nil || f.Stream.Worker == 0 {
		return 0, fmt.Errorf("%s of %s has no worker", function, node)
	}
	return f.Stream.Worker, nil
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
	andOverIPv4(t, compressADownload)
}

func compressADownload(t *testing.T, carried change) {
	w := borrow(t, example(t, "streams.yaml"), carried)
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
	old, err := w.workerOf("r2", "zip")
	must(t, err)
	must(t, unix.Kill(old, unix.SIGKILL))
	if err := <-s.ended; !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("the receiver's stream ended with %v; want a reset", err)
	}
	if err := <-s.sent; !errors.Is(err, unix.ECONNRESET) && !errors.Is(err, unix.EPIPE) {
		t.Errorf("the sender's stream ended with %v; want a reset", err)
	}
	eventually(t, func() error {
		now, err := w.workerOf("r2", "zip")
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

// A worker goes on without an agent. Detaching ends it, and so does the end of its interface.
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
	// ends waits until a worker that nobody starts again is gone.
	ends := func(pid int) {
		t.Helper()
		eventually(t, func() error {
			if b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid)); err == nil && strings.Contains(string(b), "worker") {
				return fmt.Errorf("worker %d is there", pid)
			}
			return nil
		})
	}
	for _, stop := range []func(){
		func() { w.kill("r2") },
		func() { must(t, w.StopAgent(soon(t), "r2")) },
	} {
		before, err := w.workerOf("r2", "zip")
		must(t, err)
		stop()
		w.download("h2", "h1", 100_000)
		must(t, w.StartAgent(soon(t), "r2"))
		if now, err := w.workerOf("r2", "zip"); err != nil || now != before {
			t.Errorf("the next agent has worker %d: %v; want %d", now, err, before)
		}
		w.download("h2", "h1", 100_000)
	}
	old, err := w.workerOf("r2", "zip")
	must(t, err)
	w.kill("r2")
	if r := w.detach("r2", "--yes"); r.code != 0 {
		t.Fatal(r)
	}
	if there() {
		t.Error("wss-zip is there after detaching")
	}
	ends(old)
	if left, err := filepath.Glob(filepath.Join(w.AgentDir("r2"), "wss-*")); err != nil || len(left) > 0 {
		t.Errorf("detaching leaves %v: %v", left, err)
	}
	must(t, w.StartAgent(soon(t), "r2"))
	w.download("h2", "h1", 100_000)
	if old, err = w.workerOf("r2", "zip"); err != nil {
		t.Fatal(err)
	}
	w.kill("r2")
	// A worker that is killed meanwhile takes its place along. What comes for the function is refused for that.
	must(t, unix.Kill(old, unix.SIGKILL))
	eventually(t, func() error {
		if there() {
			return errors.New("wss-zip is there without a worker")
		}
		return nil
	})
	must(t, w.Do("h1", func() error {
		c, err := net.DialTimeout("tcp", net.JoinHostPort(w.addr("h2").String(), "9"), lostTime)
		if err == nil {
			return errors.Join(errors.New("a connection without a worker"), c.Close())
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
	pid, err := w.workerOf("r2", "zip")
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

// downloads are many at once: each connection asks for a length, and gets as many bytes.
type downloads struct {
	w      *world
	to     string
	wait   sync.WaitGroup
	done   atomic.Int64
	failed chan error
}

// downloads answers at a host until the test ends. A download takes a second, so that some are always under way.
func (w *world) downloads(from string, size int) *downloads {
	w.t.Helper()
	d := &downloads{w: w, failed: make(chan error, 1000)}
	content := make([]byte, size)
	if _, err := io.ReadFull(lab.Content{Seed: 5, Size: int64(size)}.Reader(), content); err != nil {
		w.t.Fatal(err)
	}
	var l net.Listener
	must(w.t, w.Do(from, func() (err error) {
		l, err = net.Listen("tcp", net.JoinHostPort(w.addr(from).String(), "0"))
		return err
	}))
	d.to = l.Addr().String()
	w.t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				const pieces = 20
				tick := time.NewTicker(time.Second / pieces)
				defer tick.Stop()
				for i := range pieces {
					if _, err := c.Write(content[i*size/pieces : (i+1)*size/pieces]); err != nil {
						return // the other end says so
					}
					<-tick.C
				}
			}()
		}
	}()
	return d
}

// one downloads once, in the background.
func (d *downloads) one(host string, sum [sha256.Size]byte) {
	d.wait.Go(func() {
		err := d.w.Do(host, func() error {
			c, err := net.DialTimeout("tcp", d.to, settleTime)
			if err != nil {
				return err
			}
			defer c.Close()
			h := sha256.New()
			n, err := io.Copy(h, c)
			if err == nil && !bytes.Equal(h.Sum(nil), sum[:]) {
				err = fmt.Errorf("%d bytes came, and are not those that were sent", n)
			}
			return err
		})
		if err != nil {
			select {
			case d.failed <- err:
			default:
			}
		}
		d.done.Add(1)
	})
}

// Agents are killed, stopped, and replaced by those of another version, and no connection through their
// workers is lost, or ends early: neither those that are open nor those that are opened meanwhile.
func TestConnectionsOutliveAgents(t *testing.T) {
	t.Parallel()
	connectionsOutliveAgents(t, false)
}

// The same holds where descriptors are few, and a worker's event loops have tables of their own.
func TestConnectionsOutliveAgentsWithFewDescriptors(t *testing.T) {
	t.Parallel()
	connectionsOutliveAgents(t, true)
}

// limited is a program that runs another one, which may have 4096 descriptors and not raise that.
func limited(t *testing.T, of string) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "waystamp")
	must(t, os.WriteFile(name, fmt.Appendf(nil, "#!/bin/sh\nulimit -n 4096 && exec setpriv --bounding-set -sys_resource '%s' \"$@\"\n", of), 0o755))
	return name
}

func connectionsOutliveAgents(t *testing.T, few bool) {
	// Another file is another version.
	versions := filepath.Join(t.TempDir(), "waystamp")
	install := func() {
		t.Helper()
		b, err := os.ReadFile(program)
		must(t, err)
		must(t, os.WriteFile(versions+".new", b, 0o755))
		must(t, os.Rename(versions+".new", versions))
	}
	install()
	domain, binary := example(t, "streams.yaml"), versions
	if few {
		binary = limited(t, versions)
		domain = strings.Replace(domain, "run: [{gzip: {level: 1}}]}", "run: [{gzip: {level: 1}}], limits: {connections: 10000}}", 1)
	}
	w := buildFrom(t, parse(t, domain), func(c *lab.Config) { c.Binary = binary })
	if few {
		f, err := w.function("r2", "zip")
		must(t, err)
		if s := f.Stream; s == nil || s.Room != 0 || s.Loops < 6 {
			t.Fatalf("zip says %+v; want room for all connections, and six event loops with 4096 descriptors each at least", s)
		}
	}
	const size = 200_000
	sum := lab.Content{Seed: 5, Size: size}.SHA256()
	d := w.downloads("h2", size)
	for range 50 {
		d.one("h1", sum)
	}
	stop, opening := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(opening)
		tick := time.NewTicker(50 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				d.one("h1", sum)
			case <-stop:
				return
			}
		}
	}()
	more := func(n int64) {
		t.Helper()
		until := d.done.Load() + n
		eventually(t, func() error {
			if now := d.done.Load(); now < until {
				return fmt.Errorf("%d downloads are over, and not %d", now, until)
			}
			return nil
		})
	}
	more(20)
	pids := map[string]int{}
	for _, f := range [][2]string{{"r2", "zip"}, {"r3", "unzip"}} {
		pid, err := w.workerOf(f[0], f[1])
		must(t, err)
		pids[f[0]] = pid
	}
	for _, way := range []struct {
		name string
		stop func(node string)
		same bool // the worker
	}{
		{"killed", w.kill, true},
		{"stopped", func(node string) { must(t, w.StopAgent(soon(t), node)) }, true},
		{"of another version", func(node string) { w.kill(node); install() }, false},
		{"of another version again", func(node string) { must(t, w.StopAgent(soon(t), node)); install() }, false},
	} {
		for _, f := range [][2]string{{"r2", "zip"}, {"r3", "unzip"}} {
			way.stop(f[0])
			more(30) // nobody is there
			must(t, w.StartAgent(soon(t), f[0]))
			now, err := w.workerOf(f[0], f[1])
			must(t, err)
			if (now == pids[f[0]]) != way.same {
				t.Errorf("the agent of %s was %s: its worker is %d, and was %d", f[0], way.name, now, pids[f[0]])
			}
			pids[f[0]] = now
			more(30)
			if n := len(d.failed); n > 0 {
				t.Fatalf("the agent of %s was %s: %d downloads failed, the first: %v", f[0], way.name, n, <-d.failed)
			}
		}
	}
	close(stop)
	<-opening
	d.wait.Wait()
	t.Logf("%d downloads", d.done.Load())
	if len(d.failed) > 0 {
		t.Errorf("%d downloads failed, the first: %v", len(d.failed), <-d.failed)
	}
}

// Requests pass one function on packets, and answers another one; the function on byte streams has both.
func TestAnswersTakeTheFunctionsOfReturn(t *testing.T) {
	t.Parallel()
	text := streamStar
	for _, c := range [][2]string{
		{"  - {name: tap, ", "  - {name: fw, node: r3, kind: forward}\n  - {name: log, node: r3, kind: forward}\n  - {name: tap, "},
		{"functions: [tap],", "functions: [fw, tap], return: {functions: [log, tap]},"},
	} {
		if !strings.Contains(text, c[0]) {
			t.Fatalf("the domain has no %q", c[0])
		}
		text = strings.Replace(text, c[0], c[1], 1)
	}
	w := borrow(t, text)
	request, answers := w.part("plain", "forward, up to tap"), w.part("plain", "reverse, up to tap")
	for _, k := range []struct {
		p    plan.Path
		want string
	}{{request, "fw"}, {answers, "log"}} {
		if len(k.p.Hops) != 3 || k.p.Hops[1].Function != k.want {
			t.Fatalf("part %s is %+v; want it by %s", k.p.Way(), k.p.Hops, k.want)
		}
	}
	there, back := w.counting(request), w.counting(answers)
	w.download("h3", "h1", 1_000_000)
	// Each hop has stamped all that its headend has.
	if a, b := there().frames(), back().frames(); a == 0 || b < 600 {
		t.Errorf("%d frames of requests and %d of answers; want some of 1 MB", a, b)
	}
}
