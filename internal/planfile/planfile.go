// Package planfile reads files with keys: the plans of nodes, the paths with the secrets of
// all hops, and keys of functions. It refuses files that other users can read or change, as ssh does with private keys.
// internal/plan parses plans and paths. Commands, internal/agent and internal/lab call it.
package planfile

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/plan"
)

// InsecureError is a file, or its directory, that others can read or change.
type InsecureError struct {
	Path string // the file or directory with the problem
	What string
	Mend string // a command
}

func (e *InsecureError) Error() string {
	return fmt.Sprintf("%s %s; try: %s", e.Path, e.What, e.Mend)
}

// Read reads a file. If others can read or change it, or put another in its place,
// the error is an *InsecureError.
func Read(path string) ([]byte, error) {
	b, insecure, err := ReadAnyway(path)
	if err := errors.Join(insecure, err); err != nil {
		return nil, err
	}
	return b, nil
}

// ReadAnyway also reads a file that Read would refuse, and returns the reason of the refusal.
func ReadAnyway(path string) (b []byte, insecure, err error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, nil, err
	}
	defer f.Close() // read only: nothing can be lost
	if insecure, err = check(f, path); err != nil {
		return nil, nil, fmt.Errorf("read the permissions of %s: %w", path, err)
	}
	b, err = io.ReadAll(io.LimitReader(f, plan.FileMax+1))
	if err == nil && len(b) > plan.FileMax {
		err = fmt.Errorf("%s has more than %d bytes, the most that a plan may have", path, plan.FileMax)
	}
	if err != nil {
		return nil, insecure, err
	}
	return b, insecure, nil
}

// check checks the open file, even if its name now leads to another one, and the directories of
// the file and of its name.
func check(f *os.File, path string) (insecure, err error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return nil, err
	}
	me := uint32(os.Geteuid())
	if st.Uid != 0 && st.Uid != me {
		return &InsecureError{path, fmt.Sprintf("belongs to user %d, who can read and change the keys in it, and is neither root nor the user of this process", st.Uid),
			fmt.Sprintf("chown %d %s", me, path)}, nil
	}
	if mode := st.Mode & 0o7777; mode&0o077 != 0 {
		others, which, err := othersByACL(f, mode, me)
		if err != nil {
			return nil, err
		}
		if others {
			return &InsecureError{path, fmt.Sprintf("has mode %04o%s: others can read or change the keys in it", mode, which), "chmod 600 " + path}, nil
		}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return nil, nil // a pipe: no other user can replace it
	}
	real, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", f.Fd()))
	if err != nil {
		return nil, err
	}
	for _, dir := range []string{filepath.Dir(path), filepath.Dir(real)} {
		if err := unix.Stat(dir, &st); err != nil {
			return nil, fmt.Errorf("%s: %w", dir, err)
		}
		mode := st.Mode & 0o7777
		switch {
		case st.Uid != 0 && st.Uid != me:
			return &InsecureError{dir, fmt.Sprintf("belongs to user %d, who can put another file in the place of %s, and is neither root nor the user of this process", st.Uid, filepath.Base(path)),
				fmt.Sprintf("chown %d %s", me, dir)}, nil
		case mode&0o022 != 0 && mode&unix.S_ISVTX == 0:
			return &InsecureError{dir, fmt.Sprintf("has mode %04o: others can put another file in the place of %s", mode, filepath.Base(path)), "chmod go-w " + dir}, nil
		}
	}
	return nil, nil
}
