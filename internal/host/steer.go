package host

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// SteerReceived makes these CPUs process an interface's received packets (receive packet
// steering), by flow; without CPUs, the CPU that received them. It applies to each of the
// interface's queues, until the interface is removed.
func (n *Net) SteerReceived(link string, cpus ...int) error {
	// sysfs shows the interfaces of the namespace that it is mounted in. This mount is
	// nowhere in the file system.
	var sys int
	err := n.ns.Do(func() error {
		context, err := unix.Fsopen("sysfs", unix.FSOPEN_CLOEXEC)
		if err != nil {
			return os.NewSyscallError("fsopen", err)
		}
		defer unix.Close(context)
		if err := unix.FsconfigCreate(context); err != nil {
			return os.NewSyscallError("fsconfig", err)
		}
		sys, err = unix.Fsmount(context, unix.FSMOUNT_CLOEXEC, 0)
		return os.NewSyscallError("fsmount", err)
	})
	if err == nil {
		root := os.NewFile(uintptr(sys), "sysfs")
		err = errors.Join(steer(root, link, cpuMask(cpus)), root.Close())
	}
	if err != nil {
		return fmt.Errorf("steer what %s of %s receives: %w", link, n.ns, err)
	}
	return nil
}

func steer(root *os.File, link, mask string) error {
	at := func(path string, flags int) (*os.File, error) {
		fd, err := unix.Openat(int(root.Fd()), path, flags|unix.O_CLOEXEC, 0)
		if err != nil {
			return nil, &os.PathError{Op: "open", Path: path, Err: err}
		}
		return os.NewFile(uintptr(fd), path), nil
	}
	dir := "class/net/" + link + "/queues"
	queues, err := at(dir, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	names, err := queues.Readdirnames(-1)
	if err = errors.Join(err, queues.Close()); err != nil {
		return err
	}
	for _, name := range names {
		if !strings.HasPrefix(name, "rx-") {
			continue
		}
		f, err := at(dir+"/"+name+"/rps_cpus", unix.O_WRONLY)
		if err != nil {
			return err
		}
		_, err = f.WriteString(mask)
		if err = errors.Join(err, f.Close()); err != nil {
			return err
		}
	}
	return nil
}

// cpuMask is a bitmap as the kernel reads it: words of 32 bits in hexadecimal, the highest
// first, between commas.
func cpuMask(cpus []int) string {
	words := []uint32{0}
	for _, c := range cpus {
		for len(words) <= c/32 {
			words = append(words, 0)
		}
		words[c/32] |= 1 << (c % 32)
	}
	text := make([]string, len(words))
	for i, w := range words {
		text[len(words)-1-i] = fmt.Sprintf("%08x", w)
	}
	return strings.Join(text, ",")
}

// RunOn makes all threads of a process, and threads that they start, run only on these CPUs;
// without CPUs, on all of the machine. pid 0 is this process.
func RunOn(pid int, cpus ...int) error {
	if pid == 0 {
		pid = os.Getpid()
	}
	var set unix.CPUSet
	for _, c := range cpus {
		set.Set(c)
	}
	if len(cpus) == 0 {
		for c := range len(set) * 64 {
			set.Set(c) // the kernel ignores CPUs that do not exist
		}
	}
	placed := map[string]bool{}
	// A thread that is placed starts none elsewhere, so this comes to an end.
	for again := true; again; {
		again = false
		threads, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
		if err != nil {
			return fmt.Errorf("find the threads of process %d: %w", pid, err)
		}
		for _, t := range threads {
			if placed[t.Name()] {
				continue
			}
			placed[t.Name()], again = true, true
			var tid int
			if _, err := fmt.Sscan(t.Name(), &tid); err != nil {
				return fmt.Errorf("find the threads of process %d: %w", pid, err)
			}
			if err := unix.SchedSetaffinity(tid, &set); err != nil && !errors.Is(err, unix.ESRCH) {
				return fmt.Errorf("place thread %d of process %d: %w", tid, pid, err)
			}
		}
	}
	return nil
}
