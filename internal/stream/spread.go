package stream

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"os"
	"sync"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// Where SYNs wait for their servers, a SYN and the connection that comes of it have to be the same loop's, and a client
// that uses its ports again has to meet the loop that knows about the connection before. So the two ends of a connection decide
// which loop has it. The kernel gives connections to listeners by the same rule, in a program for the
// group of listeners (socket(7), SO_ATTACH_REUSEPORT_CBPF). The first loop reads all SYNs, and hands over those of others. Clients
// that are answered at once are spread by the kernel as it likes.
//
// Loops that have descriptors of their own (setApart) are more than those that listen. A connection is that of the loop which the rule says among
// these, as long as its table has room; else of one that has.

// spreadBy is 2^32 divided by the golden ratio: ports that differ by 2, as Linux gives them to one client, are spread as others are.
const spreadBy = 0x9e3779b1

// known are the connections that wait for their servers, or have waited, by their ends. Each loop has its own, or all together, if
// they have descriptors of their own.
type known struct {
	mu sync.Mutex
	by map[ends]knownAs
}

// knownAs says whose a connection is. One that is over may be known beside the next one of the same ends.
type knownAs struct{ loop, connections uint8 }

func (k *known) find(e ends) (loop int, ok bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	as, ok := k.by[e]
	return int(as.loop), ok
}

func (k *known) add(e ends, loop int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.by == nil {
		k.by = map[ends]knownAs{}
	}
	k.by[e] = knownAs{uint8(loop), k.by[e].connections + 1}
}

func (k *known) drop(e ends) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if as := k.by[e]; as.connections > 1 {
		k.by[e] = knownAs{as.loop, as.connections - 1}
		return
	}
	delete(k.by, e)
}

// loopOf is the loop that has a connection between two ends; nil: none has, of loops with descriptors of their own.
func (w *Worker) loopOf(e ends) *loop {
	if !w.apart {
		return w.loops[e.place(w.listening)]
	}
	i, ok := w.known.find(e)
	if !ok {
		return nil
	}
	return w.loops[i]
}

// choose is the loop that has, or gets, the connection of a SYN. placed: it is a new one, which has its place there, and is known. The
// first loop alone calls it.
func (w *Worker) choose(e ends) (to *loop, placed bool) {
	if to := w.loopOf(e); to != nil {
		return to, false
	}
	to = w.withRoom(e.place(w.listening))
	to.open.Add(1)
	w.known.add(e, to.index)
	return to, true
}

// withRoom is the loop for a new connection that loop i has by the rule: itself, or the first one with room in its table, if
// it has none left. Where no loop has, it is that one, which may find descriptors yet.
func (w *Worker) withRoom(i int) *loop {
	if !w.apart || w.loops[i].open.Load() < w.each {
		return w.loops[i]
	}
	// Each loop that listens has others of its own, so that as many run as there are CPUs.
	for j := i + w.listening; j < len(w.loops); j += w.listening {
		if w.loops[j].open.Load() < w.each {
			return w.loops[j]
		}
	}
	for _, l := range w.loops {
		if l.open.Load() < w.each {
			return l
		}
	}
	return w.loops[i]
}

// waitMost is how many connections of a loop may wait for their servers.
func (w *Worker) waitMost() int {
	if w.apart {
		return max(int(w.each)/heldShare, heldLeast)
	}
	return max(w.config.Connections/heldShare/len(w.loops), heldLeast)
}

// place is the rule: a number below n.
func (e ends) place(n int) int {
	last := func(a netip.Addr) uint32 {
		b := a.As16()
		return binary.BigEndian.Uint32(b[12:])
	}
	h := last(e.client.Addr()) ^ last(e.server.Addr()) ^ (uint32(e.client.Port())<<16 | uint32(e.server.Port()))
	return int(h * spreadBy >> 16 % uint32(n))
}

// spread has the kernel give connections to the listeners of the loop that they are of.
func (w *Worker) spread() error {
	if w.listening == 1 {
		return nil
	}
	program, err := bpf.Assemble(spreadProgram(w.listening))
	if err != nil {
		return fmt.Errorf("assemble the program that spreads connections: %w", err)
	}
	filters := make([]unix.SockFilter, len(program))
	for i, p := range program {
		filters[i] = unix.SockFilter{Code: p.Op, Jt: p.Jt, Jf: p.Jf, K: p.K}
	}
	// Each group of listeners has a program: that of IPv6, and that of IPv4.
	for _, fd := range w.loops[0].listeners {
		if err := unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_REUSEPORT_CBPF, &unix.SockFprog{Len: uint16(len(filters)), Filter: &filters[0]}); err != nil {
			return os.NewSyscallError("setsockopt SO_ATTACH_REUSEPORT_CBPF", err)
		}
	}
	return nil
}

// spreadProgram computes place of a SYN. It finds the IP header by an offset of the kernel's (SKF_NET_OFF of
// <linux/filter.h>), since its packet begins behind the TCP header.
func spreadProgram(n int) []bpf.Instruction {
	const ip = 0xfff00000
	ends := func(client, server uint32, ports ...bpf.Instruction) []bpf.Instruction {
		return append(ports,
			bpf.StoreScratch{Src: bpf.RegA, N: 0},
			bpf.LoadAbsolute{Off: ip + client, Size: 4},
			bpf.TAX{},
			bpf.LoadAbsolute{Off: ip + server, Size: 4},
			bpf.ALUOpX{Op: bpf.ALUOpXor},
			bpf.TAX{},
			bpf.LoadScratch{Dst: bpf.RegA, N: 0},
			bpf.ALUOpX{Op: bpf.ALUOpXor},
			bpf.ALUOpConstant{Op: bpf.ALUOpMul, Val: spreadBy},
			bpf.ALUOpConstant{Op: bpf.ALUOpShiftRight, Val: 16},
			bpf.ALUOpConstant{Op: bpf.ALUOpMod, Val: uint32(n)},
			bpf.RetA{},
		)
	}
	six := ends(ip6Source+12, ip6Destination+12, bpf.LoadAbsolute{Off: ip + ip6Len, Size: 4})
	four := ends(ip4Source, ip4Destination,
		bpf.LoadAbsolute{Off: ip, Size: 1}, // its length, in words
		bpf.ALUOpConstant{Op: bpf.ALUOpAnd, Val: 15},
		bpf.ALUOpConstant{Op: bpf.ALUOpShiftLeft, Val: 2},
		bpf.TAX{},
		bpf.LoadIndirect{Off: ip, Size: 4},
	)
	head := []bpf.Instruction{
		bpf.LoadAbsolute{Off: ip, Size: 1},
		bpf.ALUOpConstant{Op: bpf.ALUOpShiftRight, Val: 4},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: 6, SkipFalse: uint8(len(six))},
	}
	return append(append(head, six...), four...)
}

// inboxMost bounds the SYNs in an inbox. Clients of others try again.
const inboxMost = 1024

// inbox has what other loops hand over.
type inbox struct {
	mu       sync.Mutex
	syns     []handedSYN
	accepted []accepted
}

// handedSYN is the frame of a SYN.
type handedSYN struct {
	frame  []byte
	placed bool // as of choose
}

// accepted is a client's connection.
type accepted struct {
	fd int // -1: it could not be handed over, and is reset
	of ends
}

// handSYN gives the loop a frame, of which it keeps a copy.
func (l *loop) handSYN(e ends, frame []byte, placed bool) {
	l.inbox.mu.Lock()
	n := len(l.inbox.syns)
	if n < inboxMost {
		l.inbox.syns = append(l.inbox.syns, handedSYN{append([]byte(nil), frame...), placed})
	}
	l.inbox.mu.Unlock()
	if n == inboxMost && placed {
		l.giveBack(e)
	}
	if n == 0 { // else somebody has woken it up
		l.wakeUp()
	}
}

// giveBack gives up the place of a connection that is not taken.
func (l *loop) giveBack(e ends) {
	l.open.Add(-1)
	l.known.drop(e)
}

// handAccepted gives the loop a connection that another loop's listener has got.
func (l *loop) handAccepted(a accepted) {
	l.inbox.mu.Lock()
	l.inbox.accepted = append(l.inbox.accepted, a)
	l.inbox.mu.Unlock()
	l.wakeUp()
}

// takeHanded takes what is in the inbox. SYNs come first: they are older than what has come of them.
func (l *loop) takeHanded() {
	if l.waiting == nil {
		return
	}
	l.inbox.mu.Lock()
	syns, came := l.inbox.syns, l.inbox.accepted
	l.inbox.syns, l.inbox.accepted = nil, nil
	l.inbox.mu.Unlock()
	for _, h := range syns {
		s, ok := readSegment(h.frame)
		switch {
		case ok && l.drainSince == 0:
			l.takeSYN(s, h.frame, h.placed)
		case ok && h.placed:
			l.giveBack(s.ends)
		}
	}
	for _, a := range came {
		l.takeAccepted(a)
	}
}

// close gives up what nobody has taken.
func (b *inbox) close() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, a := range b.accepted {
		if a.fd >= 0 {
			unix.Close(a.fd)
		}
	}
	b.syns, b.accepted = nil, nil
}
