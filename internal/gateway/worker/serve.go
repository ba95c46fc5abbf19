// Package worker runs a gateway (internal/gateway) as a process of its own, which has no
// privilege and opens no file: the listeners, the audit log and the content of all files
// come from its parent, and it asks its parent for each connection onward. It has both
// sides: Serve is the life of the process, Start is its parent's. internal/agent calls it, and
// the hidden command "waystamp worker gateway".
package worker

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"reflect"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/gateway"
	"github.com/waystamp/waystamp/internal/seal"
	"github.com/waystamp/waystamp/internal/signer"
	"github.com/waystamp/waystamp/internal/stream/sandbox"
)

// Serve takes over a socket to the parent, the audit log and listeners of each version of IP, confines
// the process, and serves until the context ends or the parent does. Nothing that the parent
// sends is read before. A process of root's becomes the user.
func Serve(ctx context.Context, parent, audit *os.File, listeners []*os.File, stderr io.Writer, user uint32) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	w := &worker{log: slog.New(slog.NewTextHandler(stderr, nil)), waiting: map[uint64]chan answer{}, statuses: map[uint64]chan statusAnswer{}}
	c, err := net.FileConn(parent)
	if err := errors.Join(err, parent.Close()); err != nil {
		return fmt.Errorf("take over the socket to the parent: %w", err)
	}
	w.parent = c
	defer c.Close()
	l := &merged{got: make(chan accepted), closed: make(chan struct{})}
	for _, f := range listeners {
		one, err := net.FileListener(f)
		if err := errors.Join(err, f.Close()); err != nil {
			return fmt.Errorf("take over a listener: %w", err)
		}
		l.list = append(l.list, one)
	}
	defer l.Close()
	if err := sandbox.Enter(sandbox.Options{User: user, Gateway: true}); err != nil {
		return fmt.Errorf("confine the gateway: %w", err)
	}
	var first toWorker
	if err := receive(c, &first, toWorkerMax); err != nil {
		return fmt.Errorf("read the gateway's configuration: %w", err)
	}
	if first.Configuration == nil {
		return errors.New("the gateway's configuration did not come first")
	}
	w.number = first.Configuration.Number
	err = w.begin(first.Configuration, audit)
	if err := w.taken(first.Configuration.Number, err); err != nil {
		return err
	}
	if err != nil {
		return err
	}
	go func() {
		// It ends with the parent, and then nobody may let connections on.
		if err := w.follow(); !errors.Is(err, io.EOF) && ctx.Err() == nil {
			w.log.Error("the socket to the parent", "err", err)
		}
		stop()
	}()
	for _, one := range l.list {
		go l.accept(one)
	}
	go w.tell(ctx)
	return errors.Join(w.gateway.Serve(ctx, l), w.audit.Close())
}

type worker struct {
	log     *slog.Logger
	parent  net.Conn
	gateway *gateway.Gateway
	audit   *gateway.Audit
	number  uint64 // of the last configuration that came

	writing sync.Mutex

	mu      sync.Mutex
	chains  map[string]*chain
	waiting map[uint64]chan answer // answers, by the number of what was asked
	// statuses are those of responders, by the number of the question.
	statuses map[uint64]chan statusAnswer
	asked    uint64
}

// chain is one with the port that is tried next.
type chain struct {
	Chain
	next uint16
}

func (w *worker) send(m toParent) error {
	w.writing.Lock()
	defer w.writing.Unlock()
	return send(w.parent, m, toParentMax)
}

// textMax is the length in bytes of the longest error that the parent hears.
const textMax = 8 << 10

func (w *worker) taken(number uint64, err error) error {
	a := &answer{Number: number}
	if err != nil {
		a.Error = err.Error()
		a.Error = a.Error[:min(len(a.Error), textMax)]
	}
	return w.send(toParent{Taken: a})
}

func (w *worker) begin(c *configuration, audit *os.File) error {
	services, err := gateway.Load(c.Files, c.Clients, c.Services, time.Now())
	if err != nil {
		return err
	}
	if w.audit, err = gateway.GoOnAudit(audit, c.Audit, time.Now); err != nil {
		return err
	}
	w.setChains(c.Chains)
	w.gateway, err = gateway.New(gateway.Config{Services: services, Revoked: c.Revoked, Dialer: w, Status: w.status, Sign: w.sign, Audit: w.audit, Limits: gateway.DefaultLimits(), Log: w.log, Now: time.Now})
	return err
}

func (w *worker) setChains(list []Chain) {
	w.mu.Lock()
	defer w.mu.Unlock()
	before := w.chains
	w.chains = map[string]*chain{}
	for _, c := range list {
		in := &chain{Chain: c}
		if b := before[c.Name]; b != nil && b.Chain == c {
			in.next = b.next
		} else if n := uint32(c.Last) - uint32(c.First) + 1; c.First > 0 {
			// Not the ports of the worker before, some of whose connections the origin still knows.
			var b [4]byte
			rand.Read(b[:])
			in.next = c.First + uint16(binary.NativeEndian.Uint32(b[:])%n)
		}
		w.chains[c.Name] = in
	}
}

// tellTime is how often the parent hears what has changed.
const tellTime = time.Second

// tell sends numbers that have changed.
func (w *worker) tell(ctx context.Context) {
	t := time.NewTicker(tellTime)
	defer t.Stop()
	var last Statistics
	for {
		select {
		case <-t.C:
		case <-ctx.Done():
			return
		}
		now := Statistics{w.gateway.Sessions(), w.gateway.Opened(), w.gateway.Refused(), w.gateway.Counts()}
		if reflect.DeepEqual(now, last) {
			continue
		}
		if w.send(toParent{Statistics: &now}) != nil {
			return
		}
		last = now
	}
}

// follow does what the parent says.
func (w *worker) follow() error {
	for {
		var m toWorker
		if err := receive(w.parent, &m, toWorkerMax); err != nil {
			return err
		}
		if m.Answer != nil {
			w.mu.Lock()
			to := w.waiting[m.Answer.Number]
			delete(w.waiting, m.Answer.Number)
			w.mu.Unlock()
			if to != nil {
				to <- *m.Answer
			}
		}
		if m.Status != nil {
			w.mu.Lock()
			to := w.statuses[m.Status.Number]
			delete(w.statuses, m.Status.Number)
			w.mu.Unlock()
			if to != nil {
				to <- *m.Status
			}
		}
		if m.Query != nil {
			r := w.reply(m.Query)
			r.Number = m.Query.Number
			if err := w.send(toParent{Reply: &r}); err != nil {
				return err
			}
		}
		if m.Configuration != nil {
			if err := w.taken(m.Configuration.Number, w.change(m.Configuration)); err != nil {
				return err
			}
		}
	}
}

// Sessions of one reply: sessionsMost, and no more once they have sessionsBytes. Beside them there is room for the longest one.
const (
	sessionsMost  = 100
	sessionsBytes = toParentMax / 2
)

// reply does what the parent asks.
func (w *worker) reply(q *query) (r reply) {
	switch {
	case q.Revoke != nil:
		r.Ended = w.gateway.Revoke(q.Revoke.Identities)
	case q.End != nil:
		if w.gateway.End(q.End.ID) {
			r.Ended = 1
		}
	case q.List != nil:
		list, more := w.gateway.SessionsAfter(q.List.After, sessionsMost)
		size := 0
		for i, s := range list {
			text, err := json.Marshal(s)
			if size += len(text); err != nil || i > 0 && size > sessionsBytes {
				return reply{Sessions: list[:i], More: true}
			}
		}
		r.Sessions, r.More = list, more
	}
	return r
}

// change takes a configuration, or leaves all as it was.
func (w *worker) change(c *configuration) error {
	if c.Number <= w.number {
		return fmt.Errorf("configuration %d comes after %d", c.Number, w.number)
	}
	w.number = c.Number
	services, err := gateway.Load(c.Files, c.Clients, c.Services, time.Now())
	if err != nil {
		return err
	}
	w.setChains(c.Chains)
	return w.gateway.Update(services)
}

// Sealed says whether a chain is sealed up to its next end.
func (w *worker) Sealed(name string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	c := w.chains[name]
	return c != nil && c.Sealed
}

// Dial opens a connection from the client's address by a chain, once the parent has let it. In a sealed
// chain it is sealed up to the next end, which has opened the session with the origin.
func (w *worker) Dial(ctx context.Context, to gateway.Onward) (net.Conn, error) {
	w.mu.Lock()
	c := w.chains[to.Chain]
	w.mu.Unlock()
	if c == nil || c.Origin != to.Origin {
		return nil, fmt.Errorf("chain %s does not lead to %s", to.Chain, to.Origin)
	}
	if c.Sealed != to.Sealed {
		return nil, fmt.Errorf("chain %s has changed whether it is sealed", to.Chain)
	}
	var part *seal.Part
	d := net.Dialer{ControlContext: func(ctx context.Context, _, _ string, raw syscall.RawConn) error {
		var source netip.AddrPort
		var err error
		if rerr := raw.Control(func(fd uintptr) { source, err = w.bind(int(fd), c, to.Client.Addr()) }); rerr != nil {
			return rerr
		}
		if err != nil {
			return err
		}
		part, err = w.ask(ctx, Ask{Chain: to.Chain, Client: to.Client, Source: source, Origin: to.Origin})
		return err
	}}
	network := "tcp6"
	if to.Origin.Addr().Is4() {
		network = "tcp4"
	}
	under, err := d.DialContext(ctx, network, to.Origin.String())
	if err != nil || !c.Sealed {
		return under, err
	}
	conn, err := w.seal(ctx, under, part, to)
	if err != nil {
		under.Close()
		return nil, err
	}
	return conn, nil
}

// seal shakes hands with the next end of a sealed chain. Nothing goes on where there is no key.
func (w *worker) seal(ctx context.Context, under net.Conn, part *seal.Part, to gateway.Onward) (net.Conn, error) {
	if part == nil {
		return nil, fmt.Errorf("chain %s is sealed, and there is no key for it", to.Chain)
	}
	conn, err := part.Dial(ctx, under, to.Service, to.Protocol)
	if err != nil {
		return nil, err
	}
	return onwardConn{conn}, nil
}

// onwardConn says that nothing more comes when it is closed: net/http has then read all that it wants.
type onwardConn struct{ *seal.Conn }

func (c onwardConn) Close() error { return c.Conn.Conn.Close() }

// bind gives a socket the client's address, which need not be one of this machine (IP_FREEBIND, which takes no privilege), and
// the next port of the chain's that is free.
func (w *worker) bind(fd int, c *chain, client netip.Addr) (netip.AddrPort, error) {
	level, freebind := unix.IPPROTO_IPV6, unix.IPV6_FREEBIND
	if client.Is4() {
		level, freebind = unix.IPPROTO_IP, unix.IP_FREEBIND
	}
	if err := unix.SetsockoptInt(fd, level, freebind, 1); err != nil {
		return netip.AddrPort{}, os.NewSyscallError("setsockopt FREEBIND", err)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for range max(1, int(c.Last)-int(c.First)+1) {
		port := c.next
		if c.First > 0 {
			if c.next++; port == c.Last {
				c.next = c.First
			}
		}
		var to unix.Sockaddr = &unix.SockaddrInet6{Port: int(port), Addr: client.As16()}
		if client.Is4() {
			to = &unix.SockaddrInet4{Port: int(port), Addr: client.As4()}
		}
		err := unix.Bind(fd, to)
		if err == unix.EADDRINUSE {
			continue
		}
		if err != nil {
			return netip.AddrPort{}, os.NewSyscallError("bind", err)
		}
		if port == 0 {
			return boundTo(fd)
		}
		return netip.AddrPortFrom(client, port), nil
	}
	return netip.AddrPort{}, fmt.Errorf("all ports of chain %s are in use, from %s", c.Name, client)
}

func boundTo(fd int) (netip.AddrPort, error) {
	sa, err := unix.Getsockname(fd)
	if err != nil {
		return netip.AddrPort{}, os.NewSyscallError("getsockname", err)
	}
	switch sa := sa.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), uint16(sa.Port)), nil
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(sa.Addr), uint16(sa.Port)), nil
	}
	return netip.AddrPort{}, fmt.Errorf("the socket has an address of %T", sa)
}

// ask waits for the parent's answer.
func (w *worker) ask(ctx context.Context, what Ask) (*seal.Part, error) {
	to := make(chan answer, 1)
	w.mu.Lock()
	w.asked++
	number := w.asked
	w.waiting[number] = to
	w.mu.Unlock()
	defer func() {
		w.mu.Lock()
		delete(w.waiting, number)
		w.mu.Unlock()
	}()
	if err := w.send(toParent{Ask: &ask{number, what}}); err != nil {
		return nil, fmt.Errorf("ask for the connection onward: %w", err)
	}
	select {
	case a := <-to:
		if a.Error != "" {
			return nil, fmt.Errorf("the connection onward is refused: %s", a.Error)
		}
		return a.Seal, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// status has the parent ask a responder of OCSP.
func (w *worker) status(ctx context.Context, q gateway.StatusQuestion) ([]byte, error) {
	return w.got(ctx, func(number uint64) toParent { return toParent{Status: &statusAsk{number, q}} })
}

// sign has the parent ask the signer of a service.
func (w *worker) sign(ctx context.Context, service, algorithm string, message []byte) ([]byte, error) {
	return w.got(ctx, func(number uint64) toParent { return toParent{Sign: &signAsk{number, service, algorithm, message}} })
}

// got is what the parent gets from another process.
func (w *worker) got(ctx context.Context, ask func(number uint64) toParent) ([]byte, error) {
	to := make(chan statusAnswer, 1)
	w.mu.Lock()
	w.asked++
	number := w.asked
	w.statuses[number] = to
	w.mu.Unlock()
	defer func() {
		w.mu.Lock()
		delete(w.statuses, number)
		w.mu.Unlock()
	}()
	if err := w.send(ask(number)); err != nil {
		return nil, fmt.Errorf("have somebody asked: %w", err)
	}
	select {
	case a := <-to:
		switch {
		case a.Error != "" && a.Why != 0:
			return nil, &signer.Error{Why: a.Why, Err: errors.New(a.Error)}
		case a.Error != "":
			return nil, errors.New(a.Error)
		}
		return a.DER, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// merged is several listeners as one.
type merged struct {
	list   []net.Listener
	got    chan accepted
	closed chan struct{}
	once   sync.Once
}

type accepted struct {
	conn net.Conn
	err  error
}

func (m *merged) accept(l net.Listener) {
	for {
		c, err := l.Accept()
		select {
		case m.got <- accepted{c, err}:
		case <-m.closed:
			if err == nil {
				c.Close()
			}
			return
		}
		if errors.Is(err, net.ErrClosed) {
			return
		}
	}
}

func (m *merged) Accept() (net.Conn, error) {
	select {
	case a := <-m.got:
		return a.conn, a.err
	case <-m.closed:
		return nil, net.ErrClosed
	}
}

func (m *merged) Close() error {
	var errs []error
	m.once.Do(func() {
		close(m.closed)
		for _, l := range m.list {
			errs = append(errs, l.Close())
		}
	})
	return errors.Join(errs...)
}

func (m *merged) Addr() net.Addr { return m.list[0].Addr() }
