package cli

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/waystamp/waystamp/internal/await"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/planfile"
)

// What a directory of plans holds.
const (
	planPathsName = "paths.json"
	planNodesName = "nodes"
)

// writePlans compiles a domain with the secrets that the directory has, and
// writes what changed. The paths come first: should it end half-way, the next
// run finds in them the secrets that some nodes have already.
func writePlans(ctx context.Context, dir string, domain model.Domain, stderr io.Writer) (d *plan.Domain, err error) {
	nodes := filepath.Join(dir, planNodesName)
	if err := os.MkdirAll(nodes, 0o700); err != nil {
		return nil, fmt.Errorf("make the directory for plans: %w", err)
	}
	unlock, err := lockDirectory(dir)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, unlock()) }()

	last, err := await.Do(ctx, func() ([]plan.Path, error) { return readPaths(filepath.Join(dir, planPathsName)) })
	if err != nil {
		return nil, err
	}
	d, err = await.Do(ctx, func() (*plan.Domain, error) { return plan.Compile(domain, plan.NewKeyring(rand.Reader, last)) })
	if err != nil {
		return nil, err
	}
	files, err := await.Do(ctx, func() ([]planFile, error) { return encodePlans(dir, d) })
	if err != nil {
		return nil, err
	}
	current := map[string]bool{}
	for _, n := range d.Nodes {
		current[n.Name] = true
	}
	written := 0
	for _, f := range files {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		changed, err := f.write()
		if err != nil {
			return nil, fmt.Errorf("write %s: %w", f.name, err)
		}
		if changed {
			written++
		}
	}
	fmt.Fprintf(stderr, "%s: %d of %d files written, the others did not change\n", dir, written, len(files))
	return d, reportStale(nodes, current, stderr)
}

// encodePlans makes all files of a directory of plans.
func encodePlans(dir string, d *plan.Domain) ([]planFile, error) {
	b, err := plan.EncodePaths(d.Paths)
	if err != nil {
		return nil, err
	}
	files := []planFile{{filepath.Join(dir, planPathsName), b}}
	for _, n := range d.Nodes {
		if b, err = plan.EncodeNode(n); err != nil {
			return nil, err
		}
		files = append(files, planFile{filepath.Join(dir, planNodesName, n.Name+".json"), b})
	}
	return files, nil
}

// lockDirectory keeps a second run out, whose secrets would mix with ours.
func lockDirectory(dir string) (unlock func() error, err error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, fmt.Errorf("open the directory for plans: %w", err)
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		f.Close()
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, fmt.Errorf("another waystamp plan is writing to %s; try again when it is done", dir)
		}
		return nil, fmt.Errorf("lock %s: %w", dir, err)
	}
	return f.Close, nil
}

// readPaths reads the paths of the last run; there may have been none.
func readPaths(name string) ([]plan.Path, error) {
	b, err := planfile.Read(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the secrets of the last run: %w", err)
	}
	paths, err := plan.DecodePaths(b)
	if err != nil {
		return nil, fmt.Errorf("%s: %w; restore it, or move it away to give every path fresh secrets", name, err)
	}
	return paths, nil
}

// planFile is a file with secrets.
type planFile struct {
	name string
	data []byte
}

const planFileMode = 0o600

// write replaces the file in one step, unless it is as it should be: an agent
// that watches it then has nothing to do.
func (f planFile) write() (changed bool, err error) {
	if info, err := os.Lstat(f.name); err == nil && info.Mode() == planFileMode {
		if b, err := os.ReadFile(f.name); err == nil && bytes.Equal(b, f.data) {
			return false, nil
		}
	}
	dir := filepath.Dir(f.name)
	tmp, err := os.CreateTemp(dir, "."+filepath.Base(f.name)+".*") // with mode 0600
	if err != nil {
		return false, err
	}
	_, err = tmp.Write(f.data)
	if err == nil {
		err = tmp.Sync()
	}
	if err = errors.Join(err, tmp.Close()); err == nil {
		err = os.Rename(tmp.Name(), f.name)
	}
	if err != nil {
		return false, errors.Join(err, os.Remove(tmp.Name()))
	}
	return true, syncDirectory(dir)
}

// syncDirectory makes a rename last.
func syncDirectory(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// reportStale names the plans of nodes that are no longer in the domain. They
// hold secrets, and an agent may still run from them: to remove them is the
// operator's decision.
func reportStale(nodes string, current map[string]bool, stderr io.Writer) error {
	entries, err := os.ReadDir(nodes)
	if err != nil {
		return fmt.Errorf("look for plans of nodes that are gone: %w", err)
	}
	for _, e := range entries {
		name, ok := strings.CutSuffix(e.Name(), ".json")
		if ok && !strings.HasPrefix(name, ".") && !current[name] {
			fmt.Fprintf(stderr, "%s: warning: %s is not a node of the domain any more; detach its agent, then remove the file\n",
				filepath.Join(nodes, e.Name()), name)
		}
	}
	return nil
}
