package lab

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv6"

	"github.com/waystamp/waystamp/internal/host"
)

// wired returns two namespaces, fd00::a and fd00::b, with a link between them.
func wired(t *testing.T) (a, b *host.Net) {
	t.Helper()
	nets := make([]*host.Net, 2)
	for i := range nets {
		ns, err := host.Anonymous()
		must(t, err)
		nets[i], err = host.Open(ns)
		must(t, errors.Join(err, ns.Close()))
		t.Cleanup(func() { nets[i].Close() })
	}
	a, b = nets[0], nets[1]
	must(t, a.AddVeth(host.Veth{Name: "a-b", PeerName: "b-a", Peer: b.NetNS()}))
	must(t, a.AddAddress("a-b", netip.MustParsePrefix("fd00::a/64")))
	must(t, b.AddAddress("b-a", netip.MustParsePrefix("fd00::b/64")))
	must(t, a.SetUp("a-b"))
	must(t, b.SetUp("b-a"))
	must(t, a.WaitUp(soon(t), "a-b"))
	must(t, b.WaitUp(soon(t), "b-a"))
	return a, b
}

func TestPingCountsAnswersAndOnlyThose(t *testing.T) {
	t.Parallel()
	a, b := wired(t)
	there := netip.MustParseAddr("fd00::b")
	r, err := Ping(soon(t), a.NetNS(), there, PingConfig{Count: 20, Interval: time.Millisecond, Timeout: patience, Size: 1000, Source: netip.MustParseAddr("fd00::a")})
	must(t, err)
	if r.Sent != 20 || r.Received != 20 || len(r.RTTs) != 20 {
		t.Errorf("got %+v, want 20 answers", r)
	}
	for _, rtt := range r.RTTs {
		if rtt <= 0 || rtt > patience {
			t.Errorf("round trip of %s", rtt)
		}
	}
	// Two at once do not take each other's answers.
	others := make(chan PingResult, 1)
	go func() {
		r, _ := Ping(context.Background(), a.NetNS(), there, PingConfig{Count: 50, Timeout: patience})
		others <- r
	}()
	r, err = Ping(soon(t), a.NetNS(), there, PingConfig{Count: 50, Timeout: patience})
	must(t, err)
	if other := <-others; r.Received != 50 || other.Received != 50 {
		t.Errorf("two at once: %d and %d answers, want 50 each", r.Received, other.Received)
	}
	// One that does not answer, and sends answers to somebody else's requests.
	must(t, b.SetSysctl("net/ipv6/icmp/echo_ignore_all", "1"))
	forged := make(chan error, 1)
	ctx, cancel := context.WithCancelCause(soon(t))
	go func() { forged <- forgeAnswers(ctx, b.NetNS(), netip.MustParseAddr("fd00::a")) }()
	r, err = Ping(soon(t), a.NetNS(), there, PingConfig{Count: 3, Timeout: 50 * time.Millisecond})
	cancel(nil)
	must(t, errors.Join(err, <-forged))
	if r.Sent != 3 || r.Received != 0 {
		t.Errorf("of one that does not answer: %+v, want 3 sent, none received", r)
	}
	enough := errors.New("enough")
	ctx, cancel = context.WithCancelCause(soon(t))
	time.AfterFunc(10*time.Millisecond, func() { cancel(enough) })
	if _, err := Ping(ctx, a.NetNS(), there, PingConfig{Timeout: patience}); !errors.Is(err, enough) {
		t.Errorf("cancelled: got %v, want %v", err, enough)
	}
	if _, err := Ping(soon(t), a.NetNS(), netip.MustParseAddr("2001:db8::1"), PingConfig{}); err == nil {
		t.Error("without a route: no error")
	}
}

// forgeAnswers sends echo replies with the first identifiers until ctx ends.
func forgeAnswers(ctx context.Context, ns *host.NetNS, to netip.Addr) error {
	var conn *icmp.PacketConn
	err := ns.Do(func() error {
		var err error
		conn, err = icmp.ListenPacket("ip6:ipv6-icmp", "::")
		return err
	})
	if err != nil {
		return err
	}
	defer conn.Close()
	for id := 0; ctx.Err() == nil; id = (id + 1) % 16 {
		for seq := range 3 {
			b, err := (&icmp.Message{Type: ipv6.ICMPTypeEchoReply, Body: &icmp.Echo{ID: id, Seq: seq}}).Marshal(nil)
			if err == nil {
				_, err = conn.WriteTo(b, &net.IPAddr{IP: to.AsSlice()})
			}
			if err != nil {
				return err
			}
		}
	}
	return nil
}

func TestDownloadIsCheckedToTheByte(t *testing.T) {
	t.Parallel()
	a, b := wired(t)
	c := Content{Seed: 7, Size: 5<<20 + 3}
	s, err := Serve(b.NetNS(), netip.MustParseAddrPort("[fd00::b]:0"), c)
	must(t, err)
	defer s.Close()
	got, err := Download(soon(t), a.NetNS(), s.Addr(), c)
	must(t, err)
	if got.Bytes != c.Size || got.SHA256 != c.SHA256() || got.Duration <= 0 {
		t.Errorf("got %+v", got)
	}
	if _, err := Download(soon(t), a.NetNS(), s.Addr(), Content{Seed: 8, Size: c.Size}); err == nil || !strings.Contains(err.Error(), "SHA-256") {
		t.Errorf("of other content: got %v", err)
	}
	if _, err := Download(soon(t), a.NetNS(), s.Addr(), Content{Seed: 7, Size: c.Size + 1}); err == nil {
		t.Error("of more content: no error")
	}
	must(t, s.Close())
	if _, err := Download(soon(t), a.NetNS(), s.Addr(), c); err == nil {
		t.Error("after Close: no error")
	}
}

// The sockets must be the namespace's, not the test's.
func TestServerIsInsideItsNamespace(t *testing.T) {
	t.Parallel()
	_, b := wired(t)
	s, err := Serve(b.NetNS(), netip.MustParseAddrPort("[fd00::b]:0"), Content{Size: 1})
	must(t, err)
	defer s.Close()
	conn, err := (&net.Dialer{Timeout: 50 * time.Millisecond}).Dial("tcp", s.Addr().String())
	if err == nil {
		conn.Close()
		t.Error("the test reaches it from outside")
	}
}

func TestContentFollowsFromItsSeed(t *testing.T) {
	t.Parallel()
	read := func(c Content) string {
		b, err := io.ReadAll(c.Reader())
		must(t, err)
		return string(b)
	}
	a, again, other := read(Content{1, 1000}), read(Content{1, 1000}), read(Content{2, 1000})
	if len(a) != 1000 || a != again || a == other {
		t.Errorf("%d bytes; equal to itself: %t, to another: %t", len(a), a == again, a == other)
	}
	if !strings.HasPrefix(read(Content{1, 2000}), a) {
		t.Error("more of the same does not begin the same")
	}
	if c := (Content{1, 1000}); c.SHA256() != c.SHA256() || c.SHA256() == (Content{2, 1000}).SHA256() {
		t.Error("checksums do not tell contents apart")
	}
}
