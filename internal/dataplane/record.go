package dataplane

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// record is a file of state that must survive a reboot: entries after a header. It is replaced
// as a whole, in one step, and synced before update returns.
type record[E any] struct {
	path    string
	kind    string // as the header names it
	version int    // of the entries
}

// recordHeader begins each record.
type recordHeader struct {
	Record  string `json:"record"`
	Version int    `json:"version"`
	Boot    string `json:"boot"` // boot_id of the kernel that ran at the last write
}

type recordFile[E any] struct {
	recordHeader
	Entries []E `json:"entries"`
}

// read returns the entries; none if there is no file. It needs no lock.
func (r record[E]) read() ([]E, error) {
	b, err := os.ReadFile(r.path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	// First the header: the fields of another version are not damage.
	var h recordHeader
	if err := json.Unmarshal(b, &h); err != nil {
		return nil, fmt.Errorf("is damaged: %w", err)
	}
	if h.Record != r.kind {
		return nil, fmt.Errorf("is no record of %s: it says %q", r.kind, h.Record)
	}
	if h.Version != r.version {
		return nil, fmt.Errorf("has version %d, and this waystamp reads version %d: run the waystamp that wrote it", h.Version, r.version)
	}
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	var f recordFile[E]
	if err := dec.Decode(&f); err != nil {
		return nil, fmt.Errorf("is damaged: %w", err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return nil, errors.New("is damaged: something follows its end")
	}
	return f.Entries, nil
}

// update reads the entries, lets change alter them, and writes its result, under the lock of the
// directory, which it makes. changed false: the file stays.
func (r record[E]) update(change func([]E) (after []E, changed bool, err error)) error {
	dir, err := lockDir(filepath.Dir(r.path))
	if err != nil {
		return err
	}
	defer dir.Close()
	entries, err := r.read()
	if err != nil {
		return err
	}
	entries, changed, err := change(entries)
	if err != nil || !changed {
		return err
	}
	return r.write(dir, entries)
}

// replace writes the entries, whatever the file has.
func (r record[E]) replace(entries []E) error {
	dir, err := lockDir(filepath.Dir(r.path))
	if err != nil {
		return err
	}
	defer dir.Close()
	return r.write(dir, entries)
}

func (r record[E]) write(dir *os.File, entries []E) error {
	boot, err := bootID()
	if err != nil {
		return err
	}
	if entries == nil {
		entries = []E{}
	}
	b, err := json.Marshal(recordFile[E]{recordHeader{r.kind, r.version, boot}, entries})
	if err != nil {
		return err
	}
	return replaceSynced(dir, r.path, append(b, '\n'))
}

// bootID is the kernel's, another after each boot.
func bootID() (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("read the kernel's boot id: %w", err)
	}
	return strings.TrimSpace(string(b)), nil
}

// recordTrouble describes an error of a record, its consequence, and the remedy. It leaves the
// name of a temporary file out of the system's text: the same error has the same words.
func recordTrouble(err error, so string) string {
	if errno, ok := errors.AsType[unix.Errno](err); ok {
		return fmt.Sprintf("%v; %s: see to it that it can be read, and its directory be written to, with room for it", errno, so)
	}
	return fmt.Sprintf("%v; %s: restore the file, or remove it after giving the chains new secrets", err, so)
}

func pathText(path uint32) string { return fmt.Sprintf("0x%08x", path) }

// parsePath reads the output of pathText.
func parsePath(s string) (uint32, error) {
	var path uint32
	if n, err := fmt.Sscanf(s, "0x%08x", &path); n != 1 || err != nil || s != pathText(path) {
		return 0, fmt.Errorf("is damaged: %q is not a path", s)
	}
	return path, nil
}

// lockDir makes and locks a state directory for as long as the file stays open.
func lockDir(path string) (*os.File, error) {
	if err := os.MkdirAll(path, 0o700); err != nil {
		return nil, err
	}
	dir, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(dir.Fd()), unix.LOCK_EX); err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", path, err), dir.Close())
	}
	return dir, nil
}

// replaceSynced puts a file of dir in the place of the one before, in one step,
// and on the disk.
func replaceSynced(dir *os.File, path string, b []byte) error {
	tmp, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-*")
	if err != nil {
		return err
	}
	defer os.Remove(tmp.Name()) // not there any more if all went well
	_, err = tmp.Write(b)
	err = errors.Join(err, tmp.Sync(), tmp.Close())
	if err != nil {
		return err
	}
	if err := os.Rename(tmp.Name(), path); err != nil {
		return err
	}
	return dir.Sync()
}
