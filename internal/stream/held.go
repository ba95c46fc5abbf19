package stream

import (
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/stream/function"
)

// A client is answered when its server has answered: the node's program gives a SYN to the
// worker, in a frame that TCP does not know, and the worker sends the frame back once TCP
// shall have it. The worker's connection to the server begins meanwhile. A server that
// refuses is answered for with RST, and one that ICMP says cannot be reached with ICMP; of one
// that is silent the client hears nothing.

const (
	heldMax   = 64 << 10 // bytes of a frame
	heldTurn  = 64       // SYNs taken before others have their turn
	heldQuiet = 75       // seconds without a SYN of the client's, or without its connection, until one is given up
	heldShare = 4        // of all connections, so many may wait for their servers: one in this number. Loops have equal parts of it
	heldLeast = 16       // of each loop may wait in any case
)

// Hold are the MAC addresses of the pair of interfaces that SYNs wait at.
type Hold struct{ Node, Worker [6]byte }

type jsonHold struct {
	Node   string `json:"node"`
	Worker string `json:"worker"`
}

func (h *Hold) text() *jsonHold {
	if h == nil {
		return nil
	}
	return &jsonHold{net.HardwareAddr(h.Node[:]).String(), net.HardwareAddr(h.Worker[:]).String()}
}

func (j *jsonHold) hold() (*Hold, error) {
	if j == nil {
		return nil, nil
	}
	node, err := net.ParseMAC(j.Node)
	worker, werr := net.ParseMAC(j.Worker)
	if err = errors.Join(err, werr); err != nil {
		return nil, err
	}
	if len(node) != 6 || len(worker) != 6 {
		return nil, errors.New("a MAC address has six bytes")
	}
	return &Hold{[6]byte(node), [6]byte(worker)}, nil
}

// HeldSocket makes the socket that SYNs come by, in a place: it takes no other frames, and
// sends what it is given. It takes a privilege that a worker does not have.
func HeldSocket(link int) (*os.File, error) { return packetSocket(link, abi.EthPHeld) }

// ends are both ends of a connection.
type ends struct{ client, server netip.AddrPort }

// waiting is what a connection has until its client's side is there.
type waiting struct {
	ends
	syn   []byte // the frame
	since uint32 // when the last SYN came, in seconds of the loop's clock
	began uint32 // when the first did
}

// Where fields are in frames and headers (RFC 791, RFC 8200, RFC 9293).
const (
	etherLen  = 14
	etherType = 12

	ip4Len, ip4Class, ip4Source, ip4Destination = 20, 1, 12, 16
	ip6Len, ip6Source, ip6Destination           = 40, 8, 24

	tcpLen, tcpFlags, tcpChecksum = 20, 13, 16

	tcpFIN, tcpSYN, tcpRST, tcpACK = 1, 2, 4, 16
)

// segment is a frame with a segment of TCP, in parts that share its memory.
type segment struct {
	ends
	class byte // traffic class, or type of service
	ip    []byte
	tcp   []byte // with what it carries
}

// readSegment takes a frame apart. The node's program lets no other frames through; a
// worker does not depend on it.
func readSegment(frame []byte) (s segment, ok bool) {
	if len(frame) < etherLen+1 {
		return s, false
	}
	b := frame[etherLen:]
	var source, destination netip.Addr
	switch {
	case b[0]>>4 == 4 && len(b) >= ip4Len:
		head, all := int(b[0]&15)*4, int(binary.BigEndian.Uint16(b[2:]))
		if head < ip4Len || all < head || all > len(b) || b[9] != unix.IPPROTO_TCP {
			return s, false
		}
		s.ip, s.tcp, s.class = b[:head], b[head:all], b[ip4Class]
		source, _ = netip.AddrFromSlice(b[ip4Source : ip4Source+4])
		destination, _ = netip.AddrFromSlice(b[ip4Destination : ip4Destination+4])
	case b[0]>>4 == 6 && len(b) >= ip6Len:
		all := ip6Len + int(binary.BigEndian.Uint16(b[4:]))
		if all > len(b) || b[6] != unix.IPPROTO_TCP {
			return s, false
		}
		s.ip, s.tcp, s.class = b[:ip6Len], b[ip6Len:all], b[0]<<4|b[1]>>4
		source, _ = netip.AddrFromSlice(b[ip6Source : ip6Source+16])
		destination, _ = netip.AddrFromSlice(b[ip6Destination : ip6Destination+16])
	default:
		return s, false
	}
	if len(s.tcp) < tcpLen || int(s.tcp[12]>>4)*4 < tcpLen || int(s.tcp[12]>>4)*4 > len(s.tcp) {
		return s, false
	}
	s.client = netip.AddrPortFrom(source, binary.BigEndian.Uint16(s.tcp))
	s.server = netip.AddrPortFrom(destination, binary.BigEndian.Uint16(s.tcp[2:]))
	return s, true
}

func (s segment) opens() bool { return s.tcp[tcpFlags]&(tcpSYN|tcpACK|tcpRST|tcpFIN) == tcpSYN }

// check sets the segment's checksum (RFC 9293 section 3.1): between interfaces of one
// machine none has been computed yet.
func (s segment) check() {
	binary.BigEndian.PutUint16(s.tcp[tcpChecksum:], 0)
	addresses := s.ip[ip4Source:ip4Len]
	if s.ip[0]>>4 == 6 {
		addresses = s.ip[ip6Source:ip6Len]
	}
	sum := uint64(len(s.tcp)) + unix.IPPROTO_TCP
	binary.BigEndian.PutUint16(s.tcp[tcpChecksum:], fold(sum+words(addresses)+words(s.tcp)))
}

// words is the sum of the 16-bit words of b, the last one with a zero if it has a byte alone.
func words(b []byte) (sum uint64) {
	for ; len(b) >= 2; b = b[2:] {
		sum += uint64(binary.BigEndian.Uint16(b))
	}
	if len(b) == 1 {
		sum += uint64(b[0]) << 8
	}
	return sum
}

// fold is the Internet checksum (RFC 1071) of a sum of words.
func fold(sum uint64) uint16 {
	for sum>>16 != 0 {
		sum = sum&0xffff + sum>>16
	}
	return ^uint16(sum)
}

// refusal is the frame with the RST that answers a SYN to a closed port (RFC 9293 section
// 3.10.7.1).
func (s segment) refusal(h Hold) []byte {
	six := s.ip[0]>>4 == 6
	head := ip4Len
	if six {
		head = ip6Len
	}
	b := make([]byte, etherLen+head+tcpLen)
	ip := b[etherLen:]
	if six {
		h.address(b, unix.ETH_P_IPV6)
		ip[0] = 6 << 4
		binary.BigEndian.PutUint16(ip[4:], tcpLen)
		ip[6], ip[7] = unix.IPPROTO_TCP, 64
		copy(ip[ip6Source:], s.ip[ip6Destination:ip6Len])
		copy(ip[ip6Destination:], s.ip[ip6Source:ip6Destination])
	} else {
		h.address(b, unix.ETH_P_IP)
		ip[0] = 4<<4 | ip4Len/4
		binary.BigEndian.PutUint16(ip[2:], ip4Len+tcpLen)
		ip[6] = 0x40 // do not fragment
		ip[8], ip[9] = 64, unix.IPPROTO_TCP
		copy(ip[ip4Source:], s.ip[ip4Destination:ip4Len])
		copy(ip[ip4Destination:], s.ip[ip4Source:ip4Destination])
		binary.BigEndian.PutUint16(ip[10:], fold(words(ip[:ip4Len])))
	}
	tcp := ip[head:]
	copy(tcp, s.tcp[2:4])
	copy(tcp[2:], s.tcp[:2])
	length := uint32(len(s.tcp)-int(s.tcp[12]>>4)*4) + 1 // the SYN counts as a byte
	binary.BigEndian.PutUint32(tcp[8:], binary.BigEndian.Uint32(s.tcp[4:])+length)
	tcp[12], tcp[tcpFlags] = tcpLen/4<<4, tcpRST|tcpACK
	segment{ip: ip[:head], tcp: tcp}.check()
	return b
}

// unreachable is the frame with the ICMP error about a SYN, from its destination: what the kernel
// made of an error about the connection to the server. nil: it was no such error.
func (s segment) unreachable(h Hold, why error) []byte {
	codes := map[error]struct{ six, four byte }{ // RFC 4443 section 3.1, RFC 792
		unix.ENETUNREACH:  {0, 0}, // no route
		unix.EHOSTUNREACH: {3, 1}, // no way to the address
		unix.EACCES:       {1, 13},
	}
	code, ok := codes[why]
	if !ok {
		return nil
	}
	const icmpLen = 8
	quote := append(append([]byte(nil), s.ip...), s.tcp...)
	if s.ip[0]>>4 == 6 {
		quote = quote[:min(len(quote), 1280-ip6Len-icmpLen)] // RFC 4443 section 2.4 (c)
		b := make([]byte, etherLen+ip6Len+icmpLen+len(quote))
		h.address(b, unix.ETH_P_IPV6)
		ip, icmp := b[etherLen:], b[etherLen+ip6Len:]
		ip[0] = 6 << 4
		binary.BigEndian.PutUint16(ip[4:], uint16(len(icmp)))
		ip[6], ip[7] = unix.IPPROTO_ICMPV6, 64
		copy(ip[ip6Source:], s.ip[ip6Destination:ip6Len])
		copy(ip[ip6Destination:], s.ip[ip6Source:ip6Destination])
		icmp[0], icmp[1] = 1, code.six
		copy(icmp[icmpLen:], quote)
		sum := uint64(len(icmp)) + unix.IPPROTO_ICMPV6
		binary.BigEndian.PutUint16(icmp[2:], fold(sum+words(ip[ip6Source:ip6Len])+words(icmp)))
		return b
	}
	quote = quote[:min(len(quote), 576-ip4Len-icmpLen)] // RFC 1812 section 4.3.2.3
	b := make([]byte, etherLen+ip4Len+icmpLen+len(quote))
	h.address(b, unix.ETH_P_IP)
	ip, icmp := b[etherLen:etherLen+ip4Len], b[etherLen+ip4Len:]
	ip[0] = 4<<4 | ip4Len/4
	binary.BigEndian.PutUint16(ip[2:], uint16(ip4Len+len(icmp)))
	ip[6] = 0x40 // do not fragment
	ip[8], ip[9] = 64, unix.IPPROTO_ICMP
	copy(ip[ip4Source:], s.ip[ip4Destination:ip4Len])
	copy(ip[ip4Destination:], s.ip[ip4Source:ip4Destination])
	binary.BigEndian.PutUint16(ip[10:], fold(words(ip)))
	icmp[0], icmp[1] = 3, code.four
	copy(icmp[icmpLen:], quote)
	binary.BigEndian.PutUint16(icmp[2:], fold(words(icmp)))
	return b
}

// address sets a frame's Ethernet header, from the worker to the node.
func (h Hold) address(frame []byte, protocol uint16) {
	copy(frame, h.Node[:])
	copy(frame[6:], h.Worker[:])
	binary.BigEndian.PutUint16(frame[etherType:], protocol)
}

// hold takes over a HeldSocket.
func (w *Worker) hold(held *os.File) error {
	// The descriptor alone is kept: the file would close it.
	fd, err := unix.FcntlInt(held.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("fcntl F_DUPFD_CLOEXEC", err)
	}
	w.held = fd
	for _, l := range w.loops {
		l.waiting, l.known = map[ends]uint32{}, &known{}
	}
	first := w.loops[0]
	first.frame = make([]byte, heldMax)
	return errors.Join(held.Close(), unix.SetNonblock(fd, true), first.watch(fd, unix.EPOLLIN, aboutHeld, 0))
}

// dropHeld drops SYNs that came before there was somebody to take them: they may be the worker's before, and
// clients try again.
func (l *loop) dropHeld() {
	for {
		if _, err := unix.Read(l.w.held, l.frame); err != nil && err != unix.EINTR {
			return
		}
	}
}

// takeHeld takes SYNs that wait, and hands those over that are another loop's.
func (l *loop) takeHeld() {
	for range heldTurn {
		n, err := unix.Read(l.w.held, l.frame)
		switch {
		case err == unix.EINTR:
			continue
		case err != nil:
			return // there are no more; what else can be wrong shows as clients that try again
		}
		s, ok := readSegment(l.frame[:n])
		if !ok || !s.opens() {
			continue
		}
		to, placed := l.w.choose(s.ends)
		if to != l {
			to.handSYN(s.ends, l.frame[:n], placed)
			continue
		}
		l.takeSYN(s, l.frame[:n], placed)
	}
}

// takeSYN takes a SYN of this loop. placed: its connection has a place here already, and is known.
func (l *loop) takeSYN(s segment, frame []byte, placed bool) {
	if number, ok := l.waiting[s.ends]; ok {
		c := l.at(number)
		c.wait.since = l.seconds()
		if !c.connecting { // it was let in, and the answer did not come to the client
			l.letIn(s, frame)
		}
		return
	}
	if len(l.waiting) >= l.w.waitMost() {
		l.giveUpOne()
	}
	if !placed {
		l.known.add(s.ends, l.index)
	}
	if !l.admit(placed) {
		l.known.drop(s.ends)
		l.w.refused.tell(s.ends, "worker-limit")
		l.send(s.refusal(*l.w.config.Hold))
		return
	}
	c := l.newConn()
	l.words[wordOpened].Add(1)
	c.wait = &waiting{ends: s.ends, syn: append([]byte(nil), frame...), since: l.seconds(), began: l.seconds()}
	l.waiting[s.ends] = c.number
	l.openHandlers(c, function.Connection{Client: s.client, Server: s.server})
	switch err := l.connectOnward(c, s.client, s.server, int(s.class)); {
	case err == nil:
	case errors.Is(err, unix.ECONNREFUSED), errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE): // with no descriptor left, as above a limit
		if !errors.Is(err, unix.ECONNREFUSED) {
			l.w.refused.tell(s.ends, "worker-descriptors")
		}
		l.reset(c, wordUnreached) // counted first, as in release
		l.send(s.refusal(*l.w.config.Hold))
	default:
		// The server has not refused. The client tries again; meanwhile the one before, of the
		// same ends, may be over. If the client still has it, TCP knows what to answer (RFC 9293
		// section 3.10.7.4).
		l.reset(c, wordUnreached)
		if _, ok := l.known.find(s.ends); ok { // as one whose client is there: none waits
			l.letIn(s, frame)
		}
	}
}

// giveUpLooks is how many that wait are looked at to give one up.
const giveUpLooks = 16

// giveUpOne makes room for another SYN: of some that wait for a server, whichever they are, the
// one that has waited longest gives way. Servers that answer are asked for a moment only, so
// that a client whose servers do not answer gives up its own.
func (l *loop) giveUpOne() {
	var oldest *conn
	looks := 0
	for _, number := range l.waiting {
		c := l.at(number)
		if oldest == nil || c.connecting && (!oldest.connecting || c.wait.began < oldest.wait.began) {
			oldest = c
		}
		if looks++; looks == giveUpLooks {
			break
		}
	}
	if oldest != nil {
		l.reset(oldest, wordUnreached)
	}
}

// acceptedHeld takes a client's connection that has waited for its server's, or hands it over.
func (l *loop) acceptedHeld(fd int, client netip.AddrPort) {
	to, err := unix.Getsockname(fd)
	if err != nil {
		unix.Close(fd)
		return
	}
	a := accepted{fd, ends{client, addrPort(to)}}
	its := l.w.loopOf(a.of)
	switch {
	case its == nil: // its server has reset it meanwhile
		unix.Close(fd)
	case its == l:
		l.takeAccepted(a)
	case !l.w.apart:
		its.handAccepted(a)
	case !l.handFile(its, fd, a.of):
		unix.Close(fd)
		a.fd = -1
		its.handAccepted(a)
	}
}

// takeAccepted takes a client's connection of this loop.
func (l *loop) takeAccepted(a accepted) {
	number, ok := l.waiting[a.of]
	if !ok { // its server has reset it meanwhile
		if a.fd >= 0 {
			unix.Close(a.fd)
		}
		return
	}
	c := l.at(number)
	if a.fd < 0 {
		l.reset(c, wordByWorker)
		return
	}
	delete(l.waiting, c.wait.ends)
	c.ends = &ends{c.wait.client, c.wait.server}
	c.wait, c.fd[0], c.active = nil, int32(a.fd), l.seconds()
	if err := l.watchSide(c, 0); err != nil {
		l.reset(c, wordByClient)
	}
}

// letIn gives a SYN to TCP, by way of the node's program.
func (l *loop) letIn(s segment, frame []byte) {
	s.check()
	copy(frame, l.w.config.Hold.Node[:])
	copy(frame[6:], l.w.config.Hold.Worker[:])
	binary.BigEndian.PutUint16(frame[etherType:], abi.EthPHeld)
	l.send(frame)
}

// send sends a frame. One that is not sent is lost, as on any link; the client tries again.
func (l *loop) send(frame []byte) { unix.Write(l.w.held, frame) }

// serverAnswered has a client answered whose connection waits.
func (l *loop) serverAnswered(c *conn) {
	c.wait.since = l.seconds()
	if s, ok := readSegment(c.wait.syn); ok {
		l.letIn(s, c.wait.syn)
	}
	c.wait.syn = nil // another one would come with a frame of its own
}

// serverFailed answers for a server that did not let itself be connected to.
func (l *loop) serverFailed(c *conn) {
	err, syn := socketError(int(c.fd[1])), c.wait.syn
	l.reset(c, wordUnreached) // counted first, as in release
	if s, ok := readSegment(syn); ok {
		if err == unix.ECONNREFUSED {
			l.send(s.refusal(*l.w.config.Hold))
		} else if frame := s.unreachable(*l.w.config.Hold, err); frame != nil {
			l.send(frame)
		}
	}
}

// quiet tells whether a client that waits is not there any more, or never came.
func (c *conn) quiet(now uint32) bool { return c.wait != nil && now-c.wait.since > heldQuiet }
