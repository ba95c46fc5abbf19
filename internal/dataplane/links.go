package dataplane

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/dataplane/object"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/tables"
)

// linkKey is a place where a program is attached.
type linkKey struct {
	hook  hook
	index int
}

// attached is a holding that is pinned.
type attached struct {
	holding
	path string
}

func (k linkKey) pin(netns uint64) string {
	return fmt.Sprintf("%s-%d-%d", k.hook, k.index, netns)
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

// heldPin is the pin of a holding.
type heldPin struct {
	path  string
	key   linkKey
	netns uint64
	ours  bool // its name has the form of ours
	link  bool // otherwise a filter
}

// heldPins are the pins of an instance, links before filters, each in the order in which they
// can be removed.
func heldPins(dir string) (out []heldPin, err error) {
	for _, from := range []string{linksDir(dir), filtersDir(dir)} {
		entries, err := os.ReadDir(from)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return out, fmt.Errorf("read the pinned links: %w", err)
		}
		first := len(out)
		for _, e := range entries {
			p := heldPin{path: filepath.Join(from, e.Name()), link: from == linksDir(dir)}
			p.key, p.netns, p.ours = parseLinkPin(e.Name())
			out = append(out, p)
		}
		slices.SortStableFunc(out[first:], func(a, b heldPin) int { return compareRemoval(a.key, b.key) })
	}
	return out, nil
}

func (p heldPin) open(c Config) (holding, error) {
	if !p.link {
		if c.Net == nil {
			return nil, errors.New("there is no access to filters")
		}
		return openFilter(c, p.key, p.path)
	}
	l, err := link.LoadPinnedLink(p.path, nil)
	if err != nil {
		return nil, err
	}
	return linkHolding{l}, nil
}

// elsewhere is the remedy for a holding of another network namespace.
func (p heldPin) elsewhere(dir string, here uint64) error {
	return fmt.Errorf("instance %s is at work in another network namespace (inode %d, this is %d): choose another name, or detach it there", filepath.Base(dir), p.netns, here)
}

// openLinks opens the pinned links and filters of an instance, and removes those
// that hold nothing any more. It refuses an instance that is at work in another
// network namespace.
func openLinks(c Config, dir string) (_ map[linkKey]*attached, err error) {
	out := map[linkKey]*attached{}
	defer func() {
		if err != nil {
			for _, a := range out {
				a.close()
			}
		}
	}()
	here, err := netnsInode()
	if err != nil {
		return nil, err
	}
	pins, err := heldPins(dir)
	if err != nil {
		return nil, err
	}
	for _, p := range pins {
		if !p.ours {
			return nil, fmt.Errorf("%s is not a pin of waystamp's: remove it", p.path)
		}
		if !p.link && p.netns != here {
			return nil, p.elsewhere(dir, here)
		}
		h, err := p.open(c)
		if err != nil {
			return nil, fmt.Errorf("open the pinned link %s: %w", p.path, err)
		}
		index, _, err := h.state()
		if err != nil {
			h.close()
			return nil, fmt.Errorf("open the pinned link %s: %w", p.path, err)
		}
		if index == 0 {
			c.Log.Info("the device of a pinned link is gone", "link", filepath.Base(p.path))
			if err := errors.Join(h.unpin(), h.close()); err != nil {
				return nil, fmt.Errorf("remove the pinned link %s: %w", p.path, err)
			}
			continue
		}
		if p.netns != here {
			h.close()
			return nil, p.elsewhere(dir, here)
		}
		out[p.key] = &attached{h, p.path}
	}
	return out, nil
}

// dropDeadLinks removes links whose device is gone. lenient: links that cannot be read stay.
func (d *Dataplane) dropDeadLinks(lenient bool) error {
	for k, a := range d.links {
		index, _, err := a.state()
		if err != nil && lenient {
			continue
		}
		if err != nil {
			return fmt.Errorf("look at the link of interface %d: %w", k.index, err)
		}
		if index == 0 {
			if err := d.dropDeadLink(k); err != nil {
				return err
			}
		}
	}
	return nil
}

func (d *Dataplane) dropDeadLink(k linkKey) error {
	a := d.links[k]
	if err := errors.Join(a.unpin(), a.close()); err != nil {
		return fmt.Errorf("remove the link of interface %d, which is gone: %w", k.index, err)
	}
	delete(d.links, k)
	return nil
}

// programFor is the program of a role at a hook.
func programFor(r model.Role, h hook) string {
	switch {
	case h == hookFromXDP:
		return object.FunctionXDP
	case h == hookFrom:
		return object.FunctionTC
	case r == model.RoleEdge && h == hookOut:
		return object.EdgeOutTC
	case h == hookOut:
		return object.CoreOutTC
	case r == model.RoleEdge && h == hookXDP:
		return object.EdgeXDP
	case r == model.RoleEdge:
		return object.EdgeTC
	case h == hookXDP:
		return object.CoreXDP
	}
	return object.CoreTC
}

// overLabels are the programs for tail calls from programs on XDP, in domains with labels.
var overLabels = map[string]string{object.CoreXDP: object.MPLSCoreXDP, object.EdgeXDP: object.MPLSEdgeXDP}

// programsOf names the programs that a plan needs on its interfaces.
func programsOf(n plan.Node, bs []binding) []string {
	need := map[string]bool{object.ExtTC: true} // others jump to it
	for _, b := range bs {
		for _, h := range b.hooks() {
			need[programFor(b.Role, h)] = true
		}
		if b.triesXDP() {
			p := programFor(b.Role, b.hookXDP())
			need[p] = true
			if over := overLabels[p]; over != "" && n.MPLS != nil {
				need[over] = true
			}
		}
	}
	if n.MPLS != nil {
		need[object.MPLSTC] = true
	}
	if tables.LeavesOverLabels(n) {
		need[object.MPLSOutTC] = true
	}
	for _, p := range n.Proxies {
		if p.OnUnknown == model.OnUnknownOriginate {
			need[object.OriginateTC] = true
		}
		if p.Netfilter != nil && p.Netfilter.Bypass {
			need[object.BypassTC] = true
			if n.MPLS != nil {
				need[object.MPLSBypassTC] = true
			}
		}
		if p.Stream != nil || p.Gateway != nil {
			need[object.StreamTC] = true
		}
		if p.Gateway != nil {
			need[object.GatewayTC] = true
		}
	}
	return slices.Sorted(maps.Keys(need))
}

// undo is a list of steps that can be taken back, the last one first, until
// keep is called.
type undo []undoStep

type undoStep struct{ back, keep func() error }

// add notes how to undo a step, and what to release if it stays (may be nil).
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
func (d *Dataplane) attachReturns(g *generation, bs []binding, u *undo, left *leftOut) error {
	for _, b := range bs {
		for _, h := range b.hooks() {
			if h == hookTC && !b.cutter {
				continue
			}
			if err := left.take(d.attachOne(g, b, h, u, left)); err != nil {
				return err
			}
		}
	}
	return nil
}

// attach attaches the other programs of g to all interfaces: by moving existing links, or with
// new ones. They come in the order of the bindings, and TC before XDP, which leaves packets to
// TC.
func (d *Dataplane) attach(g *generation, bs []binding, u *undo, left *leftOut) error {
	for _, b := range bs {
		if b.cutter {
			continue
		}
		if !b.from {
			if err := left.take(d.attachOne(g, b, hookTC, u, left)); err != nil {
				return err
			}
		}
		if !b.triesXDP() {
			continue
		}
		if ingress := b.hooks()[len(b.hooks())-1]; left.has(linkKey{ingress, b.device.Index}) && !d.hasXDP(b) {
			continue // XDP would hand packets on to a program that is not there
		}
		err := d.attachOne(g, b, b.hookXDP(), u, left)
		if err != nil && !b.needsXDP() && noXDP(err) {
			d.cfg.Log.Info("no native XDP on this interface; TC does all the work", "interface", b.Name, "err", err)
			continue
		}
		if err := left.take(err); err != nil {
			return err
		}
	}
	return nil
}

// attachOne puts a program of g on an interface. Where there was none, the error is an
// AttachError.
func (d *Dataplane) attachOne(g *generation, b binding, h hook, u *undo, left *leftOut) error {
	k := linkKey{h, b.device.Index}
	p := g.programs[programFor(b.Role, h)]
	if a := d.links[k]; a != nil {
		return d.moveLink(a, b, h, p, u, left)
	}
	if left.has(k) {
		return left.places[k]
	}
	if err := d.attachNew(k, b, p); err != nil {
		return &AttachError{Interface: b.Name, Err: err, at: k}
	}
	u.add(func() error { return d.detachNow(k) }, nil)
	return nil
}

func (d *Dataplane) attachNew(k linkKey, b binding, p *ebpf.Program) error {
	h := k.hook
	if err := d.cfg.step(stepLinkAttach, string(h)+" "+b.Name); err != nil {
		return err
	}
	netns, err := netnsInode()
	if err != nil {
		return err
	}
	from := linksDir(d.dir)
	if d.clsact && h != hookXDP && h != hookFromXDP {
		from = filtersDir(d.dir)
	}
	if err := os.MkdirAll(from, 0o700); err != nil {
		return fmt.Errorf("make a directory for pins: %w", err)
	}
	a := &attached{path: filepath.Join(from, k.pin(netns))}
	if a.holding, err = d.attachProgram(b, k, p, a.path); err != nil {
		return err
	}
	d.links[k] = a
	return nil
}

// moveLink is one atomic step: a packet meets the old program or the new one. If it fails, the
// old program stays, whose maps may be of another generation: that is an AttachError only if the
// device has vanished.
func (d *Dataplane) moveLink(a *attached, b binding, h hook, p *ebpf.Program, u *undo, left *leftOut) error {
	k := linkKey{h, b.device.Index}
	vanished := func(err error) error {
		return &AttachError{Interface: b.Name, Err: errors.Join(err, d.dropDeadLink(k)), at: k}
	}
	index, current, err := a.state()
	if err != nil {
		err = fmt.Errorf("look at the %s link of interface %s: %w", h, b.Name, err)
		if left.inPlace() {
			err = &AttachError{Interface: b.Name, Err: err, at: k, held: true}
		}
		return err
	}
	if index == 0 {
		return vanished(fmt.Errorf("attach to interface %s: the device has vanished, or somebody has taken the filter off", b.Name))
	}
	info, err := p.Info()
	if err != nil {
		return fmt.Errorf("look at the %s program: %w", h, err)
	}
	if id, ok := info.ID(); ok && id == current {
		return nil
	}
	old, err := d.openProgram(current)
	if err != nil {
		return fmt.Errorf("hold the %s program of interface %s: %w", h, b.Name, err)
	}
	if err := d.cfg.step(stepLinkUpdate, string(h)+" "+b.Name); err != nil {
		return errors.Join(err, old.Close())
	}
	if err := a.move(p); err != nil {
		err = errors.Join(fmt.Errorf("move the %s link of interface %s to the new program: %w", h, b.Name, err), old.Close())
		if a.dead() {
			return vanished(err)
		}
		return err
	}
	u.add(func() error {
		if d.links[k] != a {
			return old.Close() // its device has vanished
		}
		err := a.move(old)
		if err != nil && a.dead() {
			err = nil
		}
		return errors.Join(err, old.Close())
	}, old.Close)
	return nil
}

// dead: the device is gone, or the filter was removed.
func (a *attached) dead() bool {
	index, _, err := a.state()
	return err == nil && index == 0
}

// attachProgram attaches a program and pins its link or filter.
func (d *Dataplane) attachProgram(b binding, k linkKey, p *ebpf.Program, path string) (holding, error) {
	var l link.Link
	var err error
	at, where := k.hook.attachType()
	switch {
	case k.hook == hookXDP || k.hook == hookFromXDP:
		l, err = link.AttachXDP(link.XDPOptions{Program: p, Interface: b.device.Index, Flags: link.XDPDriverMode})
		if err != nil {
			return nil, &xdpError{b.device, err}
		}
	case d.clsact:
		h, err := attachFilter(d.cfg, k, p, path)
		if err != nil {
			return nil, fmt.Errorf("attach to interface %s at TC %s: %w", b.Name, where, err)
		}
		return h, nil
	default:
		// First, so that no other program lets a packet pass before it.
		l, err = link.AttachTCX(link.TCXOptions{
			Program: p, Attach: at, Interface: b.device.Index, Anchor: link.Head(),
		})
		if err != nil {
			return nil, fmt.Errorf("attach to interface %s at TC %s: %w", b.Name, where, err)
		}
	}
	if err := l.Pin(path); err != nil {
		return nil, errors.Join(fmt.Errorf("pin the link of interface %s: %w", b.Name, err), l.Close())
	}
	return linkHolding{l}, nil
}

// xdpError explains why native XDP could not be attached.
type xdpError struct {
	device host.Device
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
		if e.device.Kind == "device" { // of no kind of its own
			why = "; its driver may have no native XDP: set datapath: tc"
		}
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
	if err := detachHolding(a); err != nil {
		return fmt.Errorf("detach from interface %d at %s: %w", k.index, k.hook, err)
	}
	delete(d.links, k)
	return nil
}

func detachHolding(h holding) error {
	return errors.Join(h.detach(), h.unpin(), h.close())
}

func (d *Dataplane) hasXDP(b binding) bool {
	return d.links[linkKey{b.hookXDP(), b.device.Index}] != nil
}
