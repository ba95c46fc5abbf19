package host

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Change is a set of things that Watch can look out for.
type Change uint8

const (
	ChangeLinks Change = 1 << iota
	ChangeAddresses
	ChangeRoutes
	ChangeNeighbours
	ChangeForwarding // of interfaces, or of all
	ChangeFilters    // of queueing disciplines
)

var changeGroups = []struct {
	change Change
	groups []int
}{
	{ChangeLinks, []int{unix.RTNLGRP_LINK}},
	{ChangeAddresses, []int{unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR}},
	{ChangeRoutes, []int{unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE}},
	{ChangeNeighbours, []int{unix.RTNLGRP_NEIGH}},
	{ChangeFilters, []int{unix.RTNLGRP_TC}},
	{ChangeForwarding, []int{unix.RTNLGRP_IPV4_NETCONF, unix.RTNLGRP_IPV6_NETCONF}},
}

// Watch calls f once, and again after changes of these kinds: once for any number of changes
// since the last call. It calls f from the caller's goroutine and returns when ctx ends (with
// its cause) or f fails (with its error).
func (n *Net) Watch(ctx context.Context, kinds Change, f func() error) error {
	var groups []int
	for _, c := range changeGroups {
		if kinds&c.change != 0 {
			groups = append(groups, c.groups...)
		}
	}
	sub, err := n.ns.subscribe(groups...)
	if err != nil {
		return err
	}
	defer sub.close()
	for {
		if err := f(); err != nil {
			return err
		}
		if err := sub.wait(ctx); err != nil {
			return err
		}
	}
}

// WatchAddresses calls f with the namespace's own addresses, at once and
// whenever they have changed; see Addresses and Watch.
func (n *Net) WatchAddresses(ctx context.Context, f func([]netip.Addr)) error {
	var last []netip.Addr
	first := true
	return n.Watch(ctx, ChangeAddresses, func() error {
		now, err := n.Addresses()
		if err != nil {
			return err
		}
		if first || !slices.Equal(last, now) {
			first, last = false, now
			f(slices.Clone(now))
		}
		return nil
	})
}

// Addresses returns the namespace's own addresses, sorted and each once; for IPv4 with the
// broadcast addresses of their subnets. It leaves out loopback addresses, link-local addresses
// of IPv6 (but not of IPv4: the kernel would forward to other addresses of that kind), and
// duplicate or tentative addresses (duplicate address detection).
func (n *Net) Addresses() ([]netip.Addr, error) {
	list, err := dump(func() ([]netlink.Addr, error) { return n.h.AddrList(nil, netlink.FAMILY_V6) })
	if err != nil {
		return nil, fmt.Errorf("list addresses in %s: %w", n.ns, err)
	}
	out := []netip.Addr{}
	for _, a := range list {
		addr, ok := netip.AddrFromSlice(a.IP)
		if !ok || addr.IsLinkLocalUnicast() || addr.IsLoopback() {
			continue
		}
		tentative := a.Flags&unix.IFA_F_TENTATIVE != 0 && a.Flags&unix.IFA_F_OPTIMISTIC == 0
		if tentative || a.Flags&unix.IFA_F_DADFAILED != 0 {
			continue
		}
		out = append(out, addr)
	}
	if list, err = dump(func() ([]netlink.Addr, error) { return n.h.AddrList(nil, netlink.FAMILY_V4) }); err != nil {
		return nil, fmt.Errorf("list addresses in %s: %w", n.ns, err)
	}
	for _, a := range list {
		out = append(out, addresses4(a)...)
	}
	slices.SortFunc(out, netip.Addr.Compare)
	return slices.Compact(out), nil
}

// addresses4 is an IPv4 address and the broadcast addresses of its subnet: the one that the
// kernel adds (net/ipv4/fib_frontend.c), and the one that was configured.
func addresses4(a netlink.Addr) []netip.Addr {
	var out []netip.Addr
	add := func(b []byte) {
		if addr, ok := netip.AddrFromSlice(b); ok {
			if addr = addr.Unmap(); !addr.IsLoopback() {
				out = append(out, addr)
			}
		}
	}
	add(a.IP)
	if a.Broadcast != nil {
		add(a.Broadcast)
	}
	if ones, bits := a.Mask.Size(); bits == 32 && ones < 31 {
		last := slices.Clone(a.IP.To4())
		for i := range last {
			last[i] |= ^a.Mask[i]
		}
		add(last)
	}
	return out
}

// subscription is a netlink socket whose messages only show that something has changed: the
// state is read afterwards, so a message lost in a full buffer does no harm.
type subscription struct {
	file *os.File
	raw  syscall.RawConn
}

func (n *NetNS) subscribe(groups ...int) (*subscription, error) {
	var fd int
	err := n.Do(func() error {
		var err error
		fd, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_ROUTE)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("open netlink in %s: %w", n, err)
	}
	f := os.NewFile(uintptr(fd), "netlink") // non-blocking, hence with deadlines
	err = unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
	for _, g := range groups {
		if err == nil {
			err = unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, g)
		}
	}
	var raw syscall.RawConn
	if err == nil {
		raw, err = f.SyscallConn()
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("subscribe to changes in %s: %w", n, err), f.Close())
	}
	return &subscription{file: f, raw: raw}, nil
}

func (s *subscription) close() { s.file.Close() }

// wait returns nil when something has happened since the last call, and the
// cause of ctx's end when that came first.
func (s *subscription) wait(ctx context.Context) error {
	stop := context.AfterFunc(ctx, func() { s.file.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	buf := make([]byte, 1<<16)
	happened := false
	var broken error
	// Read calls again after waiting for as long as false is returned.
	err := s.raw.Read(func(fd uintptr) bool {
		for {
			_, _, err := unix.Recvfrom(int(fd), buf, unix.MSG_DONTWAIT)
			switch {
			case err == nil, errors.Is(err, unix.ENOBUFS): // some were lost: so there were some
				happened = true
			case errors.Is(err, unix.EINTR):
			case errors.Is(err, unix.EAGAIN):
				return happened
			default:
				broken = err
				return true
			}
		}
	})
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case broken != nil:
		return fmt.Errorf("read netlink: %w", broken)
	case err != nil:
		return fmt.Errorf("read netlink: %w", err)
	}
	return nil
}
