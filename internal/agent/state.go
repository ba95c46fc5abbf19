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

// state is what Detach must know of the last agent: what it announced, and the
// names of what it guarded. It holds no secrets.
type state struct {
	Version  int            `json:"version"`
	Node     string         `json:"node,omitempty"`
	Revision uint64         `json:"revision,omitempty"` // of the plan, if it was a controller's
	Locators []netip.Prefix `json:"locators"`
	Guarded  []guarded      `json:"guarded"`
	Epochs   []epoch        `json:"epochs,omitempty"` // of all paths of the plan
	Filters  []filterSite   `json:"filters,omitempty"`
}

// epoch is that of a path, of whose secrets it tells the generation.
type epoch struct {
	Chain     string          `json:"chain"`
	Direction model.Direction `json:"direction"`
	Path      uint32          `json:"path"`
	Epoch     uint8           `json:"epoch"`
}

// epochsOf are the epochs of a plan's paths, each once. Where a path has several, the
// latest counts.
func epochsOf(n plan.Node) (out []epoch) {
	add := func(p plan.PathID) {
		e := epoch{p.Chain, p.Direction, p.Path, p.Epoch}
		i := slices.IndexFunc(out, func(o epoch) bool { return o.Path == e.Path })
		switch {
		case i < 0:
			out = append(out, e)
		case olderEpoch(out[i].Epoch, e.Epoch):
			out[i] = e
		}
	}
	for _, h := range n.Headends {
		add(h.PathID)
	}
	for _, e := range n.Endpoints {
		add(e.PathID)
	}
	for _, e := range n.Egresses {
		add(e.PathID)
	}
	return out
}

// olderEpoch: epochs count up, and after 255 comes 0.
func olderEpoch(e, than uint8) bool { return int8(e-than) < 0 }

// older is an error if the plan has an earlier epoch of some path than s, or a lower revision.
func (s state) older(n plan.Node) error {
	if n.Revision < s.Revision {
		return fmt.Errorf("the plan is older than the one before: it has revision %d of the controller's, and that had %d", n.Revision, s.Revision)
	}
	was := map[uint32]uint8{}
	for _, e := range s.Epochs {
		was[e.Path] = e.Epoch
	}
	for _, e := range epochsOf(n) {
		if have, ok := was[e.Path]; ok && olderEpoch(e.Epoch, have) {
			return fmt.Errorf("the plan is older than the one before: chain %s has epoch %d, and had %d already", guarded{e.Chain, e.Direction, e.Path}, e.Epoch, have)
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

// with is what may be there while next takes the place of s.
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

// Left tells whether an agent with this run directory has ended without a Detach after
// it: its data path may be in force.
func Left(runDir string) bool {
	_, err := os.Lstat(statePath(runDir))
	return err == nil && !answers(SocketPath(runDir))
}

// openState reads what the agent before has left; no file is an empty state.
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
