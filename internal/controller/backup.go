package controller

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"

	"github.com/waystamp/waystamp/internal/plan"
	v1 "github.com/waystamp/waystamp/internal/rpc/waystampv1"
	"github.com/waystamp/waystamp/internal/store"
)

// A backup is all records at one revision. Nodes go on behind it: when the records come back, the
// controller does not know which revisions and epochs it has given out since. So it sends nothing until all
// nodes have said what they hold, and then gives all chains fresh secrets, above all that.

// backupFormat is the version of backupFile.
const backupFormat = 1

// backupFile is a backup, as JSON.
type backupFile struct {
	Format  int               `json:"waystamp-backup"`
	Made    time.Time         `json:"made"`
	Digest  string            `json:"digest"` // of records, as JSON
	Records map[string][]byte `json:"records"`
}

// backupPart is how much of the file goes in one message.
const backupPart = 256 << 10

// Backup implements the service.
func (s admin) Backup(ctx context.Context, _ *connect.Request[v1.BackupRequest], stream *connect.ServerStream[v1.BackupResponse]) error {
	snap, err := s.c.store.Snapshot(ctx, "")
	if err != nil {
		return failed(err)
	}
	f := backupFile{Format: backupFormat, Made: s.c.cfg.Now(), Records: map[string][]byte{}}
	for key, r := range snap.Records {
		f.Records[key] = r.Value
	}
	f.Digest = digest(encode(f.Records))
	for part := range slices.Chunk(encode(f), backupPart) {
		if err := stream.Send(&v1.BackupResponse{Part: part}); err != nil {
			return err
		}
	}
	return nil
}

// CheckBackup says whether a backup is whole, and when it was made.
func CheckBackup(b []byte) (made time.Time, err error) {
	f, err := readBackup(b)
	return f.Made, err
}

func readBackup(b []byte) (f backupFile, err error) {
	if err := json.Unmarshal(b, &f); err != nil {
		return f, fmt.Errorf("it is no backup, or not whole: %w", err)
	}
	switch {
	case f.Format != backupFormat:
		return f, fmt.Errorf("it is no backup that this program reads: its version is %d, not %d", f.Format, backupFormat)
	case digest(encode(f.Records)) != f.Digest:
		return f, errors.New("it is damaged: its digest is not that of its records")
	case f.Records[keyCA] == nil:
		return f, errors.New("it has no CA")
	}
	return f, nil
}

// errHalfRestored means that a restore was interrupted.
var errHalfRestored = errors.New("a backup was not restored to its end; remove what is in the store, and restore it again")

// restoreBatch is how many records one commit of a restore has: etcd bounds what a transaction may do.
const restoreBatch = 64

// Restored is what an operator has to know of a backup.
type Restored struct {
	Made    time.Time
	Waits   []string // nodes that have to say what they hold before anything changes
	Revoked []string // all nodes that were revoked when it was made
}

// Restore puts a backup into an empty store. Tokens are left out: they may have been used since.
func Restore(ctx context.Context, s store.Store, b []byte) (r Restored, err error) {
	f, err := readBackup(b)
	if err != nil {
		return r, err
	}
	have, err := s.Snapshot(ctx, "")
	if err != nil {
		return r, err
	}
	if len(have.Records) > 0 {
		return r, errors.New("there are records in the store already; restore into an empty one")
	}
	var state stateRecord
	if b, ok := f.Records[keyState]; ok {
		if err := json.Unmarshal(b, &state); err != nil {
			return r, fmt.Errorf("the record %s is damaged: %w", keyState, err)
		}
	}
	if err := state.checkVersion(); err != nil {
		return r, err
	}
	state.Version = recordsVersion
	if state.Restored.IsZero() { // else it is a backup of records that were of a backup
		state.Restored = f.Made
	}
	last := store.Txn{If: []store.Condition{{Key: keyState}}, Put: map[string][]byte{keyState: encode(state)}, Delete: []string{keyRestoring}}
	if _, err := s.Commit(ctx, store.Txn{If: []store.Condition{{Key: keyRestoring}, {Key: keyCA}}, Put: map[string][]byte{keyRestoring: []byte("{}")}}); err != nil {
		return r, err
	}
	keys := slices.DeleteFunc(slices.Sorted(maps.Keys(f.Records)), func(key string) bool {
		return key == keyState || strings.HasPrefix(key, keyTokens) || strings.HasPrefix(key, keyJoined) ||
			strings.HasPrefix(key, keyNodes) && (strings.HasSuffix(key, "/"+partAck) || strings.HasSuffix(key, "/"+partHeld))
	})
	for batch := range slices.Chunk(keys, restoreBatch) {
		t := store.Txn{Put: map[string][]byte{}}
		for _, key := range batch {
			t.Put[key] = f.Records[key]
		}
		if _, err := s.Commit(ctx, t); err != nil {
			return r, err
		}
	}
	if _, err := s.Commit(ctx, last); err != nil {
		return r, err
	}
	v, err := readView(ctx, s)
	if err != nil {
		return r, err
	}
	return Restored{f.Made, v.unheard(), v.revoked()}, nil
}

// unheard are the nodes that have plans, and have not said since the restore what they hold.
func (v *view) unheard() (names []string) {
	for _, name := range slices.Sorted(maps.Keys(v.plans)) {
		if _, heard := v.held[name]; !heard && !v.nodes[name].Revoked {
			names = append(names, name)
		}
	}
	return names
}

const (
	// resumeBeyond is how many revisions a controller skips whose records were restored: a node of which these know
	// nothing may hold a higher one than those that have told.
	resumeBeyond = 1 << 20
	// heldMax is how far above the records' revision a node's may be.
	heldMax = 1 << 40
	// heldEpochsMax is more paths than a block has SIDs for.
	heldEpochsMax = 1 << 16
)

// hear notes what a node holds, if the records are of a backup.
func (c *Controller) hear(ctx context.Context, name string, r *v1.PlansRequest) error {
	for {
		if v, err := c.viewOf(ctx, name); err != nil || v.state.Restored.IsZero() {
			return err
		}
		v, err := c.view(ctx)
		if err != nil || v.state.Restored.IsZero() {
			return err
		}
		if r.Revision > v.state.Revision+heldMax || len(r.Held) > heldEpochsMax {
			return fmt.Errorf("node %s says that it holds revision %d and epochs of %d paths, which cannot be", name, r.Revision, len(r.Held))
		}
		h := heldRecord{Revision: r.Revision}
		for _, e := range r.Held {
			h.Epochs = append(h.Epochs, pathEpoch{e.Path, uint8(e.Epoch)})
		}
		_, err = c.store.Commit(ctx, store.Txn{
			If:  []store.Condition{v.at(keyState), v.at(keyNode(name, partID)), v.at(keyNode(name, partHeld))},
			Put: map[string][]byte{keyNode(name, partHeld): encode(h)},
		})
		if !errors.Is(err, store.ErrConflict) {
			return err
		}
	}
}

// resume goes on from a backup, above all that nodes hold: in one step, since the secrets of what they
// hold may be nobody's but theirs. Packets that are under way are refused.
func (c *Controller) resume(ctx context.Context, v *view) (bool, time.Time, error) {
	s := &v.state
	last, err := c.generation(ctx, v, cmp.Or(s.Next, s.Now))
	if err != nil {
		return false, time.Time{}, err
	}
	var held []plan.Path
	t := store.Txn{Put: map[string][]byte{}}
	for name, h := range v.held {
		s.Revision = max(s.Revision, h.Revision)
		for _, e := range h.Epochs {
			// A node that has not told may be one ahead.
			for _, epoch := range []uint8{e.Epoch, e.Epoch + 1} {
				p := plan.Path{Hops: make([]plan.Hop, 1)}
				p.Path, p.Epoch = e.Path, epoch
				held = append(held, p)
			}
		}
		t.Delete = append(t.Delete, keyNode(name, partHeld))
		t.If = append(t.If, v.at(keyNode(name, partHeld)), v.at(keyNode(name, partID)))
	}
	s.Revision += resumeBeyond
	if n := cmp.Or(s.Next, s.Now); n != 0 {
		all := map[string]bool{}
		for _, p := range last.domain.Paths {
			all[p.Chain] = true
		}
		again, err := c.compileAgain(ctx, v, last, last.domain.Paths, all, held...)
		if err != nil {
			return false, time.Time{}, fmt.Errorf("go on from the backup: %w", err)
		}
		before := s.live()
		if s.Now, err = c.add(ctx, v, again, &t); err != nil {
			return false, time.Time{}, err
		}
		for _, n := range before {
			g, err := c.generation(ctx, v, n)
			if err != nil {
				return false, time.Time{}, err
			}
			g.unstore(n, []*generation{again}, &t)
		}
		s.Next, s.Old, s.Erasing, s.Late, s.Revoked = 0, nil, nil, nil, v.revoked()
		for _, name := range v.revoked() {
			t.Delete = append(t.Delete, keyNode(name, partPlan), keyPlans+name)
			delete(v.plans, name)
		}
		for name, p := range v.plans {
			p.Content = "" // each gets another plan, if only for its revision
			v.plans[name] = p
		}
		if s.Waiting, err = c.plans(ctx, v, &t); err != nil {
			return false, time.Time{}, err
		}
		s.Step, s.Since = stepTurn, c.cfg.Now()
	}
	s.Restored = time.Time{}
	return c.commit(ctx, v, "resume", t)
}
