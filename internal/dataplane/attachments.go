package dataplane

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/host"
)

// holding attaches a program to an interface, and outlives the process: a link of the kernel, or
// at TC of kernels without tcx a filter of clsact. A pin shows it to the next process.
type holding interface {
	// state returns the interface (0: the device is gone, or the filter was removed) and the
	// program.
	state() (index int, program ebpf.ProgramID, err error)
	// move is one atomic step: a packet meets the old program or the new one.
	move(p *ebpf.Program) error
	pinned
	// detach takes the program off, before it returns. That it is off is no error.
	detach() error
	close() error
}

// linkHolding is a link, which its pin keeps alive.
type linkHolding struct{ link.Link }

func (l linkHolding) state() (index int, program ebpf.ProgramID, err error) {
	info, err := l.Info()
	if err != nil {
		return 0, 0, err
	}
	switch {
	case info.TCX() != nil:
		return int(info.TCX().Ifindex), info.Program, nil
	case info.XDP() != nil:
		return int(info.XDP().Ifindex), info.Program, nil
	}
	return 0, 0, fmt.Errorf("link %d is of a type that waystamp does not use", info.ID)
}

func (l linkHolding) move(p *ebpf.Program) error { return l.Update(p) }
func (l linkHolding) pin(path string) error      { return l.Pin(path) }
func (l linkHolding) unpin() error               { return l.Unpin() }
func (l linkHolding) close() error               { return l.Close() }

// detach does not leave it to the removal of the pin, which takes effect some
// time later.
func (l linkHolding) detach() error {
	err := l.Detach()
	if errors.Is(err, unix.ENOLINK) || errors.Is(err, unix.ENODEV) { // the device is gone
		err = nil
	}
	return err
}

// Of all filters ours have the preference that is met first; within it the newest
// one is.
const (
	filterPreference = 1
	filterHandle     = 0x77730000 // "ws", and the hook
)

// Clsact reports whether filters of clsact attach the programs at TC, since the kernel has no
// tcx.
func (d *Dataplane) Clsact() bool { return d.clsact }

func filterOf(instance string, h hook) host.Filter {
	return host.Filter{
		Preference: filterPreference, Handle: filterHandle + uint32(slices.Index(hooksByRemoval, h)), Kind: "bpf",
		Name: fmt.Sprintf("waystamp %s %s", instance, h),
	}
}

// instanceOfFilter returns the instance in a name from filterOf.
func instanceOfFilter(name string) string {
	if f := strings.Fields(name); len(f) == 3 && f[0] == "waystamp" {
		return f[1]
	}
	return "NAME"
}

// filterHolding is a filter. The filter itself refers to its program; the pin is an empty map,
// which shows that the filter was made. The pin is made before the filter, and removed after it.
type filterHolding struct {
	net    Net
	index  int
	egress bool
	filter host.Filter
	mark   *ebpf.Map
}

func newFilterHolding(c Config, k linkKey) *filterHolding {
	return &filterHolding{net: c.Net, index: k.index, egress: k.hook == hookOut, filter: filterOf(c.Instance, k.hook)}
}

// attachFilter pins the mark and makes the filter. It takes over a filter of the same name,
// which a process with removed pins has left behind.
func attachFilter(c Config, k linkKey, p *ebpf.Program, path string) (_ holding, err error) {
	f := newFilterHolding(c, k)
	f.mark, err = ebpf.NewMap(&ebpf.MapSpec{Name: "ws_filter", Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	if err != nil {
		return nil, fmt.Errorf("make the mark of a filter: %w", err)
	}
	if err := f.pin(path); err != nil {
		return nil, errors.Join(err, f.close())
	}
	err = c.Net.SetFilter(f.index, f.egress, f.filter, p.FD(), true)
	if errors.Is(err, host.ErrFilterThere) {
		var name string
		if name, err = f.nameThere(); err == nil && name == f.filter.Name {
			err = f.move(p)
		} else if err == nil {
			err = fmt.Errorf("a filter %q is there with waystamp's preference and handle", name)
		}
	}
	if err != nil {
		return nil, errors.Join(err, f.unpin(), f.close())
	}
	return f, nil
}

func openFilter(c Config, k linkKey, path string) (holding, error) {
	f := newFilterHolding(c, k)
	var err error
	f.mark, err = ebpf.LoadPinnedMap(path, nil)
	return f, err
}

func (f *filterHolding) find() (int, host.Filter, error) {
	list, err := f.net.Filters(f.index, f.egress)
	if err != nil {
		return 0, host.Filter{}, err
	}
	for i, have := range list {
		if have.Preference == f.filter.Preference && have.Handle == f.filter.Handle {
			return i, have, nil
		}
	}
	return -1, host.Filter{}, nil
}

func (f *filterHolding) nameThere() (string, error) {
	_, have, err := f.find()
	return have.Name, err
}

func (f *filterHolding) state() (index int, program ebpf.ProgramID, err error) {
	i, have, err := f.find()
	if err != nil || i < 0 || have.Name != f.filter.Name {
		return 0, 0, err
	}
	return f.index, ebpf.ProgramID(have.Program), nil
}

func (f *filterHolding) move(p *ebpf.Program) error {
	return f.net.SetFilter(f.index, f.egress, f.filter, p.FD(), false)
}

func (f *filterHolding) pin(path string) error { return f.mark.Pin(path) }
func (f *filterHolding) unpin() error          { return f.mark.Unpin() }
func (f *filterHolding) close() error          { return f.mark.Close() }

func (f *filterHolding) detach() error {
	index, _, err := f.state()
	if err != nil || index == 0 {
		return err
	}
	if err := f.net.RemoveFilter(f.index, f.egress, f.filter); err != nil {
		return err
	}
	if index, _, err = f.state(); err == nil && index != 0 {
		err = fmt.Errorf("the filter %q is still there", f.filter.Name)
	}
	return err
}

// Links below linksDir attach programs at TC, or filters with pins in filtersDir.
func linksDir(dir string) string   { return filepath.Join(dir, "links") }
func filtersDir(dir string) string { return filepath.Join(dir, "filters") }
