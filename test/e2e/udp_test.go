package e2e

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
)

// udpTrain sends payload as datagrams of size bytes, handed to the kernel at once
// (UDP_SEGMENT, udp(7)), from a port of its own.
func udpTrain(t *testing.T, ns *host.NetNS, to netip.AddrPort, size int, payload []byte) {
	t.Helper()
	must(t, ns.Do(func() error {
		c, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(to))
		if err != nil {
			return err
		}
		defer c.Close()
		if err := onSocket(c, func(fd int) error { return unix.SetsockoptInt(fd, unix.SOL_UDP, unix.UDP_SEGMENT, size) }); err != nil {
			return fmt.Errorf("UDP_SEGMENT: %w", err)
		}
		_, err = c.Write(payload)
		return err
	}))
}

// Super-packets of UDP are stamped once, whole, and come out as the datagrams that
// were sent, of both versions of IP. Those of more frames than a stamp can count
// are refused.
func TestSuperPacketsOfUDPGoThroughAChain(t *testing.T) {
	t.Parallel()
	for _, v4 := range []bool{false, true} {
		t.Run(map[bool]string{false: "IPv6", true: "IPv4"}[v4], func(t *testing.T) {
			t.Parallel()
			var changes []change
			if v4 {
				changes = append(changes, inIPv4)
			}
			pass := func(t *testing.T, s model.Scheme, carried change) {
				w := borrow(t, narrowing, append(slices.Clone(changes), proven(s), carried)...)
				w.ipv4 = v4
				w.reaches("h1", "h2")
				var conn *net.UDPConn
				must(t, w.ns("h2").Do(func() (err error) {
					conn, err = net.ListenUDP("udp", nil)
					return err
				}))
				defer conn.Close()
				to := netip.AddrPortFrom(w.addr("h2"), conn.LocalAddr().(*net.UDPAddr).AddrPort().Port())
				const size, most = 1000, 63
				for _, c := range []struct{ frames, last int }{{2, size}, {20, size}, {21, 500}, {21, 1}, {most, size}} {
					since := w.counting(w.path("web", model.Forward))
					sent := make([]byte, size*(c.frames-1)+c.last)
					for i := range sent {
						sent[i] = byte(i / size)
					}
					udpTrain(t, w.ns("h1"), to, size, sent)
					var got []byte
					must(t, conn.SetReadDeadline(time.Now().Add(settleTime)))
					for i := range c.frames {
						b := make([]byte, 2*size)
						n, err := conn.Read(b)
						must(t, err)
						if want := min(size, len(sent)-i*size); n != want {
							t.Errorf("datagram %d of %d has %d bytes, want %d", i, c.frames, n, want)
						}
						got = append(got, b[:n]...)
					}
					if !bytes.Equal(got, sent) {
						t.Errorf("%d datagrams came out as others than were sent", c.frames)
					}
					for i, h := range since() {
						packets := uint64(1)
						if w.labelled() { // cut at the headend
							packets = uint64(c.frames)
						}
						if h.Packets != packets || h.Frames != uint64(c.frames) {
							t.Errorf("%d frames: position %d has counted %d packets and %d frames", c.frames, i, h.Packets, h.Frames)
						}
					}
				}
				if w.labelled() {
					return // no stamp counts frames
				}
				udpTrain(t, w.ns("h1"), to, 100, make([]byte, 100*(most+1)))
				w.refused("r1", "train-too-long", 1)
			}
			bothSchemes(t, func(t *testing.T, s model.Scheme) { pass(t, s, overSRv6) })
			t.Run("over labels", func(t *testing.T) {
				t.Parallel()
				pass(t, model.SchemeKeyed, overLabels)
			})
		})
	}
}
