package dataplane

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/waystamp/waystamp/internal/model"
)

// AttachError means that a program could not be attached to an interface.
type AttachError struct {
	Interface string
	Err       error

	at    linkKey
	held  bool   // whether one is attached is not known
	after string // the consequence; "": nothing was left out
}

func (e *AttachError) Error() string { return e.Err.Error() + e.after }

// Unwrap gives the cause.
func (e *AttachError) Unwrap() error { return e.Err }

// leftOut are the places of a plan to which a reconciliation could not attach a program: they
// are treated as if their interface were missing, and all else gets the plan. nil: such an error
// ends the change, and the state before stays.
type leftOut struct {
	places map[linkKey]*AttachError
	anew   bool // another generation takes the place of the one at work
}

// take leaves a place out, or returns the error.
func (l *leftOut) take(err error) error {
	failed, ok := errors.AsType[*AttachError](err)
	if l == nil || !ok {
		return err
	}
	l.places[failed.at] = failed
	return nil
}

func (l *leftOut) has(k linkKey) bool { return l != nil && l.places[k] != nil }

// inPlace: all links hold programs of the generation that is to be at work.
func (l *leftOut) inPlace() bool { return l != nil && !l.anew }

func (l *leftOut) any() bool { return l != nil && len(l.places) > 0 }

// problems returns for each place the reason and the consequence.
func (l *leftOut) problems(bs []binding) (out []error) {
	if l == nil {
		return nil
	}
	order := func(a, b linkKey) int { return cmp.Or(a.index-b.index, cmp.Compare(a.hook, b.hook)) }
	for _, k := range slices.SortedFunc(maps.Keys(l.places), order) {
		e := *l.places[k]
		for _, b := range bs {
			switch {
			case b.device.Index != k.index:
			case e.held:
				e.after = "; what is attached to " + b.Name + " stays"
			default:
				e.after = "; " + b.unattached(k.hook) + ", and the next reconciliation tries again"
			}
		}
		out = append(out, &e)
	}
	return out
}

// unattached describes the consequence for packets at a hook without a program.
func (b binding) unattached(h hook) string {
	switch {
	case h == hookXDP || h == hookFromXDP:
		return "TC does all the work on " + b.Name
	case b.cutter && b.Role == model.RoleEdge:
		return "super-packets are not segmented for chains over labels"
	case b.cutter:
		return "super-packets are not segmented for functions"
	case h == hookFrom:
		return fmt.Sprintf("packets to function %s are refused, and packets that arrive on %s are not checked", b.function, b.Name)
	case h == hookOut:
		return fmt.Sprintf("packets that leave by %s are not checked there, and packets to functions in the node's own kernel are refused", b.Name)
	}
	return fmt.Sprintf("packets that arrive on %s are not checked there", b.Name)
}

// without is t where no packet goes to a function that would send it past a place
// that was left out.
func (t topology) without(l *leftOut) topology {
	if !l.any() {
		return t
	}
	t.reach = maps.Clone(t.reach)
	for k := range l.places {
		if k.hook == hookOut {
			// They could send it out there without the headers that were taken off it.
			for _, f := range t.local {
				delete(t.reach, f)
			}
		}
		for _, b := range t.bindings {
			switch {
			case b.device.Index != k.index || k.hook == hookFromXDP:
			case b.cutter && b.from:
				t.node.CutBackIfindex, t.node.CutBackDmac = 0, [6]uint8{}
			case b.cutter && b.Role == model.RoleEdge:
				t.node.CutEnterIfindex, t.node.CutEnterDmac = 0, [6]uint8{}
			case b.cutter:
				t.node.CutIfindex, t.node.CutDmac = 0, [6]uint8{}
			case b.from:
				delete(t.reach, b.function)
			}
		}
	}
	return t
}
