package controller

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"

	v1 "github.com/waystamp/waystamp/internal/rpc/waystampv1"
	"github.com/waystamp/waystamp/internal/store"
)

// narrow is a store that does not take steps of the domain for a while.
type narrow struct {
	store.Store
	full *atomic.Bool
}

func (s narrow) Commit(ctx context.Context, t store.Txn) (uint64, error) {
	if _, ok := t.Put[keyState]; ok && s.full.Load() {
		return 0, &store.Failure{Did: "write to", Err: errors.New("too many operations in txn request: start etcd with a higher --max-txn-ops")}
	}
	return s.Store.Commit(ctx, t)
}

// A step that the store does not take is told to operators, with the store's reason, until it is done.
func TestAStepThatTheStoreRefusesIsToldToOperators(t *testing.T) {
	w := newWorld(t)
	full := &atomic.Bool{}
	w.wrap = func(s store.Store) store.Store { return narrow{s, full} }
	w.start()
	for _, name := range []string{"r1", "r2", "r3"} {
		w.join(name)
	}
	w.until("settled", settled(w.apply(file)))
	if s := w.state(); s.Problem != "" {
		t.Errorf("before: %s", s.Problem)
	}
	full.Store(true)
	serial := w.rotate()
	s := w.until("the reason", func(s *v1.State) bool { return s.Problem != "" })
	if !strings.HasPrefix(s.Problem, "it waits: ") || !strings.Contains(s.Problem, "start etcd with a higher --max-txn-ops") {
		t.Errorf("the reason is %q", s.Problem)
	}
	if s.Settled || s.Serial >= serial {
		t.Errorf("something was begun: %v", s)
	}
	full.Store(false)
	w.until("it goes on, and nothing is told any more", func(s *v1.State) bool { return settled(serial)(s) && s.Problem == "" })
}
