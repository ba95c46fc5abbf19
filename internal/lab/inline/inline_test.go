package inline

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/await"
	"github.com/waystamp/waystamp/internal/host"
)

func TestMain(m *testing.M) {
	if err := host.Require(host.FeatureNetAdmin, host.FeatureNamespaces, host.FeatureVeth); err != nil {
		fmt.Fprintln(os.Stderr, "internal/lab/inline:", err)
		os.Exit(1)
	}
	goleak.VerifyTestMain(m)
}

// bench has the program between the interfaces "to" and "from" of a namespace of
// its own, and somebody at the other ends of them.
type bench struct {
	*testing.T
	net  *host.Net
	log  *bytes.Buffer // to be read once stopped
	stop func()
}

func (b *bench) must(err error) {
	b.Helper()
	if err != nil {
		b.Fatal(err)
	}
}

func newBench(t *testing.T, to, from string) *bench {
	b := &bench{T: t, log: &bytes.Buffer{}}
	inside, err := host.Anonymous()
	b.must(err)
	t.Cleanup(func() { inside.Close() })
	outside, err := host.Anonymous()
	b.must(err)
	t.Cleanup(func() { outside.Close() })
	n, err := host.Open(inside)
	b.must(err)
	t.Cleanup(func() { n.Close() })
	b.net, err = host.Open(outside)
	b.must(err)
	t.Cleanup(func() { b.net.Close() })
	for _, net := range []*host.Net{n, b.net} { // nothing of their own
		b.must(net.SetSysctl("net/ipv6/conf/default/disable_ipv6", "1"))
	}
	for _, name := range []string{"to", "from"} {
		b.must(n.AddVeth(host.Veth{Name: name, PeerName: name, Peer: outside}))
		b.must(errors.Join(n.SetUp(name), b.net.SetUp(name)))
	}
	b.must(errors.Join(n.WaitUp(t.Context(), "to", "from"), b.net.WaitUp(t.Context(), "to", "from")))

	ctx, cancel := context.WithCancel(t.Context())
	ready, done := make(chan struct{}), make(chan error, 1)
	c := Config{To: to, From: from, Log: slog.New(slog.NewTextHandler(b.log, nil)), Ready: func() error {
		close(ready)
		return nil
	}}
	// The sockets stay in the namespace that they are opened in.
	go func() {
		done <- inside.Do(func() error { return Run(ctx, c) })
	}()
	ended := false
	b.stop = func() {
		b.Helper()
		if ended {
			return
		}
		ended = true
		cancel()
		if err := <-done; err != nil {
			b.Error(err)
		}
	}
	t.Cleanup(b.stop)
	select {
	case <-ready:
	case err := <-done:
		ended = true
		cancel()
		t.Fatal(err)
	}
	return b
}

// at is a socket at somebody's end of an interface.
func (b *bench) at(name string) int {
	b.Helper()
	l, err := b.net.Link(name)
	b.must(err)
	fd := -1
	b.must(b.net.NetNS().Do(func() error {
		all := uint16(unix.ETH_P_ALL<<8 | unix.ETH_P_ALL>>8)
		if fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0); err != nil {
			return err
		}
		return errors.Join(
			unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_IGNORE_OUTGOING, 1),
			unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_AUXDATA, 1),
			unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 5}),
			unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: l.Index}))
	}))
	b.Cleanup(func() { unix.Close(fd) })
	return fd
}

// next is the next frame that comes in, as it was on the wire.
func (b *bench) next(fd int) []byte {
	b.Helper()
	buf, control := make([]byte, vlanLen+frameMax), make([]byte, 64)
	n, controlLen, _, _, err := unix.Recvmsg(fd, buf[vlanLen:], control, 0)
	b.must(err)
	return auxdataOf(control[:controlLen]).tagged(buf, n)
}

func (b *bench) send(fd int, frames ...[]byte) {
	b.Helper()
	for _, f := range frames {
		_, err := unix.Write(fd, f)
		b.must(err)
	}
}

// frame is one of a length, whose bytes are all its own.
func frame(n int, seed byte) []byte {
	f := make([]byte, n)
	for i := range f {
		f[i] = byte(i)*7 + seed
	}
	f[0] &^= 1 // to one station, which is not this one
	f[12], f[13] = 0x88, 0xb5
	return f
}

func tagged(f []byte) []byte {
	return append(append(append([]byte{}, f[:12]...), 0x81, 0, 0x20, 42), f[12:]...)
}

func TestFramesAreCopiedUnchangedInBothDirections(t *testing.T) {
	b := newBench(t, "to", "from")
	to, from := b.at("to"), b.at("from")
	for _, f := range [][]byte{frame(14, 1), frame(60, 2), tagged(frame(60, 3)), frame(1514, 4), tagged(frame(1514, 5))} {
		for _, way := range [][2]int{{to, from}, {from, to}} {
			b.send(way[0], f)
			if got := b.next(way[1]); !bytes.Equal(got, f) {
				t.Errorf("got\n%x, want\n%x", got, f)
			}
		}
	}
	// In their order.
	for i := range 200 {
		b.send(to, frame(100, byte(i)))
	}
	for i := range 200 {
		if got := b.next(from); !bytes.Equal(got, frame(100, byte(i))) {
			t.Fatalf("frame %d: got %x", i, got)
		}
	}
	b.stop()
	if said := b.log.String(); !strings.Contains(said, "interface=to in=205 out=5 too_long=0 unsent=0 without_checksum=0") {
		t.Error(said)
	}
}

func TestOneInterfaceIsBothSides(t *testing.T) {
	b := newBench(t, "to", "to")
	to := b.at("to")
	b.send(to, frame(60, 1), frame(60, 2))
	for i := range 2 {
		if got := b.next(to); !bytes.Equal(got, frame(60, byte(1+i))) {
			t.Errorf("got %x", got)
		}
	}
	// What it put out itself it does not take in again.
	b.stop()
	if said := b.log.String(); !strings.Contains(said, "interface=to in=2 out=2 ") {
		t.Error(said)
	}
}

func TestAFrameThatCannotBePutOutIsDroppedAndCounted(t *testing.T) {
	b := newBench(t, "to", "from")
	b.must(b.net.SetMTU("to", 9000))
	to, from := b.at("to"), b.at("from")
	b.send(to, frame(1515, 1), frame(60, 2)) // from takes 1514
	if got := b.next(from); !bytes.Equal(got, frame(60, 2)) {
		t.Errorf("got %x", got)
	}
	b.stop()
	if said := b.log.String(); !strings.Contains(said, "interface=from in=0 out=1 too_long=0 unsent=1") || !strings.Contains(said, "a frame cannot be put out") {
		t.Error(said)
	}
}

func TestAnInterfaceThatIsNotThereIsNamed(t *testing.T) {
	for _, c := range []Config{{To: "none", From: "lo"}, {To: "lo", From: "none"}} {
		c.Log = slog.New(slog.DiscardHandler)
		ctx, cancel := context.WithTimeout(t.Context(), await.Limit(time.Minute))
		if err := Run(ctx, c); err == nil || !strings.Contains(err.Error(), "open interface none") {
			t.Errorf("got %v", err)
		}
		cancel()
	}
}
