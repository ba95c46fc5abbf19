// Package inline is a function in user space, as a DPI in line is one: a program
// that takes frames from an interface and puts them out by another, unchanged,
// in both directions. It knows nothing of segment routing, of IP, and of
// waystamp. A lab runs it as a process for functions of kind raw; internal/cli
// makes a command of it.
//
// It takes frames as they are on a wire. Whoever attaches it completes the
// checksums and cuts the super-packets before (ethtool -K IF tx off at the other
// end, gro off at this one), as for any such program.
package inline

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync/atomic"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

const (
	frameMax = 1<<16 + 18 // an Ethernet header with a VLAN tag, and the largest IP packet
	vlanLen  = 4
	queueLen = 32 << 20 // bytes of frames that wait to be read
)

// Config says what the program is between.
type Config struct {
	To   string // interface that frames come in by
	From string // interface that they go out by; may be To
	// Ready is called once frames are copied; nil: nobody is.
	Ready func() error
	Log   *slog.Logger
}

// Run copies frames until ctx ends, and then returns nil. Frames that cannot be
// put out are dropped and counted, like those that came too fast.
func Run(ctx context.Context, c Config) (err error) {
	to, err := open(c.To)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, to.close()) }()
	ways := [][2]*port{{to, to}}
	if c.From != c.To {
		from, err := open(c.From)
		if err != nil {
			return err
		}
		defer from.close()
		ways = [][2]*port{{to, from}, {from, to}}
	}
	group, ctx := errgroup.WithContext(ctx)
	for _, w := range ways {
		group.Go(func() error { return copyFrames(ctx, w[0], w[1], c.Log) })
	}
	if c.Ready != nil {
		group.Go(c.Ready)
	}
	group.Go(func() error {
		<-ctx.Done()
		for _, w := range ways {
			w[0].end()
		}
		return nil
	})
	err = group.Wait()
	for _, w := range ways {
		w[0].tell(c.Log)
	}
	return err
}

// port is a packet socket at an interface.
type port struct {
	name string
	file *os.File

	in, out, tooLong, unsent, unsummed atomic.Uint64 // frames
}

func open(name string) (_ *port, err error) {
	i, err := net.InterfaceByName(name)
	if err != nil {
		return nil, fmt.Errorf("open interface %s: %w", name, err)
	}
	// Without a protocol: it receives nothing before it is bound.
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("open interface %s: %w", name, err)
	}
	p := &port{name: name, file: os.NewFile(uintptr(fd), name)}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("open interface %s: %w", name, err), p.close())
		}
	}()
	for _, o := range []struct{ level, option, value int }{
		{unix.SOL_PACKET, unix.PACKET_IGNORE_OUTGOING, 1}, // its own frames among them
		{unix.SOL_PACKET, unix.PACKET_AUXDATA, 1},
		{unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, queueLen},
	} {
		if err := unix.SetsockoptInt(fd, o.level, o.option, o.value); err != nil {
			return nil, err
		}
	}
	// Frames are addressed to whoever is behind.
	all := unix.PacketMreq{Ifindex: int32(i.Index), Type: unix.PACKET_MR_PROMISC}
	if err := unix.SetsockoptPacketMreq(fd, unix.SOL_PACKET, unix.PACKET_ADD_MEMBERSHIP, &all); err != nil {
		return nil, err
	}
	every := binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, unix.ETH_P_ALL))
	return p, unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: every, Ifindex: i.Index})
}

// end makes reading from and writing to the port return.
func (p *port) end() { p.file.Close() }

func (p *port) close() error {
	if err := p.file.Close(); !errors.Is(err, os.ErrClosed) {
		return err
	}
	return nil
}

// tell says what has come by the port.
func (p *port) tell(log *slog.Logger) {
	log.Info("frames", "interface", p.name, "in", p.in.Load(), "out", p.out.Load(),
		"too_long", p.tooLong.Load(), "unsent", p.unsent.Load(), "without_checksum", p.unsummed.Load())
}

// copyFrames puts out by one port what comes in by another.
func copyFrames(ctx context.Context, in, out *port, log *slog.Logger) error {
	from, err := in.file.SyscallConn()
	if err != nil {
		return err
	}
	to, err := out.file.SyscallConn()
	if err != nil {
		return err
	}
	buf := make([]byte, vlanLen+frameMax)
	control := make([]byte, unix.CmsgSpace(auxdataLen))
	for {
		var n, controlLen, flags int
		var failed error
		err := from.Read(func(fd uintptr) bool {
			n, controlLen, flags, _, failed = unix.Recvmsg(int(fd), buf[vlanLen:], control, unix.MSG_DONTWAIT)
			return !errors.Is(failed, unix.EAGAIN)
		})
		switch {
		case err != nil && ctx.Err() != nil:
			return nil
		case err != nil:
			return fmt.Errorf("read from %s: %w", in.name, err)
		case errors.Is(failed, unix.EINTR), errors.Is(failed, unix.ENETDOWN): // for now
			continue
		case failed != nil:
			return fmt.Errorf("read from %s: %w", in.name, failed)
		}
		in.in.Add(1)
		if flags&unix.MSG_TRUNC != 0 {
			in.tooLong.Add(1)
			continue
		}
		aux := auxdataOf(control[:controlLen])
		if aux.status&unix.TP_STATUS_CSUMNOTREADY != 0 && in.unsummed.Add(1) == 1 {
			log.Warn("frames come without checksums, which nobody will accept behind here; try: ethtool -K IF tx off at the other end", "interface", in.name)
		}
		frame := aux.tagged(buf, n)
		err = to.Write(func(fd uintptr) bool {
			_, failed = unix.SendmsgN(int(fd), frame, nil, nil, unix.MSG_DONTWAIT)
			return !errors.Is(failed, unix.EAGAIN)
		})
		switch {
		case err != nil && ctx.Err() != nil:
			return nil
		case err != nil:
			return fmt.Errorf("write to %s: %w", out.name, err)
		case failed != nil: // longer than the MTU, a full queue, an interface that is down
			if out.unsent.Add(1) == 1 {
				log.Warn("a frame cannot be put out", "interface", out.name, "bytes", len(frame), "err", failed)
			}
		default:
			out.out.Add(1)
		}
	}
}

// auxdata is what of a frame is not in its bytes: struct tpacket_auxdata of
// <linux/if_packet.h>.
type auxdata struct {
	status    uint32
	tci, tpid uint16 // of a VLAN tag that the kernel took out
}

const auxdataLen = 20

func auxdataOf(control []byte) auxdata {
	h, b, _, err := unix.ParseOneSocketControlMessage(control)
	if err != nil || h.Level != unix.SOL_PACKET || h.Type != unix.PACKET_AUXDATA || len(b) < auxdataLen {
		return auxdata{}
	}
	return auxdata{
		status: binary.NativeEndian.Uint32(b),
		tci:    binary.NativeEndian.Uint16(b[16:]),
		tpid:   binary.NativeEndian.Uint16(b[18:]),
	}
}

// tagged returns the frame of n bytes at buf[vlanLen:] as it was on the wire.
func (a auxdata) tagged(buf []byte, n int) []byte {
	const addresses = 12 // two MAC addresses
	if a.status&unix.TP_STATUS_VLAN_VALID == 0 || n < addresses {
		return buf[vlanLen : vlanLen+n]
	}
	copy(buf, buf[vlanLen:vlanLen+addresses])
	binary.BigEndian.PutUint16(buf[addresses:], a.tpid)
	binary.BigEndian.PutUint16(buf[addresses+2:], a.tci)
	return buf[:vlanLen+n]
}
