// Package sandbox takes from a process what a worker does not need: its user, its
// capabilities, the file system, new privileges, and all system calls but those that move
// bytes between TCP sockets. What it took does not come back. It is for all threads of the
// process; internal/stream and internal/gateway/worker call it before the first connection is accepted.
package sandbox

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// threadsMax bounds the threads of all processes of the user (RLIMIT_NPROC). A worker has some ten.
const threadsMax = 4096

// Nobody is the user and group that a process of root's becomes if it names no other.
const Nobody = 65534

// Options say what a process becomes.
type Options struct {
	// User, also a group, that a process of root's becomes; 0: Nobody. Another user's process
	// stays that user's.
	User uint32
	// Gateway lets the process make what net, net/http and an audit log need beside that: more
	// socket options, and writes to files that it has open.
	Gateway bool
	// Memory is how many bytes of its own the process may have (RLIMIT_DATA); 0: as many as it could before. With it
	// the threads of all the user's processes are bounded, too.
	Memory uint64
	// Last is called once all is given up but system calls; nil: there is nothing to do. Its error is Enter's.
	Last func() error

	noFilter bool // tests look at what is below the filter
}

// lower sets both limits of a resource, or leaves a hard limit that is lower: a machine with little memory has few
// threads, and a process without CAP_SYS_RESOURCE may not raise it.
func lower(resource int, to uint64) error {
	var is unix.Rlimit
	if err := unix.Getrlimit(resource, &is); err != nil {
		return err
	}
	to = min(to, is.Max)
	return unix.Setrlimit(resource, &unix.Rlimit{Cur: to, Max: to})
}

// Enter confines the process. If it fails the process must end: it may be confined in
// part.
func Enter(o Options) error {
	// Nothing of it is written to a disk when it dies.
	if err := unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{}); err != nil {
		return fmt.Errorf("set the limit of core files: %w", err)
	}
	if !o.Gateway {
		if err := unix.Setrlimit(unix.RLIMIT_FSIZE, &unix.Rlimit{}); err != nil {
			return fmt.Errorf("set the limit of files' sizes: %w", err)
		}
	}
	if o.Memory > 0 {
		if err := lower(unix.RLIMIT_DATA, o.Memory); err != nil {
			return fmt.Errorf("set the limit of memory: %w", err)
		}
		if err := lower(unix.RLIMIT_NPROC, threadsMax); err != nil {
			return fmt.Errorf("set the limit of threads: %w", err)
		}
	}
	if os.Geteuid() == 0 {
		if err := becomeUser(o.User); err != nil {
			return err
		}
	}
	if err := checkUnprivileged(); err != nil {
		return err
	}
	if err := onAllThreads("set no_new_privs", unix.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1, 0); err != nil {
		return err
	}
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return fmt.Errorf("keep others of the same user out: %w", err)
	}
	if err := noFiles(); err != nil {
		return err
	}
	if o.Last != nil {
		if err := o.Last(); err != nil {
			return err
		}
	}
	if o.noFilter {
		return nil
	}
	return filterCalls(o.Gateway)
}

// becomeUser gives up root: its groups, its capabilities, and the file system, for an empty
// directory that has no name.
func becomeUser(user uint32) error {
	if user == 0 {
		user = Nobody
	}
	empty, err := os.MkdirTemp("", "waystamp-empty-")
	if err != nil {
		return fmt.Errorf("make an empty root directory: %w", err)
	}
	err = errors.Join(os.Chmod(empty, 0o555), unix.Chdir(empty))
	if rerr := os.Remove(empty); err == nil {
		err = rerr
	}
	if err == nil {
		err = unix.Chroot(".")
	}
	if err != nil {
		return fmt.Errorf("change to an empty root directory: %w", err)
	}
	for c := uintptr(0); c < 64; c++ {
		err := onAllThreads("drop capabilities", unix.SYS_PRCTL, unix.PR_CAPBSET_DROP, c, 0)
		if errors.Is(err, unix.EINVAL) {
			break // the kernel has no more
		}
		if err != nil {
			return err
		}
	}
	// These are for all threads in Go.
	if err := syscall.Setgroups(nil); err != nil {
		return fmt.Errorf("give up all groups: %w", err)
	}
	if err := syscall.Setresgid(int(user), int(user), int(user)); err != nil {
		return fmt.Errorf("become group %d: %w", user, err)
	}
	if err := syscall.Setresuid(int(user), int(user), int(user)); err != nil {
		return fmt.Errorf("become user %d: %w", user, err)
	}
	return nil
}

// checkUnprivileged makes sure that no capability is left.
func checkUnprivileged() error {
	var data [2]unix.CapUserData
	if err := unix.Capget(&unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, &data[0]); err != nil {
		return fmt.Errorf("read capabilities: %w", err)
	}
	for _, d := range data {
		if d.Effective|d.Permitted|d.Inheritable != 0 {
			return fmt.Errorf("capabilities %#x are left; start the process as root, or as a user without any", data[0].Permitted|data[0].Inheritable)
		}
	}
	return nil
}

// onAllThreads makes a system call that is for the calling thread alone on each thread.
func onAllThreads(what string, trap, a, b, c uintptr) error {
	_, _, errno := syscall.AllThreadsSyscall6(trap, a, b, c, 0, 0, 0)
	if errno == unix.ENOTSUP && trap == unix.SYS_PRCTL {
		return fmt.Errorf("%s: this program was built with cgo, whose threads cannot all be confined; build it with CGO_ENABLED=0, as make does", what)
	}
	if errno != 0 {
		return fmt.Errorf("%s: %w", what, errno)
	}
	return nil
}

// landlockRules is struct landlock_ruleset_attr of <linux/landlock.h>.
type landlockRules struct {
	files, network, scopes uint64
}

const (
	landlockVersion = 1 // LANDLOCK_CREATE_RULESET_VERSION
	landlockScopes  = 3 // abstract Unix sockets, signals
)

// landlock is the version of Landlock that the kernel has; 0: none.
func landlock() (int, error) {
	version, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, 0, 0, landlockVersion)
	switch errno {
	case 0:
		return int(version), nil
	case unix.ENOSYS, unix.EOPNOTSUPP:
		return 0, nil
	}
	return 0, fmt.Errorf("ask for the version of Landlock: %w", errno)
}

// noFiles forbids all use of files by their names, with Landlock. A kernel without it has
// the filter of system calls, and for root's processes the empty root, instead.
func noFiles() error {
	version, err := landlock()
	if version == 0 {
		return err
	}
	// Each version has rights of its own; a kernel refuses those that it does not know.
	rights, size := uint(13), unsafe.Offsetof(landlockRules{}.network)
	var rules landlockRules
	if version >= 2 {
		rights++ // refer
	}
	if version >= 3 {
		rights++ // truncate
	}
	if version >= 5 {
		rights++ // ioctl of devices
	}
	if version >= 6 {
		rules.scopes, size = landlockScopes, unsafe.Sizeof(rules)
	}
	rules.files = 1<<rights - 1
	fd, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, uintptr(unsafe.Pointer(&rules)), size, 0)
	if errno != 0 {
		return fmt.Errorf("make a Landlock ruleset: %w", errno)
	}
	defer unix.Close(int(fd))
	return onAllThreads("forbid all files with Landlock", unix.SYS_LANDLOCK_RESTRICT_SELF, fd, 0, 0)
}
