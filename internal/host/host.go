// Package host is the only place that talks to the kernel about a machine's network: namespaces,
// links, addresses, routes, sysctls, device features. It reads and sets them; it decides
// nothing, is independent of chains and proofs, and loads no programs (internal/dataplane does).
// The agent, the lab and the bench call it.
//
// Inside the project addresses are netip; they become net.IP here and nowhere else.
package host

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Net configures the network of one namespace. It may be used by several
// goroutines at once.
type Net struct {
	ns *NetNS
	h  *netlink.Handle
}

// Open returns a handle on a namespace's network; nil means the namespace of the process. The
// handle keeps the namespace alive until Close, also after ns is closed.
func Open(ns *NetNS) (_ *Net, err error) {
	var own *NetNS
	if ns == nil {
		own, err = Current()
	} else {
		own, err = ns.dup()
	}
	if err != nil {
		return nil, err
	}
	n := &Net{ns: own}
	err = own.Do(func() error {
		var err error
		n.h, err = netlink.NewHandle(unix.NETLINK_ROUTE)
		return err
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open netlink in %s: %w", own, err), own.Close())
	}
	return n, nil
}

// NetNS returns the namespace that n configures. It belongs to n.
func (n *Net) NetNS() *NetNS { return n.ns }

// Close releases the handle. It may be called more than once.
func (n *Net) Close() error {
	n.h.Close()
	return n.ns.Close()
}

// Sysctl reads a kernel setting of the namespace. The key is its path below
// /proc/sys, since names of interfaces may hold dots:
// "net/ipv6/conf/all/forwarding".
func (n *Net) Sysctl(key string) (string, error) {
	path, err := sysctlPath(key)
	if err != nil {
		return "", err
	}
	var b []byte
	err = n.ns.Do(func() error {
		var err error
		b, err = os.ReadFile(path)
		return err
	})
	if err != nil {
		return "", fmt.Errorf("read sysctl %s in %s: %w", key, n.ns, err)
	}
	return strings.TrimSpace(string(b)), nil
}

// SetSysctl writes a kernel setting of the namespace; see Sysctl.
func (n *Net) SetSysctl(key, value string) error {
	path, err := sysctlPath(key)
	if err != nil {
		return err
	}
	err = n.ns.Do(func() error {
		// Not os.WriteFile: a setting that this kernel lacks must not be created.
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		if err != nil {
			return err
		}
		_, err = f.WriteString(value)
		return errors.Join(err, f.Close())
	})
	if err != nil {
		return fmt.Errorf("set sysctl %s to %s in %s: %w", key, value, n.ns, err)
	}
	return nil
}

// sysctlPath refuses all but the network's settings: only those belong to a
// namespace, the others would be the whole machine's.
func sysctlPath(key string) (string, error) {
	if !strings.HasPrefix(key, "net/") || filepath.Clean(key) != key {
		return "", fmt.Errorf("sysctl %q is not a path below net/", key)
	}
	return "/proc/sys/" + key, nil
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{
		IP:   p.Addr().AsSlice(),
		Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen()),
	}
}

// prefixOf returns false for values that are no prefix, such as nil.
func prefixOf(n *net.IPNet) (netip.Prefix, bool) {
	if n == nil {
		return netip.Prefix{}, false
	}
	a, ok := netip.AddrFromSlice(n.IP)
	ones, bits := n.Mask.Size()
	if !ok || bits != a.BitLen() {
		return netip.Prefix{}, false
	}
	return netip.PrefixFrom(a, ones), true
}
