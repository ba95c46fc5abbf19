package e2e

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/model"
)

// A chain that takes what r1 sends itself, and one for what is marked there, from
// whomever it is; the links are of 1700 bytes:
//
//	h1 --- r1 --- r2 (fw) --- r3 (dpi) --- r6 --- h2, h3
var marking = strings.NewReplacer(
	"direction: both", "direction: both\n    own-traffic: true",
	"lab:\n", `  - name: fast
    ingress: [r1]
    functions: [dpi]
    egress: r6
    match: {mark: 0x10/0xff, priority: 10}
lab:
`,
	"{name: r6-h2, role: edge}", "{name: r6-h2, role: edge}, {name: r6-h3, role: edge}",
	"  links:", `    - {name: h3, node: r6, prefix: "fc00:9::/64"}
  links:`,
).Replace(narrowing)

// counts are how many packets have taken web there, web back, and fast, since the
// last call.
type counts func() [3]uint64

func (w *world) countingChains() counts {
	paths := []func() flow{w.counting(w.path("web", model.Forward)), w.counting(w.path("web", model.Reverse)), w.counting(w.path("fast", model.Forward))}
	var before [3]uint64
	return func() (n [3]uint64) {
		for i, p := range paths {
			all := p().frames()
			n[i], before[i] = all-before[i], all
		}
		return n
	}
}

// takes checks which chains have taken packets, and whether others have not.
func (c counts) takes(t *testing.T, what string, web, back, fast bool) {
	t.Helper()
	n := c()
	if (n[0] > 0) != web || (n[1] > 0) != back || (n[2] > 0) != fast {
		t.Errorf("%s: %d packets have taken web, %d have come back, %d have taken fast; want some %t, %t, %t", what, n[0], n[1], n[2], web, back, fast)
	}
}

// shell runs a command in a node's namespace.
func (w *world) shell(node string, args ...string) string {
	w.t.Helper()
	out, err := w.Run(soon(w.t), node, args...)
	if err != nil {
		w.t.Errorf("%s on %s: %v\n%s", strings.Join(args, " "), node, err, out)
	}
	return string(out)
}

// upload sends bytes by TCP, from a socket with that mark, to a port of a host; 0: any.
func (w *world) upload(from, to string, port uint16, mark int, bytes int64) {
	w.t.Helper()
	var l *net.TCPListener
	must(w.t, w.ns(to).Do(func() (err error) {
		l, err = net.ListenTCP("tcp", net.TCPAddrFromAddrPort(netip.AddrPortFrom(w.addr(to), port)))
		return err
	}))
	defer l.Close()
	limit := time.Now().Add(patience)
	must(w.t, l.SetDeadline(limit))
	received := make(chan error, 1)
	go func() {
		c, err := l.Accept()
		if err != nil {
			received <- err
			return
		}
		defer c.Close()
		if err := c.SetDeadline(limit); err != nil {
			received <- err
			return
		}
		n, err := io.Copy(io.Discard, c)
		if err == nil && n != bytes {
			err = fmt.Errorf("%d bytes of %d came", n, bytes)
		}
		received <- err
	}()
	d := net.Dialer{Control: func(_, _ string, raw syscall.RawConn) (err error) {
		return errors.Join(raw.Control(func(fd uintptr) {
			err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK, mark)
		}), err)
	}}
	var c net.Conn
	must(w.t, w.ns(from).Do(func() (err error) {
		c, err = d.DialContext(soon(w.t), "tcp", l.Addr().String())
		return err
	}))
	must(w.t, c.SetDeadline(limit))
	sent, err := io.CopyN(c, zeros{}, bytes)
	if err := errors.Join(err, c.Close()); err != nil {
		w.t.Fatalf("%d of %d bytes sent: %v", sent, bytes, err)
	}
	must(w.t, <-received)
	w.closed(from, to, l.Addr().(*net.TCPAddr).Port)
}

// closed waits until no connection from a client to a port of a server is left, so that
// the last acknowledgement has come.
func (w *world) closed(client, server string, port int) {
	w.t.Helper()
	const listen, timeWait = "0A", "06" // enum of include/net/tcp_states.h
	left := func(node string, column int) error {
		var list []byte
		if err := w.ns(node).Do(func() error {
			for _, file := range []string{"tcp", "tcp6"} {
				b, err := os.ReadFile("/proc/thread-self/net/" + file)
				if err != nil {
					return err
				}
				list = append(list, b...)
			}
			return nil
		}); err != nil {
			return err
		}
		for line := range strings.Lines(string(list)) {
			f := strings.Fields(line) // number, local address, remote address, state, ...
			if len(f) > 3 && strings.HasSuffix(f[column], fmt.Sprintf(":%04X", port)) && f[3] != listen && f[3] != timeWait {
				return fmt.Errorf("%s: a connection to port %d is left, in state %s", node, port, f[3])
			}
		}
		return nil
	}
	eventually(w.t, func() error { return errors.Join(left(client, 2), left(server, 1)) })
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) { clear(b); return len(b), nil }

// What r1 sends itself takes a chain, as its socket says; super-packets stay whole.
func TestOwnTrafficTakesAChain(t *testing.T) {
	t.Parallel()
	boundToo(t, func(t *testing.T, s model.Scheme) {
		w := build(t, marking, proven(s))
		w.reaches("h1", "h2")
		took := w.countingChains()
		w.shell("r1", "ping", "-6", "-c", "3", "-i", "0.2", w.addr("h2").String())
		took.takes(t, "own echo requests", true, true, false)
		w.shell("r1", "ping", "-6", "-c", "3", "-i", "0.2", "-m", "16", w.addr("h2").String())
		took.takes(t, "with a mark", false, true, true)
		w.shell("r1", "ping", "-6", "-c", "3", "-i", "0.2", "-m", "32", w.addr("h3").String())
		took.takes(t, "with another mark, to h3", false, false, false)
		w.shell("r1", "ping", "-6", "-c", "3", "-i", "0.2", "-m", "272", w.addr("h3").String())
		took.takes(t, "with a mark that has other bits, to h3", false, false, true)

		since := w.counting(w.path("fast", model.Forward))
		w.upload("r1", "h2", 0, 16, 20_000_000)
		took.takes(t, "TCP of a marked socket", false, true, true)
		if f := since(); 4*f[0].Packets > f[0].Frames || f.frames() < 10_000 {
			t.Errorf("%d packets for %d frames; want super-packets", f[0].Packets, f[0].Frames)
		}
		w.upload("r1", "h2", 0, 0, 5_000_000)
		took.takes(t, "TCP", true, true, false)
	})
}

// Rules of nftables choose a chain, for what the node forwards and for what it
// sends, by whatever they know: here an address, a user, a cgroup.
func TestNftablesChoosesAChain(t *testing.T) {
	t.Parallel()
	alsoOverLabels(t, nftablesChoosesAChain)
}

func nftablesChoosesAChain(t *testing.T, carried change) {
	w := build(t, marking, carried)
	w.reaches("h1", "h2")
	group := cgroup(t)
	const user = "65534"
	must(t, w.net("r1").SetSysctl("net/ipv4/ping_group_range", "0 2147483647")) // where ping has no capability of its own
	must(t, w.net("r1").LoadRuleset(soon(t), fmt.Sprintf(`
table inet choice {
	chain forward {
		type filter hook forward priority mangle; policy accept;
		ip6 daddr fc00:9::/64 meta l4proto ipv6-icmp meta mark set 0x10
	}
	chain output {
		type route hook output priority mangle; policy accept;
		meta skuid %s meta mark set 0x10
		socket cgroupv2 level 1 "%s" meta mark set 0x10
	}
}
`, user, group)))
	took := w.countingChains()
	w.reaches("h1", "h3")
	took.takes(t, "forwarded echo requests to h3", false, false, true)
	w.upload("h1", "h3", 0, 0, 100_000)
	took.takes(t, "forwarded TCP to h3", false, false, false)
	w.reaches("h1", "h2")
	took.takes(t, "what a chain takes where it comes in", true, true, false)

	ping := []string{"ping", "-6", "-c", "2", "-i", "0.2", w.addr("h3").String()}
	w.shell("r1", ping...)
	took.takes(t, "nobody's echo requests", false, false, false)
	w.shell("r1", append([]string{"setpriv", "--reuid", user, "--clear-groups", "--inh-caps", "-all"}, ping...)...)
	took.takes(t, "a user's", false, false, true)
	w.shell("r1", "sh", "-c", "echo $$ > "+filepath.Join(cgroupRoot, group, "cgroup.procs")+" && exec "+strings.Join(ping, " "))
	took.takes(t, "a cgroup's", false, false, true)
}

const cgroupRoot = "/sys/fs/cgroup"

// cgroup makes one of version 2, by its path below the mount.
func cgroup(t *testing.T) string {
	t.Helper()
	for _, mount := range []string{"", "unified"} {
		if _, err := os.Stat(filepath.Join(cgroupRoot, mount, "cgroup.controllers")); err != nil {
			continue
		}
		name := filepath.Join(mount, newPrefix())
		must(t, os.Mkdir(filepath.Join(cgroupRoot, name), 0o755))
		t.Cleanup(func() {
			eventually(t, func() error { return os.Remove(filepath.Join(cgroupRoot, name)) })
		})
		return name
	}
	t.Fatal("there is no cgroup2 below " + cgroupRoot)
	panic("unreachable")
}

// Sockets of the headend itself learn what their chain takes, and what routers say
// to one another stays as it is.
func TestOwnSocketsLearnWhatAChainTakes(t *testing.T) {
	t.Parallel()
	alsoOverLabels(t, ownSocketsLearn)
}

func ownSocketsLearn(t *testing.T, carried change) {
	w := build(t, marking, carried)
	w.reaches("h1", "h2")
	c := udpSocket(t, w.ns("r1"), w.addr("h2"))
	fits := w.path("web", model.Forward).MTU
	if got := learns(t, c, 1640, 1700); got != fits {
		t.Errorf("the sender has learned that %d bytes fit, want %d", got, fits)
	}
	w.refusedSome("r1", "chain-mtu")
	if w.labelled() { // nobody is told of a narrower link
		w.upload("r1", "h2", 0, 0, 5_000_000)
		return
	}
	w.narrow("r2", "r3", 1500)
	if got := learns(t, c, 1450, 1700-120); got != 1500-120 {
		t.Errorf("behind a narrow link the sender has learned that %d bytes fit, want %d", got, 1500-120)
	}
	w.refusedSome("r2", "too-big")
	w.refusedSome("r1", "path-mtu")
	w.upload("r1", "h2", 0, 0, 5_000_000)
	out, err := w.Run(soon(t), "r1", "ping", "-6", "-c", "1", "-W", "5", "-M", "do", "-s", fmt.Sprint(1500-120-48), w.addr("h2").String())
	if err != nil {
		t.Errorf("ping -M do of what fits: %v\n%s", err, out)
	}
}

// Routing and neighbours are left alone even where a chain takes everything that
// a node sends.
func TestWhatRoutersSayToOneAnotherTakesNoChain(t *testing.T) {
	t.Parallel()
	alsoOverLabels(t, whatRoutersSayTakesNoChain)
}

func whatRoutersSayTakesNoChain(t *testing.T, carried change) {
	w := build(t, strings.Replace(marking, `match: {mark: 0x10/0xff, priority: 10}`, `match: {destination: "::/0"}
    own-traffic: true`, 1), carried)
	w.reaches("h1", "h2")
	took := w.countingChains()
	const other = "fc00:6::1" // r6
	w.shell("r1", "ping", "-6", "-c", "2", "-i", "0.2", other)
	took.takes(t, "another node", false, false, true)
	w.shell("r1", "ping", "-6", "-c", "2", "-i", "0.2", "-Q", "0xc0", other)
	took.takes(t, "another node, of class selector 6", false, false, false)
	w.shell("r1", "ping", "-6", "-c", "2", "-i", "0.2", "fc00:1::1")
	took.takes(t, "an own address", false, false, false)
	w.shell("r1", "ping", "-6", "-c", "2", "-i", "0.2", "ff02::2%r1-r2")
	took.takes(t, "a multicast address", false, false, false)
}
