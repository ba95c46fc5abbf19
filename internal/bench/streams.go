package bench

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/agent"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/lab"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/stream"
)

// The network for functions on byte streams: h1, r1, r2 with the function, r3, h2, with the
// addresses of that for proxies.

// streamWay is who is between h1 and h2.
type streamWay string

const (
	streamRouter   streamWay = "router"   // nobody: routing
	streamChain    streamWay = "chain"    // a chain with a proof, whose function only forwards
	streamCopy     streamWay = "copy"     // by routing, a program with io.Copy
	streamHAProxy  streamWay = "haproxy"  // by routing, HAProxy at the same place
	streamWorker   streamWay = "worker"   // by routing, our worker with identity, at the same place
	streamIdentity streamWay = "identity" // a chain with a proof, whose function is identity on byte streams
	streamEarly    streamWay = "early"    // the same, and clients are answered at once
	streamBytewise streamWay = "identity-copy"
	streamXOR      streamWay = "xor"
)

func (w streamWay) agents() bool { return w == streamChain || w.stream() }
func (w streamWay) stream() bool {
	return w == streamIdentity || w == streamEarly || w == streamBytewise || w == streamXOR
}
func (w streamWay) placed() bool {
	return w == streamCopy || w == streamHAProxy || w == streamWorker
}

// streamCase is a network that is measured.
type streamCase struct {
	way    streamWay
	links  streamLinks
	passes int // of streamXOR, over each byte
	many   int // nodes with a function in a row; 0: as links say
}

const (
	streamPort = 8080 // of the server; also what the relay and the worker listen at
	streamLink = "to-place"
	placeLink  = "place"

	streamMany   = 8    // transfers at once
	streamLossy  = 16   // the same, where packets are lost
	streamCalls  = 16   // clients at once that open one connection after the other
	streamQuiet  = 3000 // connections at once that do nothing
	streamTrips  = 200  // connections of which the median time is a run
	streamServed = 256 << 10
	streamWait   = 10 * time.Second // that a client waits for bytes at most
	lossyFor     = 5                // runs last so many times as long where packets are lost
)

// What a client asks of the server, by the byte that it sends first.
const (
	askEndless = 'e' // bytes until the client is gone
	askOne     = 'o' // a byte, and then nothing until the client ends
	askKept    = 'k' // the first of streamSizes, and so for each byte that follows
	askSizes   = '0' // and above: so many bytes, and then the end
)

// streamSizes are what clients ask for, in bytes.
var streamSizes = []int{1 << 10, 100 << 10, 10 << 20}

// streamTrack is a lab of one case, with a server on h2.
type streamTrack struct {
	streamCase
	lab     *lab.Lab
	server  *streamServer
	node    []int                          // CPUs of r2 and its function
	others  []int                          // of all else
	closers []func() error                 // of what is made besides, the last one first
	relays  []*delayer                     // in place of routers
	process func() (pids []int, err error) // of the functions
	work    []float64                      // what each run took of the processes' time, see workUnit
	resting int64                          // memory of the process without a connection, in bytes; 0: not known
	to      netip.AddrPort                 // of the server
}

func newStreamTrack(ctx context.Context, cfg Config, k streamCase) (_ *streamTrack, err error) {
	d, l := k.domain()
	w := k.way
	t := &streamTrack{streamCase: k, node: []int{cfg.cpu()}, process: func() ([]int, error) { return nil, nil }}
	for c := range runtime.NumCPU() {
		if c != cfg.cpu() {
			t.others = append(t.others, c)
		}
	}
	if t.others == nil {
		t.others = t.node
	}
	// A worker has as many event loops as its agent, which is started here, has CPUs.
	if w.stream() {
		if err := host.RunOn(0, t.node...); err != nil {
			return nil, err
		}
	}
	t.lab, err = lab.Up(ctx, lab.Config{Domain: d, Lab: l, Binary: cfg.Binary, Own: true, WithoutAgents: !w.agents(), Log: cfg.Log})
	if w.stream() {
		err = errors.Join(err, host.RunOn(0))
	}
	if err != nil {
		if t.lab != nil {
			err = errors.Join(err, t.lab.Down(context.Background()))
		}
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, t.close())
		}
	}()
	t.to = netip.AddrPortFrom(lab.HostAddress(l.Hosts[1]), streamPort)
	if t.server, err = serveStreams(ctx, t.lab, t.to); err != nil {
		return nil, err
	}
	if w.placed() {
		if err := t.place(ctx, cfg); err != nil {
			return nil, err
		}
	}
	if w.stream() {
		t.process = func() ([]int, error) { return streamFunctions(ctx, t.lab, k.nodes()) }
	}
	return t, errors.Join(t.steer(), t.limit())
}

// streamFunctions are the processes of the workers of those nodes.
func streamFunctions(ctx context.Context, l *lab.Lab, nodes []string) (pids []int, err error) {
	for _, node := range nodes {
		pid, err := streamFunction(ctx, l, node)
		if err != nil {
			return nil, err
		}
		pids = append(pids, pid)
	}
	return pids, nil
}

func streamFunction(ctx context.Context, l *lab.Lab, node string) (pid int, err error) {
	c := agent.NewClient(agent.SocketPath(l.AgentDir(node)))
	defer c.Close()
	f, err := c.Functions(ctx)
	if err != nil {
		return 0, err
	}
	for _, f := range f.Functions {
		if f.Stream != nil && f.Stream.Worker != 0 {
			return f.Stream.Worker, nil
		}
	}
	return 0, fmt.Errorf("the agent of %s has no worker", node)
}

// steer has the functions' nodes work on their own CPU, and all other members on the others.
func (t *streamTrack) steer() error {
	for _, m := range t.lab.Members() {
		cpus := t.others
		if slices.Contains(t.nodes(), m.Name) {
			cpus = t.node
		}
		err := onMember(t.lab, m.Name, func(n *host.Net) error { return steerAll(n, cpus) })
		if err != nil {
			return err
		}
	}
	return nil
}

func steerAll(n *host.Net, cpus []int) error {
	links, err := n.Links()
	if err != nil {
		return err
	}
	for _, l := range links {
		if l.Kind == "veth" {
			err = errors.Join(err, n.SteerReceived(l.Name, cpus...))
		}
	}
	return err
}

// place makes a namespace for who ends connections, as an agent does for its workers, and
// has routing lead packets of both directions there.
func (t *streamTrack) place(ctx context.Context, cfg Config) error {
	ns, err := host.Anonymous()
	if err != nil {
		return err
	}
	t.closers = append(t.closers, ns.Close)
	place, err := host.Open(ns)
	if err != nil {
		return err
	}
	t.closers = append(t.closers, place.Close)
	outside, inside := [6]byte{2, 0, 0, 0, 0, 1}, [6]byte{2, 0, 0, 0, 0, 2}
	here, there := netip.MustParseAddr("fe80::1"), netip.MustParseAddr("fe80::2")
	err = onMember(t.lab, "r2", func(n *host.Net) error {
		if err := n.AddVeth(host.Veth{Name: streamLink, PeerName: placeLink, Peer: ns, MTU: proxyMTU, MAC: outside, PeerMAC: inside}); err != nil {
			return err
		}
		if err := n.SetUp(streamLink); err != nil {
			return err
		}
		if err := (stream.Place{Link: placeLink, Gateway: here, GatewayMAC: outside}).Prepare(place); err != nil {
			return err
		}
		if err := n.AddNeighbour(streamLink, there, inside); err != nil {
			return err
		}
		for _, p := range proxyPrefixes[0] {
			if err := n.AddRoute(host.Route{Destination: p, Via: there, Device: streamLink, Table: tableToFunction}); err != nil {
				return err
			}
		}
		return errors.Join(n.AddRule(host.Rule{Priority: 100, Input: "r2-r1", Table: tableToFunction}),
			n.AddRule(host.Rule{Priority: 100, Input: "r2-r3", Table: tableToFunction}),
			steerAll(place, t.node))
	})
	if err != nil {
		return err
	}
	var pid int
	switch t.way {
	case streamCopy:
		pid, err = t.startRelay(ctx, ns)
	case streamHAProxy:
		pid, err = t.startHAProxy(ctx, ns)
	default:
		pid, err = t.startWorker(cfg, ns)
	}
	t.process = func() ([]int, error) { return []int{pid}, nil }
	return err
}

// startRelay starts this program as the relay.
func (t *streamTrack) startRelay(ctx context.Context, ns *host.NetNS) (pid int, err error) {
	self, err := os.Executable()
	if err != nil {
		return 0, fmt.Errorf("find the program of the relay: %w", err)
	}
	cmd := host.Command(ctx, ns, self, "bench", "relay", strconv.Itoa(streamPort))
	var said strings.Builder
	cmd.Stderr = &said
	up, err := cmd.StdinPipe() // it ends when this is closed, also by the end of this process
	if err != nil {
		return 0, fmt.Errorf("start the relay: %w", err)
	}
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return 0, errors.Join(fmt.Errorf("start the relay: %w", err), up.Close())
	}
	if !bufio.NewScanner(out).Scan() {
		err := errors.Join(up.Close(), cmd.Wait(), context.Cause(ctx))
		return 0, fmt.Errorf("the relay ended before it listened: %w: %s", err, strings.TrimSpace(said.String()))
	}
	t.closers = append(t.closers, func() error {
		err := errors.Join(up.Close(), cmd.Wait())
		if ctx.Err() != nil {
			return nil // it was killed, and says so
		}
		return err
	})
	return cmd.Process.Pid, nil
}

func (t *streamTrack) startWorker(cfg Config, ns *host.NetNS) (pid int, err error) {
	program := cfg.Binary
	if program == "" {
		if program, err = host.Program("waystamp"); err != nil {
			return 0, fmt.Errorf("find the program of the worker: %w", err)
		}
	}
	text, err := stream.Text("fn", streamPort, 1, []string{`"identity"`}, nil, nil, false, stream.Limits{
		Connections: model.StreamConnectionsDefault, Buffer: model.StreamBufferDefault,
		Idle: model.StreamIdleDefault, HalfClosed: model.StreamHalfClosedDefault,
	})
	if err != nil {
		return 0, err
	}
	p, listeners, err := stream.Start(ns, program, text, nil, nil)
	if err != nil {
		return 0, err
	}
	t.closers = append(t.closers, p.Close)
	for _, f := range listeners {
		err = errors.Join(err, f.Close())
	}
	return p.PID(), err
}

func (t *streamTrack) close() error {
	var err error
	for _, f := range slices.Backward(t.closers) {
		err = errors.Join(err, f())
	}
	if t.server != nil {
		t.server.close()
	}
	for _, d := range t.relays {
		err = errors.Join(err, d.close())
	}
	return errors.Join(err, t.lab.Down(context.Background()))
}

// streamServer answers what clients ask.
type streamServer struct {
	net.Listener
	all sync.WaitGroup
}

func serveStreams(ctx context.Context, l *lab.Lab, at netip.AddrPort) (*streamServer, error) {
	s := &streamServer{}
	err := l.Do("h2", func() (err error) {
		config := net.ListenConfig{}
		config.SetMultipathTCP(false)
		s.Listener, err = config.Listen(ctx, "tcp", at.String())
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("serve byte streams on h2: %w", err)
	}
	s.all.Go(func() {
		for {
			c, err := s.Accept()
			if err != nil {
				return
			}
			s.all.Go(func() { serveStream(c) })
		}
	})
	return s, nil
}

func (s *streamServer) close() {
	s.Close()
	s.all.Wait()
}

// zeroes is what is served: functions do not look at it.
var zeroes [streamServed]byte

func serveStream(c net.Conn) {
	defer c.Close()
	c.SetDeadline(time.Now().Add(time.Minute))
	var ask [1]byte
	if _, err := io.ReadFull(c, ask[:]); err != nil {
		return
	}
	switch ask[0] {
	case askOne:
		c.Write(zeroes[:1])
		c.Read(ask[:])
	case askKept:
		for {
			if _, err := c.Write(zeroes[:streamSizes[0]]); err != nil {
				return
			}
			if _, err := io.ReadFull(c, ask[:]); err != nil {
				return
			}
		}
	case askEndless:
		for {
			if _, err := c.Write(zeroes[:]); err != nil {
				return
			}
		}
	default:
		if i := int(ask[0]) - askSizes; i >= 0 && i < len(streamSizes) {
			for left := streamSizes[i]; left > 0; {
				n, err := c.Write(zeroes[:min(left, len(zeroes))])
				if err != nil {
					return
				}
				left -= n
			}
		}
	}
}

// call opens a connection from the thread's namespace and asks. The caller closes it.
func call(to netip.AddrPort, ask byte) (fd int, err error) {
	if fd, err = dial(to); err != nil {
		return -1, err
	}
	if _, err := unix.Write(fd, []byte{ask}); err != nil {
		return -1, errors.Join(os.NewSyscallError("write", err), unix.Close(fd))
	}
	return fd, nil
}

func dial(to netip.AddrPort) (fd int, err error) {
	fd, err = unix.Socket(unix.AF_INET6, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
	if err != nil {
		return -1, os.NewSyscallError("socket", err)
	}
	wait := unix.NsecToTimeval(streamWait.Nanoseconds())
	err = errors.Join(
		os.NewSyscallError("setsockopt SO_RCVTIMEO", unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &wait)),
		os.NewSyscallError("setsockopt SO_SNDTIMEO", unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &wait)))
	for err == nil {
		err = unix.Connect(fd, &unix.SockaddrInet6{Port: int(to.Port()), Addr: to.Addr().As16()})
		if err == nil || err == unix.EISCONN {
			return fd, nil
		}
		if err == unix.EINTR || err == unix.EALREADY {
			err = nil
			continue
		}
		err = os.NewSyscallError("connect", err)
	}
	return -1, errors.Join(err, unix.Close(fd))
}

func read(fd int, b []byte) (int, error) {
	for {
		n, err := unix.Read(fd, b)
		if err == unix.EINTR {
			continue
		}
		return n, os.NewSyscallError("read", err)
	}
}

// gone ends a connection at once: nothing of it is left to disturb the next run.
func gone(fd int) error {
	return errors.Join(unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}), unix.Close(fd))
}

// clients runs so many of f at once, each on a thread in h1, away from the node's CPU.
func (t *streamTrack) clients(ctx context.Context, count int, f func(ctx context.Context) error) error {
	return t.onTheirCPUs(func() error {
		g, ctx := errgroup.WithContext(ctx)
		for range count {
			g.Go(func() error { return t.lab.Do("h1", func() error { return f(ctx) }) })
		}
		return g.Wait()
	})
}

// onTheirCPUs calls f while the functions' processes run on the node's CPU, and this one away from it.
func (t *streamTrack) onTheirCPUs(f func() error) (err error) {
	pids, err := t.process()
	for _, pid := range pids {
		err = errors.Join(err, host.RunOn(pid, t.node...))
	}
	if err = errors.Join(err, host.RunOn(0, t.others...)); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, host.RunOn(0)) }()
	return f()
}

// working notes what f takes of the CPU time of the functions' processes, in nanoseconds for each
// of the pieces that f has moved. What the kernel does for packets meanwhile counts as the
// process's, if it runs at that moment.
func (t *streamTrack) working(f func() (pieces float64, err error)) error {
	pids, err := t.process()
	if err != nil {
		return err
	}
	before, err := cpuTime(pids)
	if err != nil {
		return err
	}
	pieces, err := f()
	if err != nil || len(pids) == 0 {
		return err
	}
	after, err := cpuTime(pids)
	if err == nil && pieces > 0 {
		t.work = append(t.work, float64((after-before).Nanoseconds())/pieces)
	}
	return err
}

// cpuTime is what all threads of processes have run.
func cpuTime(pids []int) (all time.Duration, err error) {
	const processClock = 2 // CPUCLOCK_SCHED, of all threads; see clock_getcpuclockid(3)
	for _, pid := range pids {
		var now unix.Timespec
		if err := unix.ClockGettime(int32(^pid<<3|processClock), &now); err != nil {
			return 0, fmt.Errorf("read the CPU time of process %d: %w", pid, os.NewSyscallError("clock_gettime", err))
		}
		all += time.Duration(now.Nano())
	}
	return all, nil
}

// transfers is Mbit/s of payload that so many clients get together.
func (t *streamTrack) transfers(ctx context.Context, count int, d time.Duration) (float64, error) {
	var bytes atomic.Int64
	var open sync.WaitGroup
	open.Add(count)
	load := func() error {
		return t.clients(ctx, count, func(ctx context.Context) (err error) {
			fd, err := call(t.to, askEndless)
			open.Done()
			if err != nil {
				return err
			}
			defer func() { err = errors.Join(err, gone(fd)) }()
			b := make([]byte, streamServed)
			open.Wait()
			for end := time.Now().Add(d); time.Now().Before(end); {
				n, err := read(fd, b)
				if err == nil && n == 0 {
					err = errors.New("a transfer ended before its time")
				}
				if err != nil {
					return err
				}
				bytes.Add(int64(n))
				if err := context.Cause(ctx); err != nil {
					return err
				}
			}
			return nil
		})
	}
	err := t.working(func() (float64, error) {
		err := load()
		return float64(bytes.Load()) / 1024, err
	})
	return float64(bytes.Load()) * 8 / 1e6 / d.Seconds(), err
}

// calls is connections per second, each of which moves so many bytes of streamSizes and ends in
// order.
func (t *streamTrack) calls(ctx context.Context, size int, d time.Duration) (float64, error) {
	var done atomic.Int64
	var took time.Duration
	load := func() error {
		start := time.Now()
		err := t.clients(ctx, streamCalls, func(ctx context.Context) error {
			b := make([]byte, streamServed)
			for end := time.Now().Add(d); time.Now().Before(end); {
				if err := callOnce(t.to, size, b); err != nil {
					return err
				}
				done.Add(1)
				if err := context.Cause(ctx); err != nil {
					return err
				}
			}
			return nil
		})
		took = time.Since(start) // with what was not over in time
		return err
	}
	err := t.working(func() (float64, error) {
		err := load()
		return float64(done.Load()), err
	})
	return float64(done.Load()) / took.Seconds(), err
}

// kept is requests per second on connections that stay: each asks for the first of streamSizes, again and again.
func (t *streamTrack) kept(ctx context.Context, d time.Duration) (float64, error) {
	var done atomic.Int64
	load := func() error {
		return t.clients(ctx, streamCalls, func(ctx context.Context) (err error) {
			fd, err := dial(t.to)
			if err != nil {
				return err
			}
			defer func() { err = errors.Join(err, gone(fd)) }()
			b := make([]byte, streamSizes[0])
			for end := time.Now().Add(d); time.Now().Before(end); {
				if _, err := unix.Write(fd, []byte{askKept}); err != nil {
					return os.NewSyscallError("write", err)
				}
				for left := len(b); left > 0; {
					n, err := read(fd, b[:left])
					if err == nil && n == 0 {
						err = errors.New("a connection ended before its time")
					}
					if err != nil {
						return err
					}
					left -= n
				}
				done.Add(1)
				if err := context.Cause(ctx); err != nil {
					return err
				}
			}
			return nil
		})
	}
	err := t.working(func() (float64, error) {
		err := load()
		return float64(done.Load()), err
	})
	return float64(done.Load()) / d.Seconds(), err
}

// sized is Mbit/s of payload of such connections.
func (t *streamTrack) sized(ctx context.Context, size int, d time.Duration) (float64, error) {
	x, err := t.calls(ctx, size, d)
	return x * float64(streamSizes[size]) * 8 / 1e6, err
}

// callOnce asks for one of streamSizes. b takes what comes.
func callOnce(to netip.AddrPort, size int, b []byte) (err error) {
	fd, err := call(to, askSizes+byte(size))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, unix.Close(fd)) }()
	got := 0
	for {
		n, err := read(fd, b)
		if err != nil {
			return err
		}
		if n == 0 {
			break
		}
		got += n
	}
	if got != streamSizes[size] {
		return fmt.Errorf("a connection moved %d bytes; want %d", got, streamSizes[size])
	}
	return nil
}

// idle is what the function's process has of memory of its own, in bytes for each of count
// connections that have moved a byte both ways and do nothing now.
func (t *streamTrack) idle(ctx context.Context, count int) (_ float64, err error) {
	pids, err := t.process()
	if err != nil {
		return 0, err
	}
	if t.resting == 0 {
		if t.resting, err = ownMemory(pids); err != nil {
			return 0, err
		}
	}
	var mu sync.Mutex
	var all []int
	defer func() {
		for _, fd := range all {
			err = errors.Join(err, gone(fd))
		}
	}()
	err = t.clients(ctx, streamCalls, func(ctx context.Context) error {
		for {
			fd, err := call(t.to, askOne)
			if err != nil {
				return err
			}
			mu.Lock()
			all = append(all, fd)
			enough := len(all) >= count
			mu.Unlock()
			var b [1]byte
			if n, err := read(fd, b[:]); err != nil || n != 1 {
				return errors.Join(err, fmt.Errorf("a connection moved %d bytes; want 1", n))
			}
			if err := context.Cause(ctx); err != nil || enough {
				return err
			}
		}
	})
	if err != nil {
		return 0, err
	}
	now, err := ownMemory(pids)
	return float64(now-t.resting) / float64(len(all)), err
}

// ownMemory is what processes hold in pages that belong to no file, in bytes.
func ownMemory(pids []int) (all int64, err error) {
	for _, pid := range pids {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		if err != nil {
			return 0, fmt.Errorf("read the memory of a process: %w", err)
		}
		_, after, ok := strings.Cut(string(text), "\nRssAnon:")
		kb, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(strings.SplitN(after, "\n", 2)[0]), " kB"), 10, 64)
		if !ok || err != nil {
			return 0, fmt.Errorf("read the memory of process %d: no RssAnon in its status", pid)
		}
		all += kb << 10
	}
	return all, nil
}

// answers is the median time in microseconds that opening a connection takes: from SYN to
// SYN-ACK, as the client sees it.
func (t *streamTrack) answers(ctx context.Context) (float64, error) {
	var us []float64
	err := t.clients(ctx, 1, func(ctx context.Context) error {
		for range streamTrips {
			start := time.Now()
			fd, err := dial(t.to)
			took := time.Since(start)
			if err != nil {
				return err
			}
			us = append(us, float64(took.Nanoseconds())/1e3)
			if err := errors.Join(gone(fd), context.Cause(ctx)); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return 0, err
	}
	return Median(us), nil
}

// streamSection is cases that are measured in the same rounds.
type streamSection struct {
	name, what, unit string
	workUnit         string // of the CPU time of the functions' processes; "": it is not shown
	better           Better
	ways             []streamWay // the first is the baseline of the others
	measure          func(ctx context.Context, t *streamTrack, d time.Duration) (float64, error)

	links  streamLinks
	passes int
	many   int
	size   string // of what clients get: the figure beside HAProxy's is named by it; "": there is none
}

// kept tells whether a case's lab is of use to other sections.
func (s streamSection) kept() bool {
	return s.links == linksFree && s.passes == 0 && s.many == 0 && s.name != "idle"
}

func (s streamSection) of(w streamWay) streamCase { return streamCase{w, s.links, s.passes, s.many} }

func streamSections() []streamSection {
	type measure = func(context.Context, *streamTrack, time.Duration) (float64, error)
	transfers := func(n int) measure {
		return func(ctx context.Context, t *streamTrack, d time.Duration) (float64, error) {
			return t.transfers(ctx, n, d)
		}
	}
	lossy := func(ctx context.Context, t *streamTrack, d time.Duration) (float64, error) {
		return t.transfers(ctx, streamLossy, lossyFor*d)
	}
	calls := func(ctx context.Context, t *streamTrack, d time.Duration) (float64, error) {
		return t.calls(ctx, 0, d)
	}
	sized := func(size int) measure {
		return func(ctx context.Context, t *streamTrack, d time.Duration) (float64, error) {
			return t.sized(ctx, size, d)
		}
	}
	kept := func(ctx context.Context, t *streamTrack, d time.Duration) (float64, error) { return t.kept(ctx, d) }
	answers := func(ctx context.Context, t *streamTrack, _ time.Duration) (float64, error) { return t.answers(ctx) }
	idle := func(ctx context.Context, t *streamTrack, _ time.Duration) (float64, error) {
		return t.idle(ctx, streamQuiet)
	}
	all := []streamWay{streamRouter, streamCopy, streamWorker, streamChain, streamIdentity}
	proxied := []streamWay{streamRouter, streamCopy, streamHAProxy, streamWorker, streamChain, streamIdentity}
	direct := []streamWay{streamRouter, streamIdentity}
	out := []streamSection{
		{name: "one", what: "one transfer", unit: "Mbit/s", workUnit: "ns/KB", better: More, ways: all, measure: transfers(1)},
		{name: "eight", what: "eight transfers", unit: "Mbit/s", workUnit: "ns/KB", better: More, ways: all, measure: transfers(streamMany)},
		{name: "short", what: "1 KB connections", unit: "1/s", workUnit: "ns/connection", better: More, ways: proxied, measure: calls, size: "size-1KB"},
		{name: "kept", what: "1 KB each, on connections that stay", unit: "1/s", workUnit: "ns/request", better: More, ways: proxied, measure: kept},
		{name: "size-100KB", what: "100 KB connections", unit: "Mbit/s", better: More, ways: []streamWay{streamRouter, streamHAProxy, streamChain, streamIdentity}, measure: sized(1), size: "size-100KB"},
		{name: "size-10MB", what: "10 MB connections", unit: "Mbit/s", better: More, ways: []streamWay{streamRouter, streamHAProxy, streamChain, streamIdentity}, measure: sized(2), size: "size-10MB"},
		{name: "connect", what: "SYN to SYN-ACK", unit: "µs", better: Less, ways: append(slices.Clone(all), streamEarly), measure: answers},
		{name: "size-1KB", what: "1 KB connections, links of 1 ms", unit: "1/s", better: More, ways: direct, measure: calls, links: linksSlow},
		{name: "loss-all", what: "1 % loss and 25 ms on all links", unit: "Mbit/s", better: More, ways: direct, measure: lossy, links: linksLossy},
		{name: "loss-behind", what: "2 % loss and 50 ms behind the node", unit: "Mbit/s", better: More, ways: direct, measure: lossy, links: linksBehind},
		{name: "two", what: "two functions at 1 Gbit/s", unit: "Mbit/s", better: More, ways: []streamWay{streamRouter, streamXOR}, measure: transfers(streamMany), links: linksTwo, passes: 1},
	}
	for _, n := range []int{3, 8} {
		out = append(out, streamSection{
			name: fmt.Sprintf("row-%d", n), what: fmt.Sprintf("%d functions in a row", n), unit: "Mbit/s", better: More,
			ways: []streamWay{streamRouter, streamChain, streamIdentity}, measure: transfers(streamMany), many: n,
		})
	}
	for _, n := range []int{1, 4, 16} {
		out = append(out, streamSection{
			name: fmt.Sprintf("work-%d", n), what: fmt.Sprintf("xor, %d passes", n), unit: "Mbit/s", workUnit: "ns/KB", better: More,
			ways: []streamWay{streamBytewise, streamXOR}, measure: transfers(1), passes: n,
		})
	}
	return append(out, streamSection{
		name: "idle", what: "idle connections", unit: "B/connection", better: Less,
		ways: []streamWay{streamCopy, streamHAProxy, streamIdentity}, measure: idle,
	})
}

// streamBeside is what a way is held against besides a section's baseline.
func streamBeside(w streamWay) (streamWay, bool) {
	switch w {
	case streamWorker:
		return streamCopy, true
	case streamIdentity:
		return streamChain, true
	case streamEarly:
		return streamIdentity, true
	}
	return "", false
}

func (s streamSection) figure(w streamWay) string { return "streams/" + s.name + "/" + string(w) }

func (s streamSection) series(w streamWay) Series {
	out := Series{Name: s.figure(w), Unit: s.unit, Better: s.better}
	if w != s.ways[0] {
		out.Baseline = s.figure(s.ways[0])
	}
	return out
}

// beside holds the figures of a section against the other things that they are held against.
func (s streamSection) beside(of []Figure) ([]Figure, error) {
	by := map[string]Figure{}
	for _, f := range of {
		by[f.Name] = f
	}
	var out []Figure
	hold := func(name string, w, base streamWay) error {
		f, here := by[s.figure(w)]
		b, there := by[s.figure(base)]
		if !here || !there || b.Name == f.Baseline {
			return nil
		}
		series := Series{Name: name, Unit: f.Unit, Better: f.Better, Baseline: b.Name, Samples: f.Samples}
		held, err := series.figure(map[string]Series{b.Name: {Name: b.Name, Unit: b.Unit, Better: b.Better, Samples: b.Samples}})
		out = append(out, held)
		return err
	}
	for _, w := range s.ways {
		base, ok := streamBeside(w)
		if !ok {
			continue
		}
		if err := hold(fmt.Sprintf("streams/%s-to-%s/%s", s.name, base, w), w, base); err != nil {
			return nil, err
		}
	}
	if s.size == "" {
		return out, nil
	}
	return out, hold("streams-to-haproxy/"+s.size+"/"+string(streamIdentity), streamIdentity, streamHAProxy)
}

// work is the CPU time of the processes of the function, of the runs that figures are of.
func (s streamSection) work(of []Figure, tracks map[streamCase]*streamTrack) ([]Figure, error) {
	if s.workUnit == "" {
		return nil, nil
	}
	figure := func(w streamWay) string { return "streams/" + s.name + "-work/" + string(w) }
	var series []Series
	for _, w := range s.ways {
		t := tracks[s.of(w)]
		i := slices.IndexFunc(of, func(f Figure) bool { return f.Name == s.figure(w) })
		if t == nil || i < 0 || len(t.work) < of[i].N {
			continue
		}
		// The first run is not counted.
		one := Series{Name: figure(w), Unit: s.workUnit, Better: Less, Samples: t.work[len(t.work)-of[i].N:]}
		if len(series) > 0 {
			one.Baseline = series[0].Name
		}
		series = append(series, one)
	}
	return Figures(series)
}

// Streams measures what a function on byte streams costs.
func Streams(ctx context.Context, c Config) (_ Result, err error) {
	r := c.begin("streams",
		fmt.Sprintf("Functions on byte streams: h1, r1, r2 with the function, r3, h2, in namespaces with veth pairs. All that r2 does, its function among it, is on CPU %d (receive packet steering), all that the others do elsewhere. Offloads are on, inner packets have up to 1500 bytes, links take 2000.", c.cpu()),
		"router: routing. copy: by routing, a Go program that ends each connection at r2 and moves bytes by io.Copy, two goroutines each. haproxy: HAProxy in its place, transparent, with splice and one thread. worker: in the same place, by the same routing, our worker with identity and one event loop, as agents with one CPU start it. chain: a chain with keyed proofs whose function at r2 forwards. identity: a chain whose function is identity on byte streams: each part is stamped and verified, and clients are answered when the server has answered (connect: first); early: at once. identity-copy and xor: the same with a function that copies each byte, and one that changes it.",
		fmt.Sprintf("one, eight: so many downloads at once, %s per run. short: %d clients that open one connection after the other, for %d bytes each, which end in order; size-100KB, size-10MB: the same with more bytes; kept: connections that stay, on which each client asks for as many bytes as short again and again. connect: the median of %d connections that are opened one after the other; early does not wait for the server, nor do copy, haproxy and worker.", c.Duration, streamCalls, streamSizes[0], streamTrips),
		fmt.Sprintf("size-1KB: as short, with links of 1 ms before and behind r2. loss-all: %d downloads at once for %s, with 25 ms and 1 %% of the frames lost on both, and %s in hosts and worker; loss-behind: 50 ms and 2 %% behind r2 alone. A program in user space delays and loses, frame by frame. two: eight downloads through xor at r2 and again at r4, links of 1 Gbit/s (HTB). row-N: eight downloads, over N nodes with a function each, all of them on one CPU. work-N: one download, with N passes over each byte. idle: memory of the function's process in pages that belong to no file (RssAnon), for each of %d connections that have moved a byte both ways; what the kernel has for them is not in it.", streamLossy, lossyFor*c.Duration, lossControl, streamQuiet),
	)
	r.Setup = append(r.Setup, fmt.Sprintf("stand: %d connections (%d with --quick) that have moved a byte both ways, all at once, one time. stand-memory: RssAnon of the worker for each. stand-kernel: what the kernel has for each at r2, in objects (Slab) and buffers of sockets: the whole machine's with them, less the same with as many connections by the chain, which has the hosts' sockets alone. stand-answer: the median time of a byte there and back, on %d of them, one after the other.", standCount, standQuick, standAsked))
	r.Setup = append(r.Setup, "NAME-work: what the functions' processes take of their CPU's time, in nanoseconds for each KB, or connection. NAME-to-BASE: the same figure as NAME, held against another baseline; streams-to-haproxy/size-1KB is of short.")
	c.note = r.note
	if !haveHAProxy() {
		r.note("HAProxy is not installed, so nothing is held against it: `make deps` installs it.")
	}
	tracks := map[streamCase]*streamTrack{}
	defer func() {
		for _, t := range tracks {
			err = errors.Join(err, t.close())
		}
	}()
	for _, s := range streamSections() {
		if !haveHAProxy() {
			s.ways = slices.DeleteFunc(slices.Clone(s.ways), func(w streamWay) bool { return w == streamHAProxy })
		}
		figures, err := c.streamSection(ctx, s, tracks)
		if err != nil {
			return Result{}, err
		}
		r.Figures = append(r.Figures, figures...)
	}
	// Processes that have had no connection yet.
	for k, t := range tracks {
		err = errors.Join(err, t.close())
		delete(tracks, k)
	}
	if err != nil {
		return Result{}, err
	}
	figures, err := c.streamStand(ctx, r.note)
	if err != nil {
		return Result{}, err
	}
	r.Figures = append(r.Figures, figures...)
	if len(r.Figures) == 0 {
		return Result{}, &NoCaseError{c.Only}
	}
	r.end()
	return r, nil
}

// streamSection measures one. Labs that are of use stay for the next one, in tracks.
func (c Config) streamSection(ctx context.Context, s streamSection, tracks map[streamCase]*streamTrack) (_ []Figure, err error) {
	var subjects []subject
	for _, w := range s.ways {
		subjects = append(subjects, subject{s.series(w), func() (_ *trial, err error) {
			t := tracks[s.of(w)]
			if t == nil {
				if t, err = newStreamTrack(ctx, c, s.of(w)); err != nil {
					return nil, err
				}
				tracks[s.of(w)] = t
			}
			return &trial{measure: func(ctx context.Context) (float64, error) { return s.measure(ctx, t, c.Duration) }}, nil
		}})
	}
	if c.skips(subjects) {
		return nil, nil
	}
	if s.name == "idle" {
		// Processes that have had no connection yet.
		for k, t := range tracks {
			err = errors.Join(err, t.close())
			delete(tracks, k)
		}
		if err != nil {
			return nil, err
		}
	}
	for _, t := range tracks {
		t.work = nil // of the section before
	}
	defer func() {
		for _, w := range s.ways {
			if t := tracks[s.of(w)]; t != nil && !s.kept() {
				err = errors.Join(err, t.close())
				delete(tracks, s.of(w))
			}
		}
	}()
	figures, err := c.rounds(ctx, "streams, "+s.what, subjects)
	if err != nil {
		return nil, err
	}
	more, err := s.beside(figures)
	if err != nil {
		return nil, err
	}
	work, err := s.work(figures, tracks)
	return append(append(figures, more...), work...), err
}
