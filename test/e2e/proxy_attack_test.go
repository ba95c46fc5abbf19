package e2e

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/lab"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/srv6"
)

// What a function does to packets, or somebody in its place, and what becomes of
// them. The world is that of TestTCPThroughAFunctionLosesNoStamp.

// oneWay leaves answers to ordinary routing.
func oneWay(text string) string {
	return strings.Replace(text, "direction: both", "direction: forward", 1)
}

// counts waits for what the proxy of fn has counted in all.
func (w *world) counts(want api.Function) {
	w.t.Helper()
	want.Function = "fn"
	eventually(w.t, func() error {
		f, err := w.function("r2", "fn")
		if err != nil {
			return err
		}
		// What it is; neighbour discovery; how long packets took; what may still
		// expire.
		f.Local, f.Recognise, f.Cache, f.TxIgnored, f.WaitedNs, f.InFlight = false, "", 0, 0, 0, nil
		if d := cmp.Diff(want, f); d != "" {
			return fmt.Errorf("counters of fn (-want +got):\n%s", d)
		}
		return nil
	})
}

// udp opens a socket in a namespace.
func (w *world) udp(host, network, address string) *net.UDPConn {
	w.t.Helper()
	var c net.PacketConn
	must(w.t, w.Do(host, func() (err error) {
		c, err = new(net.ListenConfig).ListenPacket(w.t.Context(), network, address)
		return err
	}))
	w.t.Cleanup(func() { c.Close() })
	return c.(*net.UDPConn)
}

// datagrams sends datagrams from h1 to a port of h2, and gives what reads them.
func (w *world) datagrams() (send func(payloads ...[]byte), receive func() []byte) {
	w.t.Helper()
	to := w.udp("h2", "udp", netip.AddrPortFrom(w.addr("h2"), 9).String())
	raw, err := to.SyscallConn()
	must(w.t, err)
	// More than the kernel gives to those who are not root.
	must(w.t, raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 16<<20) }))
	must(w.t, err)
	from := w.udp("h1", "udp", netip.AddrPortFrom(w.addr("h1"), 9).String())
	send = func(payloads ...[]byte) {
		w.t.Helper()
		for _, p := range payloads {
			_, err := from.WriteToUDPAddrPort(p, netip.AddrPortFrom(w.addr("h2"), 9))
			must(w.t, err)
		}
	}
	receive = func() []byte {
		w.t.Helper()
		b := make([]byte, 1<<16)
		must(w.t, to.SetReadDeadline(time.Now().Add(settleTime)))
		n, err := to.Read(b)
		must(w.t, err)
		return b[:n]
	}
	return send, receive
}

// hold makes fn, a program, take nothing while f runs; what is sent to it waits.
func (w *world) hold(f func()) {
	w.t.Helper()
	m, err := w.Member("fn")
	must(w.t, err)
	must(w.t, unix.Kill(m.Program.PID, unix.SIGSTOP))
	defer unix.Kill(m.Program.PID, unix.SIGCONT)
	// The signal reaches one thread after the other.
	eventually(w.t, func() error {
		threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", m.Program.PID))
		must(w.t, err)
		for _, file := range threads {
			b, err := os.ReadFile(file)
			if err != nil {
				return err
			}
			if _, state, _ := strings.Cut(string(b), ") "); !strings.HasPrefix(state, "T") {
				return fmt.Errorf("%s: %.1s, want T", file, state)
			}
		}
		return nil
	})
	f()
}

// waitingIn waits until n packets are in fn.
func (w *world) waitingIn(n uint64) {
	w.t.Helper()
	eventually(w.t, func() error {
		f, err := w.function("r2", "fn")
		if err == nil && f.RxSuccess-f.TxSuccess != n {
			err = fmt.Errorf("%d went in, %d came out; want %d in it", f.RxSuccess, f.TxSuccess, n)
		}
		return err
	})
}

// Byte-identical packets are interchangeable; they get their headers in the
// order in which they came.
func TestByteIdenticalPacketsKeepTheirOrder(t *testing.T) {
	t.Parallel()
	w := build(t, withFunction(inLine+", lifetime: 60s", copies))
	web := w.path("web", model.Forward)
	before, behind := w.capture("r2", "r2-r1"), w.capture("r6", "r6-r2")
	send, receive := w.datagrams()
	const n = 20
	w.hold(func() {
		for range n {
			send([]byte("again"), []byte("once more"))
		}
		w.waitingIn(2 * n)
	})
	for range 2 * n {
		receive()
	}
	w.counts(api.Function{RxSuccess: 2 * n, TxSuccess: 2 * n, RxCopies: 2 * (n - 1)})
	numbers := func(c *capture) (out []uint64) {
		for _, p := range c.proofs(web.Path) {
			out = append(out, p.RND)
		}
		return out
	}
	eventually(t, func() error {
		if a, b := numbers(before), numbers(behind); len(a) != 2*n || !slices.Equal(a, b) {
			return fmt.Errorf("numbers before fn %x, behind it %x", a, b)
		}
		return nil
	})
}

// A cache that is too small loses headers; their packets are refused, and no
// packet gets another's.
func TestAnEvictedHeaderIsAPacketRefused(t *testing.T) {
	t.Parallel()
	w := build(t, withFunction(inLine+", lifetime: 60s, cache: {size: 1000}", copies))
	web := w.path("web", model.Forward)
	send, receive := w.datagrams()
	const n = 6000
	payload := func(i int) []byte { return binary.BigEndian.AppendUint32(nil, uint32(i)) }
	w.hold(func() {
		for i := range n {
			send(payload(i))
			if i%500 == 499 { // no queue on the way is longer
				w.waitingIn(uint64(i + 1))
			}
		}
	})
	var f api.Function
	eventually(t, func() (err error) {
		if f, err = w.function("r2", "fn"); err == nil && f.TxSuccess+f.TxNotCached != n {
			err = fmt.Errorf("%+v", f)
		}
		return err
	})
	if f.TxNotCached < n/4 || f.TxSuccess < 1000 || f.Evicted != f.TxNotCached {
		t.Errorf("%+v; want 1000 headers to be kept at least, and the others to be counted", f)
	}
	t.Logf("%d headers were kept, %d lost", f.TxSuccess, f.TxNotCached)
	w.refused("r2", "not-cached", f.TxNotCached)
	// Each of the others arrived once.
	seen := map[uint32]bool{}
	for range f.TxSuccess {
		seen[binary.BigEndian.Uint32(receive())] = true
	}
	if len(seen) != int(f.TxSuccess) {
		t.Errorf("%d different packets arrived, %d have their header", len(seen), f.TxSuccess)
	}
	for i, hop := range mustFrames(w, web) {
		if want := []uint64{n, f.TxSuccess, f.TxSuccess}[i]; hop.Frames != want {
			t.Errorf("position %d: %d frames, want %d", i, hop.Frames, want)
		}
	}
}

func mustFrames(w *world, p plan.Path) []api.Path {
	w.t.Helper()
	f, err := w.frames(p)
	must(w.t, err)
	return f
}

// A NAT rewrites what recognition by content looks at.
func TestAFunctionThatRewritesTheTuple(t *testing.T) {
	t.Parallel()
	const translates = `kind: nftables
ruleset: |
  table ip6 nat {
    chain postrouting {
      type nat hook postrouting priority srcnat; policy accept;
      ip6 saddr fc00:7::/64 ip6 daddr fc00:8::/64 snat to fc00:33::1
    }
  }`
	t.Run("is refused by content", func(t *testing.T) {
		w := build(t, withFunction(routing, translates))
		w.isCutOff("h1", "h2", probes)
		w.refused("r2", "not-cached", probes)
		w.counts(api.Function{RxSuccess: probes, TxNotCached: probes})
	})
	t.Run("works by metadata", func(t *testing.T) {
		w := build(t, withFunction(routing+", recognise: metadata, rewrites: true", translates))
		h2 := w.capture("h2", "h2-r6")
		w.reaches("h1", "h2")
		w.download("h2", "h1", 1_000_000)
		w.passed("r2", "fn")
		seen := map[netip.Addr]int{}
		for _, p := range h2.soFar() {
			seen[p.Header.Source]++
		}
		if seen[natted] == 0 || seen[w.addr("h1")] != 0 {
			t.Errorf("h2 got packets from %v", seen)
		}
	})
	t.Run("is refused before it is built, where it says so", func(t *testing.T) {
		file := write(t, "nat.yaml", withFunction(routing+", rewrites: true", translates))
		r := run(t, "plan", "-f", file)
		if r.code != 2 || !strings.Contains(r.stderr, "cannot be combined with recognise: content") || !strings.Contains(r.stderr, "^") {
			t.Errorf("%s\nwant exit code 2, and where and why", r)
		}
	})
}

// The same of IPv4 (NAT44): h2 knows nobody but the NAT, and answers come back
// through it.
func TestAFunctionThatRewritesTheTupleOfIPv4(t *testing.T) {
	t.Parallel()
	const translates = `kind: nftables
ruleset: |
  table ip nat {
    chain postrouting {
      type nat hook postrouting priority srcnat; policy accept;
      ip saddr 10.0.1.0/24 ip daddr 10.0.2.0/24 snat to 203.0.113.33
    }
  }`
	for _, c := range []struct {
		name, function string
		carried        change
	}{
		{"behind interfaces, by metadata", routing + ", recognise: metadata, rewrites: true", overSRv6},
		{"in the node's own kernel", local + ", rewrites: true", overSRv6},
		{"behind interfaces, by metadata, over labels", routing + ", recognise: metadata, rewrites: true", overLabels},
		{"in the node's own kernel, over labels", local + ", rewrites: true", overLabels},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := build(t, withFunction(c.function, translates), inIPv4, c.carried)
			w.ipv4 = true
			w.reaches("h1", "h2")
			w.download("h2", "h1", 1_000_000)
			w.passed("r2", "fn")

			to := w.udp("h2", "udp4", netip.AddrPortFrom(w.addr("h2"), 9).String())
			from := w.udp("h1", "udp4", netip.AddrPortFrom(w.addr("h1"), 9).String())
			_, err := from.WriteToUDPAddrPort([]byte("who am I?"), netip.AddrPortFrom(w.addr("h2"), 9))
			must(t, err)
			must(t, to.SetReadDeadline(time.Now().Add(settleTime)))
			b := make([]byte, 64)
			n, seen, err := to.ReadFromUDPAddrPort(b)
			must(t, err)
			if got := seen.Addr().Unmap(); got != netip.MustParseAddr("203.0.113.33") || string(b[:n]) != "who am I?" {
				t.Errorf("h2 got %q from %s", b[:n], got)
			}
			_, err = to.WriteToUDPAddrPort([]byte("you"), seen)
			must(t, err)
			must(t, from.SetReadDeadline(time.Now().Add(settleTime)))
			if n, at, err := from.ReadFromUDPAddrPort(b); err != nil || at.Addr().Unmap() != w.addr("h2") || string(b[:n]) != "you" {
				t.Errorf("h1 got %q from %s, %v", b[:n], at, err)
			}
			f := w.passed("r2", "fn")
			if f.RxSuccess < 12 {
				t.Errorf("%+v", f)
			}
		})
	}
}

// What a function drops is gone, and nothing else is.
func TestAFunctionMayDrop(t *testing.T) {
	t.Parallel()
	w := build(t, withFunction(routing+", lifetime: 3s", `kind: nftables
ruleset: |
  table ip6 fw {
    chain forward {
      type filter hook forward priority filter; policy accept;
      icmpv6 type echo-request icmpv6 sequence { 3, 5, 17 } drop
    }
  }`))
	// Not told by the answers: nobody knows when the last has come.
	w.ping("h1", "h2", lab.PingConfig{Count: 20, Timeout: lostTime})
	w.counts(api.Function{RxSuccess: 37, TxSuccess: 34})
	eventually(t, func() error {
		if got := w.snmp("h1", "Icmp6InEchoReplies"); got != 17 {
			return fmt.Errorf("%d of 20 echo requests were answered, want 17", got)
		}
		return nil
	})
	// Their headers are not kept for ever.
	eventually(t, func() error {
		f, err := w.function("r2", "fn")
		if err == nil && *f.InFlight != 0 {
			err = fmt.Errorf("%d headers are still kept", *f.InFlight)
		}
		return err
	})
}

// Each fragment has a header of its own. A function that puts them together and
// cuts them anew makes other packets of them.
func TestFragmentsThroughAFunction(t *testing.T) {
	t.Parallel()
	big := bytes.Repeat([]byte("0123456789abcdef"), 250) // three fragments
	for _, c := range []struct{ name, function, made string }{
		{"routed", routing, forwards}, {"copied", inLine, copies}, {"by metadata", routing + ", recognise: metadata", forwards},
	} {
		pass := func(name string, changes ...change) {
			t.Run(name, func(t *testing.T) {
				w := build(t, withFunction(c.function, c.made), changes...)
				w.ipv4 = w.manifest.Domain.Chains[0].Match.Destination.Addr().Is4()
				send, receive := w.datagrams()
				for range 5 {
					send(big)
					if got := receive(); !bytes.Equal(got, big) {
						t.Errorf("%d bytes arrived, %d were sent", len(got), len(big))
					}
				}
				w.counts(api.Function{RxSuccess: 15, TxSuccess: 15})
			})
		}
		pass(c.name)
		pass(c.name+", IPv4", inIPv4)
		pass(c.name+", over labels", overLabels)
		pass(c.name+", IPv4, over labels", inIPv4, overLabels)
	}
	t.Run("reassembled by connection tracking", func(t *testing.T) {
		w := build(t, withFunction(routing, filters))
		send, receive := w.datagrams()
		send(big, []byte("the end"))
		if got := receive(); string(got) != "the end" {
			t.Errorf("%d bytes arrived", len(got))
		}
		// The last fragment may have gone by another CPU.
		var f api.Function
		eventually(t, func() (err error) {
			if f, err = w.function("r2", "fn"); err == nil && (f.RxSuccess != 4 || f.TxSuccess != 1 || f.TxNotCached == 0) {
				err = fmt.Errorf("%+v", f)
			}
			return err
		})
		w.refused("r2", "not-cached", f.TxNotCached)
	})
}

// A firewall that rejects instead of dropping makes packets of its own: a RST in
// the server's name, ICMP errors in its own.
const rejects = `kind: nftables
ruleset: |
  table ip6 fw {
    chain forward {
      type filter hook forward priority filter; policy accept;
      tcp dport 22 reject with tcp reset
      udp dport 22 reject with icmpv6 type admin-prohibited
    }
  }`

// knock tries port 22 of h2 from h1, and returns what the kernel says of it.
func (w *world) knock(network string, limit time.Duration) error {
	w.t.Helper()
	var c net.Conn
	err := w.Do("h1", func() (err error) {
		c, err = (&net.Dialer{Timeout: limit}).DialContext(soon(w.t), network, netip.AddrPortFrom(w.addr("h2"), 22).String())
		return err
	})
	if err != nil {
		return err
	}
	defer c.Close()
	if _, err := c.Write([]byte("anybody there?")); err != nil {
		return err
	}
	must(w.t, c.SetReadDeadline(time.Now().Add(limit)))
	_, err = c.Read(make([]byte, 1))
	return err
}

// unheard checks that nobody answers at port 22.
func (w *world) unheard(network string) {
	w.t.Helper()
	var ne net.Error
	if err := w.knock(network, lostTime); !errors.As(err, &ne) || !ne.Timeout() {
		w.t.Errorf("%s: %v; want no answer", network, err)
	}
}

func TestWhatAFunctionMakesItself(t *testing.T) {
	t.Parallel()
	t.Run("is refused", func(t *testing.T) {
		w := build(t, withFunction(routing, rejects))
		for network, from := range map[string]string{"tcp": "fc00:8::2", "udp": "fd00:6::2"} {
			since := time.Now()
			w.unheard(network)
			w.refused("r2", "not-cached", 1)
			w.explained(w.event(since, "r2", "not-cached"), "a packet from "+from+" to fc00:7::2 was refused: a function sent a packet, and no header is kept for it")
		}
		w.counts(api.Function{RxSuccess: 2, TxNotCached: 2})
	})
	t.Run("goes plain where the operator says so", func(t *testing.T) {
		w := build(t, oneWay(withFunction(routing+", on-unknown: plain", rejects)))
		for network, want := range map[string]error{"tcp": unix.ECONNREFUSED, "udp": unix.EACCES} {
			if err := w.knock(network, patience); !errors.Is(err, want) {
				t.Errorf("%s: %v, want %v", network, err, want)
			}
		}
		w.counts(api.Function{RxSuccess: 2, TxNotCached: 2, TxPlain: 2})
	})
	t.Run("does not go past a guard", func(t *testing.T) {
		w := build(t, withFunction(routing+", on-unknown: plain", rejects))
		w.unheard("tcp")
		// A RST in h2's name, whose packets are in the chain's other direction.
		w.refused("r1", "unproven", 1)
		w.counts(api.Function{RxSuccess: 1, TxNotCached: 1, TxPlain: 1})
	})
}

// Whoever sits where the function is can send what he likes; nothing gets a
// header that is not its own.
func TestSpoofedPacketsOnTheReturnInterface(t *testing.T) {
	t.Parallel()
	w := build(t, withFunction(inLine, copies))
	web := w.path("web", model.Forward)
	returned := w.capture("r2", "fn-from")
	send, receive := w.datagrams()
	send([]byte("sent by h1"))
	receive()
	w.counts(api.Function{RxSuccess: 1, TxSuccess: 1})

	inner := func(payload string) srv6.Packet {
		return srv6.Packet{
			Header:  srv6.Header{NextHeader: unix.IPPROTO_UDP, HopLimit: 63, Source: w.addr("h1"), Destination: w.addr("h2")},
			Payload: append([]byte{0, 9, 0, 9, 0, byte(8 + len(payload)), 1, 1}, payload...),
		}
	}
	copied := func() srv6.Packet {
		for _, p := range returned.soFar() {
			if p.Header.Source == w.addr("h1") {
				return p
			}
		}
		t.Fatal("nothing of h1's came back")
		panic("unreachable")
	}()
	segments := web.Segments()
	encapsulated := inner("")
	encapsulated.Header.Destination, encapsulated.Header.NextHeader = segments[len(segments)-1], unix.IPPROTO_ROUTING
	encapsulated.SRH = &srv6.SRH{
		NextHeader: srv6.NextHeaderIPv6, Segments: []netip.Addr{segments[1], segments[0]},
		TLVs: []srv6.TLV{srv6.Proof{Scheme: web.Scheme, Epoch: web.Epoch, Path: web.Path, RND: 1, CML: 2}.TLV()},
	}
	in := inner("x")
	in.Header.PayloadLength = uint16(len(in.Payload))
	var err error
	encapsulated.Payload, err = in.Append(nil)
	must(t, err)

	spoof := map[string]func(*testing.T, srv6.Packet){}
	for _, name := range []string{"fn-from", "fn-to"} {
		p := openPort(t, w.ns("fn"), name, unix.ETH_P_ALL)
		l, err := w.net("r2").Link(name)
		must(t, err)
		spoof[name] = func(t *testing.T, spoofed srv6.Packet) {
			t.Helper()
			spoofed.Ethernet = &srv6.Ethernet{Destination: l.MAC, Source: p.MAC, Type: srv6.EtherTypeIPv6}
			must(t, sendBy(p, spoofed))
		}
		for what, spoofed := range map[string]srv6.Packet{
			"in h1's name":                   inner("not sent by h1"),
			"a copy of one that came back":   copied,
			"one that brings its own header": encapsulated,
		} {
			t.Run(what+", by "+name, func(t *testing.T) {
				spoof[name](t, spoofed)
				w.in(t).refused("r2", "not-cached", 1)
			})
		}
	}
	w.counts(api.Function{RxSuccess: 1, TxSuccess: 1, TxNotCached: 6})
	// Nor does a spoofed packet take the header of one that is in the function.
	w.hold(func() {
		send([]byte("the real one"))
		w.waitingIn(1)
		spoof["fn-from"](t, inner("a false one!"))
		w.refused("r2", "not-cached", 1)
	})
	if got := receive(); string(got) != "the real one" {
		t.Errorf("h2 got %q", got)
	}
}

// Whatever the outer header carries, foreign TLVs and padding too, comes back
// behind the function as it was, but for the advance and the stamp.
func TestForeignTLVsComeBackByteForByte(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ name, function string }{
		{"by content", routing}, {"by metadata", routing + ", recognise: metadata"}, {"own kernel", local},
	} {
		t.Run(c.name, func(t *testing.T) {
			made := forwards
			if c.function == local {
				made = filters
			}
			text := withFunction(c.function, made)
			// x is between r1 and r2, and adds what the headend does not know.
			text = strings.NewReplacer("name: r1-r2", "name: r1-x", "name: r2-r1", "name: r2-x", "    - {between: [r1, r2]}\n",
				"    - {between: [r1, x]}\n    - {between: [x, r2]}\n", "  hosts:\n", "  routers: [{name: x, address: \"fc00:9::1\"}]\n  hosts:\n").Replace(text)
			w := build(t, text)
			behind := w.capture("r6", "r6-r2")
			var mu sync.Mutex
			var sent []srv6.Packet
			w.meddle("x").with(func(from string, p srv6.Packet) []srv6.Packet {
				if v, ok := p.Proof(); !ok || from != "r1" || v.Path != w.path("web", model.Forward).Path {
					return []srv6.Packet{p}
				}
				srh := *p.SRH
				srh.TLVs = slices.Concat(
					[]srv6.TLV{{Type: 4, Value: make([]byte, 2)}, {Type: 200, Value: []byte("ab")}}, // PadN, unknown
					p.SRH.TLVs,
					[]srv6.TLV{{Type: 100, Value: []byte("immutable")}, {}, {Type: 4, Value: make([]byte, 2)}}) // unknown, Pad1, PadN
				p.SRH = &srh
				mu.Lock()
				sent = append(sent, p)
				mu.Unlock()
				return []srv6.Packet{p}
			}, func() { w.reaches("h1", "h2") })
			w.counts(api.Function{RxSuccess: 10, TxSuccess: 10})

			mu.Lock()
			defer mu.Unlock()
			got := map[uint64]srv6.Packet{}
			for _, p := range behind.soFar() {
				if v, ok := p.Proof(); ok {
					got[v.RND] = p
				}
			}
			if len(sent) != 5 {
				t.Fatalf("%d packets were given more TLVs, want 5", len(sent))
			}
			for _, p := range sent {
				v, _ := p.Proof()
				back, ok := got[v.RND]
				if !ok {
					t.Errorf("the packet with number %#x has not come to r6", v.RND)
					continue
				}
				stamped, _ := back.Proof()
				want := p.WithProof(func(v *srv6.Proof) { v.CML = stamped.CML })
				srh := *want.SRH
				srh.SegmentsLeft--
				want.SRH, want.Header.Destination = &srh, srh.Segments[srh.SegmentsLeft]
				want.Header.HopLimit--
				if err := want.Fix(); err != nil {
					t.Fatal(err)
				}
				if d := cmp.Diff(headers(t, want), headers(t, back)); d != "" {
					t.Errorf("the outer header behind fn (-want +got):\n%s", d)
				}
				if stamped.CML == v.CML {
					t.Error("fn was not stamped")
				}
			}
		})
	}
}

// headers are the bytes of the outer header.
func headers(t *testing.T, p srv6.Packet) string {
	t.Helper()
	p.Ethernet, p.Payload = nil, nil
	b, err := p.Append(nil)
	must(t, err)
	return fmt.Sprintf("%x", b)
}
