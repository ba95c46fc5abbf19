package dataplane

import (
	"errors"
	"fmt"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/dataplane/object"
	"github.com/waystamp/waystamp/internal/host"
)

// Other is a program or filter that is not ours, at an interface, and meets packets before ours do.
type Other struct {
	XDP  bool   // otherwise at TC
	At   string // "XDP", "TC ingress", "TC egress"
	What string // such as: program 7 (other)
}

// Others finds what meets packets of an interface before our programs: at TC what is attached in front of them, if
// they are, since agents attach them in front of what is there; at XDP whatever is there and not ours. It runs in the
// interface's namespace. Whose a program is, needs CAP_SYS_ADMIN to be told.
func Others(net Net, l host.Link) (out []Other, err error) {
	if l.XDP != 0 {
		name, ours, err := whose(ebpf.ProgramID(l.XDP))
		if err != nil {
			return nil, err
		}
		if !ours {
			out = append(out, Other{true, "XDP", "program " + name})
		}
	}
	for _, h := range []hook{hookTC, hookOut} {
		before, err := othersAtTC(net, l.Index, h)
		if err != nil {
			return nil, err
		}
		out = append(out, before...)
	}
	return out, nil
}

// Guarded tells whether a program of ours, of any instance and version, meets packets that arrive on an interface at TC. It
// runs in the interface's namespace, and needs CAP_SYS_ADMIN.
func Guarded(net Net, l host.Link) (bool, error) {
	all, err := allAtTC(net, l.Index, hookTC)
	return slices.ContainsFunc(all, func(p atTC) bool { return p.ours }), err
}

// othersAtTC are those before ours; none if ours are not there.
func othersAtTC(net Net, index int, h hook) (out []Other, err error) {
	all, err := allAtTC(net, index, h)
	for i, p := range all {
		if p.ours {
			for _, before := range all[:i] {
				out = append(out, before.Other)
			}
			return out, nil
		}
	}
	return nil, err
}

// atTC is what is at a hook of TC.
type atTC struct {
	Other
	ours bool
}

// allAtTC are in the order in which a packet meets them: the programs of tcx and then the filters of clsact, each in the
// order of their lists. It ends behind the first of ours.
func allAtTC(net Net, index int, h hook) (all []atTC, err error) {
	at, where := h.attachType()
	where = "TC " + where
	program := func(id uint32) (done bool, err error) {
		name, ours, err := whose(ebpf.ProgramID(id))
		if err == nil {
			all = append(all, atTC{Other{false, where, "program " + name}, ours})
		}
		return ours || err != nil, err
	}
	q, err := link.QueryPrograms(link.QueryOptions{Target: index, Attach: at})
	if err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, ebpf.ErrNotSupported) { // no tcx
		return nil, fmt.Errorf("ask which programs are at %s: %w", where, err)
	}
	if err == nil {
		for _, p := range q.Programs {
			if done, err := program(uint32(p.ID)); done {
				return all, err
			}
		}
	}
	filters, err := net.Filters(index, h == hookOut)
	if err != nil {
		return nil, err
	}
	for _, f := range filters {
		if f.Program == 0 {
			all = append(all, atTC{Other{false, where, fmt.Sprintf("a filter of kind %s and preference %d", f.Kind, f.Preference)}, false})
			continue
		}
		if done, err := program(f.Program); done {
			return all, err
		}
	}
	return all, nil
}

// whose describes a program, and tells whether it is one of ours, of any version, by its name.
func whose(id ebpf.ProgramID) (name string, ours bool, err error) {
	p, err := ebpf.NewProgramFromID(id)
	if err != nil {
		return "", false, fmt.Errorf("look at program %d: %w", id, err)
	}
	defer p.Close()
	info, err := p.Info()
	if err != nil {
		return "", false, fmt.Errorf("look at program %d: %w", id, err)
	}
	for _, o := range object.All {
		ours = ours || o.Program == info.Name
	}
	return programName(id), ours, nil
}
