// Package store keeps the controller's records: keys with values, transactions that
// compare before they write, and a watch of what was written. It knows nothing of
// what the records say. Bolt is on this machine's disk, for one process; Etcd is an etcd that several
// share. Both pass the same contract test. Only internal/controller calls it.
package store

import (
	"context"
	"errors"
	"fmt"
	"slices"
)

// Store is a set of records with one revision, which each commit raises by one.
// All methods may be called by several goroutines at once.
type Store interface {
	// Snapshot is all records whose key begins with prefix, as they were at one
	// revision. The caller owns it.
	Snapshot(ctx context.Context, prefix string) (Snapshot, error)
	// Commit does all of a transaction or nothing, and makes it last before it returns the
	// new revision. ErrConflict: a condition did not hold.
	Commit(ctx context.Context, t Txn) (revision uint64, err error)
	// Watch calls f for each commit behind revision after that touched keys with prefix,
	// in order, each once, until ctx ends (with its cause) or f fails (with its error).
	// ErrCompacted: the store does not know any more what came behind after. Read a
	// snapshot then, and watch from its revision.
	Watch(ctx context.Context, prefix string, after uint64, f func(Commit) error) error
	// Close ends all watches with ErrClosed.
	Close() error
}

// Shared is a store that several processes have open at once. One of them leads.
type Shared interface {
	Store
	// Lead waits until this process leads. From then on Commit is fenced: when another
	// process leads, it returns ErrDeposed, until Lead is called again. self is what
	// Leader tells the others.
	Lead(ctx context.Context, self string) (Leadership, error)
	// Leader is what the process that leads said of itself, or will soon; ErrNoLeader: there
	// is none.
	Leader(ctx context.Context) (string, error)
}

// Leadership lasts until Lost is closed, or Resign was called; call it in any case.
type Leadership struct {
	Lost   <-chan struct{}
	Resign func() error
}

// Snapshot is records at one revision of the store.
type Snapshot struct {
	Revision uint64
	Records  map[string]Record // by key
}

// Record is a value, and the revision of the commit that wrote it.
type Record struct {
	Value    []byte
	Revision uint64
}

// Txn is what one commit does if all conditions hold. A key is put or deleted, not both; to
// delete what is not there is no error.
type Txn struct {
	If     []Condition
	Put    map[string][]byte
	Delete []string
}

// Condition holds if the record was written last at this revision; 0: if there is none.
type Condition struct {
	Key      string
	Revision uint64
}

// Commit says which keys a commit touched, and no values: an erased secret is in no
// history.
type Commit struct {
	Revision uint64
	Keys     []string // those watched, sorted
}

var (
	// ErrConflict means that somebody else has written a record meanwhile.
	ErrConflict = errors.New("the record was changed by somebody else meanwhile")
	// ErrCompacted means that the history does not reach back so far.
	ErrCompacted = errors.New("the store has forgotten the changes since then")
	// ErrClosed means that the store was closed.
	ErrClosed = errors.New("the store is closed")
	// ErrDeposed means that another process leads now.
	ErrDeposed = errors.New("another controller leads now")
	// ErrNoLeader means that no process leads.
	ErrNoLeader = errors.New("no controller leads at the moment")
)

// Failure is an error of the store itself, and not of what it was asked: it may pass.
type Failure struct {
	Did string // read, write to or watch
	Err error
}

func (f *Failure) Error() string { return f.Did + " the store: " + f.Err.Error() }

// Unwrap gives the cause.
func (f *Failure) Unwrap() error { return f.Err }

// keys are all that a transaction touches, sorted.
func (t Txn) keys() ([]string, error) {
	keys := slices.Clone(t.Delete)
	for k := range t.Put {
		if slices.Contains(t.Delete, k) {
			return nil, fmt.Errorf("write to the store: %s is put and deleted at once", k)
		}
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return slices.Compact(keys), nil
}

// HistoryMax is how many commits a store remembers at least for those who watch.
const HistoryMax = 1024
