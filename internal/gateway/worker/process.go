package worker

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/gateway"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/seal"
)

// Options are what Start needs. The caller closes the files.
type Options struct {
	NS        *host.NetNS // where the process runs; nil: where this one does
	Program   string      // that has the command "worker gateway"
	Folder    string      // that names of files count from
	Audit     *os.File    // of gateway.OpenAuditFile
	Listeners []*os.File  // one of each version of IP
	// Allow answers what the worker asks before it opens a connection, one after the other. The worker's word is not to be
	// trusted. The error goes to the worker, and so does the part of a sealed chain.
	Allow   func(Ask) (*seal.Part, error)
	Revoked []string // identities that are not let in; Revoke replaces them
	// Signatures signs the audit log as it grows; nil: nobody does. Start closes it, or the end of the process.
	Signatures *gateway.Signatures
	Log        *slog.Logger
}

// Process is a gateway in a process of its own, which ends with this one.
type Process struct {
	options Options
	cmd     *exec.Cmd
	conn    net.Conn // the worker ends when it is closed
	stderr  host.Tail
	ended   chan struct{}
	err     error
	// responders are asked for the worker, by so many at once as statuses has room for.
	responders *gateway.Responders
	statuses   chan struct{}
	once       sync.Once
	stop       chan struct{}
	wait       sync.WaitGroup

	handing sync.Mutex // a configuration over: files are read, and sent, in the order of the numbers
	writing sync.Mutex
	listing sync.Mutex // sessions: one list at a time is kept

	mu      sync.Mutex // the last to be taken
	broken  error      // why the process was killed
	now     Configuration
	stamp   string // of the files that the worker has
	number  uint64
	pending map[uint64]chan error // of configurations that are sent
	queries map[uint64]chan reply // that are sent
	asked   uint64                // queries
	numbers Statistics
}

const (
	// startTime bounds how long a worker takes to begin: it reads the whole audit log.
	startTime = time.Minute
	// endTime bounds how long it takes to end, or to read what it is sent.
	endTime = 5 * time.Second
	// lookTime is how often files are looked at.
	lookTime = 250 * time.Millisecond
)

// Start runs `program worker gateway`, hands it the files, and waits until it serves. From then on files
// that change are handed over again.
func Start(o Options, c Configuration) (_ *Process, err error) {
	p := &Process{options: o, now: c, ended: make(chan struct{}), stop: make(chan struct{}), pending: map[uint64]chan error{}, queries: map[uint64]chan reply{},
		responders: gateway.NewResponders(), statuses: make(chan struct{}, statusesWaiting)}
	signs := o.Signatures
	defer func() {
		if signs != nil {
			err = errors.Join(err, signs.Close())
		}
	}()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socketpair", err)
	}
	ours, its := os.NewFile(uintptr(fds[0]), "worker"), os.NewFile(uintptr(fds[1]), "parent")
	p.conn, err = net.FileConn(ours)
	if err = errors.Join(err, ours.Close()); err != nil {
		return nil, errors.Join(err, its.Close())
	}
	args := []string{"worker", "gateway", "--parent-fd", "3", "--audit-fd", "4"}
	for i := range o.Listeners {
		args = append(args, "--listener-fd", fmt.Sprint(5+i))
	}
	p.cmd = exec.CommandContext(context.Background(), o.Program, args...)
	p.cmd.Stderr, p.cmd.ExtraFiles = &p.stderr, append([]*os.File{its, o.Audit}, o.Listeners...)
	start := p.cmd.Start
	if o.NS != nil {
		start = func() error { return o.NS.Do(p.cmd.Start) }
	}
	if err := errors.Join(start(), its.Close()); err != nil {
		return nil, errors.Join(fmt.Errorf("start the gateway's worker: %w", err), p.conn.Close())
	}
	go func() {
		p.err = p.cmd.Wait()
		close(p.ended)
	}()
	p.wait.Go(p.follow)
	if signs != nil {
		s := signs
		p.wait.Go(func() { p.sign(s) })
		signs = nil
	}
	if err := p.Configure(c, startTime); err != nil {
		return nil, errors.Join(fmt.Errorf("the gateway's worker: %w", err), p.Close())
	}
	p.wait.Go(p.watch)
	return p, nil
}

func (p *Process) send(m toWorker) error {
	p.writing.Lock()
	defer p.writing.Unlock()
	// A worker that reads nothing does not stop this process.
	if err := p.conn.SetWriteDeadline(time.Now().Add(endTime)); err != nil {
		return err
	}
	err := send(p.conn, m, toWorkerMax)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		p.kill(fmt.Errorf("it has read nothing for %s", endTime))
	}
	if err != nil {
		p.conn.Close() // half a message could be there
	}
	return err
}

// kill ends a process that cannot be spoken with; Err says why.
func (p *Process) kill(why error) {
	p.mu.Lock()
	if p.broken == nil {
		p.broken = why
	}
	p.mu.Unlock()
	if err := p.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		p.options.Log.Error("the gateway's worker cannot be killed", "err", err)
	}
}

// Configure hands over a configuration with the files as they are, and waits until the worker has taken it. On an error the worker
// goes on with the one before.
func (p *Process) Configure(c Configuration, most time.Duration) error {
	p.handing.Lock()
	// Before the files are read: what changes meanwhile is seen.
	return p.handLocked(c, gateway.Stamp(p.options.Folder, c.Clients, c.Services), most)
}

// refresh hands over the configuration again that was the last, if files of it have changed; did says whether they have.
func (p *Process) refresh(most time.Duration) (did bool, err error) {
	p.handing.Lock()
	p.mu.Lock()
	c, before := p.now, p.stamp
	p.mu.Unlock()
	stamp := gateway.Stamp(p.options.Folder, c.Clients, c.Services)
	if stamp == before {
		p.handing.Unlock()
		return false, nil
	}
	return true, p.handLocked(c, stamp, most)
}

// handLocked unlocks p.handing once the configuration is sent.
func (p *Process) handLocked(c Configuration, stamp string, most time.Duration) error {
	m := &configuration{Configuration: c, Files: gateway.TakeSnapshot(p.options.Folder, c.Clients, c.Services), Audit: p.options.Audit.Name(), Revoked: p.options.Revoked}
	done := make(chan error, 1)
	p.mu.Lock()
	p.number++
	m.Number = p.number
	p.now, p.stamp = c, stamp
	p.pending[m.Number] = done
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		delete(p.pending, m.Number)
		p.mu.Unlock()
	}()
	err := p.send(toWorker{Configuration: m})
	p.handing.Unlock()
	if err != nil {
		select {
		case <-p.ended:
			return p.Err()
		case <-time.After(endTime):
		}
		return fmt.Errorf("hand over the configuration: %w", err)
	}
	select {
	case err := <-done:
		return err
	case <-p.ended:
		select { // its last word
		case err := <-done:
			return err
		default:
		}
		return p.Err()
	case <-time.After(most):
		return fmt.Errorf("the worker has not taken its configuration in %s", most)
	}
}

// follow answers the worker, and kills it if it goes on although it cannot be spoken with any more.
func (p *Process) follow() {
	defer func() {
		p.conn.Close()
		select {
		case <-p.ended:
		case <-time.After(endTime):
			p.kill(errors.New("its socket was closed, and it did not end"))
		}
	}()
	var asks bucket
	for {
		var m toParent
		if err := receive(p.conn, &m, toParentMax); err != nil {
			gone := errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, unix.ECONNRESET) || errors.Is(err, net.ErrClosed)
			if !gone {
				p.options.Log.Error("what the gateway's worker says cannot be read; it is killed", "err", err)
				p.kill(fmt.Errorf("what it says cannot be read: %w", err))
			}
			return
		}
		if m.Taken != nil {
			p.mu.Lock()
			to := p.pending[m.Taken.Number]
			delete(p.pending, m.Taken.Number)
			p.mu.Unlock()
			if to != nil {
				var err error
				if m.Taken.Error != "" {
					err = errors.New(m.Taken.Error)
				}
				to <- err
			}
		}
		if m.Statistics != nil {
			p.mu.Lock()
			p.numbers = *m.Statistics
			p.mu.Unlock()
		}
		if m.Reply != nil {
			p.mu.Lock()
			to := p.queries[m.Reply.Number]
			delete(p.queries, m.Reply.Number)
			p.mu.Unlock()
			if to != nil {
				to <- *m.Reply
			}
		}
		if m.Status != nil {
			p.get(m.Status.Number, func(ctx context.Context) ([]byte, error) { return p.status(ctx, m.Status.StatusQuestion) })
		}
		if m.Sign != nil {
			p.get(m.Sign.Number, func(ctx context.Context) ([]byte, error) { return p.signed(ctx, m.Sign) })
		}
		if m.Ask != nil {
			a := &answer{Number: m.Ask.Number}
			if !asks.take(time.Now()) {
				a.Error = fmt.Sprintf("more than %d connections onward in a second", asksPerSecond)
			} else if part, err := p.options.Allow(m.Ask.Ask); err != nil {
				a.Error = err.Error()
			} else {
				a.Seal = part
			}
			if p.send(toWorker{Answer: a}) != nil {
				return
			}
		}
	}
}

// A worker may ask for asksPerSecond connections onward, and for twice as many after a pause.
const asksPerSecond = 2000

// bucket counts what a worker asks for. The zero value is full.
type bucket struct {
	taken float64
	at    time.Time
}

// take says whether the worker may ask now.
func (b *bucket) take(now time.Time) bool {
	b.taken = max(0, b.taken-now.Sub(b.at).Seconds()*asksPerSecond)
	b.at = now
	if b.taken+1 > 2*asksPerSecond {
		return false
	}
	b.taken++
	return true
}

// sign signs the audit log until the process has ended, and then what it wrote last. The process does not go on if it writes what does
// not follow from what it wrote before.
func (p *Process) sign(s *gateway.Signatures) {
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	go func() {
		select {
		case <-p.ended:
			stop()
		case <-ctx.Done():
		}
	}()
	if err := s.Run(ctx); err != nil {
		p.options.Log.Error("the gateway's worker is killed, for what it has done to its audit log", "err", err)
		p.kill(err)
	}
	if err := s.Close(); err != nil {
		p.options.Log.Error("the signatures of the audit log", "err", err)
	}
}

// watch hands files over that have changed.
func (p *Process) watch() {
	t := time.NewTicker(lookTime)
	defer t.Stop()
	for {
		select {
		case <-t.C:
		case <-p.stop:
			return
		case <-p.ended:
			return
		}
		switch did, err := p.refresh(startTime); {
		case !did:
		case err == nil:
			p.options.Log.Info("the gateway has taken files in that have changed")
		default:
			p.options.Log.Error("files of the gateway have changed and cannot be taken in; it goes on with those before", "err", err)
		}
	}
}

// query asks the worker, and waits for its reply.
func (p *Process) query(q query, most time.Duration) (reply, error) {
	to := make(chan reply, 1)
	p.mu.Lock()
	p.asked++
	q.Number = p.asked
	p.queries[q.Number] = to
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		delete(p.queries, q.Number)
		p.mu.Unlock()
	}()
	if err := p.send(toWorker{Query: &q}); err != nil {
		return reply{}, fmt.Errorf("ask the gateway's worker: %w", err)
	}
	select {
	case r := <-to:
		return r, nil
	case <-p.ended:
		return reply{}, fmt.Errorf("the gateway's worker ended: %w", p.Err())
	case <-time.After(most):
		return reply{}, fmt.Errorf("the gateway's worker has not answered in %s", most)
	}
}

// queryTime bounds how long a worker takes for a query; it may be reading a configuration.
const queryTime = 5 * time.Second

// What is kept of what a worker says is bounded by sessions, bytes and time.
const (
	sessionsListed = 100_000
	listedBytes    = 32 << 20
	listTime       = 2 * queryTime
)

// Sessions are those that are open, by their IDs. They are the worker's word.
func (p *Process) Sessions() (list []gateway.SessionState, err error) {
	p.listing.Lock()
	defer p.listing.Unlock()
	after, size, until := uint64(0), 0, time.Now().Add(listTime)
	for {
		r, err := p.query(query{List: &listQuery{after}}, min(queryTime, time.Until(until)))
		if err != nil {
			return nil, err
		}
		for _, s := range r.Sessions {
			size += sessionSize(s)
			if s.ID <= after {
				return nil, fmt.Errorf("the gateway's worker lists session %d behind %d", s.ID, after)
			}
			after = s.ID
		}
		list = append(list, r.Sessions...)
		switch {
		case !r.More:
			return list, nil
		case len(r.Sessions) == 0 || len(list) > sessionsListed || size > listedBytes || time.Now().After(until):
			return nil, fmt.Errorf("the gateway's worker lists sessions without end, %d so far", len(list))
		}
	}
}

// sessionSize is about what a session takes of memory.
func sessionSize(s gateway.SessionState) int {
	n := 256 + len(s.Service) + len(s.Host) + len(s.Identity) + len(s.Serial)
	for _, c := range s.Chains {
		n += 16 + len(c)
	}
	return n
}

// End ends a session. It is false if there is none with this ID.
func (p *Process) End(id uint64) (bool, error) {
	r, err := p.query(query{End: &endQuery{id}}, queryTime)
	return r.Ended > 0, err
}

// Revoke replaces the list of identities that are not let in, and says how many sessions ended for it. A worker that does
// not confirm it is killed: the next one starts with the list that its parent has then.
func (p *Process) Revoke(identities []string) (ended int, err error) {
	r, err := p.query(query{Revoke: &revokeQuery{identities}}, queryTime)
	if err != nil && !p.hasEnded() {
		p.kill(fmt.Errorf("it has not taken the list of revoked identities: %w", err))
	}
	return r.Ended, err
}

func (p *Process) hasEnded() bool {
	select {
	case <-p.ended:
		return true
	default:
		return false
	}
}

// Statistics are the worker's numbers, of a second ago at most.
func (p *Process) Statistics() Statistics {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.numbers
}

// Ended is closed when the process is gone.
func (p *Process) Ended() <-chan struct{} { return p.ended }

// PID is that of the process.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Err says why the process is gone; only then.
func (p *Process) Err() error {
	said := strings.TrimSpace(p.stderr.String())
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.broken != nil:
		return fmt.Errorf("it was killed: %w", p.broken)
	case p.err == nil:
		return errors.New("it ended")
	case said != "":
		return fmt.Errorf("%w: %s", p.err, said)
	}
	return p.err
}

// Close ends the process: its connections are reset.
func (p *Process) Close() (err error) {
	p.once.Do(func() {
		close(p.stop)
		err = p.conn.Close()
		if errors.Is(err, net.ErrClosed) {
			err = nil
		}
		select {
		case <-p.ended:
		case <-time.After(endTime):
			p.cmd.Process.Kill()
			<-p.ended
		}
		p.wait.Wait()
		p.responders.Close()
	})
	return err
}
