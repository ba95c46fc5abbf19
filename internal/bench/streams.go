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
	streamPlain  streamWay = "plain"  // nobody: routing
	streamChain  streamWay = "chain"  // a chain with a proof, whose function only forwards
	streamCopy   streamWay = "copy"   // by routing, a program with io.Copy
	streamWorker streamWay = "worker" // by routing, our worker with identity, at the same place
	streamOurs   streamWay = "stream" // a chain with a proof, whose function is identity
	streamEarly  streamWay = "early"  // the same, and clients are answered at once
)

func (w streamWay) agents() bool { return w == streamChain || w.stream() }
func (w streamWay) stream() bool { return w == streamOurs || w == streamEarly }
func (w streamWay) placed() bool { return w == streamCopy || w == streamWorker }

const (
	streamPort = 8080 // of the server; also what the relay and the worker listen at
	streamLink = "to-place"
	placeLink  = "place"

	streamMany   = 8       // transfers at once
	streamCalls  = 16      // clients at once that open one connection after the other
	streamBytes  = 1 << 10 // that each gets
	streamTrips  = 200     // connections of which the median time is a run
	streamServed = 256 << 10
	streamWait   = 10 * time.Second // that a client waits for bytes at most
)

// What a client asks of the server, by the byte that it sends first.
const (
	askEndless = 'e' // bytes until the client is gone
	askOnce    = 'o' // streamBytes, and then the end
)

func (w streamWay) domain() (model.Domain, model.Lab) {
	c := proxyCase{way: wayPlain}
	d, l := c.domain()
	f := model.Function{Name: "fn", Node: "r2"}
	if w.stream() {
		f.Kind, f.Proxy = model.KindStream, model.StreamDetour("fn")
		f.Stream = model.Stream{
			Run: []string{`"identity"`}, Early: w == streamEarly,
			Connections: model.StreamConnectionsDefault, Buffer: model.StreamBufferDefault,
			Idle: model.StreamIdleDefault, HalfClosed: model.StreamHalfClosedDefault,
		}
	}
	d.Functions, l.Functions = []model.Function{f}, nil
	return d, l
}

// streamTrack is a lab of one way, with a server on h2.
type streamTrack struct {
	way     streamWay
	lab     *lab.Lab
	server  *streamServer
	node    []int                       // CPUs of r2 and its function
	others  []int                       // of all else
	closers []func() error              // of what is made besides, the last one first
	process func() (pid int, err error) // of the function; 0: none
	work    []float64                   // what each run took of the process's time, see workUnit
	to      netip.AddrPort              // of the server
}

func newStreamTrack(ctx context.Context, cfg Config, w streamWay) (_ *streamTrack, err error) {
	d, l := w.domain()
	t := &streamTrack{way: w, node: []int{cfg.cpu()}, process: func() (int, error) { return 0, nil }}
	for c := range runtime.NumCPU() {
		if c != cfg.cpu() {
			t.others = append(t.others, c)
		}
	}
	if t.others == nil {
		t.others = t.node
	}
	if t.lab, err = lab.Up(ctx, lab.Config{Domain: d, Lab: l, Binary: cfg.Binary, Own: true, WithoutAgents: !w.agents(), Log: cfg.Log}); err != nil {
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
		t.process = func() (int, error) { return streamFunction(ctx, t.lab) }
	}
	return t, t.steer()
}

// streamFunction is the process of the worker of r2.
func streamFunction(ctx context.Context, l *lab.Lab) (pid int, err error) {
	c := agent.NewClient(agent.SocketPath(l.AgentDir("r2")))
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
	return 0, errors.New("the agent of r2 has no worker")
}

// steer has the function's node work on its own CPU, and all other members on the others.
func (t *streamTrack) steer() error {
	for _, m := range t.lab.Members() {
		cpus := t.others
		if m.Name == "r2" {
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
	if t.way == streamCopy {
		pid, err = t.startRelay(ctx, ns)
	} else {
		pid, err = t.startWorker(cfg, ns)
	}
	t.process = func() (int, error) { return pid, nil }
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
	case askOnce:
		c.Write(zeroes[:streamBytes])
	case askEndless:
		for {
			if _, err := c.Write(zeroes[:]); err != nil {
				return
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
func (t *streamTrack) clients(ctx context.Context, count int, f func(ctx context.Context) error) (err error) {
	pid, err := t.process()
	if err == nil && pid != 0 {
		err = host.RunOn(pid, t.node...)
	}
	if err = errors.Join(err, host.RunOn(0, t.others...)); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, host.RunOn(0)) }()
	g, ctx := errgroup.WithContext(ctx)
	for range count {
		g.Go(func() error { return t.lab.Do("h1", func() error { return f(ctx) }) })
	}
	return g.Wait()
}

// working notes what f takes of the CPU time of the function's process, in nanoseconds for each
// of the pieces that f has moved. What the kernel does for packets meanwhile counts as the
// process's, if it runs at that moment.
func (t *streamTrack) working(f func() (pieces float64, err error)) error {
	pid, err := t.process()
	if err != nil {
		return err
	}
	before, err := cpuTime(pid)
	if err != nil {
		return err
	}
	pieces, err := f()
	if err != nil || pid == 0 {
		return err
	}
	after, err := cpuTime(pid)
	if err == nil && pieces > 0 {
		t.work = append(t.work, float64((after-before).Nanoseconds())/pieces)
	}
	return err
}

// cpuTime is what all threads of a process have run; 0 is none.
func cpuTime(pid int) (time.Duration, error) {
	if pid == 0 {
		return 0, nil
	}
	const processClock = 2 // CPUCLOCK_SCHED, of all threads; see clock_getcpuclockid(3)
	var now unix.Timespec
	if err := unix.ClockGettime(int32(^pid<<3|processClock), &now); err != nil {
		return 0, fmt.Errorf("read the CPU time of process %d: %w", pid, os.NewSyscallError("clock_gettime", err))
	}
	return time.Duration(now.Nano()), nil
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

// calls is connections per second, each of which moves streamBytes and ends in order.
func (t *streamTrack) calls(ctx context.Context, d time.Duration) (float64, error) {
	var done atomic.Int64
	load := func() error {
		return t.clients(ctx, streamCalls, func(ctx context.Context) error {
			for end := time.Now().Add(d); time.Now().Before(end); {
				if err := callOnce(t.to); err != nil {
					return err
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

func callOnce(to netip.AddrPort) (err error) {
	fd, err := call(to, askOnce)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, unix.Close(fd)) }()
	var b [2 * streamBytes]byte
	got := 0
	for {
		n, err := read(fd, b[:])
		if err != nil {
			return err
		}
		if n == 0 {
			break
		}
		got += n
	}
	if got != streamBytes {
		return fmt.Errorf("a connection moved %d bytes; want %d", got, streamBytes)
	}
	return nil
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
	workUnit         string // of the CPU time of the function's process; "": it is not shown
	better           Better
	ways             []streamWay
	measure          func(ctx context.Context, t *streamTrack, d time.Duration) (float64, error)
}

func streamSections() []streamSection {
	transfers := func(n int) func(context.Context, *streamTrack, time.Duration) (float64, error) {
		return func(ctx context.Context, t *streamTrack, d time.Duration) (float64, error) {
			return t.transfers(ctx, n, d)
		}
	}
	all := []streamWay{streamPlain, streamCopy, streamWorker, streamChain, streamOurs}
	return []streamSection{
		{"one", "one transfer", "Mbit/s", "ns/KB", More, all, transfers(1)},
		{"eight", "eight transfers", "Mbit/s", "ns/KB", More, all, transfers(streamMany)},
		{"short", "1 KB connections", "1/s", "ns/connection", More, all, func(ctx context.Context, t *streamTrack, d time.Duration) (float64, error) { return t.calls(ctx, d) }},
		{"connect", "SYN to SYN-ACK", "µs", "", Less, append(slices.Clone(all), streamEarly), func(ctx context.Context, t *streamTrack, _ time.Duration) (float64, error) { return t.answers(ctx) }},
	}
}

// streamBeside is what a way is held against besides plain routing.
func streamBeside(w streamWay) (streamWay, bool) {
	switch w {
	case streamWorker:
		return streamCopy, true
	case streamOurs:
		return streamChain, true
	case streamEarly:
		return streamOurs, true
	}
	return "", false
}

func (s streamSection) figure(w streamWay) string { return "streams/" + s.name + "/" + string(w) }

func (s streamSection) series(w streamWay) Series {
	out := Series{Name: s.figure(w), Unit: s.unit, Better: s.better}
	if w != streamPlain {
		out.Baseline = s.figure(streamPlain)
	}
	return out
}

// beside holds the figures of a section against the second thing that they are held against.
func (s streamSection) beside(of []Figure) ([]Figure, error) {
	by := map[string]Figure{}
	for _, f := range of {
		by[f.Name] = f
	}
	var out []Figure
	for _, w := range s.ways {
		base, ok := streamBeside(w)
		f, here := by[s.figure(w)]
		b, there := by[s.figure(base)]
		if !ok || !here || !there {
			continue
		}
		series := Series{
			Name: fmt.Sprintf("streams/%s-to-%s/%s", s.name, base, w), Unit: f.Unit, Better: f.Better, Baseline: b.Name, Samples: f.Samples,
		}
		held, err := series.figure(map[string]Series{b.Name: {Name: b.Name, Unit: b.Unit, Better: b.Better, Samples: b.Samples}})
		if err != nil {
			return nil, err
		}
		out = append(out, held)
	}
	return out, nil
}

// work is the CPU time of the processes of the function, of the runs that figures are of.
func (s streamSection) work(of []Figure, tracks map[streamWay]*streamTrack) ([]Figure, error) {
	if s.workUnit == "" {
		return nil, nil
	}
	figure := func(w streamWay) string { return "streams/" + s.name + "-work/" + string(w) }
	var series []Series
	for _, w := range s.ways {
		t := tracks[w]
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
		"plain: routing. copy: by routing, a Go program that ends each connection at r2 and moves bytes by io.Copy, two goroutines each. worker: in the same place, by the same routing, our worker with identity and one event loop, as agents start it. chain: a chain with keyed proofs whose function at r2 forwards. stream: a chain whose function is identity on byte streams: each part is stamped and verified, and clients are answered when the server has answered (connect: first); early: at once.",
		fmt.Sprintf("one, eight: so many downloads at once, %s per run. short: %d clients that open one connection after the other, for %d bytes each, which end in order. connect: the median of %d connections that are opened one after the other; early does not wait for the server, nor do copy and worker.", c.Duration, streamCalls, streamBytes, streamTrips),
	)
	r.Setup = append(r.Setup, "NAME-work: what the function's process takes of its CPU's time, in nanoseconds for each KB, or connection. NAME-to-BASE: the same figure as NAME, held against another baseline.")
	c.note = r.note
	tracks := map[streamWay]*streamTrack{}
	defer func() {
		for _, t := range tracks {
			err = errors.Join(err, t.close())
		}
	}()
	for _, s := range streamSections() {
		figures, err := c.streamSection(ctx, s, tracks)
		if err != nil {
			return Result{}, err
		}
		r.Figures = append(r.Figures, figures...)
	}
	if len(r.Figures) == 0 {
		return Result{}, &NoCaseError{c.Only}
	}
	r.end()
	return r, nil
}

// streamSection measures one. Labs stay for the next one, in tracks.
func (c Config) streamSection(ctx context.Context, s streamSection, tracks map[streamWay]*streamTrack) ([]Figure, error) {
	var subjects []subject
	for _, w := range s.ways {
		subjects = append(subjects, subject{s.series(w), func() (_ *trial, err error) {
			t := tracks[w]
			if t == nil {
				if t, err = newStreamTrack(ctx, c, w); err != nil {
					return nil, err
				}
				tracks[w] = t
			}
			return &trial{measure: func(ctx context.Context) (float64, error) { return s.measure(ctx, t, c.Duration) }}, nil
		}})
	}
	if c.skips(subjects) {
		return nil, nil
	}
	for _, t := range tracks {
		t.work = nil // of the section before
	}
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
