package dataplane

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
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
func pinCall(cmd uintptr, path string, fd uint32) (int, error) {
	name, err := unix.BytePtrFromString(path)
	if err != nil {
		return 0, err
	}
	attr := pinAttr{path: uint64(uintptr(unsafe.Pointer(name))), fd: fd}
	got, _, errno := unix.Syscall(unix.SYS_BPF, cmd, uintptr(unsafe.Pointer(&attr)), unsafe.Sizeof(attr))
	runtime.KeepAlive(name)
	if errno != 0 {
		return 0, errno
	}
	return int(got), nil
}

// MovePins gives the pins of an instance another directory on a bpf filesystem, and another owner: for an agent that is to run as
// another user. Objects, links and the packets in between do not notice: each object is pinned a second time, under a name that
// no agent reads, which becomes the instance's at once; then the pins of before are removed. The error is ErrBusy if an agent holds the
// instance, ErrNotThere if there is none. It leaves the pins of before if it fails.
func MovePins(cfg Config, to string, uid, gid int) (moved int, err error) {
	if cfg.PinDir == "" {
		cfg.PinDir = DefaultPinDir
	}
	from, at := instanceDir(cfg.PinDir, cfg.Instance), instanceDir(to, cfg.Instance)
	if filepath.Clean(from) == filepath.Clean(at) {
		return 0, fmt.Errorf("the pins of instance %s are in %s already", cfg.Instance, to)
	}
	lock, err := lockInstance(from, false)
	if err != nil {
		return 0, err
	}
	defer lock.Close()
	if err := ensurePinDir(to); err != nil {
		return 0, err
	}
	if _, err := os.Lstat(at); !errors.Is(err, fs.ErrNotExist) {
		return 0, fmt.Errorf("%s is there already (%w): an agent has pinned a data path of this instance there; detach one of the two (waystamp agent --detach --pin-dir DIRECTORY)", at, errors.Join(err, fs.ErrExist))
	}
	if err := removeAborted(to, cfg.Instance); err != nil {
		return 0, err
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
		err = os.Rename(aside, at)
	}
	if err != nil {
		return 0, errors.Join(fmt.Errorf("move the pins of instance %s: %w", cfg.Instance, err), removeTree(aside))
	}
	return moved, removeTree(from)
}

// movingMark is behind the instance's name in that of a directory of a move that has not come to its end. No instance's name has it.
const movingMark = "+moving-"

// removeAborted removes what moves to a directory have left that were killed: such pins would hold links that Detach removes.
func removeAborted(pinDir, instance string) error {
	left, err := filepath.Glob(filepath.Join(pinDir, instance+movingMark+"*"))
	for _, dir := range left {
		err = errors.Join(err, removeTree(dir))
	}
	return err
}

// pinAgain pins all objects below a directory a second time, below another one that exists and is this process's alone. The
// directory that it is in may be the other owner's, who could put another in its place: it is opened, and is the other's as the
// last thing of all.
func pinAgain(from, to string, uid, gid int) (pinned int, err error) {
	dir, err := os.OpenFile(to, unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, dir.Close()) }()
	var st unix.Stat_t
	if err := unix.Fstat(int(dir.Fd()), &st); err != nil {
		return 0, err
	}
	if int(st.Uid) != os.Geteuid() || st.Mode&0o077 != 0 {
		return 0, fmt.Errorf("%s was changed meanwhile", to)
	}
	held := fmt.Sprintf("/proc/self/fd/%d", dir.Fd())
	err = filepath.WalkDir(from, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		at := held + strings.TrimPrefix(path, from)
		switch {
		case path == from:
			return nil
		case e.IsDir():
			if err := os.Mkdir(at, 0o700); err != nil {
				return err
			}
		case e.Type().IsRegular():
			fd, err := pinCall(bpfObjGet, path, 0)
			if err != nil {
				return &fs.PathError{Op: "open pin", Path: path, Err: err}
			}
			_, err = pinCall(bpfObjPin, at, uint32(fd))
			if err = errors.Join(err, unix.Close(fd)); err != nil {
				return &fs.PathError{Op: "pin", Path: at, Err: err}
			}
			pinned++
		default:
			return fmt.Errorf("%s is of another kind than a pin (%s): remove it", path, e.Type())
		}
		return os.Lchown(at, uid, gid)
	})
	if err == nil {
		err = dir.Chown(uid, gid)
	}
	return pinned, err
}
