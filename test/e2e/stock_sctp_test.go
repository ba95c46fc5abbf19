//go:build stock

package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/lab"
	"github.com/waystamp/waystamp/internal/model"
)

// sctp is an end of an association, in the style of one socket for each (RFC 6458 4).
type sctp struct{ *os.File }

// sctpSocket opens one in a namespace. use gets it as a number.
func sctpSocket(ns *host.NetNS, at netip.Addr, use func(fd int, family int) error) (s sctp, err error) {
	family := unix.AF_INET6
	if at.Is4() {
		family = unix.AF_INET
	}
	err = ns.Do(func() error {
		fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_SCTP)
		if err != nil {
			return fmt.Errorf("a socket of SCTP: %w", err)
		}
		if err := use(fd, family); err != nil {
			return errors.Join(err, unix.Close(fd))
		}
		s = sctp{os.NewFile(uintptr(fd), "sctp")}
		return nil
	})
	return s, err
}

func sockaddr(a netip.Addr, port int) unix.Sockaddr {
	if a.Is4() {
		return &unix.SockaddrInet4{Addr: a.As4(), Port: port}
	}
	return &unix.SockaddrInet6{Addr: a.As16(), Port: port}
}

// patientSocket ends what waits for the other end.
func patientSocket(fd int) error {
	limit := unix.NsecToTimeval(patience.Nanoseconds())
	return errors.Join(unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit), unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &limit))
}

// sctpPair is an association between two hosts.
func (w *world) sctpPair(from, to string) (client, server sctp) {
	w.t.Helper()
	const port = 5000
	listener, err := sctpSocket(w.ns(to), w.addr(to), func(fd, _ int) error {
		return errors.Join(patientSocket(fd), unix.Bind(fd, sockaddr(w.addr(to), port)), unix.Listen(fd, 1))
	})
	must(w.t, err)
	defer listener.Close()
	client, err = sctpSocket(w.ns(from), w.addr(from), func(fd, _ int) error {
		return errors.Join(patientSocket(fd), unix.Bind(fd, sockaddr(w.addr(from), 0)), unix.Connect(fd, sockaddr(w.addr(to), port)))
	})
	must(w.t, err)
	w.t.Cleanup(func() { client.Close() })
	raw, err := listener.SyscallConn()
	must(w.t, err)
	var failed error
	must(w.t, raw.Control(func(fd uintptr) {
		var n int
		if n, _, failed = unix.Accept4(int(fd), unix.SOCK_CLOEXEC); failed == nil {
			failed = patientSocket(n)
			server = sctp{os.NewFile(uintptr(n), "sctp")}
		}
	}))
	must(w.t, failed)
	w.t.Cleanup(func() { server.Close() })
	return client, server
}

// An association of SCTP takes a chain both ways, and what it carries arrives as it was sent. Its checksums are CRC32c, which the kernel
// leaves to the last device. Hosts are kept from super-packets, which headends refuse: GSO of SCTP cuts them where no size of a frame says.
func TestStockSCTPTakesAChain(t *testing.T) {
	for _, v4 := range []bool{false, true} {
		t.Run(map[bool]string{false: "IPv6", true: "IPv4"}[v4], func(t *testing.T) {
			changes := []change{proven(model.SchemeKeyed)}
			if v4 {
				changes = append(changes, inIPv4)
			}
			w := build(t, narrowing, changes...)
			w.ipv4 = v4
			w.shell("h1", "ip", "link", "set", "dev", "h1-r1", "gso_max_size", "1500")
			w.shell("h2", "ip", "link", "set", "dev", "h2-r6", "gso_max_size", "1500")
			w.reaches("h1", "h2")
			since, back := w.counting(w.path("web", model.Forward)), w.counting(w.path("web", model.Reverse))
			client, server := w.sctpPair("h1", "h2")
			const size, piece = 300_000, 30_000 // of a message: several chunks
			for i, way := range [][2]sctp{{client, server}, {server, client}} {
				want := make([]byte, size)
				_, err := io.ReadFull(lab.Content{Seed: uint64(i + 1), Size: size}.Reader(), want)
				must(t, err)
				sent := make(chan error, 1)
				go func() {
					for at := 0; at < size; at += piece {
						if _, err := way[0].Write(want[at : at+piece]); err != nil {
							sent <- err
							return
						}
					}
					sent <- nil
				}()
				got := make([]byte, size)
				if n, err := io.ReadFull(way[1], got); err != nil {
					t.Fatalf("behind %d of %d bytes: %v", n, size, err)
				}
				select {
				case err := <-sent:
					must(t, err)
				case <-time.After(patience):
					t.Fatal("the sender does not end, though all has arrived")
				}
				if !bytes.Equal(got, want) {
					t.Error("what has arrived is not what was sent")
				}
			}
			for _, f := range []flow{since(), back()} {
				if least := uint64(size / 1500); f.frames() < least {
					t.Errorf("%d frames were stamped and verified, want %d at least", f.frames(), least)
				}
			}
		})
	}
}
