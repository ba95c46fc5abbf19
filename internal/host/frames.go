package host

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// Frames sends and receives whole Ethernet frames at an interface.
type Frames struct {
	MAC   [6]byte
	Index int
	file  *os.File

	mu       sync.Mutex
	progress sync.Cond // of taken
	queued   uint64    // by the kernel, at the last reading
	dropped  uint64    // by the kernel, for lack of room, at the last reading
	taken    uint64    // from the queue, and done with
}

// framesBuffer is the size of the buffer for a reader, in bytes.
const framesBuffer = 64 << 20

// OpenFrames opens an interface of a namespace for the frames of a protocol: unix.ETH_P_IPV6 for
// frames that come in, unix.ETH_P_ALL for all frames in both directions, before any program at
// TC sees them.
func OpenFrames(ns *NetNS, name string, protocol uint16) (p *Frames, err error) {
	p = &Frames{}
	p.progress.L = &p.mu
	err = ns.Do(func() error {
		i, err := net.InterfaceByName(name)
		if err != nil {
			return err
		}
		p.Index = i.Index
		copy(p.MAC[:], i.HardwareAddr)
		// Without a protocol: it receives nothing before it is bound.
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		if err != nil {
			return err
		}
		p.file = os.NewFile(uintptr(fd), name)
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, framesBuffer); err != nil {
			return err
		}
		network := binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, protocol))
		return unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: network, Ifindex: i.Index})
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open %s in %s for frames: %w", name, ns, err), p.Close())
	}
	return p, nil
}

// Close makes Receive return. It may be called more than once.
func (p *Frames) Close() error {
	if p.file == nil {
		return nil
	}
	if err := p.file.Close(); !errors.Is(err, os.ErrClosed) {
		return err
	}
	return nil
}

// Send puts a frame on the wire.
func (p *Frames) Send(frame []byte) error {
	_, err := p.file.Write(frame)
	return err
}

// Receive calls f for each frame that comes in until p is closed. Frames longer than buf are
// truncated; f must not keep its slice of buf.
func (p *Frames) Receive(buf []byte, f func(frame []byte)) error {
	raw, err := p.file.SyscallConn()
	if err != nil {
		return err
	}
	for {
		var (
			n      int
			from   unix.Sockaddr
			failed error
		)
		err := raw.Read(func(fd uintptr) bool {
			n, from, failed = unix.Recvfrom(int(fd), buf, unix.MSG_DONTWAIT)
			return !errors.Is(failed, unix.EAGAIN)
		})
		switch {
		case err != nil: // closed
			return nil
		case errors.Is(failed, unix.ENETDOWN): // for now
			continue
		case failed != nil:
			return failed
		}
		if l, ok := from.(*unix.SockaddrLinklayer); !ok || l.Pkttype != unix.PACKET_OUTGOING {
			f(buf[:n])
		}
		p.mu.Lock()
		p.taken++
		p.progress.Broadcast()
		p.mu.Unlock()
	}
}

// CaughtUp waits until Receive, which another goroutine calls, has processed every frame that
// the kernel has queued so far. It returns the number of frames that the kernel has dropped for
// lack of room since p was opened.
func (p *Frames) CaughtUp(ctx context.Context) (dropped uint64, err error) {
	defer context.AfterFunc(ctx, func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.progress.Broadcast()
	})()
	p.mu.Lock()
	defer p.mu.Unlock()
	raw, err := p.file.SyscallConn()
	if err != nil {
		return 0, err
	}
	var s *unix.TpacketStats // since the last reading
	var failed error
	if err := raw.Control(func(fd uintptr) {
		s, failed = unix.GetsockoptTpacketStats(int(fd), unix.SOL_PACKET, unix.PACKET_STATISTICS)
	}); err != nil || failed != nil {
		return 0, errors.Join(err, failed)
	}
	p.queued += uint64(s.Packets - s.Drops)
	p.dropped += uint64(s.Drops)
	for want := p.queued; p.taken < want; p.progress.Wait() {
		if err := ctx.Err(); err != nil {
			return 0, fmt.Errorf("%s: %d of %d frames were taken from the queue: %w", p.file.Name(), p.taken, want, err)
		}
	}
	return p.dropped, nil
}
