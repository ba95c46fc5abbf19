package dataplane

import (
	"errors"
	"fmt"
	"path/filepath"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
)

// checkPositions names the programs that stand before ours at TC: whatever they
// let pass, ours do not see. To move ours is no remedy: the kernel takes a
// program once per hook, so that there would be none for a moment; and whoever
// put the other one there may do so again.
func (d *Dataplane) checkPositions(bs []binding) (problems []error) {
	for _, b := range bs {
		for _, h := range b.hooks() {
			a := d.links[linkKey{h, b.device.Index}]
			if a == nil {
				continue
			}
			if err := checkFirst(a.link, b, h); err != nil {
				problems = append(problems, err)
			}
		}
	}
	return problems
}

func checkFirst(l link.Link, b binding, h hook) error {
	_, ours, err := linkState(l)
	if err != nil {
		return fmt.Errorf("look at the %s link of interface %s: %w", h, b.Name, err)
	}
	at, where := h.attachType()
	q, err := link.QueryPrograms(link.QueryOptions{Target: b.device.Index, Attach: at})
	if err != nil {
		return fmt.Errorf("ask which programs are at the %s of interface %s: %w", where, b.Name, err)
	}
	if len(q.Programs) == 0 || q.Programs[0].ID == ours {
		return nil // a link whose device has just gone has none
	}
	return fmt.Errorf("interface %s: program %s stands before waystamp's at TC %s, which does not see what that one lets pass: detach it, or attach it behind waystamp's", b.Name, programName(q.Programs[0].ID), where)
}

// checkAlone refuses interfaces at which another instance's programs are. Both would
// stamp and judge each packet, with the same numbers if they have the same plan.
// Where a link of this instance is, it was alone when it came.
func (d *Dataplane) checkAlone(bs []binding) error {
	var errs []error
	for _, b := range bs {
	hooks:
		for _, h := range b.hooks() {
			if d.links[linkKey{h, b.device.Index}] != nil {
				continue
			}
			at, where := h.attachType()
			q, err := link.QueryPrograms(link.QueryOptions{Target: b.device.Index, Attach: at})
			if err != nil {
				continue // to attach says what is wrong
			}
			for _, p := range q.Programs {
				if isOurs(p.ID) {
					other := instanceOf(d.cfg.PinDir, p.ID)
					errs = append(errs, fmt.Errorf("interface %s: program %s of instance %s is at TC %s, and only one instance can have it: run the agent with --instance %[3]s, or first waystamp agent --detach --instance %[3]s --yes", b.Name, programName(p.ID), other, where))
					break hooks // the same for all
				}
			}
		}
	}
	return errors.Join(errs...)
}

// isOurs tells programs of waystamp, of whichever version, by their names.
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
	for _, o := range objects {
		if o.program == info.Name {
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
		_, has, err := linkState(l)
		l.Close()
		if err == nil && has == id {
			return filepath.Base(filepath.Dir(filepath.Dir(pin)))
		}
	}
	return "NAME" // its pins are elsewhere
}

// attachType is the hook of TC, and what people call it.
func (h hook) attachType() (at ebpf.AttachType, where string) {
	if h == hookOut {
		return ebpf.AttachTCXEgress, "egress"
	}
	return ebpf.AttachTCXIngress, "ingress"
}

// programName is what is known of somebody else's program.
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
