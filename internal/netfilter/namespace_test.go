package netfilter

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/host"
)

// node makes a namespace that plays the node, and describes one of a function there.
// Whatever is left of it is removed by handle.
func node(t *testing.T) (*host.Net, Namespace) {
	t.Helper()
	name := "wstest-" + strings.ToLower(rand.Text()[:8])
	ns, err := host.New(name + "-node") // with a name: children enter it
	must(t, err)
	n, err := host.Open(ns)
	must(t, err)
	s := Namespace{Name: name, Node: ns, To: "fw-to", From: "fw-from", MTU: 1700, Addresses: []netip.Addr{
		netip.MustParseAddr("2001:db8:f::1"), netip.MustParseAddr("192.0.2.200"),
	}}
	t.Cleanup(func() {
		err := errors.Join(s.Remove(context.Background()), n.Close(), ns.Delete())
		if err != nil {
			t.Error(err)
		}
	})
	return n, s
}

// whole fails unless another Ensure finds nothing to change.
func whole(t *testing.T, s Namespace) {
	t.Helper()
	state, err := s.Ensure(soon(t))
	if err != nil || len(state.Changed) != 0 || len(state.Missing) != 0 {
		t.Errorf("not whole: %v, %+v", err, state)
	}
}

// gone fails unless nothing is left of a namespace.
func gone(t *testing.T, n *host.Net, s Namespace) {
	t.Helper()
	if ns, err := host.OpenNamed(s.Name); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("opening namespace %s: got %v, want that it is not there", s.Name, err)
		if err == nil {
			ns.Close()
		}
	}
	links, err := n.Links()
	must(t, err)
	if len(links) != 1 {
		t.Errorf("the node has %+v, want its loopback interface alone", links)
	}
}

func inside(t *testing.T, s Namespace) *host.Net {
	t.Helper()
	ns, err := s.Open()
	must(t, err)
	defer ns.Close()
	n, err := host.Open(ns)
	must(t, err)
	t.Cleanup(func() { n.Close() })
	return n
}

func TestNamespaceIsMadeOnceAndRemoved(t *testing.T) {
	n, s := node(t)
	ctx := soon(t)
	must(t, s.Remove(ctx)) // nothing to remove
	state, err := s.Ensure(ctx)
	must(t, err)
	if len(state.Changed) < 20 {
		t.Errorf("only %q was changed", state.Changed)
	}
	whole(t, s)
	must(t, s.Remove(ctx))
	gone(t, n, s)
	must(t, s.Remove(ctx))
}

func TestWhateverWasChangedIsRepaired(t *testing.T) {
	n, s := node(t)
	ctx := soon(t)
	_, err := s.Ensure(ctx)
	must(t, err)
	whole := func(t *testing.T) { whole(t, s) }
	in := inside(t, s)
	reopen := func() { in = inside(t, s) } // until all are through, not one of them
	for name, spoil := range map[string]func() error{
		"a pair is gone":      func() error { return n.DeleteLink("fw-to") },
		"by the inside":       func() error { return in.DeleteLink(InsideOut) },
		"the node's end down": func() error { return n.SetDown("fw-from") },
		"an inner end down":   func() error { return in.SetDown(InsideOut) },
		"MTU":                 func() error { return in.SetMTU(InsideIn, 1500) },
		"MAC":                 func() error { return n.SetHardwareAddress("fw-from", [6]byte{2, 0, 0, 0, 0, 1}) },
		"alias":               func() error { return n.SetAlias("fw-to", "") },
		"address":             func() error { return in.DeleteAddress(InsideOut, netip.MustParsePrefix("fe80::2/64")) },
		"address of errors":   func() error { return in.DeleteAddress("lo", netip.MustParsePrefix("192.0.2.200/32")) },
		"offload":             func() error { return n.SetOffload("fw-to", host.TSO, false) },
		"neighbour":           func() error { return in.AddNeighbour(InsideOut, nodeAddress, [6]byte{2, 0, 0, 0, 0, 2}) },
		"forwarding of IPv4":  func() error { return in.SetSysctl("net/ipv4/ip_forward", "0") },
		"forwarding of IPv6":  func() error { return in.SetSysctl("net/ipv6/conf/all/forwarding", "0") },
		"rp_filter":           func() error { return in.SetSysctl("net/ipv4/conf/all/rp_filter", "1") },
		"rp_filter of an end": func() error { return in.SetSysctl("net/ipv4/conf/"+InsideIn+"/rp_filter", "2") },
		"loopback":            func() error { return in.SetDown("lo") },
		"another route": func() error {
			return in.ReplaceRoute(host.Route{Destination: netip.MustParsePrefix("::/0"), Via: nodeAddress, Device: InsideIn, Metric: 1})
		},
		"another route of IPv4": func() error {
			return in.ReplaceRoute(host.Route{Destination: netip.MustParsePrefix("0.0.0.0/0"), Via: nodeAddress, Device: InsideIn})
		},
		"the name is taken away": func() error {
			ns, err := host.OpenNamed(s.Name)
			return errors.Join(err, ns.Delete())
		},
	} {
		t.Run(name, func(t *testing.T) {
			if err := spoil(); err != nil {
				t.Fatal(err)
			}
			state, err := s.Ensure(ctx)
			if err != nil || len(state.Changed) == 0 {
				t.Errorf("got %v, %+v; want that it is repaired", err, state)
			}
			whole(t)
			reopen()
		})
	}
}

// A function becomes one that plain connections go through, and the other way round; each time nothing of before stays, and what
// is changed is repaired.
func TestANamespaceOfPlainConnectionsRoutesBothWays(t *testing.T) {
	n, s := node(t)
	ctx := soon(t)
	_, err := s.Ensure(ctx)
	must(t, err)
	in := inside(t, s)
	plain := s
	plain.Plain = true
	rule := host.Rule{Priority: 100, Input: InsideIn, Table: toServers}
	look := func(is bool) {
		t.Helper()
		for _, ipv4 := range []bool{false, true} {
			r := rule
			r.IPv4 = ipv4
			if has, err := in.HasRule(r); err != nil || has != is {
				t.Errorf("the routing rule of plain connections is there: %t, %v; want %t", has, err, is)
			}
		}
		for _, end := range []string{"fw-to", "fw-from"} {
			has, err := n.HasAddress(end, netip.PrefixFrom(nodeAddress, 64))
			if err != nil || has == is {
				t.Errorf("%s has an address on the node: %t, %v; want %t", end, has, err, !is)
			}
		}
		want := map[bool]string{true: "1", false: "0"}[is]
		if v, err := n.Sysctl("net/ipv6/conf/fw-from/disable_ipv6"); err != nil || v != want {
			t.Errorf("disable_ipv6 of fw-from is %q, %v; want %s", v, err, want)
		}
	}
	look(false)
	for range 2 {
		_, err = plain.Ensure(ctx)
		must(t, err)
		look(true)
		whole(t, plain)
		for name, spoil := range map[string]func() error{
			"a rule is gone": func() error { return in.DeleteRule(rule) },
			"another way to servers": func() error {
				return in.ReplaceRoute(host.Route{Destination: netip.MustParsePrefix("0.0.0.0/0"), Via: nodeAddress, Device: InsideIn, Table: toServers})
			},
			"the node takes packets": func() error { return n.SetSysctl("net/ipv6/conf/fw-from/disable_ipv6", "0") },
			"the node forwards":      func() error { return n.SetSysctl("net/ipv4/conf/fw-to/forwarding", "1") },
		} {
			must(t, spoil())
			if state, err := plain.Ensure(ctx); err != nil || len(state.Changed) == 0 {
				t.Errorf("%s: got %v, %+v; want that it is repaired", name, err, state)
			}
			whole(t, plain)
		}
		_, err = s.Ensure(ctx)
		must(t, err)
		look(false)
		whole(t, s)
	}
}

func TestNamesOfOthersAreNotTaken(t *testing.T) {
	ctx := soon(t)
	says := map[string]string{
		"namespace": "a namespace of that name is there and not waystamp's; delete it (ip netns delete ",
		"interface": "an interface fw-from is there in ",
	}
	for name, take := range map[string]func(n *host.Net, s Namespace) (free func() error, err error){
		"namespace": func(_ *host.Net, s Namespace) (func() error, error) {
			ns, err := host.New(s.Name)
			return func() error { return ns.Delete() }, err
		},
		"interface": func(n *host.Net, s Namespace) (func() error, error) {
			return func() error { return n.DeleteLink("fw-from") }, n.AddVeth(host.Veth{Name: "fw-from", PeerName: "other"})
		},
	} {
		t.Run(name, func(t *testing.T) {
			n, s := node(t)
			free, err := take(n, s)
			must(t, err)
			if _, err := s.Ensure(ctx); !errors.Is(err, ErrTaken) || !strings.Contains(err.Error(), says[name]) {
				t.Errorf("got %v, want %v, with %q", err, ErrTaken, says[name])
			}
			must(t, s.Remove(ctx))
			if ns, err := host.OpenNamed(s.Name); err == nil {
				must(t, ns.Close())
			} else if name == "namespace" {
				t.Errorf("the namespace of somebody else is not there any more: %v", err)
			}
			must(t, free()) // of an interface: fails if it is not there
			_, err = s.Ensure(ctx)
			must(t, err)
			whole(t, s)
		})
	}
}

// child is what a test binary that is to be killed does.
type child struct {
	Node   string
	S      Namespace
	At     int // the change before which it is killed, from 0
	Remove bool
}

func killedChild() {
	var c child
	err := json.NewDecoder(os.Stdin).Decode(&c)
	if err == nil {
		c.S.Node, err = host.OpenNamed(c.Node)
	}
	if err == nil {
		n := 0
		c.S.step = func(string) error {
			if n == c.At {
				return errors.Join(syscall.Kill(os.Getpid(), syscall.SIGKILL), errors.New("still alive"))
			}
			n++
			return nil
		}
		if c.Remove {
			err = c.S.Remove(context.Background())
		} else {
			_, err = c.S.Ensure(context.Background())
		}
	}
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
}

// kill runs Ensure or Remove in a process that is killed before a change; done if it
// came to its end before.
func kill(t *testing.T, s Namespace, at int, remove bool) (done bool) {
	t.Helper()
	c := child{Node: s.Node.Name(), S: s, At: at, Remove: remove}
	c.S.Node = nil
	in, err := json.Marshal(c)
	must(t, err)
	cmd := exec.CommandContext(soon(t), "/proc/self/exe")
	cmd.Env = append(os.Environ(), asChild+"=killed")
	cmd.Stdin = strings.NewReader(string(in))
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	switch {
	case err == nil:
		return true
	case errors.As(err, &exit) && exit.Sys().(syscall.WaitStatus).Signal() == syscall.SIGKILL:
		return false
	}
	t.Fatalf("before change %d: %v: %s", at, err, out)
	return false
}

func TestKilledBetweenAnyTwoStepsItGoesOn(t *testing.T) {
	n, s := node(t)
	ctx := soon(t)
	at := 0
	for ; !kill(t, s, at, false); at++ {
		_, err := s.Ensure(ctx)
		if err != nil {
			t.Fatalf("after a kill before change %d: %v", at, err)
		}
		whole(t, s)
		must(t, s.Remove(ctx))
		gone(t, n, s)
		// What was killed can be removed as it is, too.
		kill(t, s, at, false)
		must(t, s.Remove(ctx))
		gone(t, n, s)
	}
	whole(t, s)
	if at < 20 {
		t.Errorf("only %d changes were tried", at)
	}
	removed := 0
	for ; !kill(t, s, removed, true); removed++ {
		must(t, s.Remove(ctx))
		gone(t, n, s)
		_, err := s.Ensure(ctx)
		must(t, err)
	}
	gone(t, n, s)
	if removed != 3 {
		t.Errorf("Remove made %d changes, want 3", removed)
	}
	t.Logf("killed before each of %d changes of Ensure and %d of Remove", at, removed)
}

// seenRules count a mark's packets at the three hooks that a forwarded packet meets.
func seenRules() string {
	var b strings.Builder
	for _, hook := range []string{"prerouting", "forward", "postrouting"} {
		fmt.Fprintf(&b, "counter %s {\n}\nchain %s {\n\ttype filter hook %s priority filter;\n\tudp dport 4242 counter name %s\n}\n", hook, hook, hook, hook)
	}
	return b.String()
}

// The kernel makes the packets: the node sends them into the first pair, and they come
// out of the second. The last one of each version is a super-packet.
func TestPacketsComeOutOfTheSecondPairAndMeetAllThreeHooks(t *testing.T) {
	n, s := node(t)
	ctx := soon(t)
	_, err := s.Ensure(ctx)
	must(t, err)
	must(t, s.Load(ctx, Ruleset{Function: "fw", Text: seenRules()}))
	crosses(t, n, s)
}

func crosses(t *testing.T, n *host.Net, s Namespace) {
	t.Helper()
	// Sources of the node, and routes of it into the function.
	must(t, n.SetUp("lo"))
	for _, c := range []struct{ source, destination string }{{"2001:db8:1::1/128", "2001:db8:2::/64"}, {"198.51.100.1/32", "203.0.113.0/24"}} {
		must(t, n.AddAddress("lo", netip.MustParsePrefix(c.source)))
		must(t, n.AddRoute(host.Route{Destination: netip.MustParsePrefix(c.destination), Via: insideAddress, Device: s.To,
			Source: netip.MustParsePrefix(c.source).Addr()}))
	}
	frames, err := host.OpenFrames(n.NetNS(), s.From, unix.ETH_P_ALL)
	must(t, err)
	defer frames.Close()
	const payload = 1000
	var mu sync.Mutex
	lengths := map[uint16][]int{}
	enough := make(chan struct{})
	go frames.Receive(make([]byte, 1<<16), func(f []byte) {
		mu.Lock()
		defer mu.Unlock()
		proto := binary.BigEndian.Uint16(f[12:])
		port := 0
		switch {
		case proto == unix.ETH_P_IPV6 && f[14+6] == unix.IPPROTO_UDP:
			port = 14 + 40 + 2
		case proto == unix.ETH_P_IP && f[14+9] == unix.IPPROTO_UDP:
			port = 14 + 20 + 2
		default:
			return
		}
		if binary.BigEndian.Uint16(f[port:]) != 4242 {
			return
		}
		if ttl := map[uint16]int{unix.ETH_P_IPV6: 14 + 7, unix.ETH_P_IP: 14 + 8}[proto]; f[ttl] != 63 {
			t.Errorf("a packet has TTL %d, want 63: it was forwarded once", f[ttl])
		}
		lengths[proto] = append(lengths[proto], len(f)-(port+6))
		if len(lengths[unix.ETH_P_IPV6]) == 2 && len(lengths[unix.ETH_P_IP]) == 2 {
			close(enough)
		}
	})
	for _, to := range []string{"2001:db8:2::1", "203.0.113.1"} {
		must(t, n.NetNS().Do(func() error { return superPackets(netip.MustParseAddr(to), payload) }))
	}
	select {
	case <-enough:
	case <-soon(t).Done():
		t.Fatal("not all packets came out")
	}
	mu.Lock()
	defer mu.Unlock()
	for proto, got := range lengths {
		if want := []int{payload, 5 * payload}; !slices.Equal(got, want) {
			t.Errorf("protocol %#x: payloads of %v bytes came out, want %v", proto, got, want)
		}
	}
	got, err := s.Counters(soon(t), "fw")
	must(t, err)
	for _, hook := range []string{"prerouting", "forward", "postrouting"} {
		if got.Named[hook].Packets != 4 {
			t.Errorf("%s saw %d packets, want 4", hook, got.Named[hook].Packets)
		}
	}
}

// superPackets sends one datagram, and five that the kernel keeps in one piece as
// long as nobody needs them cut.
func superPackets(to netip.Addr, payload int) error {
	domain, sa := unix.AF_INET6, unix.Sockaddr(&unix.SockaddrInet6{Port: 4242, Addr: to.As16()})
	if to.Is4() {
		domain, sa = unix.AF_INET, &unix.SockaddrInet4{Port: 4242, Addr: to.As4()}
	}
	fd, err := unix.Socket(domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := unix.SetsockoptInt(fd, unix.SOL_UDP, unix.UDP_SEGMENT, payload); err != nil {
		return err
	}
	return errors.Join(unix.Sendto(fd, make([]byte, payload), 0, sa), unix.Sendto(fd, make([]byte, 5*payload), 0, sa))
}

func TestOfAnExistingNamespaceOnlyOurInterfacesAreChanged(t *testing.T) {
	n, s := node(t)
	ctx := soon(t)
	s.Existing, s.Addresses = true, nil
	missing := "namespace " + s.Name + " of the function behind fw-to and fw-from: it does not exist; create it (ip netns add " + s.Name + "), or give the function another namespace: "
	if _, err := s.Ensure(ctx); !errors.Is(err, fs.ErrNotExist) || !strings.HasPrefix(err.Error(), missing) {
		t.Errorf("without a namespace: got %v, want %v, and %q", err, fs.ErrNotExist, missing)
	}
	ns, err := host.New(s.Name)
	must(t, err)
	defer ns.Delete()
	in := inside(t, s)
	must(t, in.SetSysctl("net/ipv4/ip_forward", "0"))
	must(t, in.SetSysctl("net/ipv6/conf/all/forwarding", "0"))
	must(t, in.SetSysctl("net/ipv4/conf/all/rp_filter", "2"))
	must(t, in.AddVeth(host.Veth{Name: "eth0", PeerName: "eth1"}))
	before := settings(t, in)

	state, err := s.Ensure(ctx)
	must(t, err)
	for i, want := range []string{"does not forward IPv6", "rp_filter", "ip -6 route add default via inet6 fe80::1 dev waystamp-out", "ip -4 route add default via inet6 fe80::1 dev waystamp-out"} {
		if i >= len(state.Missing) || !strings.Contains(state.Missing[i], want) {
			t.Fatalf("missing: got %q, want %q as number %d", state.Missing, want, i)
		}
	}
	if after := settings(t, in); after != before {
		t.Errorf("settings before:\n%s\nafter:\n%s", before, after)
	}
	again, err := s.Ensure(ctx)
	if err != nil || len(again.Changed) != 0 || len(again.Missing) != 4 {
		t.Errorf("again: %v, %+v", err, again)
	}
	// The owner does as told.
	must(t, in.SetSysctl("net/ipv6/conf/all/forwarding", "1"))
	must(t, in.SetSysctl("net/ipv4/conf/all/rp_filter", "0"))
	for _, family := range []string{"-6", "-4"} {
		if out, err := host.Command(ctx, ns, "ip", family, "route", "add", "default", "via", "inet6", "fe80::1", "dev", "waystamp-out").CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	whole(t, s)
	must(t, s.Load(ctx, Ruleset{Function: "fw", Text: seenRules()}))
	crosses(t, n, s)

	must(t, s.Remove(ctx))
	links, err := in.Links()
	must(t, err)
	if len(links) != 3 {
		t.Errorf("the namespace has %+v, want lo, eth0 and eth1", links)
	}
	// The same by a path, and an interface of its owner in the way.
	s.Name = filepath.Join(host.NamespaceDir, s.Name)
	must(t, in.AddVeth(host.Veth{Name: InsideIn, PeerName: "eth2"}))
	if _, err := s.Ensure(ctx); !errors.Is(err, ErrTaken) {
		t.Errorf("got %v, want %v", err, ErrTaken)
	}
	must(t, in.DeleteLink("eth2"))
	_, err = s.Ensure(ctx)
	must(t, err)
	must(t, s.Remove(ctx))
}

// settings are those of a namespace and of its interfaces that are not ours.
func settings(t *testing.T, n *host.Net) string {
	t.Helper()
	var b strings.Builder
	count := 0
	must(t, n.NetNS().Do(func() error {
		for _, version := range []string{"ipv4", "ipv6"} {
			for _, of := range []string{"all", "default", "lo", "eth0"} {
				dir := filepath.Join("/proc/sys/net", version, "conf", of)
				files, err := os.ReadDir(dir)
				if err != nil {
					return err
				}
				for _, f := range files {
					value, err := os.ReadFile(filepath.Join(dir, f.Name()))
					if err != nil {
						continue // one that is only written
					}
					count++
					fmt.Fprintf(&b, "%s %s %s: %s", version, of, f.Name(), value)
				}
			}
		}
		return nil
	}))
	if count < 200 {
		t.Fatalf("%d settings are not all", count)
	}
	out, err := host.Command(t.Context(), n.NetNS(), "sh", "-c", "ip route show table all dev eth0; ip rule; ip addr show eth0").CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return b.String() + string(out)
}

// A function moves to another namespace: its interfaces lead there now, and stay where
// its old namespace is removed without them.
func TestNamespaceIsRemovedWithoutItsPairs(t *testing.T) {
	n, old := node(t)
	ctx := soon(t)
	_, err := old.Ensure(ctx)
	must(t, err)
	others, err := host.New(old.Name + "-c1")
	must(t, err)
	t.Cleanup(func() { must(t, others.Delete()) })
	moved := Namespace{Name: old.Name + "-c1", Existing: true, Node: old.Node, To: old.To, From: old.From, In: old.To, Out: old.From, MTU: old.MTU}
	t.Cleanup(func() { must(t, moved.Remove(context.Background())) })
	_, err = moved.Ensure(ctx)
	must(t, err)
	old.To, old.From = "", ""
	must(t, old.Remove(ctx))
	if _, err := host.OpenNamed(old.Name); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("opening the old namespace: %v, want that it is gone", err)
	}
	state, err := moved.Ensure(ctx)
	if err != nil || len(state.Changed) != 0 {
		t.Errorf("the pairs: %v, %+v; want them as they were", err, state)
	}
	in := inside(t, moved)
	for _, name := range []string{moved.To, moved.From} {
		if ok, err := n.ArePeers(name, in, name); err != nil || !ok {
			t.Errorf("%s leads to the new namespace: %t, %v", name, ok, err)
		}
	}
}
