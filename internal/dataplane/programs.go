package dataplane

import (
	"path/filepath"

	"github.com/cilium/ebpf"
)

// openProgram opens a program that an interface has, by the pin of a generation, which may be one of
// another version's objects. Without a pin the kernel wants CAP_SYS_ADMIN. The caller closes it.
func (d *Dataplane) openProgram(id ebpf.ProgramID) (*ebpf.Program, error) {
	pins, err := filepath.Glob(filepath.Join(d.dir, "*", "*"))
	if err != nil {
		return nil, err
	}
	for _, pin := range pins {
		p, err := ebpf.LoadPinnedProgram(pin, nil)
		if err != nil {
			continue // a map or a link, or gone by now
		}
		if info, err := p.Info(); err == nil {
			if has, ok := info.ID(); ok && has == id {
				return p, nil
			}
		}
		p.Close()
	}
	return ebpf.NewProgramFromID(id)
}
