package dataplane

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/dataplane/object"
)

// checkPositions names the programs before ours at TC: our programs do not see packets that
// those accept. Moving ours is no remedy: the kernel accepts a program once per hook, so there
// would be none for a moment; and the owner of the other program may attach it first again.
func (d *Dataplane) checkPositions(bs []binding) (problems []error) {
	for _, b := range bs {
		for _, h := range b.hooks() {
			a := d.links[linkKey{h, b.device.Index}]
			if a == nil {
				continue
			}
			if err := checkFirst(a.holding, b, h); err != nil {
				problems = append(problems, err)
			}
		}
	}
	return problems
}

func checkFirst(held holding, b binding, h hook) error {
	_, ours, err := held.state()
	if err != nil {
		return fmt.Errorf("look at the %s link of interface %s: %w", h, b.Name, err)
	}
	at, where := h.attachType()
	before := func(what string) error {
		return fmt.Errorf("interface %s: %s stands before waystamp's at TC %s, which does not see what that one lets pass: detach it, or attach it behind waystamp's", b.Name, what, where)
	}
	q, err := link.QueryPrograms(link.QueryOptions{Target: b.device.Index, Attach: at})
	f, isFilter := held.(*filterHolding)
	if err != nil && !(isFilter && errors.Is(err, unix.EINVAL)) { // no tcx, which would be before filters
		return fmt.Errorf("ask which programs are at the %s of interface %s: %w", where, b.Name, err)
	}
	if err == nil && len(q.Programs) > 0 && q.Programs[0].ID != ours {
		return before("program " + programName(q.Programs[0].ID))
	}
	if !isFilter {
		return nil
	}
	list, err := f.net.Filters(f.index, f.egress)
	if err != nil || len(list) == 0 || list[0].Program == uint32(ours) {
		return err
	}
	if list[0].Program != 0 {
		return before("program " + programName(ebpf.ProgramID(list[0].Program)))
	}
	return before(fmt.Sprintf("a filter of kind %s and preference %d", list[0].Kind, list[0].Preference))
}

// checkAlone refuses interfaces with programs of another instance. Both would process each
// packet, with the same numbers if they have the same plan. A link of this instance was alone
// when it was made. It also returns the places without a link on these interfaces; the error has
// each interface once.
func (d *Dataplane) checkAlone(bs []binding) (shared map[linkKey]*AttachError, err error) {
	var errs []error
	shared = map[linkKey]*AttachError{}
	for _, b := range bs {
		own := d.programsOn(b.device.Index)
	hooks:
		for _, h := range b.hooks() {
			if d.links[linkKey{h, b.device.Index}] != nil {
				continue
			}
			_, where := h.attachType()
			for _, p := range d.residents(b.device.Index, h) {
				if !slices.Contains(own, p.id) && isOurs(p.id) {
					err := fmt.Errorf("interface %s: program %s of instance %s is at TC %s, and only one instance can have it: run the agent with --instance %[3]s, or first waystamp agent --detach --instance %[3]s --yes", b.Name, programName(p.id), p.instance, where)
					errs = append(errs, err)
					for _, h := range b.hooks() {
						if k := (linkKey{h, b.device.Index}); d.links[k] == nil {
							shared[k] = &AttachError{Interface: b.Name, Err: err, at: k}
						}
					}
					break hooks // the same for all
				}
			}
		}
	}
	return shared, errors.Join(errs...)
}

// programsOn are this instance's programs on an interface, for any use: an interface of a
// function may have become another one.
func (d *Dataplane) programsOn(index int) (out []ebpf.ProgramID) {
	for k, a := range d.links {
		if k.index != index {
			continue
		}
		if _, id, err := a.state(); err == nil {
			out = append(out, id)
		}
	}
	return out
}

// resident is a program at TC, and the instance that it would be of if it were ours.
type resident struct {
	id       ebpf.ProgramID
	instance string
}

// residents are the programs at a hook, except this instance's own filters. A hook that cannot
// be queried has none here: attaching to it returns the error.
func (d *Dataplane) residents(index int, h hook) (out []resident) {
	at, _ := h.attachType()
	if q, err := link.QueryPrograms(link.QueryOptions{Target: index, Attach: at}); err == nil {
		for _, p := range q.Programs {
			out = append(out, resident{p.ID, instanceOf(d.cfg.PinDir, p.ID)})
		}
	}
	if d.cfg.Net == nil {
		return out
	}
	filters, err := d.cfg.Net.Filters(index, h == hookOut)
	if err != nil {
		return out
	}
	for _, f := range filters {
		if instance := instanceOfFilter(f.Name); f.Program != 0 && instance != d.cfg.Instance {
			out = append(out, resident{ebpf.ProgramID(f.Program), instance})
		}
	}
	return out
}

// isOurs recognises programs of waystamp, of any version, by their names.
func isOurs(id ebpf.ProgramID) bool {
	p, err := ebpf.NewProgramFromID(id)
	if err != nil {
		return false
	}
	defer p.Close()
	info, err := p.Info()
	if err != nil {
		return false
	}
	for _, o := range object.All {
		if o.Program == info.Name {
			return true
		}
	}
	return false
}

// instanceOf looks for the instance that has pinned a link of a program.
func instanceOf(pinDir string, id ebpf.ProgramID) string {
	pins, err := filepath.Glob(filepath.Join(pinDir, "*", "links", "*"))
	if err != nil {
		return "NAME"
	}
	for _, pin := range pins {
		l, err := link.LoadPinnedLink(pin, nil)
		if err != nil {
			continue
		}
		_, has, err := linkHolding{l}.state()
		l.Close()
		if err == nil && has == id {
			return filepath.Base(filepath.Dir(filepath.Dir(pin)))
		}
	}
	return "NAME" // its pins are elsewhere
}

// attachType is the hook of TC, and its usual name.
func (h hook) attachType() (at ebpf.AttachType, where string) {
	if h == hookOut {
		return ebpf.AttachTCXEgress, "egress"
	}
	return ebpf.AttachTCXIngress, "ingress"
}

// programName describes a program of another owner.
func programName(id ebpf.ProgramID) string {
	p, err := ebpf.NewProgramFromID(id)
	if err != nil {
		return fmt.Sprintf("%d", id)
	}
	defer p.Close()
	info, err := p.Info()
	if err != nil || info.Name == "" {
		return fmt.Sprintf("%d", id)
	}
	return fmt.Sprintf("%d (%s)", id, info.Name)
}
