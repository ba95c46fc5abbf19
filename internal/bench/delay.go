package bench

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/srv6"
)

// delayer is a function in user space: it reads frames from one interface, keeps
// each for a time, and writes it to another one as a router would, but for the
// hop limit. There is no netem on every kernel.
type delayer struct {
	in, out int // packet sockets
	delay   time.Duration
	lose    float64 // part of the frames
	dice    uint64  // of them; never 0
	to      [6]byte // destination of what it writes
	from    [6]byte
	stop    context.CancelFunc
	done    sync.WaitGroup

	// One goroutine reads and one writes, without waking each other: ring holds
	// the frames from written to read, each number modulo its length.
	ring          []delayed
	read, written atomic.Uint64
	ended         atomic.Bool // no more will be read
}

type delayed struct {
	due   time.Duration // CLOCK_MONOTONIC
	len   int
	frame []byte
}

const (
	delayerFrames = 1 << 15                // that wait at once: 5 ms of 6 million per second
	delayerLook   = 100 * time.Microsecond // at least, see look
)

// newDelayer starts a delayer in the namespace of n. next is the MAC address of
// the node's end of out.
func newDelayer(n *host.Net, in, out string, next [6]byte, delay time.Duration, lose float64) (_ *delayer, err error) {
	d := &delayer{in: -1, out: -1, delay: delay, lose: lose, dice: 1 + uint64(monotonic()), to: next, ring: make([]delayed, delayerFrames)}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("start a function that delays packets: %w", err), d.closeSockets())
		}
	}()
	if d.from, err = n.HardwareAddress(out); err != nil {
		return nil, err
	}
	if d.in, err = packetSocket(n, in, unix.ETH_P_IPV6); err != nil {
		return nil, err
	}
	if d.out, err = packetSocket(n, out, 0); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	d.stop = cancel
	d.done.Add(2)
	go d.receive(ctx)
	go d.send()
	return d, nil
}

// packetSocket opens a socket for the frames of an interface; protocol 0: it
// only sends.
func packetSocket(n *host.Net, link string, protocol uint16) (fd int, err error) {
	l, err := n.Link(link)
	if err != nil {
		return -1, err
	}
	network := binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, protocol))
	err = n.NetNS().Do(func() error {
		if fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, int(network)); err != nil {
			return err
		}
		err := errors.Join(
			unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 64<<20),
			unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, 64<<20),
			unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_IGNORE_OUTGOING, 1),
			// A reader looks up at times whether it shall end.
			unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 100_000}),
			unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: network, Ifindex: l.Index}),
		)
		if err != nil {
			unix.Close(fd)
			fd = -1
		}
		return err
	})
	return fd, err
}

func monotonic() time.Duration {
	var ts unix.Timespec
	unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts) // cannot fail for this clock
	return time.Duration(ts.Nano())
}

// receive ends with ctx.
func (d *delayer) receive(ctx context.Context) {
	defer d.done.Done()
	defer d.ended.Store(true)
	for ctx.Err() == nil {
		read := d.read.Load()
		if read-d.written.Load() == delayerFrames {
			time.Sleep(d.look()) // the socket's queue fills, and then loses
			continue
		}
		f := &d.ring[read%delayerFrames]
		if f.frame == nil {
			f.frame = make([]byte, proxyMTU+srv6.EthernetLen)
		}
		n, _, err := unix.Recvfrom(d.in, f.frame, 0)
		if err != nil || n < srv6.EthernetLen+srv6.IPv6Len || !forOthers(f.frame[srv6.EthernetLen:]) || d.loses() {
			continue
		}
		copy(f.frame, d.to[:])
		copy(f.frame[6:], d.from[:])
		f.due, f.len = monotonic()+d.delay, n
		d.read.Store(read + 1)
	}
}

// forOthers tells the packets that the function forwards from those that its
// kernel answers: neighbour discovery.
func forOthers(packet []byte) bool {
	return packet[24] != 0xff && !(packet[24] == 0xfe && packet[25]&0xc0 == 0x80)
}

// loses tells whether the next frame is lost, of all others alike (Marsaglia's xorshift).
func (d *delayer) loses() bool {
	d.dice ^= d.dice << 13
	d.dice ^= d.dice >> 7
	d.dice ^= d.dice << 17
	return float64(d.dice>>11)/(1<<53) < d.lose
}

// look is how long its goroutines wait for each other: no frame waits for longer than that
// beyond its time.
func (d *delayer) look() time.Duration { return max(delayerLook, d.delay/20) }

// send ends when all that was read is written.
func (d *delayer) send() {
	defer d.done.Done()
	for {
		written := d.written.Load()
		if written == d.read.Load() {
			if d.ended.Load() {
				return
			}
			time.Sleep(d.look())
			continue
		}
		f := &d.ring[written%delayerFrames]
		for monotonic() < f.due {
			ts := unix.NsecToTimespec(int64(f.due))
			// Interrupted by a signal at times.
			unix.ClockNanosleep(unix.CLOCK_MONOTONIC, unix.TIMER_ABSTIME, &ts, nil)
		}
		// A full queue of the device loses a frame, as any function may.
		unix.Write(d.out, f.frame[:f.len])
		d.written.Store(written + 1)
	}
}

func (d *delayer) closeSockets() error {
	var errs []error
	for _, fd := range []int{d.in, d.out} {
		if fd >= 0 {
			errs = append(errs, unix.Close(fd))
		}
	}
	return errors.Join(errs...)
}

func (d *delayer) close() error {
	d.stop()
	d.done.Wait()
	return d.closeSockets()
}
