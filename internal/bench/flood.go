package bench

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/dataplane/meter"
	"github.com/waystamp/waystamp/internal/host"
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
	floodPayload = 1428 // bytes of each frame
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

// floodTo is nobody's address behind r3.
var floodTo = netip.MustParseAddr("fc00:8::99")

// flooder writes packets to a socket at h1.
type flooder struct {
	t        *proxyTrack
	cpu, fd  int
	frame    []byte // with a struct virtio_net_hdr before it
	sequence uint32
	programs *meter.Programs
}

func newFlooder(t *proxyTrack, cpu int) (_ *flooder, err error) {
	f := &flooder{t: t, cpu: cpu, fd: -1}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("make ready for a load of single packets: %w", err), f.close())
		}
	}()
	var sink, next [6]byte
	err = errors.Join(
		t.on("h2", func(n *host.Net) (err error) { sink, err = n.HardwareAddress("h2-r3"); return err }),
		t.on("r1", func(n *host.Net) (err error) { next, err = n.HardwareAddress("r1-h1"); return err }),
		t.on("r3", func(n *host.Net) error { return n.AddNeighbour("r3-h2", floodTo, sink) }),
		t.on("h1", func(n *host.Net) (err error) { f.fd, err = packetSocket(n, "h1-r1", 0); return err }),
	)
	if err != nil {
		return nil, err
	}
	if err := unix.SetsockoptInt(f.fd, unix.SOL_PACKET, unix.PACKET_VNET_HDR, 1); err != nil {
		return nil, err
	}
	if name := t.flood.program; name != "" {
		if f.programs, err = meter.OpenPrograms(t.lab.Instance("r2"), name); err != nil {
			return nil, err
		}
	}
	f.frame, err = floodFrame(next, t.flood.what)
	return f, err
}

// floodFrame is a packet of TCP whose checksum is left to devices.
func floodFrame(to [6]byte, what floodKind) ([]byte, error) {
	payload := floodPayload
	if what == floodSupers {
		payload *= floodFrames
	}
	segment := make([]byte, 20+floodOptions+payload)
	copy(segment, []byte{0, 80, 0, 81, 12: (20 + floodOptions) / 4 << 4, 13: 0x10})
	copy(segment[20:], []byte{1, 1, 8, 10}) // timestamps
	p := srv6.Packet{
		Ethernet: &srv6.Ethernet{Destination: to, Type: srv6.EtherTypeIPv6},
		Header: srv6.Header{
			NextHeader: 6, HopLimit: 64, PayloadLength: uint16(len(segment)),
			Source: proxyPrefixes[0][0].Addr().Next().Next(), Destination: floodTo,
		},
		Payload: segment,
	}
	head := make([]byte, virtioLen)
	head[0] = virtioNeedsSum
	if what == floodSupers {
		head[1] = virtioTCPv6
	}
	for i, v := range []int{floodHeaders, floodPayload, floodTCP, floodTCPSum} {
		binary.NativeEndian.PutUint16(head[2+2*i:], uint16(v))
	}
	b, err := p.Append(head)
	if err != nil {
		return nil, err
	}
	// The sum of the pseudo-header, as a sender's stack leaves it.
	sum := uint32(len(segment)) + 6
	for at := virtioLen + srv6.EthernetLen + 8; at < virtioLen+floodTCP; at += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[at:]))
	}
	sum = sum&0xffff + sum>>16
	sum = sum&0xffff + sum>>16
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
	if f.t.cut && f.t.flood.what == floodSupers {
		want *= floodFrames
	}
	now, err := f.arrived()
	if err != nil {
		return 0, err
	}
	if now-arrived < want {
		return 0, fmt.Errorf("of %d packets through a function %d arrived", want, now-arrived)
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
		return 0, fmt.Errorf("program %s ran %d times for %d packets", f.t.flood.program, runs, sent)
	}
	return float64((after.Time - before.Time).Nanoseconds()) / float64(runs), nil
}

// burst sends for a short time before all other tasks, on a thread of its own.
func (f *flooder) burst() (sent uint64, took time.Duration, err error) {
	send := func() error {
		start := time.Now()
		for time.Since(start) < floodBurst {
			for range 10 {
				f.sequence += floodFrames * floodPayload
				binary.BigEndian.PutUint32(f.frame[virtioLen+floodTCP+floodTCPSequence:], f.sequence)
				if _, err := unix.Write(f.fd, f.frame); err != nil {
					return fmt.Errorf("send to a function: %w", err)
				}
				sent++
			}
		}
		took = time.Since(start)
		return nil
	}
	err = f.t.on("h1", func(n *host.Net) error {
		return n.NetNS().Do(func() error { return pinned(f.cpu, send) })
	})
	return sent, took, err
}

func (f *flooder) arrived() (packets uint64, err error) {
	err = f.t.on("h2", func(n *host.Net) (err error) { packets, err = n.Received("h2-r3"); return err })
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
