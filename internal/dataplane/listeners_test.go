package dataplane

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/host"
)

// A worker gets the connections that come by one interface, to whatever port; those that come by another one are reset, also to
// the ports that its listeners are bound to.
func TestConnectionsComeByOneInterface(t *testing.T) {
	t.Parallel()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	open := func() *host.Net {
		ns, err := host.Anonymous()
		must(err)
		n, err := host.Open(ns)
		must(err)
		t.Cleanup(func() { must(errors.Join(n.Close(), ns.Close())) })
		return n
	}
	worker, node, function := open(), open(), open()
	for i, far := range []*host.Net{node, function} {
		name := fmt.Sprintf("from%d", i)
		must(worker.AddVeth(host.Veth{Name: name, PeerName: "to", Peer: far.NetNS()}))
		for _, a := range []string{"fd00:%d::%d/64", "10.0.%d.%d/24"} {
			must(worker.AddAddress(name, netip.MustParsePrefix(fmt.Sprintf(a, i, 1))))
			must(far.AddAddress("to", netip.MustParsePrefix(fmt.Sprintf(a, i, 2))))
		}
		must(errors.Join(worker.SetUp(name), far.SetUp("to")))
		must(worker.WaitUp(t.Context(), name))
		must(far.WaitUp(t.Context(), "to"))
	}
	const bound = 4000
	var files []*os.File
	must(worker.NetNS().Do(func() error {
		for _, network := range []string{"tcp6", "tcp4"} {
			config := net.ListenConfig{}
			config.SetMultipathTCP(false) // no socket of a map
			l, err := config.Listen(t.Context(), network, fmt.Sprintf(":%d", bound))
			if err != nil {
				return err
			}
			t.Cleanup(func() { l.Close() })
			f, err := l.(*net.TCPListener).File()
			if err != nil {
				return err
			}
			t.Cleanup(func() { f.Close() })
			files = append(files, f)
		}
		return nil
	}))
	from, err := worker.Link("from0")
	must(err)
	given, err := GiveConnections(worker.NetNS(), from.Index, files)
	must(err)
	defer func() { must(given.Close()) }()
	for i, far := range []*host.Net{node, function} {
		for _, host := range []string{fmt.Sprintf("[fd00:%d::1]", i), fmt.Sprintf("10.0.%d.1", i)} {
			for _, port := range []int{bound, 80, 55555} {
				must(far.NetNS().Do(func() error {
					c, err := net.DialTimeout("tcp", fmt.Sprintf("%s:%d", host, port), waitLimit)
					if err == nil {
						c.Close()
					}
					if far == node && err != nil {
						t.Errorf("from the node: %v", err)
					}
					if far == function && !errors.Is(err, unix.ECONNREFUSED) {
						t.Errorf("from the function to %s:%d: %v; want %v", host, port, err, unix.ECONNREFUSED)
					}
					return nil
				}))
			}
		}
	}
}

// Who takes all connections of a namespace detaches the programs of others there, also while these hold their links, and none of another
// namespace.
func TestListenersThatTakeAllAreAlone(t *testing.T) {
	t.Parallel()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	give := func(ns *host.NetNS, port int) *Listeners {
		t.Helper()
		var files []*os.File
		must(ns.Do(func() error {
			for _, network := range []string{"tcp6", "tcp4"} {
				config := net.ListenConfig{}
				config.SetMultipathTCP(false)
				l, err := config.Listen(t.Context(), network, fmt.Sprintf(":%d", port))
				if err != nil {
					return err
				}
				t.Cleanup(func() { l.Close() })
				f, err := l.(*net.TCPListener).File()
				if err != nil {
					return err
				}
				t.Cleanup(func() { f.Close() })
				files = append(files, f)
			}
			return nil
		}))
		l, err := GiveConnections(ns, 1, files)
		must(err)
		t.Cleanup(func() { must(l.Close()) })
		return l
	}
	here, err := host.Anonymous()
	must(err)
	defer here.Close()
	there, err := host.Anonymous()
	must(err)
	defer there.Close()
	give(here, 4000)
	give(here, 4001)
	last, other := give(here, 4002), give(there, 4000)
	for _, want := range []int{2, 0} {
		if n, err := last.TakeAll(here); err != nil || n != want {
			t.Errorf("%d others gave connections: %v; want %d", n, err, want)
		}
	}
	attached := func(ns *host.NetNS, l *Listeners) {
		t.Helper()
		info, err := l.program.Info()
		must(err)
		own, _ := info.ID()
		f, err := ns.File()
		must(err)
		defer f.Close()
		got, err := link.QueryPrograms(link.QueryOptions{Target: int(f.Fd()), Attach: ebpf.AttachSkLookup})
		must(err)
		if len(got.Programs) != 1 || got.Programs[0].ID != own {
			t.Errorf("programs %+v are attached; want %d alone", got.Programs, own)
		}
	}
	attached(here, last)
	attached(there, other)
}
