package agent

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"slices"

	"github.com/waystamp/waystamp/internal/dataplane"
	"github.com/waystamp/waystamp/internal/host"
)

// Detached lists the objects that Detach has removed, or would remove.
type Detached struct {
	Links     int            // programs on interfaces
	Locators  []netip.Prefix // routes
	SIDs      int            // routes
	Unguarded []string       // chains whose packets no longer need a proof
}

// Detach removes the data path of an instance, the routes of locators and SIDs that its agent
// announced, and its state in the run directory. The record of used packet numbers stays in the
// state directory: it must exist as long as the chains' secrets. If there is nothing to remove,
// that is no error. If an agent is running, the error is dataplane.ErrBusy.
func Detach(cfg Config) (_ Detached, err error) {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if err := CheckInstance(cfg.Instance); err != nil {
		return Detached{}, fmt.Errorf("instance %q %w", cfg.Instance, err)
	}
	n := cfg.Net
	if n == nil {
		if n, err = host.Open(nil); err != nil {
			return Detached{}, err
		}
		defer func() { err = errors.Join(err, n.Close()) }()
	}
	f, err := openState(cfg.RunDir)
	if err != nil {
		// Only the names are missing: pins are removed all the same.
		cfg.Log.Warn("the names of chains are not known; their ids are shown", "err", err)
		f = &stateFile{}
	}
	s := f.get()
	out := Detached{Locators: s.Locators}

	var removed dataplane.Removed
	err = n.NetNS().Do(func() error {
		var err error
		removed, err = dataplane.Detach(cfg.dataplane(n))
		return err
	})
	out.Links = removed.Links
	out.Unguarded = names(s, removed.Unguarded)
	if err != nil && !errors.Is(err, dataplane.ErrNotThere) {
		return out, err
	}
	// An agent whose pins were removed holds no lock that Detach could find.
	if err != nil && answers(SocketPath(cfg.RunDir)) {
		return out, fmt.Errorf("nothing is pinned, but an agent answers at %s: %w", SocketPath(cfg.RunDir), dataplane.ErrBusy)
	}
	// After the programs: until here a packet to a SID was refused or stamped.
	var errs []error
	for _, l := range s.Locators {
		_, sids, _, err := setSIDs(n, l, nil)
		out.SIDs += sids
		errs = append(errs, err, n.WithdrawLocator(l))
	}
	_, _, err = n.ManageNeighbours(nil)
	errs = append(errs, err)
	for _, f := range s.Filters {
		errs = append(errs, removeFilter(kernelFilter{n}, f, nil))
	}
	for _, c := range cutters(cfg.Instance) {
		errs = append(errs, n.RemoveCutter(c))
	}
	errs = append(errs, newKernelStreams(n, cfg.Instance, cfg.RunDir, cfg.Log).RemoveStrays(nil))
	if err := errors.Join(errs...); err != nil {
		return out, err
	}
	for _, path := range []string{statePath(cfg.RunDir), SocketPath(cfg.RunDir)} {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return out, fmt.Errorf("remove the agent's socket and state: %w", err)
		}
	}
	return out, nil
}

// WouldDetach lists the objects that Detach would remove, as far as the agent has recorded them.
func WouldDetach(cfg Config) (Detached, error) {
	if err := CheckInstance(cfg.Instance); err != nil {
		return Detached{}, fmt.Errorf("instance %q %w", cfg.Instance, err)
	}
	f, err := openState(cfg.RunDir)
	if err != nil {
		return Detached{}, err
	}
	s := f.get()
	return Detached{Locators: s.Locators, Unguarded: names(s, nil)}, nil
}

// names are the names of all chains that the agent's record has as guarded, and the numbers of
// further paths in the programs' maps.
func names(s state, paths []uint32) []string {
	known := map[uint32]bool{}
	var out []string
	for _, g := range s.Guarded {
		known[g.Path] = true
		out = append(out, g.String())
	}
	for _, p := range paths {
		name := fmt.Sprintf("path %#x", p)
		// The path of packets that a function makes has the chain's name, too.
		if i := slices.IndexFunc(s.Epochs, func(e epoch) bool { return e.Path == p }); i >= 0 {
			name = guarded{s.Epochs[i].Chain, s.Epochs[i].Direction, p}.String()
		}
		if !known[p] && !slices.Contains(out, name) {
			out = append(out, name)
		}
	}
	return out
}
