package dataplane

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Commands of bpf(2) for pins of any object. The library has them by the kind of object alone.
const (
	bpfObjPin = 6
	bpfObjGet = 7
)

// pinAttr is union bpf_attr for both.
type pinAttr struct {
	path  uint64
	fd    uint32
	flags uint32
}

// pinCall does a command; fd is of the object to pin, or 0.
func pinCall(cmd uintptr, path string, fd int) (int, error) {
	name, err := unix.BytePtrFromString(path)
	if err != nil {
		return 0, err
	}
	attr := pinAttr{path: uint64(uintptr(unsafe.Pointer(name))), fd: uint32(fd)}
	got, _, errno := unix.Syscall(unix.SYS_BPF, cmd, uintptr(unsafe.Pointer(&attr)), unsafe.Sizeof(attr))
	runtime.KeepAlive(name)
	if errno != 0 {
		return 0, errno
	}
	return int(got), nil
}

// MovePins gives the pins of an instance another directory on a bpf filesystem, and another owner: for an agent that is to run as
// another user. Objects, links and the packets in between do not notice: each object is pinned a second time, under a name that
// no agent reads, which becomes the instance's at once; then the pins of before are removed. Called again, it finishes a move whose
// process was killed. The error is ErrBusy if an agent holds the instance, ErrNotThere if there is none; after any other error the
// instance has all its pins in one of the directories or in both.
func MovePins(cfg Config, to string, uid, gid int) (moved int, err error) {
	if cfg.PinDir == "" {
		cfg.PinDir = DefaultPinDir
	}
	from, at := instanceDir(cfg.PinDir, cfg.Instance), instanceDir(to, cfg.Instance)
	lock, err := lockInstance(from, false)
	if err != nil {
		return 0, err
	}
	defer lock.Close()
	if err := mayPin(to, from, uid); err != nil {
		return 0, err
	}
	if err := removeAborted(to, cfg.Instance); err != nil {
		return 0, err
	}
	if _, err := os.Lstat(at); err == nil {
		same, pins, err := samePins(from, at)
		if err == nil && !same {
			err = fmt.Errorf("it is another data path than that in %s; look at both (bpftool link list), and detach the one that is not to stay (waystamp agent --detach --pin-dir DIRECTORY)", cfg.PinDir)
		}
		if err != nil {
			return 0, fmt.Errorf("%s is there already: %w", at, errors.Join(err, fs.ErrExist))
		}
		return pins, removeBefore(from)
	}
	aside, err := os.MkdirTemp(to, cfg.Instance+movingMark)
	if err != nil {
		return 0, fmt.Errorf("make a directory for the pins: %w", err)
	}
	moved, err = pinAgain(from, aside, uid, gid)
	if err == nil {
		err = cfg.step(stepMove, cfg.Instance)
	}
	if err == nil {
		err = unix.Renameat2(unix.AT_FDCWD, aside, unix.AT_FDCWD, at, unix.RENAME_NOREPLACE)
	}
	if err != nil {
		return 0, errors.Join(fmt.Errorf("move the pins of instance %s: %w", cfg.Instance, err), removeTree(aside))
	}
	return moved, removeBefore(from)
}

// mayPin: a directory exists, is another than that of the pins, on a bpf filesystem, and the user can pin there.
func mayPin(to, from string, uid int) error {
	if !filepath.IsAbs(to) {
		return fmt.Errorf("pin directory %q is not an absolute path", to)
	}
	var st unix.Stat_t
	err := unix.Stat(to, &st)
	switch {
	case errors.Is(err, unix.ENOENT):
		return fmt.Errorf("%s does not exist: make it for that user (install -d -o USER -m 0700 %s)", to, to)
	case err != nil:
		return &fs.PathError{Op: "stat", Path: to, Err: err}
	case uid != 0 && int(st.Uid) != uid:
		return fmt.Errorf("%s belongs to user %d, and an agent of user %d could pin nothing there: chown it, or choose another one", to, st.Uid, uid)
	}
	onto, err := onBPF(to)
	if err != nil {
		return err
	}
	if !onto {
		return fmt.Errorf("pin directory %s is not on a bpf filesystem", to)
	}
	resolved := [2]string{}
	for i, path := range []string{from, to} {
		if resolved[i], err = filepath.EvalSymlinks(path); err != nil {
			return err
		}
	}
	if filepath.Dir(resolved[0]) == resolved[1] {
		return fmt.Errorf("the pins of instance %s are in %s already", filepath.Base(from), to)
	}
	if rel, err := filepath.Rel(resolved[0], resolved[1]); err == nil && filepath.IsLocal(rel) {
		return fmt.Errorf("%s is among the pins that are to move there", to)
	}
	return nil
}

func removeBefore(from string) error {
	if err := removeTree(from); err != nil {
		return fmt.Errorf("the pins have moved, and those of before are left: %w", err)
	}
	return nil
}

// movingMark is behind the instance's name in that of a directory of a move that has not come to its end. No instance's name has it.
const movingMark = "+moving-"

// removeAborted removes what moves to a directory have left that were killed: such pins hold links and maps.
func removeAborted(pinDir, instance string) error {
	all, err := os.ReadDir(pinDir)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) { // then there is no instance, or its own directory is all that is this user's
		return nil
	}
	for _, e := range all {
		if strings.HasPrefix(e.Name(), instance+movingMark) {
			err = errors.Join(err, removeTree(filepath.Join(pinDir, e.Name())))
		}
	}
	return err
}

// pinTree is a directory of pins that is open, so that nobody can put another in its place while it is walked.
type pinTree struct {
	*os.File
	uid uint32
}

func openTree(path string) (pinTree, error) {
	f, err := os.OpenFile(path, unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return pinTree{}, err
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return pinTree{}, errors.Join(err, f.Close())
	}
	return pinTree{f, st.Uid}, nil
}

// pathOf leads to an open file or directory, whatever its name is by now.
func pathOf(f *os.File) string { return fmt.Sprintf("/proc/self/fd/%d", f.Fd()) }

// walk calls f for all directories below and pins, of which none may be a link or another user's. Below has the names that lead
// there, and entry is open (O_PATH).
func (t pinTree) walk(below string, f func(below string, isDir bool, entry *os.File) error) error {
	names, err := t.Readdirnames(-1)
	if err != nil {
		return err
	}
	slices.Sort(names)
	for _, name := range names {
		if err := t.enter(filepath.Join(below, name), name, f); err != nil {
			return err
		}
	}
	return nil
}

func (t pinTree) enter(below, name string, f func(string, bool, *os.File) error) (err error) {
	fd, err := unix.Openat(int(t.Fd()), name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return &fs.PathError{Op: "open pin", Path: below, Err: err}
	}
	entry := os.NewFile(uintptr(fd), below)
	defer func() { err = errors.Join(err, entry.Close()) }()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	kind := st.Mode & unix.S_IFMT
	if kind != unix.S_IFDIR && kind != unix.S_IFREG || st.Uid != t.uid {
		return fmt.Errorf("%s is no pin, or not of the user to whom the others belong (mode %#o, user %d): remove it", below, st.Mode, st.Uid)
	}
	if err := f(below, kind == unix.S_IFDIR, entry); err != nil || kind == unix.S_IFREG {
		return err
	}
	in, err := os.OpenFile(pathOf(entry), unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, in.Close()) }()
	return pinTree{in, t.uid}.walk(below, f)
}

// pinAgain pins all objects below a directory a second time, below another one that exists and is this process's alone. The
// directory that it is in may be the other owner's: it becomes that user's as the last thing of all.
func pinAgain(from, to string, uid, gid int) (pinned int, err error) {
	there, err := openTree(from)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, there.Close()) }()
	dir, err := openTree(to)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, dir.Close()) }()
	if info, err := dir.Stat(); err != nil || int(dir.uid) != os.Geteuid() || info.Mode().Perm()&0o077 != 0 {
		return 0, errors.Join(fmt.Errorf("%s was changed meanwhile", to), err)
	}
	err = there.walk("", func(below string, isDir bool, entry *os.File) error {
		at := filepath.Join(pathOf(dir.File), below)
		if isDir {
			if err := os.Mkdir(at, 0o700); err != nil {
				return err
			}
			return os.Lchown(at, uid, gid)
		}
		fd, err := pinCall(bpfObjGet, pathOf(entry), 0)
		if err != nil {
			return &fs.PathError{Op: "open pin", Path: below, Err: err}
		}
		_, err = pinCall(bpfObjPin, at, fd)
		if err = errors.Join(err, unix.Close(fd)); err != nil {
			return &fs.PathError{Op: "pin", Path: below, Err: err}
		}
		pinned++
		return os.Lchown(at, uid, gid)
	})
	if err == nil {
		err = dir.Chown(uid, gid)
	}
	return pinned, err
}

// samePins tells whether each pin of a directory is there in another one, too, of the same object.
func samePins(a, b string) (same bool, pins int, err error) {
	var all [2]map[string]string
	for i, root := range []string{a, b} {
		all[i] = map[string]string{}
		t, err := openTree(root)
		if err != nil {
			return false, 0, err
		}
		err = t.walk("", func(below string, isDir bool, entry *os.File) error {
			if isDir {
				return nil
			}
			fd, err := pinCall(bpfObjGet, pathOf(entry), 0)
			if err != nil {
				return &fs.PathError{Op: "open pin", Path: below, Err: err}
			}
			all[i][below], err = objectOf(fd)
			return errors.Join(err, unix.Close(fd))
		})
		if err = errors.Join(err, t.Close()); err != nil {
			return false, 0, err
		}
	}
	for name, object := range all[0] {
		if all[1][name] != object {
			return false, 0, nil
		}
	}
	return len(all[0]) > 0, len(all[0]), nil
}

// objectOf names the object of a descriptor by the ids that the kernel shows of it.
func objectOf(fd int) (string, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/self/fdinfo/%d", fd))
	if err != nil {
		return "", err
	}
	var ids []string
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) == 2 && strings.HasSuffix(f[0], "_id:") {
			ids = append(ids, f[0]+f[1])
		}
	}
	if len(ids) == 0 {
		return "", errors.New("the kernel does not show which object a pin is of")
	}
	return strings.Join(ids, " "), nil
}
