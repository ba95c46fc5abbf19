package agent

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
)

func u32(b []byte) uint32 { return binary.NativeEndian.Uint32(b) }

// state is the record of the last agent for Detach: its announcements, and the names of the
// chains that it guarded. It has no secrets.
type state struct {
	Version  int            `json:"version"`
	Node     string         `json:"node,omitempty"`
	Revision uint64         `json:"revision,omitempty"` // of the plan, if it was a controller's
	Locators []netip.Prefix `json:"locators"`
	Guarded  []guarded      `json:"guarded"`
	Epochs   []epoch        `json:"epochs,omitempty"` // of all paths of the plan
	Filters  []filterSite   `json:"filters,omitempty"`
}

// epoch is an epoch of a path: the generation of its secrets.
type epoch struct {
	Chain     string          `json:"chain"`
	Direction model.Direction `json:"direction"`
	Path      uint32          `json:"path"`
	Epoch     uint8           `json:"epoch"`           // the latest
	Holds     []int           `json:"holds,omitempty"` // all; none: an agent wrote this that kept the latest alone
	Sends     []int           `json:"sends,omitempty"` // that of a headend
}

// epochsOf are the epochs of a plan's paths, each path once.
func epochsOf(n plan.Node) (out []epoch) {
	at := map[uint32]int{} // by path: in out
	add := func(p plan.PathID) *epoch {
		i, ok := at[p.Path]
		if !ok {
			i = len(out)
			at[p.Path] = i
			out = append(out, epoch{Chain: p.Chain, Direction: p.Direction, Path: p.Path, Epoch: p.Epoch})
		}
		e := &out[i]
		if olderEpoch(e.Epoch, p.Epoch) {
			e.Epoch = p.Epoch
		}
		if !slices.Contains(e.Holds, int(p.Epoch)) {
			e.Holds = append(e.Holds, int(p.Epoch))
		}
		return e
	}
	for _, h := range n.Headends {
		if e := add(h.PathID); !slices.Contains(e.Sends, int(h.Epoch)) {
			e.Sends = append(e.Sends, int(h.Epoch))
		}
	}
	for _, e := range n.Endpoints {
		add(e.PathID)
	}
	for _, e := range n.Egresses {
		add(e.PathID)
	}
	return out
}

// earlier is an epoch of next that the node has given up: one that it does not hold although it
// holds a later one, or one that a headend used before its present one. A node may give up its
// latest epoch and continue with another that it holds, since it has its numbers and windows.
func (e epoch) earlier(next epoch) (epoch uint8, is bool) {
	if len(e.Holds) == 0 {
		return next.Epoch, olderEpoch(next.Epoch, e.Epoch)
	}
	for _, h := range next.Holds {
		if olderEpoch(uint8(h), e.Epoch) && !slices.Contains(e.Holds, h) {
			return uint8(h), true
		}
	}
	for _, s := range next.Sends {
		for _, sent := range e.Sends {
			if olderEpoch(uint8(s), uint8(sent)) {
				return uint8(s), true
			}
		}
	}
	return 0, false
}

// olderEpoch: epochs count up, and after 255 comes 0.
func olderEpoch(e, than uint8) bool { return int8(e-than) < 0 }

// older is an error if the plan has an epoch of some path that s is beyond, or a lower revision.
func (s state) older(n plan.Node) error {
	if n.Revision < s.Revision {
		return fmt.Errorf("the plan is older than the one before: it has revision %d of the controller's, and that had %d", n.Revision, s.Revision)
	}
	was := map[uint32]epoch{}
	for _, e := range s.Epochs {
		was[e.Path] = e
	}
	for _, e := range epochsOf(n) {
		have, ok := was[e.Path]
		if !ok {
			continue
		}
		if epoch, is := have.earlier(e); is {
			return fmt.Errorf("the plan is older than the one before: chain %s has epoch %d, and had %d already", guarded{e.Chain, e.Direction, e.Path}, epoch, have.Epoch)
		}
	}
	return nil
}

type guarded struct {
	Chain     string          `json:"chain"`
	Direction model.Direction `json:"direction"`
	Path      uint32          `json:"path"`
}

func (g guarded) String() string {
	if g.Direction == model.Forward {
		return g.Chain
	}
	return fmt.Sprintf("%s (%s)", g.Chain, g.Direction)
}

func stateOf(n plan.Node, instance string) state {
	s := state{Version: 1, Node: n.Name, Revision: n.Revision, Locators: []netip.Prefix{n.Locator}, Guarded: []guarded{}, Epochs: epochsOf(n), Filters: sitesOf(instance, n)}
	for _, e := range n.Egresses {
		if e.Of != 0 {
			continue // the whole path's guard
		}
		g := guarded{e.Chain, e.Direction, e.Path}
		if !slices.Contains(s.Guarded, g) {
			s.Guarded = append(s.Guarded, g)
		}
	}
	return s
}

// with is the record while next replaces s.
func (s state) with(next state) state {
	for _, l := range s.Locators {
		if !slices.Contains(next.Locators, l) {
			next.Locators = append(next.Locators, l)
		}
	}
	for _, g := range s.Guarded {
		if !slices.Contains(next.Guarded, g) {
			next.Guarded = append(next.Guarded, g)
		}
	}
	for _, f := range s.Filters {
		if !slices.Contains(next.Filters, f) {
			next.Filters = append(next.Filters, f)
		}
	}
	return next
}

// stateFile keeps a state on disk.
type stateFile struct {
	path string
	mu   sync.Mutex
	now  state
}

func statePath(runDir string) string { return filepath.Join(runDir, "state.json") }

// Left reports whether an agent with this run directory has ended without a later Detach: its
// data path may be in force.
func Left(runDir string) bool {
	_, err := os.Lstat(statePath(runDir))
	return err == nil && !answers(SocketPath(runDir))
}

// openState reads the record of the earlier agent; no file is an empty record.
func openState(runDir string) (*stateFile, error) {
	f := &stateFile{path: statePath(runDir), now: state{Version: 1}}
	b, err := os.ReadFile(f.path)
	if errors.Is(err, fs.ErrNotExist) {
		return f, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the agent's state: %w", err)
	}
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	var s state
	if err := d.Decode(&s); err != nil {
		return nil, fmt.Errorf("the agent's state %s is damaged: %w; remove it", f.path, err)
	}
	if s.Version != 1 {
		return nil, fmt.Errorf("the agent's state %s has version %d; expect 1", f.path, s.Version)
	}
	f.now = s
	return f, nil
}

func (f *stateFile) get() state {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.now
}

func (f *stateFile) put(s state) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(s.Locators) == 0 { // there was none before: leave nothing
		f.now = s
		if err := os.Remove(f.path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove the agent's state: %w", err)
		}
		return nil
	}
	b, err := json.MarshalIndent(s, "", "\t")
	if err != nil {
		return fmt.Errorf("write the agent's state: %w", err)
	}
	tmp := f.path + ".new"
	if err := os.WriteFile(tmp, append(b, '\n'), 0o600); err != nil {
		return fmt.Errorf("write the agent's state: %w", err)
	}
	if err := os.Rename(tmp, f.path); err != nil {
		return fmt.Errorf("write the agent's state: %w", err)
	}
	f.now = s
	return nil
}
