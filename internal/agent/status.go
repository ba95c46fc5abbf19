package agent

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/plan"
)

// statusBoard is an api.Status that several goroutines write on.
type statusBoard struct {
	mu      sync.Mutex
	now     api.Status
	loc     netip.Prefix
	plan    error // why the plan file is not in force
	working error // the error of the plan in force
	saving  error // why the replay windows are not on disk
	pinning error // why pins that were removed are not back

	warnings map[string][]string // by kind

	lost   int       // pins that were removed since the agent started
	lostAt time.Time // the last of them
	lostOf string    // directory
}

// lostTold is the time for which a status shows pins that were removed and restored.
const lostTold = time.Hour

func newStatusBoard(instance string) *statusBoard {
	return &statusBoard{now: api.Status{Version: api.Version, Instance: instance}, warnings: map[string][]string{}}
}

func (b *statusBoard) applied(n plan.Node, digest string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.now.Ready = true
	b.now.Node = n.Name
	b.now.Generation++
	b.now.Plan = digest
	b.now.Since = time.Now().Round(0)
	b.now.Paths = pathStates(n)
	b.plan, b.working = nil, nil
	b.loc = n.Locator
}

// pathStates are the roles of a node, in the order of its plan.
func pathStates(n plan.Node) []api.PathState {
	out := []api.PathState{}
	add := func(role string, p plan.PathID, function string, sid *netip.Addr) {
		out = append(out, api.PathState{
			Role: role, Chain: p.Chain, Direction: p.Direction.String(), From: p.From, To: p.To, Path: p.Path, Epoch: int(p.Epoch), Function: function, SID: sid,
		})
	}
	for _, h := range n.Headends {
		add(api.RoleHeadend, h.PathID, "", nil)
	}
	for _, e := range n.Endpoints {
		add(api.RoleEndpoint, e.PathID, e.Function, &e.SID)
	}
	for _, e := range n.Egresses {
		add(api.RoleEgress, e.PathID, "", &e.SID)
	}
	return out
}

// refused notes why a new plan is not in force, and reports whether that is new.
func (b *statusBoard) refused(err error) (news bool) { return b.note(&b.plan, err) }

// failed notes the error of the plan in force, nil: no error, and reports whether that is new.
func (b *statusBoard) failed(err error) (news bool) { return b.note(&b.working, err) }

// saved notes why the replay windows could not be saved, nil: they were saved, and reports
// whether that is new.
func (b *statusBoard) saved(err error) (news bool) { return b.note(&b.saving, err) }

// pinned notes why pins could not be restored, nil: all exist, and reports whether that is new.
func (b *statusBoard) pinned(err error) (news bool) { return b.note(&b.pinning, err) }

// pinsLost notes that pins were removed and are back.
func (b *statusBoard) pinsLost(dir string, n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.lost += n
	b.lostAt, b.lostOf = time.Now(), dir
}

func (b *statusBoard) note(at *error, err error) (news bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	before := *at
	*at = err
	if err == nil || before == nil {
		return err != before
	}
	return err.Error() != before.Error()
}

// degraded notes the problems, and returns the new ones and whether there are no more.
func (b *statusBoard) degraded(problems []string) (fresh []string, whole bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	whole = len(b.now.Problems) > 0 && len(problems) == 0
	for _, p := range problems {
		if !slices.Contains(b.now.Problems, p) {
			fresh = append(fresh, p)
		}
	}
	b.now.Problems = problems
	return fresh, whole
}

// warned notes all warnings of a kind, and returns the new ones and those that are gone.
func (b *statusBoard) warned(kind string, warnings []string) (fresh, gone []string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	without := func(all, some []string) []string {
		return slices.DeleteFunc(slices.Clone(all), func(w string) bool { return slices.Contains(some, w) })
	}
	fresh, gone = without(warnings, b.warnings[kind]), without(b.warnings[kind], warnings)
	b.warnings[kind] = warnings
	return fresh, gone
}

func (b *statusBoard) locator() netip.Prefix {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.loc
}

func (b *statusBoard) get() api.Status {
	b.mu.Lock()
	defer b.mu.Unlock()
	s := b.now
	s.Problems = slices.Clone(s.Problems)
	for _, kind := range slices.Sorted(maps.Keys(b.warnings)) {
		s.Warnings = append(s.Warnings, b.warnings[kind]...)
	}
	if b.lost > 0 && time.Since(b.lostAt) < lostTold {
		s.Warnings = append(s.Warnings, fmt.Sprintf("pins below %s were removed, the last one at %s, and the agent has put %d back since it started: find the program that removes them; without pins the guard ends when the agent ends",
			b.lostOf, b.lostAt.Format(time.RFC3339), b.lost))
	}
	if err := errors.Join(b.plan, b.working, b.saving, b.pinning); err != nil {
		s.Error = err.Error()
	}
	return s
}
