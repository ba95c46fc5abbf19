package host

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Filter is a classifier of the queueing discipline clsact: it runs a program at TC on kernels
// that have no links there (before Linux 6.6).
type Filter struct {
	Preference uint16 // the lowest one meets packets first
	Handle     uint32 // distinguishes filters of one preference
	Kind       string // "bpf", "flower" …
	Name       string // of kind bpf: the name from its creator
	Program    uint32 // of kind bpf: the program's id
}

// ErrFilterThere means that there is a filter of that preference and handle.
var ErrFilterThere = errors.New("there is a filter already")

func filterParent(egress bool) (parent uint32, where string) {
	if egress {
		return netlink.HANDLE_MIN_EGRESS, "egress"
	}
	return netlink.HANDLE_MIN_INGRESS, "ingress"
}

// Filters returns the filters at one direction of clsact of the interface with that index, in
// the order in which packets meet them. It returns none if the interface has no clsact, or does
// not exist.
func (n *Net) Filters(index int, egress bool) ([]Filter, error) {
	parent, where := filterParent(egress)
	link := &netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: index}}
	list, err := dump(func() ([]netlink.Filter, error) { return n.h.FilterList(link, parent) })
	if errors.Is(err, unix.ENODEV) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list the filters at the %s of interface %d in %s: %w", where, index, n.ns, err)
	}
	var out []Filter
	for _, f := range list {
		a := f.Attrs()
		// The kernel lists each preference, too; packets meet another chain only by a jump.
		if a.Handle == 0 || a.Chain != nil && *a.Chain != 0 {
			continue
		}
		one := Filter{Preference: a.Priority, Handle: a.Handle, Kind: f.Type()}
		if b, ok := f.(*netlink.BpfFilter); ok {
			one.Name, one.Program = b.Name, uint32(b.Id)
		}
		out = append(out, one)
	}
	return out, nil
}

// SetFilter adds a program (by its file descriptor) at one direction of clsact, and makes clsact
// if it is missing. fresh: the error is ErrFilterThere if there is a filter of that preference
// and handle; otherwise that filter is replaced in one step: a packet meets the old or the new
// one. Of filters of one preference the newest is the first.
func (n *Net) SetFilter(index int, egress bool, f Filter, program int, fresh bool) error {
	parent, where := filterParent(egress)
	if err := n.ensureClsact(index); err != nil {
		return err
	}
	b := &netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: index, Parent: parent, Priority: f.Preference, Handle: f.Handle, Protocol: unix.ETH_P_ALL,
		},
		Fd: program, Name: f.Name, DirectAction: true,
	}
	set := n.h.FilterReplace
	if fresh {
		set = n.h.FilterAdd
	}
	err := set(b)
	switch {
	case errors.Is(err, unix.EEXIST):
		return ErrFilterThere
	case errors.Is(err, unix.EINVAL):
		return fmt.Errorf("put a filter at the %s of interface %d in %s: %w; another of preference %d that is not of kind bpf and protocol all may be in the way: give that one another (tc filter show)", where, index, n.ns, err, f.Preference)
	case err != nil:
		return fmt.Errorf("put a filter at the %s of interface %d in %s: %w", where, index, n.ns, permission(err))
	}
	return nil
}

// RemoveFilter removes the filter of that preference and handle. A missing filter is no error.
// clsact stays: its creator is unknown.
func (n *Net) RemoveFilter(index int, egress bool, f Filter) error {
	parent, where := filterParent(egress)
	err := n.h.FilterDel(&netlink.BpfFilter{FilterAttrs: netlink.FilterAttrs{
		LinkIndex: index, Parent: parent, Priority: f.Preference, Handle: f.Handle, Protocol: unix.ETH_P_ALL,
	}})
	// The interface, clsact, the preference or the filter is not there.
	if err == nil || errors.Is(err, unix.ENODEV) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
		return nil
	}
	return fmt.Errorf("take the filter off the %s of interface %d in %s: %w", where, index, n.ns, permission(err))
}

// ensureClsact makes the queueing discipline that has filters at both ends and
// queues nothing.
func (n *Net) ensureClsact(index int) error {
	clsact := &netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT,
	}}
	err := n.h.QdiscAdd(clsact)
	if err == nil {
		return nil
	}
	if errors.Is(err, unix.ENODEV) {
		return ErrNoLink
	}
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EOPNOTSUPP) {
		return fmt.Errorf("make clsact on interface %d in %s: %w; the kernel needs CONFIG_NET_SCH_INGRESS and CONFIG_NET_CLS_BPF", index, n.ns, err)
	}
	if !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("make clsact on interface %d in %s: %w", index, n.ns, permission(err))
	}
	switch kind, err := n.AtIngress(index); {
	case err != nil:
		return err
	case kind != "" && kind != clsact.Type():
		return fmt.Errorf("make clsact on interface %d in %s: its queueing discipline %s is in the way; clsact does all that one does, so put it in its place", index, n.ns, kind)
	}
	return nil
}

// AtIngress is the kind of queueing discipline that has the filters of an interface: "clsact", "ingress", which has
// those of arriving packets alone, or "": none.
func (n *Net) AtIngress(index int) (string, error) {
	link := &netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: index}}
	list, err := dump(func() ([]netlink.Qdisc, error) { return n.h.QdiscList(link) })
	if err != nil {
		return "", fmt.Errorf("list the queueing disciplines of interface %d in %s: %w", index, n.ns, err)
	}
	for _, q := range list {
		if q.Attrs().Handle == netlink.MakeHandle(0xffff, 0) {
			return q.Type(), nil
		}
	}
	return "", nil
}
