package dataplane

import (
	"fmt"

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
