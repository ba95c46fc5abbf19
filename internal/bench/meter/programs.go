package meter

import (
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/dataplane"
)

// Programs is a program of an instance that is attached, and the kernel's count of
// its runs, which goes on until Close.
type Programs struct {
	program *ebpf.Program
	stats   io.Closer
}

// ProgramTime is what the kernel has counted of a program.
type ProgramTime struct {
	Runs uint64
	Time time.Duration // with the kernel's own clock, some 20 ns each
}

// OpenPrograms looks for a program below the default pin directory.
func OpenPrograms(instance, name string) (_ *Programs, err error) {
	found, err := filepath.Glob(filepath.Join(dataplane.DefaultPinDir, instance, "gen-*", name))
	if err != nil {
		return nil, err
	}
	if len(found) != 1 {
		return nil, fmt.Errorf("instance %s has %d generations with a program %s; expect one", instance, len(found), name)
	}
	p := &Programs{}
	if p.program, err = ebpf.LoadPinnedProgram(found[0], nil); err != nil {
		return nil, err
	}
	if p.stats, err = ebpf.EnableStats(unix.BPF_STATS_RUN_TIME); err != nil {
		return nil, errors.Join(fmt.Errorf("let the kernel count the time of programs: %w", err), p.program.Close())
	}
	return p, nil
}

// Read returns the count since the program was loaded.
func (p *Programs) Read() (ProgramTime, error) {
	s, err := p.program.Stats()
	if err != nil {
		return ProgramTime{}, fmt.Errorf("read what the kernel counts of a program: %w", err)
	}
	return ProgramTime{s.RunCount, s.Runtime}, nil
}

// Close lets go of both.
func (p *Programs) Close() error { return errors.Join(p.stats.Close(), p.program.Close()) }
