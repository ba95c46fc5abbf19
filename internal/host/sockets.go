package host

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"syscall"
	"unsafe"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// TCPEnds are the two ends of a TCP socket.
type TCPEnds struct{ Local, Remote netip.AddrPort }

// TCPSocket is what the kernel knows about a TCP socket.
type TCPSocket struct {
	State    TCPState // 0: there is no such socket
	Received uint64   // bytes of payload, in their order
	Sent     uint64   // bytes of payload, each once; some may not have been acknowledged
}

// TCPState is a state of <net/tcp_states.h>.
type TCPState uint8

const (
	tcpCloseWait = 8
	tcpLastAck   = 9
	tcpClosing   = 11
)

var tcpStates = [...]string{
	1: "established", 2: "syn-sent", 3: "syn-received", 4: "fin-wait-1", 5: "fin-wait-2", 6: "time-wait", 7: "closed", tcpCloseWait: "close-wait",
	tcpLastAck: "last-ack", 10: "listen", tcpClosing: "closing", 12: "syn-received",
}

// String is the name of RFC 9293 section 3.3.2; "": there is none.
func (s TCPState) String() string {
	if int(s) >= len(tcpStates) {
		return ""
	}
	return tcpStates[s]
}

// Of <linux/inet_diag.h>.
const (
	diagRequestLen = 56 // struct inet_diag_req_v2
	diagAnswerLen  = 72 // struct inet_diag_msg
	diagID         = 8  // where struct inet_diag_sockid is in the request; in the answer it is at 4
	diagInfo       = 2  // INET_DIAG_INFO
)

// diagRequest asks for one socket (struct inet_diag_req_v2).
type diagRequest TCPEnds

func (diagRequest) Len() int { return diagRequestLen }

func (r diagRequest) Serialize() []byte {
	b := make([]byte, diagRequestLen)
	b[0], b[1], b[2] = unix.AF_INET6, unix.IPPROTO_TCP, 1<<(diagInfo-1)
	if r.Local.Addr().Is4() {
		b[0] = unix.AF_INET
	}
	binary.NativeEndian.PutUint32(b[4:], ^uint32(0)) // in any state
	r.id(b[diagID:])
	return b
}

// id writes the ends as struct inet_diag_sockid has them.
func (r diagRequest) id(b []byte) {
	binary.BigEndian.PutUint16(b, r.Local.Port())
	binary.BigEndian.PutUint16(b[2:], r.Remote.Port())
	copy(b[4:], r.Local.Addr().AsSlice())
	copy(b[20:], r.Remote.Addr().AsSlice())
	for i := 40; i < 48; i++ {
		b[i] = 0xff // whatever its cookie is
	}
}

// read takes the answer. The kernel gives a listener where there is no other socket: it has other ends.
func (r diagRequest) read(b []byte) (s TCPSocket, err error) {
	if len(b) < diagAnswerLen {
		return s, fmt.Errorf("the kernel's answer about a socket has %d bytes; expect %d or more", len(b), diagAnswerLen)
	}
	want := make([]byte, 48)
	r.id(want)
	n := 36 // its ports and addresses
	if string(b[4:4+n]) != string(want[:n]) {
		return s, nil
	}
	s.State = TCPState(b[1])
	attrs, err := nl.ParseRouteAttr(b[diagAnswerLen:])
	if err != nil {
		return s, fmt.Errorf("read the kernel's answer about a socket: %w", err)
	}
	for _, a := range attrs {
		if a.Attr.Type != diagInfo {
			continue
		}
		// An older kernel's is shorter.
		var info unix.TCPInfo
		copy(unsafe.Slice((*byte)(unsafe.Pointer(&info)), unsafe.Sizeof(info)), a.Value)
		s.Received, s.Sent = info.Bytes_received, info.Bytes_sent-min(info.Bytes_retrans, info.Bytes_sent)
		switch s.State {
		case tcpCloseWait, tcpLastAck, tcpClosing: // the FIN counts as a byte
			s.Received -= min(s.Received, 1)
		}
	}
	return s, nil
}

// TCPSockets looks for TCP sockets of a namespace, one by one: its cost is that of those that are asked for, however many there are.
func (n *NetNS) TCPSockets(ends []TCPEnds) (found []TCPSocket, err error) {
	err = n.Do(func() error {
		s, err := nl.Subscribe(unix.NETLINK_INET_DIAG)
		if err != nil {
			return fmt.Errorf("open a socket for questions about others: %w", permission(err))
		}
		handle := &nl.SocketHandle{Socket: s}
		defer handle.Close()
		for _, e := range ends {
			req := nl.NewNetlinkRequest(nl.SOCK_DIAG_BY_FAMILY, 0)
			req.Sockets = map[int]*nl.SocketHandle{unix.NETLINK_INET_DIAG: handle}
			req.AddData(diagRequest(e))
			var t TCPSocket
			answers, err := req.Execute(unix.NETLINK_INET_DIAG, nl.SOCK_DIAG_BY_FAMILY)
			switch {
			case errors.Is(err, syscall.ENOENT):
			case err != nil:
				return fmt.Errorf("ask for the socket from %s to %s: %w", e.Local, e.Remote, err)
			case len(answers) > 0:
				if t, err = diagRequest(e).read(answers[0]); err != nil {
					return err
				}
			}
			found = append(found, t)
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read TCP sockets of %s: %w", n, err)
	}
	return found, nil
}
