package lab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"os/signal"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/lab/inline"
	"github.com/waystamp/waystamp/internal/model"
)

// fakeProgram is what the test binary does when it is run as the program of a
// function: all that the real one does.
func fakeProgram(args []string) {
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGTERM)
	defer stop()
	// --name NAME TO FROM
	err := inline.Run(ctx, inline.Config{To: args[2], From: args[3], Log: slog.New(slog.NewTextHandler(os.Stderr, nil)),
		Ready: func() error {
			_, err := fmt.Println(`{"ready":true}`)
			return err
		}})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

const dropTelnet = `
table ip6 fw {
  chain forward {
    type filter hook forward priority filter; policy accept;
    tcp dport 23 drop
  }
}
`

// withFunctions is the paper's network with functions that know nothing of
// segment routing:
//
//	r2: fw (nftables), plain (forward; one interface)
//	r3: dpi (raw), tap (raw; one interface), and a ruleset of r3's own
func withFunctions() (model.Domain, model.Lab) {
	d, l := paper()
	unaware := func(name, node string, p model.Proxy) {
		p.Cache, p.Lifetime = 1000, time.Second
		d.Functions = append(d.Functions, model.Function{Name: name, Node: node, Kind: model.KindUnaware, Proxy: p})
	}
	unaware("wall", "r2", model.Proxy{To: "wall-to", From: "wall-from", Via: netip.MustParseAddr("fe80::1")})
	unaware("plain", "r2", model.Proxy{To: "plain0", From: "plain0", Via: netip.MustParseAddr("fd00:6::2")})
	unaware("ids", "r3", model.Proxy{To: "ids-to", From: "ids-from"})
	unaware("tap", "r3", model.Proxy{To: "tap0", From: "tap0"})
	unaware("nat", "r3", model.Proxy{Local: true, Recognise: model.RecogniseMetadata, Segments: model.SegmentsKeep})
	l.Functions = []model.LabFunction{
		{Name: "wall", Kind: model.LabNftables, Ruleset: dropTelnet},
		{Name: "plain", Kind: model.LabForward, MTU: 1600},
		{Name: "ids", Kind: model.LabRaw},
		{Name: "tap", Kind: model.LabRaw},
		{Name: "nat", Kind: model.LabNftables, Ruleset: dropTelnet},
	}
	return d, l
}

// packetTo is a frame with a TCP segment to a port, as a proxy sends it.
func packetTo(to [6]byte, port byte) []byte {
	b := slices.Concat(to[:], make([]byte, 6), []byte{0x86, 0xdd, 0x60, 0, 0, 0, 0, 20, 6, 64})
	b = append(b, h1.AsSlice()...)
	b = append(b, h2.AsSlice()...)
	return append(b, 4, 0, 0, port, 0, 0, 0, 1, 0, 0, 0, 0, 0x50, 2, 0xff, 0xff, 0, 0, 0, 0)
}

// trip sends frames out by an interface of a node and returns what comes in by
// another one, until it is the last one that was sent, apart from the MAC
// addresses and the hop limit.
func trip(t *testing.T, l *Lab, node, to, from string, frames ...[]byte) (got [][]byte) {
	t.Helper()
	n := l.mustNet(t, node)
	open := func(name string) (fd int) {
		link, err := n.Link(name)
		must(t, err)
		must(t, n.NetNS().Do(func() error {
			if fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0); err != nil {
				return err
			}
			v6 := uint16(0xdd86)
			if name == to && from != to {
				v6 = 0
			}
			return errors.Join(
				unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_IGNORE_OUTGOING, 1),
				unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 10}),
				unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: v6, Ifindex: link.Index}))
		}))
		t.Cleanup(func() { unix.Close(fd) })
		return fd
	}
	in, out := open(from), open(to)
	for _, f := range frames {
		_, err := unix.Write(out, f)
		must(t, err)
	}
	last := frames[len(frames)-1][22:]
	for buf := make([]byte, 2000); ; {
		n, err := unix.Read(in, buf)
		must(t, err)
		if n < 74 || !bytes.Equal(buf[22:54], last[:32]) {
			continue // neighbour discovery
		}
		got = append(got, slices.Clone(buf[:n]))
		if bytes.Equal(buf[22:n], last) {
			return got
		}
	}
}

func TestFunctionsAreWhatTheFileSays(t *testing.T) {
	t.Parallel()
	d, world := withFunctions()
	l := upOf(t, Config{Domain: d, Lab: world})
	mac := func(member, name string) [6]byte {
		link, err := l.mustNet(t, member).Link(name)
		must(t, err)
		return link.MAC
	}
	for _, c := range []struct {
		function, node, to, from string
		mtu                      int
		hops                     byte // the hop limit that a packet of 64 comes back with
		want                     int  // of two packets, the first of them to port 23
	}{
		{"wall", "r2", "wall-to", "wall-from", 1700, 63, 1},
		{"plain", "r2", "plain0", "plain0", 1600, 63, 2},
		{"ids", "r3", "ids-to", "ids-from", 1700, 64, 2},
		{"tap", "r3", "tap0", "tap0", 1700, 64, 2},
	} {
		t.Run(c.function, func(t *testing.T) {
			m, err := l.Member(c.function)
			must(t, err)
			if m.Role != RoleFunction || m.Namespace != l.Prefix()+"-"+c.function || (c.hops == 64) != m.Program.Running() {
				t.Errorf("%+v", m)
			}
			// A frame to somebody else, as one that routes would not take.
			to := [6]byte{2, 0, 0, 0, 0, 9}
			if c.hops == 63 {
				to = mac(c.function, c.to)
			}
			got := trip(t, l, c.node, c.to, c.from, packetTo(to, 23), packetTo(to, 80))
			if len(got) != c.want {
				t.Errorf("%d of 2 packets came back, want %d", len(got), c.want)
			}
			for _, f := range got {
				if f[21] != c.hops {
					t.Errorf("a packet came back with hop limit %d, want %d", f[21], c.hops)
				}
				if back := mac(c.node, c.from); c.hops == 63 && !bytes.Equal(f[:6], back[:]) {
					t.Errorf("a packet came back to %x, want the node's own %x", f[:6], back)
				}
			}
			for _, at := range []string{c.node, c.function} {
				for _, name := range []string{c.to, c.from} {
					link, err := l.mustNet(t, at).Link(name)
					must(t, err)
					if link.MTU != c.mtu {
						t.Errorf("%s of %s has MTU %d, want %d", name, at, link.MTU, c.mtu)
					}
				}
			}
			sum, err := l.mustNet(t, c.node).Offload(c.to, host.TransmitSum)
			must(t, err)
			if sum != (c.hops == 63) {
				t.Errorf("checksums are left to %s: %t", c.to, sum)
			}
		})
	}
	// nat is r3 itself.
	if _, err := l.Member("nat"); err == nil {
		t.Error("a local function has a namespace of its own")
	}
	for name, want := range map[string]bool{"r3": true, "r2": false, "wall": true, "plain": false} {
		out, err := l.Run(soon(t), name, "nft", "list", "ruleset")
		must(t, err)
		if got := strings.Contains(string(out), "tcp dport 23 drop"); got != want {
			t.Errorf("rules in %s: %q", name, out)
		}
	}
	// What comes out goes to the node's end, over whatever the function has
	// learned there.
	for at, want := range map[string]string{"wall": "fe80::2", "plain": "fe80::1"} {
		out, err := l.Run(soon(t), at, "cat", "/proc/thread-self/net/ipv6_route")
		must(t, err)
		via := fmt.Sprintf("00 %x ", netip.MustParseAddr(want).As16())
		if !strings.Contains(string(out), strings.Repeat("0", 32)+" 00 "+strings.Repeat("0", 32)+" "+via) {
			t.Errorf("%s has no default route by %s:\n%s", at, want, out)
		}
	}
}

func TestFunctionsGoWithTheirLab(t *testing.T) {
	t.Parallel()
	d, world := withFunctions()
	c := Config{Domain: d, Lab: world, RunDir: t.TempDir()}
	l := upOf(t, c)
	members := l.Members()
	other, err := Open(c.RunDir, l.Prefix(), nil) // as another process would
	must(t, err)
	must(t, other.Down(soon(t)))
	leavesNothing(t, c.RunDir, l.Prefix(), members)
}

// Whoever built was killed between starting a program and writing its number
// down.
func TestDownEndsAProgramWhoseNumberIsNotKnown(t *testing.T) {
	t.Parallel()
	d, world := withFunctions()
	c := Config{Domain: d, Lab: world, RunDir: t.TempDir()}
	l := upOf(t, c)
	members := l.Members()
	must(t, l.updateMember("ids", func(m *Member) { m.Program = &Program{} }))
	must(t, l.Down(soon(t)))
	leavesNothing(t, c.RunDir, l.Prefix(), members)
}

func TestCancelledUpLeavesNothingOfFunctions(t *testing.T) {
	t.Parallel()
	d, world := withFunctions()
	cancelled(t, Config{Domain: d, Lab: world, Binary: self(t)}, 20)
}

func TestAFunctionThatCannotBeMadeLeavesNothing(t *testing.T) {
	for name, c := range map[string]struct {
		edit func(*model.Domain, *model.Lab)
		path string
		want string // one line of the error
	}{
		"a ruleset that is none": {func(_ *model.Domain, l *model.Lab) {
			l.Functions[0].Ruleset = "table ip6 fw {\n  chain forward {\n    tcp dport 23 dorp\n  }\n}\n"
		}, "", "load the ruleset of function wall: nft says: line 3:"},
		"a ruleset that is none, of a node": {func(_ *model.Domain, l *model.Lab) { l.Functions[4].Ruleset = "nonsense" },
			"", "load the ruleset of function nat: nft says: line 1:"},
		"no nft": {nil, "/nowhere", "function wall of the lab is a ruleset: there is no program nft; install the package nftables"},
		"no via": {func(d *model.Domain, _ *model.Lab) { d.Functions[2].Proxy.Via = netip.Addr{} },
			"", "function wall of the lab: it routes"},
		"of another kind": {func(d *model.Domain, _ *model.Lab) { d.Functions[2].Kind = model.KindForward },
			"", "the lab makes function wall, which is not one of kind unaware"},
		"local, and a program": {func(_ *model.Domain, l *model.Lab) { l.Functions[4].Kind = model.LabRaw },
			"", "function nat is local, and raw in the lab"},
		"interfaces that cannot be": {func(d *model.Domain, _ *model.Lab) { d.Functions[4].Proxy.To = "tap0" },
			"", "tap0"},
	} {
		t.Run(name, func(t *testing.T) {
			d, world := withFunctions()
			if c.edit != nil {
				c.edit(&d, &world)
			}
			if c.path != "" {
				t.Setenv("PATH", c.path)
			}
			dir, prefix := t.TempDir(), "wstest-"+randomPart()
			_, err := Up(soon(t), Config{Domain: d, Lab: world, RunDir: dir, Prefix: prefix, WithoutAgents: true, Binary: self(t)})
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %q", err, c.want)
			}
			leavesNothing(t, dir, prefix, nil)
		})
	}
}
