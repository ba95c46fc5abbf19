package host

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// NamespaceDir is the directory of named network namespaces, for `ip netns` and other programs.
const NamespaceDir = "/run/netns"

// NetNS is a handle on a network namespace. While it is open the namespace
// lives, with a name or without.
type NetNS struct {
	name  string // its file in NamespaceDir; "" if it has none
	inode uint64
	setns func(fd int) error

	mu   sync.Mutex
	file *os.File // nil once closed
}

var errNoNamespace = errors.New("is not a namespace")

func newNetNS(name string, file *os.File) (*NetNS, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(file.Fd()), &st); err != nil {
		return nil, errors.Join(fmt.Errorf("stat %s: %w", file.Name(), err), file.Close())
	}
	var fst unix.Statfs_t
	if err := unix.Fstatfs(int(file.Fd()), &fst); err != nil {
		return nil, errors.Join(fmt.Errorf("statfs %s: %w", file.Name(), err), file.Close())
	}
	if fst.Type != unix.NSFS_MAGIC {
		return nil, errors.Join(fmt.Errorf("%s %w", file.Name(), errNoNamespace), file.Close())
	}
	return &NetNS{
		name:  name,
		inode: st.Ino,
		setns: func(fd int) error { return unix.Setns(fd, unix.CLONE_NEWNET) },
		file:  file,
	}, nil
}

// Current returns a handle on the namespace that the process runs in, also when
// it is called from inside Do.
func Current() (*NetNS, error) {
	// A goroutine that is not locked to a thread runs on one that is at home. Not
	// /proc/self: that is the first thread, which may just be away, inside Do.
	type opened struct {
		f   *os.File
		err error
	}
	home := make(chan opened)
	go func() {
		f, err := os.Open("/proc/thread-self/ns/net")
		home <- opened{f, err}
	}()
	o := <-home
	if o.err != nil {
		return nil, fmt.Errorf("open the current network namespace: %w", o.err)
	}
	return newNetNS("", o.f)
}

// OpenNamed returns a handle on the namespace of that name. The error is
// fs.ErrNotExist if there is none.
func OpenNamed(name string) (*NetNS, error) {
	if err := checkName(name); err != nil {
		return nil, err
	}
	f, err := os.Open(filepath.Join(NamespaceDir, name))
	if err != nil {
		return nil, fmt.Errorf("open network namespace %s: %w", name, err)
	}
	ns, err := newNetNS(name, f)
	// The process that made the name was killed before it mounted a namespace there.
	if errors.Is(err, errNoNamespace) && removeEmpty(f.Name()) {
		return nil, fmt.Errorf("open network namespace %s: %w", name, fs.ErrNotExist)
	}
	return ns, err
}

// removeEmpty removes a file that has nothing in it and is no mount.
func removeEmpty(name string) bool {
	st, err := os.Lstat(name)
	return err == nil && st.Mode().IsRegular() && st.Size() == 0 && os.Remove(name) == nil
}

// OpenProcess opens the namespace that a process is in.
func OpenProcess(pid int) (*NetNS, error) {
	name := fmt.Sprintf("/proc/%d/ns/net", pid)
	f, err := os.Open(name)
	if err != nil {
		return nil, fmt.Errorf("open the network namespace of process %d: %w", pid, err)
	}
	return newNetNS(name, f)
}

// Anonymous makes a namespace without a name. It is gone when the handle and
// everything that runs in it are. Its loopback interface is down.
func Anonymous() (*NetNS, error) {
	home, err := Current()
	if err != nil {
		return nil, err
	}
	defer home.Close()
	var f *os.File
	// Do takes the thread back to its namespace afterwards.
	err = home.Do(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return err
		}
		f, err = os.Open("/proc/thread-self/ns/net")
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("make a network namespace: %w", permission(err))
	}
	return newNetNS("", f)
}

// New makes a namespace with a name for `ip netns`. The error is fs.ErrExist if the name is
// taken.
func New(name string) (*NetNS, error) {
	ns, err := Anonymous()
	if err != nil {
		return nil, err
	}
	if err := ns.Publish(name); err != nil {
		return nil, errors.Join(err, ns.Close())
	}
	return ns, nil
}

// Publish gives a namespace a name for `ip netns`. From then on the namespace outlives the
// process, until Delete.
func (n *NetNS) Publish(name string) (err error) {
	if err := checkName(name); err != nil {
		return err
	}
	if n.name != "" {
		return fmt.Errorf("network namespace %s has a name already", n.name)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.file == nil {
		return fmt.Errorf("name network namespace %s: %w", name, fs.ErrClosed)
	}
	unlock, err := lockNamespaceDir()
	if err != nil {
		return fmt.Errorf("name network namespace %s: %w", name, permission(err))
	}
	defer unlock()
	path := filepath.Join(NamespaceDir, name)
	f, err := os.OpenFile(path, os.O_RDONLY|os.O_CREATE|os.O_EXCL, 0)
	if err != nil {
		return fmt.Errorf("name network namespace %s: %w", name, permission(err))
	}
	f.Close()
	from := fmt.Sprintf("/proc/self/fd/%d", n.file.Fd())
	if err := unix.Mount(from, path, "none", unix.MS_BIND, ""); err != nil {
		return errors.Join(fmt.Errorf("name network namespace %s: mount it on %s: %w", name, path, permission(err)), os.Remove(path))
	}
	n.name = name
	return nil
}

// lockNamespaceDir makes NamespaceDir a mount with shared propagation, as `ip netns` does, so
// that no other mount namespace keeps a namespace alive that is deleted here. The lock is that
// of `ip netns`: of two mounts at the same time, one would hide the names of the other.
func lockNamespaceDir() (unlock func(), err error) {
	if err := os.MkdirAll(NamespaceDir, 0o755); err != nil {
		return nil, err
	}
	dir, err := os.Open(NamespaceDir)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(dir.Fd()), unix.LOCK_EX); err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", NamespaceDir, err), dir.Close())
	}
	err = unix.Mount("", NamespaceDir, "none", unix.MS_SHARED|unix.MS_REC, "")
	if errors.Is(err, unix.EINVAL) { // not a mount point yet
		err = unix.Mount(NamespaceDir, NamespaceDir, "none", unix.MS_BIND|unix.MS_REC, "")
		if err == nil {
			err = unix.Mount("", NamespaceDir, "none", unix.MS_SHARED|unix.MS_REC, "")
		}
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("share %s: %w", NamespaceDir, err), dir.Close())
	}
	return func() {
		// Not by Close alone: a process that is just being started has it open too.
		unix.Flock(int(dir.Fd()), unix.LOCK_UN)
		dir.Close()
	}, nil
}

// checkName refuses names that would be a file elsewhere.
func checkName(name string) error {
	if name == "" || name == "." || name == ".." || strings.ContainsAny(name, "/\x00") || len(name) > 255 {
		return fmt.Errorf("%q is not a name for a network namespace", name)
	}
	return nil
}

// Name returns the namespace's name, or "".
func (n *NetNS) Name() string { return n.name }

// FromFile makes a handle of a namespace's file, which it takes over.
func FromFile(f *os.File) (*NetNS, error) { return newNetNS("", f) }

// File returns a file of the namespace, such as can be handed to another process. The caller closes it.
func (n *NetNS) File() (*os.File, error) {
	own, err := n.dup()
	if err != nil {
		return nil, err
	}
	return own.file, nil
}

// Inode returns the number that distinguishes this namespace from all others that exist.
func (n *NetNS) Inode() uint64 { return n.inode }

func (n *NetNS) String() string {
	if n.name != "" {
		return "namespace " + n.name
	}
	return fmt.Sprintf("namespace net:[%d]", n.inode)
}

// Close releases the handle; a named namespace stays. It may be called more than once.
func (n *NetNS) Close() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.file == nil {
		return nil
	}
	f := n.file
	n.file = nil
	return f.Close()
}

// Delete takes the name away, if it still is this namespace's, and closes the
// handle. The kernel then removes the namespace and all links in it as soon as
// no process is left in it. It may be called more than once.
func (n *NetNS) Delete() error {
	if n.name == "" {
		return n.Close()
	}
	return errors.Join(n.unpublish(), n.Close())
}

func (n *NetNS) unpublish() error {
	path := filepath.Join(NamespaceDir, n.name)
	unlock, err := lockNamespaceDir()
	if err != nil {
		return fmt.Errorf("delete network namespace %s: %w", n.name, permission(err))
	}
	defer unlock()
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return fmt.Errorf("delete network namespace %s: %w", n.name, err)
	}
	if st.Ino != n.inode {
		return nil // another namespace has the name by now
	}
	if err := unix.Unmount(path, unix.MNT_DETACH); err != nil {
		return fmt.Errorf("delete network namespace %s: unmount %s: %w", n.name, path, permission(err))
	}
	if err := os.Remove(path); err != nil {
		return fmt.Errorf("delete network namespace %s: %w", n.name, err)
	}
	return nil
}

// dup returns a handle of its own on the same namespace.
func (n *NetNS) dup() (*NetNS, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.file == nil {
		return nil, fmt.Errorf("%s: %w", n, fs.ErrClosed)
	}
	fd, err := unix.FcntlInt(n.file.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("duplicate the handle of %s: %w", n, err)
	}
	return &NetNS{name: n.name, inode: n.inode, setns: n.setns, file: os.NewFile(uintptr(fd), n.file.Name())}, nil
}

var errGoexit = errors.New("the function ended its goroutine")

// Do runs f inside the namespace, in a goroutine and on a thread of its own, and waits for it.
// Sockets and processes that f makes belong to the namespace, and stay there; goroutines that f
// starts do not. If the thread cannot return to its former namespace, it ends, and no other
// goroutine runs on it.
func (n *NetNS) Do(f func() error) error {
	// A handle of its own: after a Close the number may belong to another file.
	own, err := n.dup()
	if err != nil {
		return fmt.Errorf("enter %w", err)
	}
	defer own.Close()

	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		result := errGoexit
		home, err := os.Open("/proc/thread-self/ns/net")
		if err != nil {
			runtime.UnlockOSThread()
			done <- fmt.Errorf("open the thread's network namespace: %w", err)
			return
		}
		defer func() {
			if isHere(home) || own.setns(int(home.Fd())) == nil {
				runtime.UnlockOSThread()
			}
			home.Close()
			done <- result
		}()
		// To enter a namespace takes CAP_SYS_ADMIN, also if the thread is in it already.
		if !isHere(own.file) {
			if err := own.setns(int(own.file.Fd())); err != nil {
				result = fmt.Errorf("enter %s: %w", n, permission(err))
				return
			}
		}
		result = f()
	}()
	return <-done
}

// isHere reports whether the calling thread is in a namespace. The caller has locked its
// goroutine to the thread.
func isHere(ns *os.File) bool {
	var here, there unix.Stat_t
	return unix.Stat("/proc/thread-self/ns/net", &here) == nil && unix.Fstat(int(ns.Fd()), &there) == nil &&
		here.Dev == there.Dev && here.Ino == there.Ino
}

// Cmd is an exec.Cmd that runs inside a namespace. Only the network is the
// namespace's: unlike `ip netns exec` it leaves all mounts as they are, /sys and
// with it the pins in /sys/fs/bpf among them.
type Cmd struct {
	*exec.Cmd
	ns *NetNS
}

// Command returns a command that will run inside ns; see exec.CommandContext.
func Command(ctx context.Context, ns *NetNS, name string, args ...string) *Cmd {
	return &Cmd{Cmd: exec.CommandContext(ctx, name, args...), ns: ns}
}

// Start starts the command inside its namespace.
func (c *Cmd) Start() error { return c.ns.Do(c.Cmd.Start) }

// Run starts the command inside its namespace and waits for it.
func (c *Cmd) Run() error { return c.ns.Do(c.Cmd.Run) }

// Output runs the command inside its namespace and returns its output.
func (c *Cmd) Output() (b []byte, err error) {
	err = c.ns.Do(func() error {
		var err error
		b, err = c.Cmd.Output()
		return err
	})
	return b, err
}

// CombinedOutput is Output with standard error among it.
func (c *Cmd) CombinedOutput() (b []byte, err error) {
	err = c.ns.Do(func() error {
		var err error
		b, err = c.Cmd.CombinedOutput()
		return err
	})
	return b, err
}

// Exec replaces the process by a command that runs inside the namespace: its
// terminal, signals and exit status are the process's own. It returns only if
// that does not work.
func (n *NetNS) Exec(argv, env []string) error {
	path, err := exec.LookPath(argv[0])
	if err != nil {
		return err
	}
	return n.Do(func() error {
		// The kernel keeps the namespace of the thread that calls.
		if err := unix.Exec(path, argv, env); err != nil {
			return fmt.Errorf("run %s in %s: %w", path, n, err)
		}
		return nil
	})
}
