package dataplane

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/model"
)

// linkKey is a place where a program is attached.
type linkKey struct {
	hook  hook
	index int
}

// attached is a link that is pinned.
type attached struct {
	link link.Link
	path string
}

func linksDir(dir string) string { return filepath.Join(dir, "links") }

func (k linkKey) pin(dir string, netns uint64) string {
	return filepath.Join(linksDir(dir), fmt.Sprintf("%s-%d-%d", k.hook, k.index, netns))
}

func parseLinkPin(name string) (k linkKey, netns uint64, ok bool) {
	h, rest, ok := strings.Cut(name, "-")
	if !ok || !slices.Contains(hooksByRemoval, hook(h)) {
		return linkKey{}, 0, false
	}
	k.hook = hook(h)
	if _, err := fmt.Sscanf(rest, "%d-%d", &k.index, &netns); err != nil {
		return linkKey{}, 0, false
	}
	return k, netns, true
}

// linkState tells where a link is attached (0: its device is gone) and the
// program that it holds.
func linkState(l link.Link) (index int, program ebpf.ProgramID, err error) {
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

// openLinks opens the pinned links of an instance, and removes those whose
// device is gone. It refuses an instance that is at work in another network
// namespace.
func openLinks(dir string, log *slog.Logger) (_ map[linkKey]*attached, err error) {
	out := map[linkKey]*attached{}
	defer func() {
		if err != nil {
			for _, a := range out {
				a.link.Close()
			}
		}
	}()
	here, err := netnsInode()
	if err != nil {
		return nil, err
	}
	entries, err := os.ReadDir(linksDir(dir))
	if errors.Is(err, fs.ErrNotExist) {
		return out, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the pinned links: %w", err)
	}
	for _, e := range entries {
		path := filepath.Join(linksDir(dir), e.Name())
		k, netns, ok := parseLinkPin(e.Name())
		if !ok {
			return nil, fmt.Errorf("%s is not a pin of waystamp's: remove it", path)
		}
		l, err := link.LoadPinnedLink(path, nil)
		if err != nil {
			return nil, fmt.Errorf("open the pinned link %s: %w", path, err)
		}
		index, _, err := linkState(l)
		if err != nil {
			l.Close()
			return nil, fmt.Errorf("open the pinned link %s: %w", path, err)
		}
		if index == 0 {
			log.Info("the device of a pinned link is gone", "link", e.Name())
			if err := errors.Join(l.Unpin(), l.Close()); err != nil {
				return nil, fmt.Errorf("remove the pinned link %s: %w", path, err)
			}
			continue
		}
		if netns != here {
			l.Close()
			return nil, fmt.Errorf("instance %s is at work in another network namespace (inode %d, this is %d): choose another name, or detach it there", filepath.Base(dir), netns, here)
		}
		out[k] = &attached{l, path}
	}
	return out, nil
}

// dropDeadLinks forgets links whose device is gone, and puts pins back that
// somebody has removed.
func (d *Dataplane) dropDeadLinks() error {
	for k, a := range d.links {
		index, _, err := linkState(a.link)
		if err != nil {
			return fmt.Errorf("look at the link of interface %d: %w", k.index, err)
		}
		if index == 0 {
			if err := errors.Join(a.link.Unpin(), a.link.Close()); err != nil {
				return fmt.Errorf("remove the link of interface %d, which is gone: %w", k.index, err)
			}
			delete(d.links, k)
			continue
		}
		if _, err := os.Lstat(a.path); errors.Is(err, fs.ErrNotExist) {
			if err := errors.Join(a.link.Unpin(), os.MkdirAll(linksDir(d.dir), 0o700), a.link.Pin(a.path)); err != nil {
				return fmt.Errorf("put the pin of a link back: %w", err)
			}
		}
	}
	return nil
}

// programFor is the program of a role at a hook.
func programFor(r model.Role, h hook) string {
	switch {
	case h == hookFromXDP:
		return progFunctionXDP
	case h == hookFrom:
		return progFunctionTC
	case r == model.RoleEdge && h == hookOut:
		return progEdgeOutTC
	case h == hookOut:
		return progCoreOutTC
	case r == model.RoleEdge && h == hookXDP:
		return progEdgeXDP
	case r == model.RoleEdge:
		return progEdgeTC
	case h == hookXDP:
		return progCoreXDP
	}
	return progCoreTC
}

// undo is a list of steps that can be taken back, the last one first, until
// keep is called.
type undo []undoStep

type undoStep struct{ back, keep func() error }

// add notes how to take a step back, and what to let go of if it stays (may be
// nil).
func (u *undo) add(back, keep func() error) { *u = append(*u, undoStep{back, keep}) }

func (u undo) run() error {
	var errs []error
	for i := len(u) - 1; i >= 0; i-- {
		errs = append(errs, u[i].back())
	}
	if err := errors.Join(errs...); err != nil {
		return &undoError{err}
	}
	return nil
}

// undoError means that something of a plan that is not in force may be left.
type undoError struct{ err error }

func (e *undoError) Error() string {
	return "the state before could not be restored in full: " + e.err.Error()
}

func (e *undoError) Unwrap() error { return e.err }

func (u undo) keep() error {
	var errs []error
	for _, s := range u {
		if s.keep != nil {
			errs = append(errs, s.keep())
		}
	}
	return errors.Join(errs...)
}

// attachReturns puts the programs of g where packets come back from functions,
// and on cutters, as attach does.
func (d *Dataplane) attachReturns(g *generation, bs []binding, u *undo) error {
	for _, b := range bs {
		for _, h := range b.hooks() {
			if h == hookTC && !b.cutter {
				continue
			}
			if err := d.attachOne(g, b, h, u); err != nil {
				return err
			}
		}
	}
	return nil
}

// attach puts the other programs of g on all interfaces: by moving links that
// there are, and with new links where there are none. They come in the order of
// the bindings, and TC before XDP, which hands on what it cannot finish.
func (d *Dataplane) attach(g *generation, bs []binding, u *undo) error {
	for _, b := range bs {
		if b.cutter {
			continue
		}
		if !b.from {
			if err := d.attachOne(g, b, hookTC, u); err != nil {
				return err
			}
		}
		if !b.triesXDP() {
			continue
		}
		err := d.attachOne(g, b, b.hookXDP(), u)
		if err != nil && !b.needsXDP() && noXDP(err) {
			d.cfg.Log.Info("no native XDP on this interface; TC does all the work", "interface", b.Name, "err", err)
			continue
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (d *Dataplane) attachOne(g *generation, b binding, h hook, u *undo) error {
	k := linkKey{h, b.device.Index}
	p := g.programs[programFor(b.Role, h)]
	if a := d.links[k]; a != nil {
		return d.moveLink(a, b, h, p, u)
	}
	if err := d.cfg.step(stepLinkAttach, string(h)+" "+b.Name); err != nil {
		return err
	}
	netns, err := netnsInode()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(linksDir(d.dir), 0o700); err != nil {
		return fmt.Errorf("make a directory for pins: %w", err)
	}
	l, err := attachProgram(b, h, p)
	if err != nil {
		return err
	}
	a := &attached{l, k.pin(d.dir, netns)}
	if err := l.Pin(a.path); err != nil {
		return errors.Join(fmt.Errorf("pin the link of interface %s: %w", b.Name, err), l.Close())
	}
	d.links[k] = a
	u.add(func() error { return d.detachNow(k) }, nil)
	return nil
}

// moveLink is one atomic step: a packet meets the old program or the new one.
func (d *Dataplane) moveLink(a *attached, b binding, h hook, p *ebpf.Program, u *undo) error {
	_, current, err := linkState(a.link)
	if err != nil {
		return fmt.Errorf("look at the %s link of interface %s: %w", h, b.Name, err)
	}
	info, err := p.Info()
	if err != nil {
		return fmt.Errorf("look at the %s program: %w", h, err)
	}
	if id, ok := info.ID(); ok && id == current {
		return nil
	}
	old, err := ebpf.NewProgramFromID(current)
	if err != nil {
		return fmt.Errorf("hold the %s program of interface %s: %w", h, b.Name, err)
	}
	if err := d.cfg.step(stepLinkUpdate, string(h)+" "+b.Name); err != nil {
		return errors.Join(err, old.Close())
	}
	if err := a.link.Update(p); err != nil {
		return errors.Join(fmt.Errorf("move the %s link of interface %s to the new program: %w", h, b.Name, err), old.Close())
	}
	u.add(func() error { return errors.Join(a.link.Update(old), old.Close()) }, old.Close)
	return nil
}

func attachProgram(b binding, h hook, p *ebpf.Program) (link.Link, error) {
	if h != hookXDP && h != hookFromXDP {
		at, _ := h.attachType()
		// First, so that no other program lets a packet pass before it.
		l, err := link.AttachTCX(link.TCXOptions{
			Program: p, Attach: at, Interface: b.device.Index, Anchor: link.Head(),
		})
		if errors.Is(err, link.ErrNotSupported) {
			return nil, &UnsupportedError{Feature: "tcx (programs at TC by link)", Min: "6.6"}
		}
		if err != nil {
			return nil, fmt.Errorf("attach to interface %s at TC: %w", b.Name, err)
		}
		return l, nil
	}
	l, err := link.AttachXDP(link.XDPOptions{Program: p, Interface: b.device.Index, Flags: link.XDPDriverMode})
	if err != nil {
		return nil, &xdpError{b.device, err}
	}
	return l, nil
}

// xdpError explains why native XDP could not be attached.
type xdpError struct {
	device Device
	err    error
}

func (e *xdpError) Unwrap() error { return e.err }

func (e *xdpError) Error() string {
	why := ""
	switch {
	case errors.Is(e.err, unix.EBUSY), errors.Is(e.err, unix.EEXIST):
		why = "; another XDP program is there: remove it, or set datapath: tc"
	case errors.Is(e.err, unix.ERANGE):
		why = fmt.Sprintf("; its MTU (%d), or its peer's, is more than its native XDP can do: lower it (3498 is what fits one page), or set datapath: tc", e.device.MTU)
	case errors.Is(e.err, unix.EOPNOTSUPP), errors.Is(e.err, unix.EINVAL):
		why = fmt.Sprintf("; devices of kind %s may have no native XDP: set datapath: tc", e.device.Kind)
	}
	return fmt.Sprintf("attach to interface %s at XDP: %v%s", e.device.Name, e.err, why)
}

// noXDP: the device cannot, as opposed to something being in the way.
func noXDP(err error) bool {
	return errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ERANGE) || errors.Is(err, unix.ENOMEM)
}

// surplus are the links that no interface of bs wants, in the order in which
// they can go.
func (d *Dataplane) surplus(bs []binding) []linkKey {
	keep := map[linkKey]bool{}
	for _, b := range bs {
		for _, h := range b.hooks() {
			keep[linkKey{h, b.device.Index}] = true
		}
		keep[linkKey{b.hookXDP(), b.device.Index}] = b.triesXDP()
	}
	var gone []linkKey
	for k := range d.links {
		if !keep[k] {
			gone = append(gone, k)
		}
	}
	slices.SortFunc(gone, compareRemoval)
	return gone
}

func compareRemoval(a, b linkKey) int {
	return cmp.Or(slices.Index(hooksByRemoval, a.hook)-slices.Index(hooksByRemoval, b.hook), a.index-b.index)
}

// detachOne takes a program off its interface, before it returns.
func (d *Dataplane) detachOne(k linkKey) error {
	if err := d.cfg.step(stepLinkDetach, string(k.hook)); err != nil {
		return err
	}
	return d.detachNow(k)
}

func (d *Dataplane) detachNow(k linkKey) error {
	a := d.links[k]
	if a == nil {
		return nil
	}
	if err := detachLink(a.link); err != nil {
		return fmt.Errorf("detach from interface %d at %s: %w", k.index, k.hook, err)
	}
	delete(d.links, k)
	return nil
}

// detachLink does not leave it to the removal of the pin, which takes effect
// some time later.
func detachLink(l link.Link) error {
	err := l.Detach()
	if errors.Is(err, unix.ENOLINK) || errors.Is(err, unix.ENODEV) { // the device is gone
		err = nil
	}
	return errors.Join(err, l.Unpin(), l.Close())
}

func (d *Dataplane) hasXDP(b binding) bool {
	return d.links[linkKey{b.hookXDP(), b.device.Index}] != nil
}
