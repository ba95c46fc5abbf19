package bench

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/host"
)

const (
	echoRequest = 128 // RFC 4443 section 4.1
	echoReply   = 129 // RFC 4443 section 4.2
	echoLen     = 8 + 56
	tripTimeout = time.Second
)

// roundTrips sends that many ICMPv6 echo requests from a namespace, one after
// the other, the interval between them, and returns the round trips in
// microseconds: from the call that sends one until its answer has been read.
//
// One thread on one CPU does both, before all other tasks there, and it does not
// sleep in between: what a sleeping CPU and a scheduler take to wake up is many
// times what the nodes do.
func roundTrips(ctx context.Context, ns *host.NetNS, dst netip.Addr, cpu, count int, interval time.Duration) (us []float64, err error) {
	err = ns.Do(func() error {
		fd, err := echoSocket(dst)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		return pinned(cpu, func() error {
			next := time.Now()
			for seq := range count {
				for time.Now().Before(next) {
				}
				if err := context.Cause(ctx); err != nil {
					return err
				}
				d, err := roundTrip(fd, uint16(seq))
				if err != nil {
					return fmt.Errorf("request %d of %d: %w", seq+1, count, err)
				}
				us = append(us, float64(d.Nanoseconds())/1e3)
				next = time.Now().Add(interval)
			}
			return nil
		})
	})
	if err != nil {
		return nil, fmt.Errorf("ping %s from %s: %w", dst, ns, err)
	}
	return us, nil
}

// echoSocket takes answers of dst alone. The kernel computes the checksum.
func echoSocket(dst netip.Addr) (fd int, err error) {
	fd, err = unix.Socket(unix.AF_INET6, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_ICMPV6)
	if err != nil {
		return -1, err
	}
	var only unix.ICMPv6Filter // a bit set keeps a type away
	for i := range only.Data {
		only.Data[i] = ^uint32(0)
	}
	only.Data[echoReply/32] &^= 1 << (echoReply % 32)
	wait := unix.NsecToTimeval(tripTimeout.Nanoseconds())
	err = errors.Join(
		unix.SetsockoptICMPv6Filter(fd, unix.IPPROTO_ICMPV6, unix.ICMPV6_FILTER, &only),
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &wait),
		unix.Connect(fd, &unix.SockaddrInet6{Addr: dst.As16()}),
	)
	if err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

func roundTrip(fd int, seq uint16) (time.Duration, error) {
	request, answer := [echoLen]byte{echoRequest}, [echoLen]byte{}
	binary.BigEndian.PutUint16(request[6:], seq)
	start := time.Now()
	if _, err := unix.Write(fd, request[:]); err != nil {
		return 0, err
	}
	for {
		n, err := unix.Read(fd, answer[:])
		d := time.Since(start)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if errors.Is(err, unix.EAGAIN) {
			return 0, fmt.Errorf("no answer within %s", tripTimeout)
		}
		if err != nil {
			return 0, err
		}
		// Late ones of other requests are passed over.
		if n == echoLen && binary.BigEndian.Uint16(answer[6:]) == seq {
			return d, nil
		}
	}
}
