package cli

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/waystamp/waystamp/internal/await"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/planfile"
)

// What a directory of plans holds.
const (
	planPathsName = "paths.json"
	planNodesName = "nodes"
	planBothName  = "1-both"
	planTurnName  = "2-turn"
)

// planChange is how plans change besides what the domain says.
type planChange struct {
	keepEpochs bool
	rotate     func(chain string) bool
}

// writePlans compiles a domain with the secrets that the directory has, and
// writes what changed. The paths come first: should it end half-way, the next
// run finds in them the secrets that some nodes have already. With how.keepEpochs it writes
// the steps of the change, too.
func writePlans(ctx context.Context, dir string, domain model.Domain, how planChange, stderr io.Writer) (d *plan.Domain, err error) {
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
	keys := plan.NewKeyring(rand.Reader, last)
	keys.Rotate(how.rotate)
	if how.keepEpochs {
		keys.KeepSIDs()
	}
	d, err = await.Do(ctx, func() (*plan.Domain, error) { return plan.Compile(domain, keys) })
	if err != nil {
		return nil, err
	}
	var steps plan.Steps
	if how.keepEpochs {
		if steps, err = await.Do(ctx, func() (plan.Steps, error) { return stepsFrom(dir, last, d) }); err != nil {
			return nil, err
		}
	}
	files, err := await.Do(ctx, func() ([]planFile, error) { return encodePlans(dir, d, steps) })
	if err != nil {
		return nil, err
	}
	// Those of the change before would turn a node back. If nothing changes they may be just being carried.
	for _, step := range []string{planBothName, planTurnName} {
		if how.keepEpochs && steps.Turns == nil && steps.Lossy == nil {
			break
		}
		if err := os.RemoveAll(filepath.Join(dir, step)); err != nil {
			return nil, fmt.Errorf("remove the plans of a change before: %w", err)
		}
		if steps.Turns == nil {
			continue
		}
		if err := os.Mkdir(filepath.Join(dir, step), 0o700); err != nil {
			return nil, fmt.Errorf("make the directory for plans: %w", err)
		}
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
	rest := ", the others did not change"
	if written == len(files) {
		rest = ""
	}
	fmt.Fprintf(stderr, "%s: %d of %d files written%s\n", dir, written, len(files), rest)
	if how.keepEpochs {
		tellSteps(stderr, dir, domain, steps)
	}
	return d, reportStale(nodes, current, stderr)
}

// stepsFrom compares what is compiled with the plans of the last run.
func stepsFrom(dir string, last []plan.Path, d *plan.Domain) (plan.Steps, error) {
	if last == nil {
		return plan.Steps{}, fmt.Errorf("%s holds no plans yet, so no epoch can be kept; leave out --keep-epochs", dir)
	}
	entries, err := os.ReadDir(filepath.Join(dir, planNodesName))
	if err != nil {
		return plan.Steps{}, fmt.Errorf("read the plans of the last run: %w", err)
	}
	on := map[string]bool{}
	for _, p := range last {
		for _, h := range p.Hops {
			on[h.Node] = true
		}
		for _, in := range p.Ingress {
			on[in.Node] = true
		}
	}
	var was []plan.Node
	for _, e := range entries {
		name, ok := strings.CutSuffix(e.Name(), ".json")
		if !ok || strings.HasPrefix(name, ".") {
			continue
		}
		file := filepath.Join(dir, planNodesName, e.Name())
		b, err := planfile.Read(file)
		if err != nil {
			return plan.Steps{}, fmt.Errorf("read the plans of the last run: %w", err)
		}
		n, err := plan.DecodeNode(b)
		if err != nil {
			return plan.Steps{}, fmt.Errorf("%s: %w; restore it, or leave out --keep-epochs", file, err)
		}
		// Those that left the domain before stay on disk until the operator removes them.
		if on[n.Name] || slices.ContainsFunc(d.Nodes, func(x plan.Node) bool { return x.Name == n.Name }) {
			was = append(was, n)
			delete(on, n.Name)
		}
	}
	if len(on) > 0 {
		return plan.Steps{}, fmt.Errorf("%s lacks the plans of %s, which are in force; restore them, or leave out --keep-epochs",
			filepath.Join(dir, planNodesName), strings.Join(slices.Sorted(maps.Keys(on)), ", "))
	}
	return plan.MakeSteps(last, was, d)
}

// tellSteps says how the plans are to be carried.
func tellSteps(w io.Writer, dir string, domain model.Domain, s plan.Steps) {
	// Without steps, it happens while the only ones are carried.
	when := "in step 2"
	if s.Turns == nil {
		when = "of " + filepath.Join(dir, planNodesName)
	}
	for _, p := range s.Lossy {
		fmt.Fprintf(w, "%s: warning: %s, is added or removed: its packets may be refused from the first node that takes its plan %s until the last has\n", dir, p.PathID, when)
	}
	if s.Turns == nil {
		fmt.Fprintf(w, "%s: no path gets another epoch, so there are no steps: carry %s\n", dir, filepath.Join(dir, planNodesName, "NAME.json"))
		return
	}
	for _, p := range s.Turns {
		fmt.Fprintf(w, "%s: %s, gets epoch %d\n", dir, p.PathID, p.Epoch)
	}
	fmt.Fprintf(w, `Carry the change in three steps, each to all nodes before the next (waystamp status shows it in force):
  1. %s
  2. %s
  3. %s, %s later
`, filepath.Join(dir, planBothName, "NAME.json"), filepath.Join(dir, planTurnName, "NAME.json"), filepath.Join(dir, planNodesName, "NAME.json"), drainTime(domain))
}

// drainTime is how long packets of an old epoch may be under way: in queues, and in
// functions.
func drainTime(d model.Domain) time.Duration {
	const queues = 5 * time.Second
	longest := time.Duration(0)
	for _, f := range d.Functions {
		longest = max(longest, f.Proxy.Lifetime)
	}
	return longest + queues
}

// encodePlans makes all files of a directory of plans; those of steps if a path turns.
func encodePlans(dir string, d *plan.Domain, s plan.Steps) ([]planFile, error) {
	b, err := plan.EncodePaths(d.Paths)
	if err != nil {
		return nil, err
	}
	files := []planFile{{filepath.Join(dir, planPathsName), b}}
	folders := []struct {
		name  string
		nodes []plan.Node
	}{{planNodesName, d.Nodes}}
	if s.Turns != nil {
		folders = append(folders, folders[0], folders[0])
		folders[1].name, folders[1].nodes = planBothName, s.Both
		folders[2].name, folders[2].nodes = planTurnName, s.Turn
	}
	for _, f := range folders {
		for _, n := range f.nodes {
			if b, err = plan.EncodeNode(n); err != nil {
				return nil, err
			}
			files = append(files, planFile{filepath.Join(dir, f.name, n.Name+".json"), b})
		}
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
