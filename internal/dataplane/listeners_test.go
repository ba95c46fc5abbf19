package dataplane

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

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
					c, err := net.DialTimeout("tcp", fmt.Sprintf("%s:%d", host, port), time.Minute)
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
