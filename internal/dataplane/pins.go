package dataplane

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// bpfRoot is where the bpf filesystem is mounted everywhere.
const bpfRoot = "/sys/fs/bpf"

// ErrBusy means that another process holds the instance.
var ErrBusy = errors.New("another waystamp agent holds this instance")

// ErrNotThere means that nothing is pinned for an instance.
var ErrNotThere = errors.New("nothing is there")

func instanceDir(pinDir, instance string) string { return filepath.Join(pinDir, instance) }

func onBPF(path string) (bool, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil {
		return false, &fs.PathError{Op: "statfs", Path: path, Err: err}
	}
	return st.Type == unix.BPF_FS_MAGIC, nil
}

// ensurePinDir makes dir, and mounts the bpf filesystem if dir is to be in it
// and it is not there.
func ensurePinDir(dir string) error {
	if !filepath.IsAbs(dir) {
		return fmt.Errorf("pin directory %q is not an absolute path", dir)
	}
	above := filepath.Clean(dir)
	for {
		_, err := os.Stat(above)
		if err == nil {
			break
		}
		if !errors.Is(err, fs.ErrNotExist) || above == "/" {
			return fmt.Errorf("pin directory %s: %w", dir, err)
		}
		above = filepath.Dir(above)
	}
	ok, err := onBPF(above)
	if err != nil {
		return fmt.Errorf("pin directory %s: %w", dir, err)
	}
	if !ok {
		if rel, err := filepath.Rel(bpfRoot, filepath.Clean(dir)); err != nil || !filepath.IsLocal(rel) {
			return fmt.Errorf("pin directory %s is not on a bpf filesystem; choose one below %s", dir, bpfRoot)
		}
		if err := MountBPF(); err != nil {
			return err
		}
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("make the pin directory: %w", err)
	}
	return nil
}

// MountBPF mounts the bpf filesystem at its place. It refuses where the mount, and the pins with it, would be gone with
// the process: in the private mount namespace that `ip netns exec` makes.
func MountBPF() error {
	if private, err := privateMounts(); err != nil {
		return err
	} else if private {
		return fmt.Errorf("no bpf filesystem at %s in this mount namespace, and pins in one mounted here would not outlive the process; if `ip netns exec` hides it, use `nsenter --net=/run/netns/NAME` instead", bpfRoot)
	}
	return mountOnce()
}

// mountOnce mounts the bpf filesystem unless another process has done so meanwhile: a second
// mount on top would hide the pins in the first. Agents may start at the same time, so they lock
// the directory below it.
func mountOnce() error {
	beneath, err := os.Open(bpfRoot)
	if err != nil {
		return fmt.Errorf("mount the bpf filesystem: %w", err)
	}
	defer beneath.Close()
	if err := unix.Flock(int(beneath.Fd()), unix.LOCK_EX); err != nil {
		return fmt.Errorf("lock %s to mount the bpf filesystem: %w", bpfRoot, err)
	}
	if done, err := onBPF(bpfRoot); err != nil || done {
		return err
	}
	if err := unix.Mount("bpf", bpfRoot, "bpf", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0700"); err != nil {
		return fmt.Errorf("mount the bpf filesystem at %s: %w; mount it as root: mount -t bpf bpf %s", bpfRoot, err, bpfRoot)
	}
	return nil
}

// privateMounts reports whether this process has other mounts than its parent or process 1.
// Mounts that it may not read count as the same.
func privateMounts() (bool, error) {
	own, err := os.Readlink("/proc/self/ns/mnt")
	if err != nil {
		return false, fmt.Errorf("read the mount namespace: %w", err)
	}
	for _, pid := range []int{1, os.Getppid()} {
		other, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/mnt", pid))
		if err == nil && other != own {
			return true, nil
		}
	}
	return false, nil
}

// lockInstance opens an instance's directory, makes it if create is set, and locks it for as
// long as the file stays open.
func lockInstance(dir string, create bool) (*os.File, error) {
	for {
		if create {
			if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
				return nil, fmt.Errorf("make the instance's pin directory: %w", err)
			}
		}
		f, err := os.Open(dir)
		if errors.Is(err, fs.ErrNotExist) {
			if create {
				continue // removed meanwhile
			}
			return nil, fmt.Errorf("%s: %w", dir, ErrNotThere)
		}
		if errors.Is(err, fs.ErrPermission) {
			return nil, fmt.Errorf("open the instance's pin directory: %w; run as root, or as the user whose agent made it", err)
		}
		if err != nil {
			return nil, fmt.Errorf("open the instance's pin directory: %w", err)
		}
		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
			who := lockHolder(f)
			f.Close()
			if errors.Is(err, unix.EWOULDBLOCK) {
				return nil, fmt.Errorf("%s: %w%s; stop that agent first, or choose another --instance", dir, ErrBusy, who)
			}
			return nil, fmt.Errorf("lock %s: %w", dir, err)
		}
		// The former holder of the lock may have removed the directory.
		held, err := f.Stat()
		if err == nil {
			if now, statErr := os.Stat(dir); statErr == nil && os.SameFile(held, now) {
				return f, nil
			}
		}
		f.Close()
	}
}

// lockHolder names the process that holds a lock on f; "" if the kernel does not show it, as for
// one outside of this PID namespace.
func lockHolder(f *os.File) string {
	var st unix.Stat_t
	if unix.Fstat(int(f.Fd()), &st) != nil {
		return ""
	}
	file := fmt.Sprintf("%02x:%02x:%d", unix.Major(st.Dev), unix.Minor(st.Dev), st.Ino)
	// The list is read in pieces, and passes over locks while others come and go.
	for range lockReads {
		locks, err := os.ReadFile("/proc/locks")
		if err != nil {
			return ""
		}
		for line := range strings.Lines(string(locks)) {
			// 1: FLOCK  ADVISORY  WRITE 4242 00:1f:4711 0 EOF
			if x := strings.Fields(line); len(x) >= 6 && x[1] == "FLOCK" && x[5] == file && x[4] != "0" {
				return " (process " + x[4] + ")"
			}
		}
	}
	return ""
}

// lockReads is how often the list of locks is read to find one that is there.
const lockReads = 10

func isNotEmpty(err error) bool {
	return errors.Is(err, unix.ENOTEMPTY) || errors.Is(err, fs.ErrExist)
}

// removeTree removes pins, and with them objects without other references.
func removeTree(dir string) error {
	if err := os.RemoveAll(dir); err != nil {
		return fmt.Errorf("remove pins: %w", err)
	}
	return nil
}

// netnsInode identifies the network namespace of the calling thread.
func netnsInode() (uint64, error) {
	var st unix.Stat_t
	if err := unix.Stat("/proc/thread-self/ns/net", &st); err != nil {
		return 0, fmt.Errorf("stat the network namespace: %w", err)
	}
	return st.Ino, nil
}
