package host

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/await"
	"github.com/waystamp/waystamp/internal/model"
)

// These tests configure real namespaces, and fail where they cannot: a test
// that did not run has shown nothing.

// Variables are initialised on the process's first thread: TestMain stays there until that has served, see below.
var _ = func() bool { runtime.LockOSThread(); return true }()

func TestMain(m *testing.M) {
	if err := Require(FeatureNetAdmin, FeatureNamespaces, FeatureIPv6, FeatureVeth, FeatureSEG6Local); err != nil {
		fmt.Fprintln(os.Stderr, "internal/host:", err)
		os.Exit(1)
	}
	currentWhileAway = tryCurrentWhileAway()
	runtime.UnlockOSThread()
	os.Exit(m.Run())
}

func scratch(t *testing.T) *Net {
	t.Helper()
	ns, err := Anonymous()
	if err != nil {
		t.Fatal(err)
	}
	n, err := Open(ns)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(n.Close(), ns.Close()); err != nil {
			t.Error(err)
		}
	})
	return n
}

// pair makes two namespaces with a veth a-b/b-a between them, up.
func pair(t *testing.T, mtu int) (a, b *Net) {
	t.Helper()
	a, b = scratch(t), scratch(t)
	must(t, a.AddVeth(Veth{Name: "a-b", PeerName: "b-a", Peer: b.NetNS(), MTU: mtu}))
	must(t, a.SetUp("a-b"))
	must(t, b.SetUp("b-a"))
	return a, b
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func soon(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), await.Limit(time.Minute))
	t.Cleanup(cancel)
	return ctx
}

func randomName(t *testing.T) string {
	t.Helper()
	return "wstest-" + strings.ToLower(rand.Text()[:8])
}

// threadNS returns the namespace of the calling thread.
func threadNS() (string, error) { return os.Readlink("/proc/thread-self/ns/net") }

func TestDoRunsInsideAndReturns(t *testing.T) {
	t.Parallel()
	n := scratch(t)
	before, err := threadNS()
	must(t, err)
	var inside string
	must(t, n.NetNS().Do(func() error {
		var err error
		inside, err = threadNS()
		return err
	}))
	if want := fmt.Sprintf("net:[%d]", n.NetNS().Inode()); inside != want {
		t.Errorf("inside Do: got %s, want %s", inside, want)
	}
	// Every thread that runs Go code again must be at home.
	for range 64 {
		now, err := make(chan string), error(nil)
		go func() {
			var s string
			s, err = threadNS()
			now <- s
		}()
		if got := <-now; err != nil || got != before {
			t.Fatalf("a goroutine afterwards runs in %s (%v), want %s", got, err, before)
		}
	}
}

func TestCurrentIsTheProcessesNamespaceWhoeverIsAway(t *testing.T) {
	t.Parallel()
	if err := currentWhileAway; err != nil {
		t.Error(err)
	}
}

// currentWhileAway is what TestMain found: only there it is sure to run on the
// process's first thread, whose namespace is what /proc/self shows.
var currentWhileAway error

func tryCurrentWhileAway() error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if unix.Gettid() != os.Getpid() {
		return errors.New("TestMain does not run on the first thread: nothing was shown")
	}
	before, err := threadNS()
	if err != nil {
		return err
	}
	home, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		return err
	}
	defer home.Close()
	away, err := Anonymous()
	if err != nil {
		return err
	}
	defer away.Close()
	if err := away.setns(int(away.file.Fd())); err != nil {
		return err
	}
	current, err := Current()
	if back := away.setns(int(home.Fd())); back != nil {
		panic(back) // no test could be believed
	}
	if err != nil {
		return err
	}
	defer current.Close()
	if got := fmt.Sprintf("net:[%d]", current.Inode()); got != before {
		return fmt.Errorf("while the first thread is in %s: got %s, want %s", away, got, before)
	}
	return nil
}

func TestDoReturnsWhatTheFunctionSays(t *testing.T) {
	t.Parallel()
	n := scratch(t)
	want := errors.New("mine")
	if err := n.NetNS().Do(func() error { return want }); err != want {
		t.Errorf("got %v, want %v", err, want)
	}
	if err := n.NetNS().Do(func() error { runtime.Goexit(); return nil }); !errors.Is(err, errGoexit) {
		t.Errorf("after Goexit: got %v, want %v", err, errGoexit)
	}
}

// A thread that cannot go home must never run anything else.
func TestDoDropsAThreadThatCannotReturn(t *testing.T) {
	t.Parallel()
	n := scratch(t)
	ns, err := n.NetNS().dup()
	must(t, err)
	defer ns.Close()
	enter := ns.setns
	tid := os.Getpid()
	for tid == os.Getpid() { // the process's first thread cannot end: Go parks it
		calls := 0
		ns.setns = func(fd int) error {
			if calls++; calls > 1 {
				return unix.EPERM
			}
			return enter(fd)
		}
		must(t, ns.Do(func() error { tid = unix.Gettid(); return nil }))
	}
	deadline := time.Now().Add(await.Limit(time.Minute))
	for {
		_, err := os.Stat(fmt.Sprintf("/proc/self/task/%d", tid))
		if errors.Is(err, fs.ErrNotExist) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("thread %d is still there, in the wrong namespace", tid)
		}
		runtime.Gosched()
	}
}

func TestNamedNamespaceComesAndGoes(t *testing.T) {
	t.Parallel()
	name := randomName(t)
	ns, err := New(name)
	must(t, err)
	t.Cleanup(func() { ns.Delete() })

	again, err := OpenNamed(name)
	must(t, err)
	if again.Inode() != ns.Inode() {
		t.Errorf("%s opened by name is another namespace: %d, want %d", name, again.Inode(), ns.Inode())
	}
	must(t, again.Close())
	if _, err := New(name); !errors.Is(err, fs.ErrExist) {
		t.Errorf("a second %s: got %v, want %v", name, err, fs.ErrExist)
	}
	must(t, ns.Delete())
	must(t, ns.Delete())
	if _, err := os.Lstat(filepath.Join(NamespaceDir, name)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("after Delete: got %v, want that %s is gone", err, name)
	}
	if _, err := OpenNamed(name); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("open after Delete: got %v, want %v", err, fs.ErrNotExist)
	}
}

// Somebody else may have taken the name since.
func TestDeleteLeavesAnothersNamespaceOfTheSameName(t *testing.T) {
	t.Parallel()
	name := randomName(t)
	old, err := New(name)
	must(t, err)
	stale, err := OpenNamed(name)
	must(t, err)
	must(t, old.Delete())
	other, err := New(name)
	must(t, err)
	t.Cleanup(func() { other.Delete() })

	must(t, stale.Delete())
	if ns, err := OpenNamed(name); err != nil {
		t.Errorf("the new %s was deleted with the old one's handle: %v", name, err)
	} else {
		ns.Close()
	}
}

func TestNamesThatAreNotNames(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"", ".", "..", "a/b", "../../tmp/x", strings.Repeat("a", 256)} {
		if ns, err := New(name); err == nil {
			ns.Delete()
			t.Errorf("New(%q): no error", name)
		}
	}
}

func TestCommandRunsInside(t *testing.T) {
	t.Parallel()
	n := scratch(t)
	out, err := Command(soon(t), n.NetNS(), "readlink", "/proc/self/ns/net").Output()
	must(t, err)
	if got, want := strings.TrimSpace(string(out)), fmt.Sprintf("net:[%d]", n.NetNS().Inode()); got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

func TestVethInTwoNamespaces(t *testing.T) {
	t.Parallel()
	a, b := scratch(t), scratch(t)
	must(t, a.AddVeth(Veth{Name: "a-b", PeerName: "b-a", Peer: b.NetNS(), MTU: 1700}))
	for _, c := range []struct {
		n    *Net
		name string
	}{{a, "a-b"}, {b, "b-a"}} {
		got, err := c.n.Link(c.name)
		must(t, err)
		if got.Index == 0 {
			t.Errorf("%s has no index", c.name)
		}
		got.Index = 0
		if got.MAC == [6]byte{} {
			t.Errorf("%s has no MAC address", c.name)
		}
		got.MAC = [6]byte{}
		// The other namespace is the first that each of them knows.
		if diff := cmp.Diff(Link{Name: c.name, Kind: "veth", Frame: "ether", MTU: 1700, SuperMax: 65536, PeerNamespace: 1, Peer: 2}, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", c.name, diff)
		}
	}
	if _, err := a.Link("b-a"); !errors.Is(err, ErrNoLink) {
		t.Errorf("b-a in a: got %v, want %v", err, ErrNoLink)
	}
	must(t, b.DeleteLink("b-a"))
	if _, err := a.Link("a-b"); !errors.Is(err, ErrNoLink) {
		t.Errorf("a-b without its peer: got %v, want %v", err, ErrNoLink)
	}
}

func TestVethNamesThatDoNotFitAreRefused(t *testing.T) {
	t.Parallel()
	n := scratch(t)
	for _, name := range []string{"", "sixteen-bytes-xx"} {
		if err := n.AddVeth(Veth{Name: name, PeerName: "peer"}); err == nil {
			t.Errorf("%q: no error", name)
		}
	}
}

func TestWaitUpWaitsForBothEnds(t *testing.T) {
	t.Parallel()
	a, b := scratch(t), scratch(t)
	must(t, a.AddVeth(Veth{Name: "a-b", PeerName: "b-a", Peer: b.NetNS()}))
	must(t, a.SetUp("a-b"))

	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := a.WaitUp(ctx, "a-b"); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("with its peer down: got %v, want %v", err, context.DeadlineExceeded)
	}
	up := make(chan error)
	go func() { up <- a.WaitUp(soon(t), "a-b") }()
	must(t, b.SetUp("b-a"))
	must(t, <-up)
	l, err := a.Link("a-b")
	must(t, err)
	if !l.Up {
		t.Error("WaitUp returned while the link was down")
	}
	if err := a.WaitUp(soon(t), "nothing"); !errors.Is(err, ErrNoLink) {
		t.Errorf("got %v, want %v", err, ErrNoLink)
	}
}

func TestSysctlIsTheNamespaces(t *testing.T) {
	t.Parallel()
	a, b := scratch(t), scratch(t)
	const key = "net/ipv6/conf/all/forwarding"
	must(t, a.SetSysctl(key, "1"))
	for _, c := range []struct {
		n    *Net
		want string
	}{{a, "1"}, {b, "0"}} {
		got, err := c.n.Sysctl(key)
		must(t, err)
		if got != c.want {
			t.Errorf("%s in %s: got %s, want %s", key, c.n.NetNS(), got, c.want)
		}
	}
	if err := a.SetSysctl("net/ipv6/conf/none/forwarding", "1"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("got %v, want %v", err, fs.ErrNotExist)
	}
	for _, key := range []string{"kernel/hostname", "net/../kernel/hostname", "net.ipv6", ""} {
		if err := a.SetSysctl(key, "x"); err == nil {
			t.Errorf("%q: no error", key)
		}
	}
}

func TestAddressesAreUsableAtOnce(t *testing.T) {
	t.Parallel()
	a, _ := pair(t, 1500)
	must(t, a.AddAddress("a-b", netip.MustParsePrefix("fd00:1::2/64")))
	must(t, a.AddAddress("a-b", netip.MustParsePrefix("fd00:1::1/64")))
	must(t, a.AddAddress("a-b", netip.MustParsePrefix("fe80::1/64")))
	for _, v4 := range []string{"192.0.2.1/25", "198.51.100.8/31", "203.0.113.9/32", "169.254.3.3/16"} {
		must(t, a.AddAddress("a-b", netip.MustParsePrefix(v4)))
	}
	got, err := a.Addresses()
	must(t, err)
	var want []netip.Addr
	for _, w := range []string{
		"169.254.3.3", "169.254.255.255", "192.0.2.1", "192.0.2.127", "198.51.100.8", "203.0.113.9", "fd00:1::1", "fd00:1::2",
	} {
		want = append(want, netip.MustParseAddr(w))
	}
	if diff := cmp.Diff(want, got, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
		t.Errorf("addresses (-want +got):\n%s", diff)
	}
	must(t, a.NetNS().Do(func() error {
		fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		return unix.Bind(fd, &unix.SockaddrInet6{Addr: netip.MustParseAddr("fd00:1::1").As16()})
	}))
}

func TestWatchAddressesTellsEveryChange(t *testing.T) {
	t.Parallel()
	n := scratch(t)
	must(t, n.SetUp("lo"))
	ctx, cancel := context.WithCancelCause(soon(t))
	seen, done := make(chan []netip.Addr, 16), make(chan error, 1)
	go func() { done <- n.WatchAddresses(ctx, func(a []netip.Addr) { seen <- a }) }()

	next := func(want ...string) {
		t.Helper()
		select {
		case got := <-seen:
			if fmt.Sprint(got) != fmt.Sprint(want) {
				t.Fatalf("got %s, want %s", got, want)
			}
		case err := <-done:
			t.Fatalf("the watch ended: %v", err)
		}
	}
	next()
	must(t, n.AddAddress("lo", netip.MustParsePrefix("fd00::1/128")))
	next("fd00::1")
	must(t, n.AddAddress("lo", netip.MustParsePrefix("fd00::2/128")))
	next("fd00::1", "fd00::2")
	must(t, n.DeleteAddress("lo", netip.MustParsePrefix("fd00::1/128")))
	next("fd00::2")

	enough := errors.New("enough")
	cancel(enough)
	if err := <-done; !errors.Is(err, enough) {
		t.Errorf("after cancel: got %v, want %v", err, enough)
	}
	if len(seen) != 0 {
		t.Errorf("%d reports of no change", len(seen))
	}
}

// Many changes while the callback is busy are one call.
func TestWatchCoalesces(t *testing.T) {
	t.Parallel()
	n := scratch(t)
	ctx, cancel := context.WithCancel(soon(t))
	defer cancel()
	entered, leave, done := make(chan int), make(chan struct{}), make(chan error, 1)
	calls := 0
	go func() {
		done <- n.Watch(ctx, ChangeRoutes, func() error {
			calls++
			select {
			case entered <- calls:
				<-leave
			case <-ctx.Done():
			}
			return nil
		})
	}()
	<-entered
	// Of routes that refuse the kernel tells at once and in full.
	for i := range 200 {
		must(t, n.AnnounceLocator(netip.MustParsePrefix(fmt.Sprintf("fd00:0:0:%x::/64", i+1))))
	}
	leave <- struct{}{}
	if got := <-entered; got != 2 {
		t.Fatalf("call %d, want 2", got)
	}
	leave <- struct{}{}
	// Every event had been there when the second call began.
	select {
	case got := <-entered:
		leave <- struct{}{}
		t.Errorf("call %d for changes that call 2 has seen", got)
	case <-time.After(50 * time.Millisecond):
	}
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want %v", err, context.Canceled)
	}
}

// Until its solicited-node group is joined an address cannot be found: the first
// packet to it would wait a second for the neighbour's second try.
func TestWaitUpWaitsUntilNeighboursFindTheAddresses(t *testing.T) {
	t.Parallel()
	a, b := scratch(t), scratch(t)
	must(t, a.SetSysctl("net/ipv6/conf/default/addr_gen_mode", "1")) // no addresses but ours
	must(t, a.AddVeth(Veth{Name: "a-b", PeerName: "b-a", Peer: b.NetNS()}))
	must(t, a.SetUp("a-b"))
	must(t, b.SetUp("b-a"))
	must(t, a.WaitUp(soon(t), "a-b"))
	must(t, b.WaitUp(soon(t), "b-a"))
	// A link without neighbours joins nothing. Once it has some, the kernel joins
	// within a second, after a random time.
	addr := netip.MustParsePrefix("fd00::1:2:3/64")
	must(t, a.onLink("set arp off", "a-b", a.h.LinkSetARPOff))
	must(t, a.AddAddress("a-b", addr))
	must(t, a.WaitUp(soon(t), "a-b"))
	must(t, a.onLink("set arp on", "a-b", a.h.LinkSetARPOn))
	must(t, a.WaitUp(soon(t), "a-b"))
	l, err := a.Link("a-b")
	must(t, err)
	got, err := a.groups()
	must(t, err)
	if want := netip.MustParseAddr("ff02::1:ff02:3"); !got[group{l.Index, want}] {
		t.Errorf("WaitUp returned before %s was joined", want)
	}
}

var routeEqual = cmp.Options{
	cmp.Comparer(func(a, b netip.Addr) bool { return a == b }),
	cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }),
}

func TestRoutesAreReadAsTheyWereWritten(t *testing.T) {
	t.Parallel()
	a, _ := pair(t, 1500)
	must(t, a.SetUp("lo"))
	must(t, a.WaitUp(soon(t), "a-b"))
	must(t, a.AddAddress("a-b", netip.MustParsePrefix("fe80::1/64")))
	must(t, a.AddAddress("lo", netip.MustParsePrefix("fd00::1/128")))
	via, src := netip.MustParseAddr("fe80::2"), netip.MustParseAddr("fd00::1")
	for _, r := range []Route{
		{Destination: netip.MustParsePrefix("fd00:a::/64"), Via: via, Device: "a-b", Source: src},
		{Destination: netip.MustParsePrefix("fd00:b::/64"), Device: "a-b", Metric: 7},
		{Destination: netip.MustParsePrefix("fd00:c::/64"), Type: RouteProhibit, Protocol: ProtocolWaystamp},
		{Destination: netip.MustParsePrefix("fd00:d::/64"), Type: RouteBlackhole},
		{Destination: netip.MustParsePrefix("fd00:e::/64"), Type: RouteEnd, Device: "a-b"},
		{Destination: netip.MustParsePrefix("fd00:f::/64"), Type: RouteEncap, Via: via, Device: "a-b", Segments: []netip.Addr{
			netip.MustParseAddr("fd00:1::"), netip.MustParseAddr("fd00:2::"), netip.MustParseAddr("fd00:3::"),
		}},
		{Destination: netip.MustParsePrefix("::/0"), Via: via, Device: "a-b"},
	} {
		must(t, a.AddRoute(r))
		want := r
		if want.Protocol == 0 {
			want.Protocol = ProtocolStatic
		}
		if want.Metric == 0 {
			want.Metric = 1024
		}
		if want.Type == RouteProhibit || want.Type == RouteBlackhole {
			want.Device = "lo" // where the kernel puts them
		}
		have, err := a.Routes(want.Protocol)
		must(t, err)
		found := false
		for _, h := range have {
			if h.Destination == want.Destination {
				found = true
				if diff := cmp.Diff(want, h, routeEqual); diff != "" {
					t.Errorf("%s (-want +got):\n%s", r.Destination, diff)
				}
			}
		}
		if !found {
			t.Errorf("%s is not listed", r.Destination)
		}
		if err := a.AddRoute(r); !errors.Is(err, fs.ErrExist) {
			t.Errorf("%s again: got %v, want %v", r.Destination, err, fs.ErrExist)
		}
		must(t, a.DeleteRoute(want))
		if err := a.DeleteRoute(want); !errors.Is(err, unix.ESRCH) {
			t.Errorf("%s deleted twice: got %v, want %v", r.Destination, err, unix.ESRCH)
		}
	}
	err := a.AddRoute(Route{Destination: netip.MustParsePrefix("fd00:a::/64"), Device: "nothing"})
	if !errors.Is(err, ErrNoLink) {
		t.Errorf("got %v, want %v", err, ErrNoLink)
	}
}

func TestLocatorIsAnnouncedOnceAndOthersRoutesStay(t *testing.T) {
	t.Parallel()
	n := scratch(t)
	must(t, n.SetUp("lo"))
	loc := netip.MustParsePrefix("fd00:0:0:100::/56")
	foreign := Route{Destination: loc, Type: RouteBlackhole, Metric: 1024}
	must(t, n.AddRoute(foreign))

	must(t, n.AnnounceLocator(loc))
	must(t, n.AnnounceLocator(loc))
	got, err := n.Locators()
	must(t, err)
	if fmt.Sprint(got) != fmt.Sprint([]netip.Prefix{loc}) {
		t.Errorf("announced: got %s, want %s once", got, loc)
	}
	must(t, n.WithdrawLocator(loc))
	must(t, n.WithdrawLocator(loc))
	if got, err := n.Locators(); err != nil || len(got) != 0 {
		t.Errorf("after withdrawal: got %s, %v", got, err)
	}
	left, err := n.Routes(ProtocolStatic)
	must(t, err)
	if len(left) != 1 || left[0].Destination != loc {
		t.Errorf("the operator's own route to %s is gone: %v", loc, left)
	}
}

func TestSIDsAreAnnouncedByTheirMarkAndOthersRoutesStay(t *testing.T) {
	t.Parallel()
	n := scratch(t)
	must(t, n.SetUp("lo"))
	loc := netip.MustParsePrefix("fd00:0:0:100::/56")
	sid := func(s string) netip.Prefix { return netip.MustParsePrefix("fd00:0:0:" + s + "::/64") }
	must(t, n.AnnounceLocator(loc))
	must(t, n.AnnounceLocator(sid("900"))) // a locator of 64 bits, which is no SID
	foreign := []Route{
		{Destination: sid("101"), Type: RouteBlackhole, Metric: 1024},
		{Destination: sid("102"), Type: RouteProhibit, Metric: model.SIDMetric},
		{Destination: sid("103"), Type: RouteProhibit, Protocol: ProtocolWaystamp, Metric: 1024},
	}
	for _, r := range foreign {
		must(t, n.AddRoute(r))
	}
	must(t, n.AddRoute(Route{Destination: sid("901"), Type: RouteBlackhole})) // of another locator
	must(t, n.AddRoute(Route{Destination: netip.MustParsePrefix("fd00:0:0:180::/57"), Type: RouteBlackhole}))

	for _, s := range []string{"100", "101", "103"} {
		must(t, n.AnnounceSID(sid(s)))
	}
	for _, s := range []string{"100", "102"} {
		if err := n.AnnounceSID(sid(s)); !errors.Is(err, fs.ErrExist) {
			t.Errorf("%s, whose prefix and metric are there: got %v, want %v", s, err, fs.ErrExist)
		}
	}
	for _, s := range []string{"100", "102", "100"} { // 102 is not waystamp's
		must(t, n.WithdrawSID(sid(s)))
	}
	got, others, err := n.SIDs(loc)
	must(t, err)
	slices.SortFunc(got, netip.Prefix.Compare)
	if want := []netip.Prefix{sid("101"), sid("103")}; !slices.Equal(got, want) {
		t.Errorf("announced: got %s, want %s", got, want)
	}
	var left []netip.Prefix
	for _, r := range others {
		left = append(left, r.Destination)
	}
	slices.SortFunc(left, netip.Prefix.Compare)
	if want := []netip.Prefix{sid("101"), sid("102"), sid("103")}; !slices.Equal(left, want) {
		t.Errorf("routes of others: got %v, want those to %s", others, want)
	}
	locators, err := n.Locators()
	must(t, err)
	slices.SortFunc(locators, netip.Prefix.Compare)
	if want := []netip.Prefix{loc, sid("900")}; !slices.Equal(locators, want) {
		t.Errorf("locators: got %s, want %s", locators, want)
	}
	if got, others, err := n.SIDs(sid("900")); err != nil || len(got)+len(others) > 0 {
		t.Errorf("within a locator of 64 bits: %s, %v, %v", got, others, err)
	}
}

func TestOffloadsAreSwitched(t *testing.T) {
	t.Parallel()
	a, _ := pair(t, 1500)
	for _, o := range []Offload{TSO, GSO, GRO} {
		for _, on := range []bool{true, false, true} {
			must(t, a.SetOffload("a-b", o, on))
			got, err := a.Offload("a-b", o)
			must(t, err)
			if got != on {
				t.Errorf("%s: got %t, want %t", o, got, on)
			}
		}
	}
	if err := a.SetOffload("nothing", TSO, false); !errors.Is(err, ErrNoLink) {
		t.Errorf("got %v, want %v", err, ErrNoLink)
	}
}

func TestHandlesAreRefusedAfterClose(t *testing.T) {
	t.Parallel()
	ns, err := Anonymous()
	must(t, err)
	must(t, ns.Close())
	must(t, ns.Close())
	if err := ns.Do(func() error { return nil }); !errors.Is(err, fs.ErrClosed) {
		t.Errorf("Do: got %v, want %v", err, fs.ErrClosed)
	}
	if _, err := Open(ns); !errors.Is(err, fs.ErrClosed) {
		t.Errorf("Open: got %v, want %v", err, fs.ErrClosed)
	}
}

// A thread of its own gives up the capabilities, and ends with them.
func TestRequireNamesWhatIsMissing(t *testing.T) {
	t.Parallel()
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends
		hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var none [2]unix.CapUserData
		if err := unix.Capset(&hdr, &none[0]); err != nil {
			done <- fmt.Errorf("capset: %w", err)
			return
		}
		done <- Require(FeatureNetAdmin, FeatureNamespaces, FeatureIPv6, FeatureVeth)
	}()
	err := <-done
	if !errors.Is(err, fs.ErrPermission) {
		t.Fatalf("got %v, want %v", err, fs.ErrPermission)
	}
	want := "no permission to configure the network: CAP_NET_ADMIN is missing; run as root\n" +
		"no permission to make network namespaces: CAP_SYS_ADMIN is missing; run as root"
	if err.Error() != want {
		t.Errorf("got\n%s\nwant\n%s", err, want)
	}
}
