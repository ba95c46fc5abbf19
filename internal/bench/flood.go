package bench

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/bench/meter"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/lab"
	"github.com/waystamp/waystamp/internal/srv6"
)

// floodKind is what goes through a function one by one.
type floodKind uint8

const (
	floodNone floodKind = iota // TCP instead
	floodPackets
	floodSupers
)

// flood is a load of single packets, and what is measured of it.
type flood struct {
	what    floodKind
	program string // by its own time, at the function's node; "": the whole way
}

func (f flood) unit() string {
	switch {
	case f.program != "":
		return "ns/run"
	case f.what == floodSupers:
		return "ns/super-packet"
	}
	return "ns/packet"
}

const (
	floodPayload = 1428 // bytes of each frame, where links take as much
	floodFrames  = 44   // of a super-packet
	floodBurst   = 20 * time.Millisecond
	floodBursts  = 15 // of a run at most; a real-time task must leave others their share
	floodRest    = 10 * time.Millisecond

	virtioLen        = 10 // struct virtio_net_hdr
	virtioNeedsSum   = 1
	virtioTCPv6      = 4
	floodOptions     = 12
	floodTCP         = srv6.EthernetLen + srv6.IPv6Len
	floodHeaders     = floodTCP + 20 + floodOptions
	floodTCPSum      = 16
	floodTCPSequence = 4
)

// interfaceOf names an interface of a lab.
type interfaceOf struct{ member, link string }

func (i interfaceOf) net(l *lab.Lab, f func(*host.Net) error) error { return onMember(l, i.member, f) }

// onMember does something to a member's network.
func onMember(l *lab.Lab, name string, f func(*host.Net) error) error {
	n, err := l.Net(name)
	if err != nil {
		return err
	}
	defer n.Close()
	return f(n)
}

// floodWay is where packets go.
type floodWay struct {
	flood
	lab        *lab.Lab
	payload    int         // bytes of each frame
	cut        bool        // super-packets are, on the way
	finished   bool        // checksums are computed by the sender
	source, to netip.Addr  // to: nobody's, behind the last router
	out, first interfaceOf // of the sender and of the first router
	last, sink interfaceOf // of the last router and of the host behind it
	function   string      // member with the program whose time is taken
}

// flooder writes packets to a socket at the sender.
type flooder struct {
	floodWay
	cpu, fd  int
	frame    []byte // with a struct virtio_net_hdr before it
	sequence uint32
	programs *meter.Programs
}

func newFlooder(w floodWay, cpu int) (_ *flooder, err error) {
	f := &flooder{floodWay: w, cpu: cpu, fd: -1}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("make ready for a load of single packets: %w", err), f.close())
		}
	}()
	var sink, next [6]byte
	err = errors.Join(
		w.sink.net(w.lab, func(n *host.Net) (err error) { sink, err = n.HardwareAddress(w.sink.link); return err }),
		w.first.net(w.lab, func(n *host.Net) (err error) { next, err = n.HardwareAddress(w.first.link); return err }),
		w.last.net(w.lab, func(n *host.Net) error { return n.AddNeighbour(w.last.link, w.to, sink) }),
		w.out.net(w.lab, func(n *host.Net) (err error) { f.fd, err = packetSocket(n, w.out.link, 0); return err }),
	)
	if err != nil {
		return nil, err
	}
	if err := unix.SetsockoptInt(f.fd, unix.SOL_PACKET, unix.PACKET_VNET_HDR, 1); err != nil {
		return nil, err
	}
	if name := w.program; name != "" {
		if f.programs, err = meter.OpenPrograms(w.lab.Instance(w.function), name); err != nil {
			return nil, err
		}
	}
	f.frame, err = w.frameTo(next)
	return f, err
}

// frameTo is a packet of TCP for the first router.
func (w floodWay) frameTo(mac [6]byte) ([]byte, error) {
	payload := w.payload
	if w.what == floodSupers {
		payload *= floodFrames
	}
	segment := make([]byte, 20+floodOptions+payload)
	copy(segment, []byte{0, 80, 0, 81, 12: (20 + floodOptions) / 4 << 4, 13: 0x10})
	copy(segment[20:], []byte{1, 1, 8, 10}) // timestamps
	p := srv6.Packet{
		Ethernet: &srv6.Ethernet{Destination: mac, Type: srv6.EtherTypeIPv6},
		Header: srv6.Header{
			NextHeader: 6, HopLimit: 64, PayloadLength: uint16(len(segment)),
			Source: w.source, Destination: w.to,
		},
		Payload: segment,
	}
	head := make([]byte, virtioLen)
	if !w.finished {
		head[0] = virtioNeedsSum
	}
	if w.what == floodSupers {
		head[1] = virtioTCPv6
	}
	for i, v := range []int{floodHeaders, w.payload, floodTCP, floodTCPSum} {
		binary.NativeEndian.PutUint16(head[2+2*i:], uint16(v))
	}
	b, err := p.Append(head)
	if err != nil {
		return nil, err
	}
	// The sum of the pseudo-header, as a sender's stack leaves it, or of all.
	sum := uint32(len(segment)) + 6
	summed := b[virtioLen+srv6.EthernetLen+8 : virtioLen+floodTCP]
	if w.finished {
		summed = b[virtioLen+srv6.EthernetLen+8:]
	}
	for len(summed) > 1 {
		sum += uint32(binary.BigEndian.Uint16(summed))
		summed = summed[2:]
	}
	sum = sum&0xffff + sum>>16
	sum = sum&0xffff + sum>>16
	if w.finished {
		sum ^= 0xffff
	}
	binary.BigEndian.PutUint16(b[virtioLen+floodTCP+floodTCPSum:], uint16(sum))
	return b, nil
}

// run sends for that long at most and returns what a packet took. None may be
// lost.
func (f *flooder) run(ctx context.Context, d time.Duration) (float64, error) {
	arrived, err := f.arrived()
	if err != nil {
		return 0, err
	}
	var before meter.ProgramTime
	if f.programs != nil {
		if before, err = f.programs.Read(); err != nil {
			return 0, err
		}
	}
	var sent uint64
	var spent time.Duration
	for range min(floodBursts, max(1, int(d/(floodBurst+floodRest)))) {
		n, took, err := f.burst()
		if err != nil {
			return 0, err
		}
		sent, spent = sent+n, spent+took
		select {
		case <-ctx.Done():
			return 0, context.Cause(ctx)
		case <-time.After(floodRest):
		}
	}
	want := sent
	if f.cut && f.what == floodSupers {
		want *= floodFrames
	}
	now, err := f.arrived()
	if err != nil {
		return 0, err
	}
	if now-arrived < want {
		return 0, fmt.Errorf("of %d packets %d arrived", want, now-arrived)
	}
	if f.programs == nil {
		return float64(spent.Nanoseconds()) / float64(sent), nil
	}
	after, err := f.programs.Read()
	if err != nil {
		return 0, err
	}
	runs := after.Runs - before.Runs
	if runs < sent {
		return 0, fmt.Errorf("program %s ran %d times for %d packets", f.program, runs, sent)
	}
	return float64((after.Time - before.Time).Nanoseconds()) / float64(runs), nil
}

// burst sends for a short time before all other tasks, on a thread of its own.
func (f *flooder) burst() (sent uint64, took time.Duration, err error) {
	send := func() error {
		start := time.Now()
		for time.Since(start) < floodBurst {
			for range 10 {
				if !f.finished {
					f.sequence += uint32(floodFrames * f.payload)
					binary.BigEndian.PutUint32(f.frame[virtioLen+floodTCP+floodTCPSequence:], f.sequence)
				}
				if _, err := unix.Write(f.fd, f.frame); err != nil {
					return fmt.Errorf("send single packets: %w", err)
				}
				sent++
			}
		}
		took = time.Since(start)
		return nil
	}
	err = f.out.net(f.lab, func(n *host.Net) error {
		return n.NetNS().Do(func() error { return pinned(f.cpu, send) })
	})
	return sent, took, err
}

func (f *flooder) arrived() (packets uint64, err error) {
	err = f.sink.net(f.lab, func(n *host.Net) (err error) { packets, err = n.Received(f.sink.link); return err })
	return packets, err
}

func (f *flooder) close() error {
	var err error
	if f.fd >= 0 {
		err = unix.Close(f.fd)
	}
	if f.programs != nil {
		err = errors.Join(err, f.programs.Close())
	}
	return err
}
