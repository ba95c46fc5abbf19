package host

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// OnCPU runs f on one CPU, on the calling thread, which must be locked to its
// goroutine (NetNS.Do does so). AnyCPU is the first one it may run on.
func OnCPU(cpu int, f func() error) error {
	var all, one unix.CPUSet
	if err := unix.SchedGetaffinity(0, &all); err != nil {
		return fmt.Errorf("read the CPUs of the thread: %w", err)
	}
	if cpu == AnyCPU {
		for cpu = 0; !all.IsSet(cpu); cpu++ {
		}
	}
	one.Set(cpu)
	if err := unix.SchedSetaffinity(0, &one); err != nil {
		return fmt.Errorf("stay on CPU %d: %w", cpu, err)
	}
	return errors.Join(f(), unix.SchedSetaffinity(0, &all))
}

// AnyCPU leaves the choice to OnCPU.
const AnyCPU = -1
