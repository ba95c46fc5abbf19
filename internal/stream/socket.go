package stream

import (
	"fmt"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"
)

// listen makes a socket that accepts connections to any address of its IP version, at
// one port. It is plain TCP and not MPTCP, whose sockets cannot be spliced by the same
// rules. Accepted sockets inherit all of its options:
//
//   - SO_LINGER of 0: a socket that is closed, also by the end of the process, sends RST;
//     only an orderly end takes the option off;
//   - SO_OOBINLINE: urgent data stays at its place in the stream;
//   - TCP_NODELAY: bytes go on when they come.
//
// SO_REUSEPORT lets each event loop have a listener of its own.
func listen(family int, port uint16) (fd int, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("listen on port %d of %s: %w", port, familyName(family), err)
		}
	}()
	fd, err = unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
	if err != nil {
		return -1, os.NewSyscallError("socket", err)
	}
	defer func() {
		if err != nil {
			unix.Close(fd)
		}
	}()
	var to unix.Sockaddr = &unix.SockaddrInet4{Port: int(port)}
	if family == unix.AF_INET6 {
		to = &unix.SockaddrInet6{Port: int(port)}
		if err := unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1); err != nil {
			return -1, os.NewSyscallError("setsockopt IPV6_V6ONLY", err)
		}
	}
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1); err != nil {
		return -1, os.NewSyscallError("setsockopt SO_REUSEPORT", err)
	}
	if err := setOptions(fd); err != nil {
		return -1, err
	}
	if err := unix.Bind(fd, to); err != nil {
		return -1, os.NewSyscallError("bind", err)
	}
	// The kernel holds it to net.core.somaxconn.
	return fd, os.NewSyscallError("listen", unix.Listen(fd, 1<<16-1))
}

func familyName(family int) string {
	if family == unix.AF_INET6 {
		return "IPv6"
	}
	return "IPv4"
}

// setOptions sets what sockets on both sides have, see listen. When keep-alives begin
// is a setting of the namespace.
func setOptions(fd int) error {
	if err := unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}); err != nil {
		return os.NewSyscallError("setsockopt SO_LINGER", err)
	}
	for _, o := range []struct {
		level, name int
		text        string
	}{
		{unix.SOL_SOCKET, unix.SO_REUSEADDR, "SO_REUSEADDR"},
		{unix.SOL_SOCKET, unix.SO_KEEPALIVE, "SO_KEEPALIVE"},
		{unix.SOL_SOCKET, unix.SO_OOBINLINE, "SO_OOBINLINE"},
		{unix.IPPROTO_TCP, unix.TCP_NODELAY, "TCP_NODELAY"},
	} {
		if err := unix.SetsockoptInt(fd, o.level, o.name, 1); err != nil {
			return os.NewSyscallError("setsockopt "+o.text, err)
		}
	}
	return nil
}

const classDefault = -1

// connect begins a connection to the server, from the client's address and port. The
// address need not be one of this machine (IP_FREEBIND, which takes no privilege); that
// packets may have it as their source is the namespace's doing, see Place. class is the
// traffic class of IPv6, or type of service of IPv4, of its packets but for ECN, which is
// TCP's; classDefault leaves it to the kernel.
func connect(client, server netip.AddrPort, class int) (fd int, err error) {
	family, level, freebind, classOf := unix.AF_INET6, unix.IPPROTO_IPV6, unix.IPV6_FREEBIND, unix.IPV6_TCLASS
	if server.Addr().Is4() {
		family, level, freebind, classOf = unix.AF_INET, unix.IPPROTO_IP, unix.IP_FREEBIND, unix.IP_TOS
	}
	fd, err = unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
	if err != nil {
		return -1, os.NewSyscallError("socket", err)
	}
	err = setOptions(fd)
	if err == nil {
		err = os.NewSyscallError("setsockopt FREEBIND", unix.SetsockoptInt(fd, level, freebind, 1))
	}
	if err == nil && class != classDefault {
		err = os.NewSyscallError("setsockopt traffic class", unix.SetsockoptInt(fd, level, classOf, class&^3))
	}
	if err == nil {
		err = os.NewSyscallError("bind", unix.Bind(fd, sockaddr(client)))
	}
	if err == nil {
		err = os.NewSyscallError("connect", unix.Connect(fd, sockaddr(server)))
	}
	if err != nil && err.(*os.SyscallError).Err != unix.EINPROGRESS {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

func sockaddr(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
	}
	return &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
}

func addrPort(sa unix.Sockaddr) netip.AddrPort {
	switch sa := sa.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), uint16(sa.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(sa.Addr), uint16(sa.Port))
	}
	return netip.AddrPort{}
}

// orderly lets a socket that is closed send what is left, and FIN.
func orderly(fd int) error {
	return unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{})
}

// socketError takes the error that the kernel has noted for a socket.
func socketError(fd int) error {
	n, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
	if err != nil {
		return err
	}
	if n == 0 {
		return nil
	}
	return unix.Errno(n)
}
