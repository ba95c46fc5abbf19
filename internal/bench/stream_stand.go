package bench

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/host"
)

// Many connections at once that do nothing: whether they stand, what the function's process and the kernel have for
// each, and how soon one of them gets its next byte.

const (
	standCount = 100_000 // what a function allows, if its file does not say otherwise
	standQuick = 10_000
	standPorts = 8     // of the server, for which a client has ports of its own each
	standFirst = 18080 // the first of them
	standAsked = 1000  // connections that are asked for a byte, one after the other
)

// standServer gives back each byte that it gets at a port. It holds a descriptor for each connection, and nothing else.
type standServer struct {
	epoll    int
	stop     int // an eventfd
	listener int
	ended    chan struct{}
}

func newStandServer(at netip.AddrPort) (_ *standServer, err error) {
	s := &standServer{epoll: -1, stop: -1, listener: -1, ended: make(chan struct{})}
	defer func() {
		if err != nil {
			err = fmt.Errorf("serve many connections: %w", errors.Join(err, s.release()))
		}
	}()
	if s.epoll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return nil, os.NewSyscallError("epoll_create1", err)
	}
	if s.stop, err = unix.Eventfd(0, unix.EFD_CLOEXEC); err != nil {
		return nil, os.NewSyscallError("eventfd", err)
	}
	if err := s.watch(s.stop); err != nil {
		return nil, err
	}
	if s.listener, err = unix.Socket(unix.AF_INET6, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP); err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	if err := unix.SetsockoptInt(s.listener, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
		return nil, os.NewSyscallError("setsockopt SO_REUSEADDR", err)
	}
	if err := unix.Bind(s.listener, &unix.SockaddrInet6{Port: int(at.Port()), Addr: at.Addr().As16()}); err != nil {
		return nil, os.NewSyscallError("bind", err)
	}
	if err := unix.Listen(s.listener, 4096); err != nil {
		return nil, os.NewSyscallError("listen", err)
	}
	if err := s.watch(s.listener); err != nil {
		return nil, err
	}
	return s, nil
}

func (s *standServer) watch(fd int) error {
	err := unix.EpollCtl(s.epoll, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(fd)})
	return os.NewSyscallError("epoll_ctl", err)
}

// run serves until close, with descriptors of its own.
func (s *standServer) run(at *host.NetNS) {
	defer close(s.ended)
	at.DoOnOwnDescriptors(func() error { // what does not work shows at the clients
		s.serve()
		return nil
	})
}

func (s *standServer) serve() {
	events := make([]unix.EpollEvent, 256)
	open := map[int]bool{}
	defer func() {
		for fd := range open {
			unix.Close(fd)
		}
	}()
	var b [16]byte
	for {
		n, err := unix.EpollWait(s.epoll, events, -1)
		if err != nil && err != unix.EINTR {
			return
		}
		for _, e := range events[:max(n, 0)] {
			fd := int(e.Fd)
			switch {
			case fd == s.stop:
				return
			case fd == s.listener:
				got, _, err := unix.Accept4(fd, unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
				if err != nil {
					continue
				}
				// Where that fails the client waits, and says so.
				if s.watch(got) != nil {
					unix.Close(got)
					continue
				}
				open[got] = true
			default:
				n, err := unix.Read(fd, b[:])
				if err == unix.EAGAIN || err == unix.EINTR {
					continue
				}
				if n <= 0 || err != nil {
					delete(open, fd)
					unix.Close(fd)
					continue
				}
				unix.Write(fd, b[:n])
			}
		}
	}
}

func (s *standServer) close() error {
	var one [8]byte
	one[0], one[7] = 1, 1 // not zero in any byte order
	if _, err := unix.Write(s.stop, one[:]); err != nil {
		return os.NewSyscallError("write", err)
	}
	<-s.ended
	return s.release()
}

func (s *standServer) release() (err error) {
	for _, fd := range []int{s.listener, s.epoll, s.stop} {
		if fd >= 0 {
			err = errors.Join(err, os.NewSyscallError("close", unix.Close(fd)))
		}
	}
	return err
}

// stood is what was seen of connections that stand.
type stood struct {
	count  int
	kernel int64         // memory of the kernel with all of them, of the whole machine, in bytes
	memory int64         // of the functions' processes, of their own
	took   time.Duration // to open all
	answer float64       // median of the time that a byte takes there and back, in microseconds
}

// stand opens connections, which do nothing then, and asks some of them. Each port of the server, and each of the threads that
// open connections, has descriptors of its own.
func (t *streamTrack) stand(ctx context.Context, count int) (out stood, err error) {
	clients, err := t.lab.NetNS("h1")
	if err != nil {
		return out, err
	}
	defer clients.Close()
	servers, err := t.lab.NetNS("h2")
	if err != nil {
		return out, err
	}
	defer servers.Close()
	for i := range standPorts {
		var s *standServer
		if err := servers.Do(func() (err error) {
			s, err = newStandServer(netip.AddrPortFrom(t.to.Addr(), uint16(standFirst+i)))
			return err
		}); err != nil {
			return out, err
		}
		go s.run(servers)
		defer func() { err = errors.Join(err, s.close()) }()
	}
	pids, err := t.process()
	if err != nil {
		return out, err
	}
	resting, err := ownMemory(pids)
	if err != nil {
		return out, err
	}
	var begun atomic.Int64
	var opened, asked sync.WaitGroup // a thread that fails does not hold up others
	opened.Add(streamCalls)
	asked.Add(streamCalls)
	measured := make(chan struct{})
	var asking sync.Mutex // one connection at a time
	var us []float64
	began := time.Now()
	client := func(ctx context.Context) (err error) {
		var mine []int
		defer func() {
			for _, fd := range mine {
				err = errors.Join(err, gone(fd))
			}
		}()
		err = func() error {
			defer opened.Done()
			for {
				n := int(begun.Add(1)) - 1
				if n >= count {
					return nil
				}
				fd, err := call(netip.AddrPortFrom(t.to.Addr(), uint16(standFirst+n%standPorts)), 'b')
				if err != nil {
					return fmt.Errorf("connection %d: %w", n, err)
				}
				mine = append(mine, fd)
				if err := errors.Join(echoed(fd), context.Cause(ctx)); err != nil {
					return fmt.Errorf("connection %d: %w", n, err)
				}
			}
		}()
		if err == nil {
			<-measured
			asking.Lock()
			ask := min(standAsked/streamCalls, len(mine))
			for i := range ask {
				fd := mine[i*len(mine)/ask]
				start := time.Now()
				_, err = unix.Write(fd, []byte{'b'})
				if err = errors.Join(os.NewSyscallError("write", err), echoed(fd), context.Cause(ctx)); err != nil {
					err = fmt.Errorf("a connection that stood does not answer: %w", err)
					break
				}
				us = append(us, float64(time.Since(start).Nanoseconds())/1e3)
			}
			asking.Unlock()
		}
		asked.Done()
		if err == nil {
			asked.Wait()
		}
		return err
	}
	err = t.onTheirCPUs(func() error {
		g, ctx := errgroup.WithContext(ctx)
		for range streamCalls {
			g.Go(func() error {
				called := false
				err := clients.DoOnOwnDescriptors(func() error {
					called = true
					return client(ctx)
				})
				if !called {
					opened.Done()
					asked.Done()
				}
				return err
			})
		}
		opened.Wait()
		out.count, out.took = min(int(begun.Load()), count), time.Since(began)
		now, err := ownMemory(pids)
		out.memory = now - resting
		if err == nil {
			out.kernel, err = kernelMemory()
		}
		close(measured)
		return errors.Join(g.Wait(), err)
	})
	if err != nil {
		return out, err
	}
	out.answer = Median(us)
	return out, nil
}

func echoed(fd int) error {
	var b [1]byte
	n, err := read(fd, b[:])
	if err == nil && n != 1 {
		err = errors.New("it ended")
	}
	return err
}

// kernelMemory is what the kernel has of memory for objects and for the buffers of sockets, in bytes.
func kernelMemory() (int64, error) {
	field := func(file, line string, at int) (int64, error) {
		text, err := os.ReadFile(file)
		if err != nil {
			return 0, fmt.Errorf("read the kernel's memory: %w", err)
		}
		for l := range strings.Lines(string(text)) {
			if f := strings.Fields(l); len(f) > at && f[0] == line {
				return strconv.ParseInt(f[at], 10, 64)
			}
		}
		return 0, fmt.Errorf("%s has no line of %s", file, line)
	}
	slab, err := field("/proc/meminfo", "Slab:", 1) // KB
	if err != nil {
		return 0, err
	}
	// TCP: inuse N orphan N tw N alloc N mem PAGES
	pages, err := field("/proc/net/sockstat", "TCP:", 10)
	return slab<<10 + pages*int64(os.Getpagesize()), err
}

// standFiles are for what the program has open besides.
const standFiles = 4096

// standing raises this process's limit of descriptors for so many connections, if it has to and may. A port of the server has the most
// in one table. It returns how many the limit suffices for.
func standing(count int) (int, error) {
	var have unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &have); err != nil {
		return 0, os.NewSyscallError("getrlimit RLIMIT_NOFILE", err)
	}
	want := uint64((count+standPorts-1)/standPorts + standFiles)
	if have.Cur >= want {
		return count, nil
	}
	err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: want, Max: max(want, have.Max)})
	switch {
	case err == nil:
		return count, nil
	case !errors.Is(err, unix.EPERM): // which CAP_SYS_RESOURCE would help against
		return 0, os.NewSyscallError("setrlimit RLIMIT_NOFILE", err)
	case have.Cur <= standFiles:
		return 0, fmt.Errorf("%d descriptors are too few; raise the limit of open files (ulimit -n) to %d", have.Cur, want)
	}
	return int(have.Cur-standFiles) * standPorts, nil
}

// streamStand measures connections that do nothing, once: by a chain whose function forwards packets, and by one with identity.
// The kernel has the hosts' sockets in both, and the worker's in the second.
func (c Config) streamStand(ctx context.Context, note func(string)) (_ []Figure, err error) {
	const answers = "streams/stand-answer/"
	series := []Series{
		{Name: answers + string(streamChain), Unit: "µs", Better: Less},
		{Name: answers + string(streamIdentity), Unit: "µs", Better: Less, Baseline: answers + string(streamChain)},
		{Name: "streams/stand-memory/" + string(streamIdentity), Unit: "B/connection", Better: Less},
		{Name: "streams/stand-kernel/" + string(streamIdentity), Unit: "B/connection", Better: Less},
	}
	if c.Only != "" && !slices.ContainsFunc(series, func(s Series) bool { return strings.Contains(s.Name, c.Only) }) {
		return nil, nil
	}
	count := standCount
	if c.Quick {
		count = standQuick
	}
	allowed, err := standing(count)
	if err != nil {
		return nil, fmt.Errorf("open %d connections: %w", count, err)
	}
	if allowed < count {
		note(fmt.Sprintf("stand: %d descriptors are allowed, and this program may not raise that (CAP_SYS_RESOURCE), so that %d connections stood and not %d.", allowed/standPorts+standFiles, allowed, count))
		count = allowed
	}
	p := newProgress(c.Progress, "streams, connections that stand", 2)
	defer p.done()
	var tracks []*streamTrack
	defer func() {
		for _, t := range tracks {
			err = errors.Join(err, t.close())
		}
	}()
	for _, w := range []streamWay{streamChain, streamIdentity} {
		t, err := newStreamTrack(ctx, c, streamCase{way: w})
		if err != nil {
			return nil, err
		}
		tracks = append(tracks, t)
	}
	var by []stood
	for _, t := range tracks {
		p.step(string(t.way))
		s, err := t.stand(ctx, count)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", t.way, err)
		}
		by = append(by, s)
	}
	chain, identity := by[0], by[1]
	series[0].Samples, series[1].Samples = []float64{chain.answer}, []float64{identity.answer}
	series[2].Samples = []float64{float64(identity.memory) / float64(identity.count)}
	series[3].Samples = []float64{float64(identity.kernel-chain.kernel) / float64(identity.count)}
	note(fmt.Sprintf("stand: %d connections stood at once, measured one time; they were opened in %s, by the chain without the function in %s.",
		identity.count, identity.took.Round(time.Second/10), chain.took.Round(time.Second/10)))
	return Figures(series)
}
