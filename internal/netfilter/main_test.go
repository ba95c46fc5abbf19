package netfilter

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/waystamp/waystamp/internal/await"
	"github.com/waystamp/waystamp/internal/host"
)

// These tests run nft in namespaces of their own, and fail where they cannot: a test
// that did not run has shown nothing.

// asChild is set where a test runs this binary again, to what that one shall do.
const asChild = "WAYSTAMP_TEST_CHILD"

func TestMain(m *testing.M) {
	if do, ok := children[os.Getenv(asChild)]; ok {
		do()
		return
	}
	if err := errors.Join(host.Require(host.FeatureNetAdmin, host.FeatureNamespaces, host.FeatureIPv6, host.FeatureVeth), host.RequireNft()); err != nil {
		fmt.Fprintln(os.Stderr, "internal/netfilter:", err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func soon(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), await.Limit(2*time.Minute))
	t.Cleanup(cancel)
	return ctx
}

func scratch(t *testing.T) *host.NetNS {
	t.Helper()
	ns, err := host.Anonymous()
	must(t, err)
	t.Cleanup(func() { ns.Close() })
	return ns
}

// nftIn runs nft as an operator would.
func nftIn(t *testing.T, ns *host.NetNS, args ...string) string {
	t.Helper()
	out, err := host.Command(t.Context(), ns, "nft", args...).CombinedOutput()
	if err != nil {
		t.Fatalf("nft %q: %v\n%s", args, err, out)
	}
	return string(out)
}

var children = map[string]func(){
	"check":  checkAsChild,
	"killed": killedChild,
}

// joined makes two namespaces with a link between them, 192.0.2.1 to 192.0.2.2.
func joined(t *testing.T) (a, b *host.NetNS) {
	t.Helper()
	a, b = scratch(t), scratch(t)
	for i, ns := range []*host.NetNS{a, b} {
		n, err := host.Open(ns)
		must(t, err)
		defer n.Close()
		if i == 0 {
			must(t, n.AddVeth(host.Veth{Name: "link", PeerName: "link", Peer: b}))
		}
		must(t, n.AddAddress("link", netip.PrefixFrom(netip.AddrFrom4([4]byte{192, 0, 2, byte(i + 1)}), 24)))
		must(t, n.SetUp("link"))
	}
	return a, b
}

// send sends a datagram to each port.
func send(t *testing.T, ns *host.NetNS, to string, ports ...uint16) {
	t.Helper()
	must(t, ns.Do(func() error {
		for _, port := range ports {
			if err := datagram(to, port); err != nil {
				return err
			}
		}
		return nil
	}))
}

// datagram is sent from the namespace of the thread.
func datagram(to string, port uint16) error {
	c, err := net.Dial("udp", net.JoinHostPort(to, fmt.Sprint(port)))
	if err != nil {
		return err
	}
	_, err = c.Write([]byte("x"))
	return errors.Join(err, c.Close())
}

// until waits for counters that packets in flight are about to change.
func until(t *testing.T, reached func() bool) {
	t.Helper()
	for deadline := time.Now().Add(await.Limit(10 * time.Second)); !reached(); {
		if time.Now().After(deadline) {
			t.Error("the packets did not arrive within 10 s")
			return
		}
	}
}
