package stream

import (
	"context"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/seal"
	"github.com/waystamp/waystamp/internal/stream/function"
)

// An intrusive function's connections are sealed on both sides. Their event loop opens them as
// any; once both sockets are connected it hands them over to goroutines of their own, since
// crypto/tls waits. Nothing of them goes on before both ends are who they have to be.

// Ask is what a worker asks its parent about a connection that has come to it.
type Ask struct{ Client, Server netip.AddrPort }

// Ends says how a connection is sealed: by the part that its SYN has come by, and onward by the next
// part or to the origin.
type Ends struct {
	From    seal.Part
	To      *seal.Part     // nil: the origin is next
	Origins []SealedOrigin // of services; the first record names one
}

// SealedOrigin is how a session with a service's origin is opened.
type SealedOrigin struct {
	Service string
	Roots   string // certificates in PEM that its own is signed by
	Name    string // that its certificate is for
}

type jsonAsk struct {
	Number uint64 `json:"number"`
	Ask
	Drained bool     `json:"drained,omitempty"` // no question: the worker takes no more connections
	Refused *Refusal `json:"refused,omitempty"` // the same: it has refused one
}

type jsonEnds struct {
	Number uint64 `json:"number"`
	Ends   *Ends  `json:"ends,omitempty"`
	Error  string `json:"error,omitempty"`
	End    bool   `json:"end,omitempty"`   // no answer: end
	Drain  bool   `json:"drain,omitempty"` // no answer: take no more connections
}

// messageMax bounds what parent and worker say to each other, in bytes; sockets take as much at once.
const messageMax = 160 << 10

// sealTime bounds how long both ends take to shake hands, up to the origin.
const sealTime = 10 * time.Second

// ask asks the parent. While there is none, the next one is asked.
func (s *speaking) ask(ctx context.Context, about Ask) (*Ends, error) {
	a := &waitingAsk{to: make(chan jsonEnds, 1)}
	s.mu.Lock()
	s.number++
	number := s.number
	var err error
	a.text, err = json.Marshal(jsonAsk{Number: number, Ask: about})
	if err == nil {
		s.waiting[number] = a
		// What a parent that is gone does not get is said to the next one.
		if s.fd >= 0 && say(s.fd, a.text) == unix.EAGAIN {
			delete(s.waiting, number)
			err = errBusy
		}
	}
	s.mu.Unlock()
	if err != nil {
		return nil, err
	}
	defer func() {
		s.mu.Lock()
		delete(s.waiting, number)
		s.mu.Unlock()
	}()
	select {
	case m := <-a.to:
		if m.Ends == nil {
			return nil, errors.New(m.Error)
		}
		return m.Ends, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

var errBusy = errors.New("the agent has too many connections to answer for")

// say sends a message, which is one write (unix(7), SOCK_SEQPACKET). It does not wait: both sides could wait for each
// other.
func say(fd int, text []byte) error {
	_, err := unix.SendmsgN(fd, text, nil, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
	return err
}

// socketFile is a socket that goroutines read and write.
type socketFile struct {
	*os.File
	raw interface {
		Read(func(fd uintptr) bool) error
		Control(func(fd uintptr)) error
	}
	pause func() error    // called before a read that has to wait; nil: nothing is
	words []atomic.Uint64 // of the loop; nil without batches

	// Set before goroutines share the file: a read takes as much as there is, up to batchMax, and what is written waits for a
	// batch, or for flush. crypto/tls makes a system call for each record. nil, or where none is left: each read and write is one.
	batches *batchBudget
	ahead   []byte // read, and not asked for yet: the rest of a batch
	from    *batch // that ahead is of
	writing sync.Mutex
	held    *batch // written, and not sent: the first heldLen bytes
	heldLen int
}

// batchMax is four records of TLS, in bytes (RFC 8446 section 5.2: header, type and tag beside the payload).
const batchMax = 4 * (16<<10 + 22)

type batch [batchMax]byte

// batches are those that no connection has: one that waits for bytes has none.
var batches = sync.Pool{New: func() any { return new(batch) }}

// batchesBuffer is how many bytes of limits.buffer a direction takes that has batches: what was read and what is to be written
// may both wait for a receiver that does not read, beside the piece between them.
const batchesBuffer = 2*batchMax + pieceMax

// batchBudget is how many more batches the connections of a worker may have.
type batchBudget struct{ left atomic.Int64 }

// Of the memory that a worker may have, batches take one byte in this number.
const (
	batchShare  = 8
	batchesFree = 64 << 20 // bytes that they take where there is no limit of memory
)

// batchesMost is how many batches a worker with a limit of memory may have; 0: no limit.
func batchesMost(memory uint64) int64 {
	if memory == 0 {
		return batchesFree / batchMax
	}
	return int64(memory / batchShare / batchMax)
}

// take is a batch, which give gives back; nil: none is left.
func (b *batchBudget) take(words []atomic.Uint64) *batch {
	if b.left.Add(-1) < 0 {
		b.left.Add(1)
		words[wordUnbatched].Add(1)
		return nil
	}
	words[wordBatches].Add(1)
	return batches.Get().(*batch)
}

func (b *batchBudget) give(x *batch, words []atomic.Uint64) {
	batches.Put(x)
	words[wordBatches].Add(^uint64(0))
	b.left.Add(1)
}

func newSocketFile(fd int32) (*socketFile, error) {
	// Its descriptor does not block, so that the file does not either.
	f := os.NewFile(uintptr(fd), "connection")
	raw, err := f.SyscallConn()
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return &socketFile{File: f, raw: raw}, nil
}

func (f *socketFile) Read(p []byte) (n int, err error) {
	if len(f.ahead) > 0 {
		return f.takeAhead(p), nil
	}
	for wait := f.pause == nil; ; wait = true {
		var rerr error
		done := false
		if err := f.raw.Read(func(fd uintptr) bool {
			into := p
			if f.batches != nil {
				if f.from = f.batches.take(f.words); f.from != nil {
					into = f.from[:]
				}
			}
			for {
				n, rerr = unix.Read(int(fd), into)
				if rerr != unix.EINTR {
					break
				}
			}
			if f.from != nil && n > 0 && rerr == nil {
				f.ahead = into[:n]
				n = f.takeAhead(p)
			} else if f.from != nil {
				f.batches.give(f.from, f.words)
				f.from = nil
			}
			done = rerr != unix.EAGAIN
			return done || !wait
		}); err != nil {
			return 0, err
		}
		switch {
		case done && rerr != nil:
			return 0, os.NewSyscallError("read", rerr)
		case done && n == 0 && len(p) > 0:
			return 0, io.EOF
		case done:
			return n, nil
		}
		if err := f.pause(); err != nil {
			return 0, err
		}
	}
}

// takeAhead gives bytes of the batch that was read.
func (f *socketFile) takeAhead(p []byte) int {
	n := copy(p, f.ahead)
	if f.ahead = f.ahead[n:]; len(f.ahead) == 0 {
		f.batches.give(f.from, f.words)
		f.ahead, f.from = nil, nil
	}
	return n
}

// Write sends at once, or with a batch. What a batch has taken may fail with a later Write or flush.
func (f *socketFile) Write(p []byte) (n int, err error) {
	if f.batches == nil {
		return f.File.Write(p)
	}
	f.writing.Lock()
	defer f.writing.Unlock()
	for n < len(p) {
		if f.held == nil {
			if f.held = f.batches.take(f.words); f.held == nil { // nothing waits before it
				k, err := f.File.Write(p[n:])
				return n + k, err
			}
		}
		k := copy(f.held[f.heldLen:], p[n:])
		n += k
		if f.heldLen += k; f.heldLen == batchMax {
			if err := f.flushLocked(); err != nil {
				return n - k, err
			}
		}
	}
	return n, nil
}

// flush sends what Write has kept.
func (f *socketFile) flush() error {
	if f.batches == nil {
		return nil
	}
	f.writing.Lock()
	defer f.writing.Unlock()
	return f.flushLocked()
}

func (f *socketFile) flushLocked() error {
	if f.held == nil {
		return nil
	}
	_, err := f.File.Write(f.held[:f.heldLen])
	f.batches.give(f.held, f.words)
	f.held, f.heldLen = nil, 0
	return err
}

// drop gives back the batches of a file that nobody reads and writes any more.
func (f *socketFile) drop() {
	for _, b := range []**batch{&f.from, &f.held} {
		if *b != nil {
			f.batches.give(*b, f.words)
			*b = nil
		}
	}
	f.ahead, f.heldLen = nil, 0
}

func (f *socketFile) LocalAddr() net.Addr  { return nil }
func (f *socketFile) RemoteAddr() net.Addr { return nil }

// endWrites sends FIN behind what is written.
func (f *socketFile) endWrites() error {
	if err := f.flush(); err != nil {
		return err
	}
	var err error
	if cerr := f.raw.Control(func(fd uintptr) { err = unix.Shutdown(int(fd), unix.SHUT_WR) }); cerr != nil {
		return cerr
	}
	return os.NewSyscallError("shutdown", err)
}

// orderly lets the socket, once it is closed, send what is left, and FIN.
func (f *socketFile) orderly() { f.raw.Control(func(fd uintptr) { orderly(int(fd)) }) }

// sealed is a connection that goroutines have taken over.
type sealed struct {
	l      *loop
	number uint32
	about  Ask
	socket [2]*socketFile
	flow   [2]*flow
	gates  [2][]function.Gate
	once   sync.Once
	quit   context.Context // ends when the connection has to
	stop   context.CancelFunc
	word   atomic.Int32   // why, if it was ended from outside; else -1
	active atomic.Uint32  // when bytes moved last, in seconds of the loop's clock
	half   atomic.Bool    // one side has ended, and the other side has been told
	ended  [2]atomic.Bool // by direction, of connections through a function: its sender has ended

	more  sync.Mutex
	plain [2]*socketFile // through a function that knows nothing of seals; else nil
}

// handOver has goroutines go on with a connection whose sockets are both connected.
func (l *loop) handOver(c *conn) {
	s := &sealed{l: l, number: c.number, about: Ask{c.ends.client, c.ends.server}}
	s.quit, s.stop = context.WithCancel(context.Background())
	s.active.Store(l.seconds())
	for side := range c.fd {
		fd := c.fd[side]
		if err := unix.EpollCtl(l.epoll, unix.EPOLL_CTL_DEL, int(fd), nil); err != nil {
			l.reset(c, wordByWorker)
			return
		}
	}
	for side := range c.fd {
		f, err := newSocketFile(c.fd[side])
		c.fd[side] = -1 // the file's, also where that has failed
		if err != nil {
			if s.socket[0] != nil {
				s.socket[0].Close()
			}
			l.reset(c, wordByWorker)
			return
		}
		s.socket[side] = f
		// Errors are always told: a reset of who sends is noticed also while the receiver does not read.
		var raw error
		if err := f.raw.Control(func(fd uintptr) { raw = l.watch(int(fd), unix.EPOLLET, int(c.number), c.pad(side)) }); errors.Join(err, raw) != nil {
			for _, f := range s.socket[:side+1] {
				f.Close()
			}
			l.reset(c, wordByWorker)
			return
		}
		d := &c.dir[side]
		s.flow[side], s.gates[side], d.flow, d.gates = d.flow, d.gates, nil, nil
		if s.flow[side] != nil {
			s.flow[side].gathers = true
		}
	}
	c.sealed = s
	l.sealing.Go(s.run)
}

// end ends a connection from outside of its goroutines.
func (s *sealed) end(word int) {
	s.count(word)
	s.stop()
	s.close()
}

// hasError ends the connection if one of its ends has reset it: goroutines do not notice while the other end does not read. Once
// a side has ended they know what its reset means.
func (s *sealed) hasError(side int) {
	if !s.half.Load() {
		s.end([2]int{wordByClient, wordByServer}[side])
	}
}

// count counts the end of the connection, before anybody sees it. What comes first counts.
func (s *sealed) count(word int) {
	s.once.Do(func() {
		s.l.words[word].Add(1)
		s.l.w.connections.Add(-1)
		s.l.open.Add(-1)
		if why, ok := refusalWhy[word]; ok {
			s.l.w.refused.tell(ends{s.about.Client, s.about.Server}, why)
		}
	})
}

func (s *sealed) close() {
	for _, f := range s.socket {
		f.Close() // whoever reads and writes fails
	}
	s.closePlain()
}

func (s *sealed) run() {
	word := s.serve()
	s.count(word)
	if word == wordEnded {
		for _, f := range s.socket {
			f.orderly()
		}
	}
	s.stop()
	s.close()
	for _, f := range s.socket {
		f.drop()
	}
	s.l.working.Lock()
	for _, f := range s.flow {
		if f != nil {
			f.close()
		}
	}
	s.l.working.Unlock()
	s.l.over.Lock()
	s.l.finished = append(s.l.finished, s.number)
	s.l.over.Unlock()
	s.l.wakeUp()
}

var refusedWords = map[seal.Reason]int{
	seal.PartMismatch: wordMismatch, seal.Unsealed: wordUnsealed, seal.Peer: wordPeer, seal.Untrusted: wordUntrusted, seal.Expired: wordExpired, seal.Revoked: wordRevoked, seal.Key: wordNoKey, seal.Gone: wordByClient,
}

// serve is a connection's life; word is how it ends.
func (s *sealed) serve() (word int) {
	ctx, stop := context.WithTimeout(s.quit, sealTime)
	defer stop()
	defer context.AfterFunc(ctx, func() {
		if errors.Is(ctx.Err(), context.DeadlineExceeded) {
			s.end(wordByLimit)
		}
	})()
	ends, err := s.l.w.ask(ctx, s.about)
	if err != nil {
		return wordNoKey
	}
	from, hello, err := ends.From.Accept(ctx, s.socket[0])
	if err != nil {
		return refusedWords[seal.ReasonOf(err)]
	}
	to, failure, err := s.onward(ctx, ends, hello)
	if err != nil {
		word = wordUnreached
		if failure == seal.FailureService {
			word = wordMismatch
		}
		s.count(word)
		s.refuse(ctx, from, seal.Answer{Failure: failure, Text: err.Error()})
		return word
	}
	var in, out *socketFile
	if s.l.w.plain != nil {
		if in, out, err = s.through(ctx); err != nil {
			s.count(wordByFunction)
			s.refuse(ctx, from, seal.Answer{Failure: seal.FailurePart, Text: err.Error()})
			return wordByFunction
		}
	}
	if err := from.Answer(ctx, seal.Answer{}); err != nil {
		return wordByClient
	}
	stop() // no bound of time from here on but those of connections
	if in != nil {
		return s.carryThrough(from, to, in, out)
	}
	return s.carry([2]*seal.Conn{from, to})
}

// onward opens the next session.
func (s *sealed) onward(ctx context.Context, ends *Ends, hello seal.Hello) (*seal.Conn, seal.Failure, error) {
	if ends.To != nil {
		to, err := ends.To.Dial(ctx, s.socket[1], hello.Service, hello.Protocol)
		if err != nil {
			if f := seal.KindOf(err); f != seal.FailureTLS {
				return nil, f, err
			}
			return nil, seal.FailurePart, err
		}
		return to, "", nil
	}
	for _, o := range ends.Origins {
		if o.Service != hello.Service {
			continue
		}
		roots := authorities.of(o.Roots)
		if roots == nil {
			return nil, seal.FailureCertificate, fmt.Errorf("service %s: the file of the origin's authority has no certificate", o.Service)
		}
		to, err := seal.Origin(ctx, s.socket[1], roots, o.Name, hello.Protocol)
		if err != nil {
			return nil, seal.KindOf(err), err
		}
		return to, "", nil
	}
	return nil, seal.FailureService, fmt.Errorf("chain %s has no service %q", hello.Chain, hello.Service)
}

// rootsKept bounds the authorities that a worker remembers.
const rootsKept = 64

// rootPools are authorities of origins by their text, which comes with each connection. They do not change.
type rootPools struct {
	mu   sync.Mutex
	kept map[string]*x509.CertPool
}

var authorities rootPools // of this process

// of reads certificates in PEM; nil: there is none.
func (r *rootPools) of(text string) *x509.CertPool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if p := r.kept[text]; p != nil {
		return p
	}
	p := x509.NewCertPool()
	if !p.AppendCertsFromPEM([]byte(text)) {
		return nil
	}
	if r.kept == nil || len(r.kept) >= rootsKept {
		r.kept = map[string]*x509.CertPool{}
	}
	r.kept[text] = p
	return p
}

// refuse answers, and waits until the other end has gone: a reset would overtake the answer.
func (s *sealed) refuse(ctx context.Context, from *seal.Conn, a seal.Answer) {
	s.socket[1].Close()
	if from.Answer(ctx, a) != nil || from.CloseWrite() != nil {
		return
	}
	s.socket[0].orderly()
	for b := make([]byte, 512); ctx.Err() == nil; {
		if _, err := from.Read(b); err != nil {
			return
		}
	}
}

// carry moves bytes in both directions until both have ended, or one fails.
func (s *sealed) carry(conns [2]*seal.Conn) int {
	if s.l.w.config.Buffer >= batchesBuffer {
		for _, f := range s.socket {
			f.batches, f.words = &s.l.w.batches, s.l.words
		}
	}
	words := make(chan int, 2)
	for side := range conns {
		go func() {
			word := s.move(side, conns[side], conns[1-side])
			if word != wordEnded {
				s.end(word) // RST: what was cut off never looks complete
			}
			words <- word
		}()
	}
	first, second := <-words, <-words
	if first != wordEnded {
		return first
	}
	return second
}

// pieceMax is how much is read at once, in bytes: a record of TLS.
const pieceMax = 16 << 10

// move moves the bytes of one direction.
func (s *sealed) move(side int, from, to *seal.Conn) int {
	reads, writes := wordByClient, wordByServer
	if side == 1 {
		reads, writes = writes, reads
	}
	words := s.l.words[wordSides+side*wordsOfSide:]
	buf := make([]byte, min(pieceMax, len(s.l.buf)))
	out := func(p []byte) bool {
		n, err := to.Write(p)
		words[wordOut].Add(uint64(n))
		s.active.Store(s.now())
		return err == nil
	}
	through := func(begin func(f *flow) outcome) (word int) {
		word = s.work(side, begin, out)
		if word == wordByServer { // of writing
			word = writes
		}
		return word
	}
	fed := false
	paused := wordEnded
	// What was written goes out before anything here waits.
	flush := func() error {
		if s.socket[1-side].flush() != nil {
			paused = writes
			return errStopped
		}
		return nil
	}
	s.socket[side].pause = func() error {
		if !fed || s.flow[side] == nil {
			return flush()
		}
		fed = false
		paused = through(func(f *flow) outcome { f.sweep(function.Pause); return flows })
		if paused != wordEnded {
			return errStopped
		}
		return flush()
	}
	for {
		want := s.allow(side, len(buf), flush)
		if want == 0 {
			if paused != wordEnded {
				return paused
			}
			return wordByWorker
		}
		n, err := from.Read(buf[:want])
		if want > n {
			s.unused(side, want-n)
		}
		if n > 0 {
			words[wordIn].Add(uint64(n))
			s.active.Store(s.now())
			fed = true
			if s.flow[side] == nil {
				if !out(buf[:n]) {
					return writes
				}
			} else if word := through(func(f *flow) outcome { return f.push(nil, side, 0, buf[:n], function.More) }); word != wordEnded {
				return word
			}
		}
		switch {
		case err == nil:
			continue
		case errors.Is(err, errStopped):
			return paused
		case !errors.Is(err, io.EOF):
			return reads
		}
		// The other end has said that nothing more comes.
		if s.flow[side] != nil {
			if word := through(func(f *flow) outcome { f.sweep(function.End); return flows }); word != wordEnded {
				return word
			}
		}
		if err := errors.Join(to.CloseWrite(), s.socket[1-side].endWrites()); err != nil && !s.half.Load() {
			return writes // who has ended itself may be gone already
		}
		s.half.Store(true)
		return wordEnded
	}
}

var errStopped = errors.New("a function has ended the connection")

// work runs functions, which are the loop's, one connection at a time, and writes what comes out of them
// without holding the others up. It gives wordEnded if all went on.
func (s *sealed) work(side int, begin func(f *flow) outcome, out func([]byte) bool) int {
	f := s.flow[side]
	for step := begin; ; step = func(*flow) outcome { return flows } {
		s.l.working.Lock()
		o := step(f)
		if o == flows {
			o = f.resume(nil, side)
		}
		gathered := f.out
		f.out = nil
		passes := o == flows && f.passes()
		s.l.working.Unlock()
		if len(gathered) > 0 && !out(gathered) {
			return wordByServer
		}
		switch {
		case o == refuse:
			return wordByFunction
		case o == closed:
			return wordByWorker
		case o == flows:
			if passes && !f.sweeps {
				f.close()
				s.flow[side] = nil
			}
			return wordEnded
		}
	}
}

func (s *sealed) now() uint32 { return uint32(time.Since(s.l.start) / time.Second) }

// allow waits until gates let bytes be read, and says how many of want. 0: the connection has ended, or waits has failed, which is
// called before each wait.
func (s *sealed) allow(side, want int, waits func() error) int {
	for len(s.gates[side]) > 0 {
		n, wait := s.takeGates(side, want)
		if n > 0 {
			return n
		}
		if waits() != nil {
			return 0
		}
		t := time.NewTimer(wait)
		select {
		case <-t.C:
		case <-s.quit.Done():
			t.Stop()
			return 0
		}
	}
	return want
}

func (s *sealed) takeGates(side, want int) (n int, wait time.Duration) {
	s.l.working.Lock()
	defer s.l.working.Unlock()
	for i, g := range s.gates[side] {
		n, wait := g.Take(want, time.Since(s.l.start))
		if n < want {
			for _, before := range s.gates[side][:i] {
				before.Return(want - n)
			}
		}
		if n == 0 {
			return 0, wait
		}
		want = n
	}
	return want, 0
}

func (s *sealed) unused(side, n int) {
	if len(s.gates[side]) == 0 {
		return
	}
	s.l.working.Lock()
	defer s.l.working.Unlock()
	for _, g := range s.gates[side] {
		g.Return(n)
	}
}

// takeFinished gives up connections whose goroutines have ended.
func (l *loop) takeFinished() {
	l.over.Lock()
	list := l.finished
	l.finished = nil
	l.over.Unlock()
	for _, number := range list {
		if c := l.at(number); c.open && c.sealed != nil {
			l.forget(c)
		}
	}
}
