package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// Relay is what a worker is held against: it accepts connections at a port of its
// namespace, in which every address is local on the way in, opens one to the original
// destination from the client's address and port, and has io.Copy move the bytes, a
// goroutine for each direction. It calls ready when it listens, and ends with ctx.
func Relay(ctx context.Context, port uint16, ready func() error) error {
	config := net.ListenConfig{}
	config.SetMultipathTCP(false) // sockets of MPTCP are not spliced
	l, err := config.Listen(ctx, "tcp6", fmt.Sprintf("[::]:%d", port))
	if err != nil {
		return fmt.Errorf("relay: %w", err)
	}
	defer context.AfterFunc(ctx, func() { l.Close() })()
	var all sync.WaitGroup
	defer all.Wait()
	if err := ready(); err != nil {
		l.Close()
		return fmt.Errorf("relay: say that it listens: %w", err)
	}
	for {
		c, err := l.Accept()
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return fmt.Errorf("relay: %w", err)
		}
		all.Go(func() { relay(ctx, c.(*net.TCPConn)) })
	}
}

// relay moves bytes until both sides have ended. What ends otherwise is reset on both sides.
func relay(ctx context.Context, client *net.TCPConn) {
	defer client.Close()
	defer context.AfterFunc(ctx, func() { client.Close() })()
	d := net.Dialer{LocalAddr: client.RemoteAddr(), Control: fromAnywhere}
	d.SetMultipathTCP(false)
	c, err := d.DialContext(ctx, "tcp6", client.LocalAddr().String())
	if err != nil {
		client.SetLinger(0)
		return
	}
	server := c.(*net.TCPConn)
	defer server.Close()
	move := func(to, from *net.TCPConn) {
		if _, err := io.Copy(to, from); err != nil {
			// Whoever has not ended yet learns of it.
			client.SetLinger(0)
			server.SetLinger(0)
			client.Close()
			server.Close()
			return
		}
		to.CloseWrite()
	}
	var both sync.WaitGroup
	both.Go(func() { move(server, client) })
	move(client, server)
	both.Wait()
}

// fromAnywhere lets a socket have an address that is none of this machine's, and a port that
// was used a moment ago.
func fromAnywhere(_, _ string, c syscall.RawConn) error {
	var set error
	err := c.Control(func(fd uintptr) {
		set = errors.Join(
			os.NewSyscallError("setsockopt IPV6_FREEBIND", unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_FREEBIND, 1)),
			os.NewSyscallError("setsockopt SO_REUSEADDR", unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)))
	})
	return errors.Join(err, set)
}
