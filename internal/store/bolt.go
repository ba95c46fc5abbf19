package store

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"go.etcd.io/bbolt"
)

// Bolt is a store in one file of mode 0600, for one process at a time.
type Bolt struct {
	db *bbolt.DB

	writing sync.Mutex // held by a commit until its watches know of it; taken before mu

	mu      sync.Mutex
	watches map[*boltWatch]bool
	closed  bool
}

// boltWatch is what a watch has not been told yet. Commits that do not concern it cost it nothing.
type boltWatch struct {
	prefix string
	behind []Commit
	lost   bool          // there were more than HistoryMax of them
	news   chan struct{} // holds one element if there is something, or the store was closed
}

// The file's buckets. In data a value has the revision of its commit in front, 8 bytes, big-endian. In
// history the key is a revision, of the same form, and the value a JSON list of keys.
var (
	bucketMeta    = []byte("meta")
	bucketData    = []byte("data")
	bucketHistory = []byte("history")
	keyRevision   = []byte("revision")
	keyFormat     = []byte("format")
)

// boltFormat is the version of what the buckets hold.
const boltFormat = "1"

// lockPatience is how long another process is waited for that is just ending.
const lockPatience = 2 * time.Second

// OpenBolt opens the file, and makes it if it is not there.
func OpenBolt(path string) (*Bolt, error) {
	if info, err := os.Stat(path); err == nil && info.Mode().Perm()&0o077 != 0 {
		return nil, fmt.Errorf("open the store %s: it has mode %04o, and others can read or change the secrets in it; try: chmod 600 %[1]s", path, info.Mode().Perm())
	}
	db, err := bbolt.Open(path, 0o600, &bbolt.Options{Timeout: lockPatience, FreelistType: bbolt.FreelistMapType})
	if errors.Is(err, bbolt.ErrTimeout) {
		return nil, fmt.Errorf("open the store %s: another process has it open; one controller at a time", path)
	}
	if err != nil {
		return nil, fmt.Errorf("open the store %s: %w", path, err)
	}
	err = db.Update(func(tx *bbolt.Tx) error {
		for _, name := range [][]byte{bucketMeta, bucketData, bucketHistory} {
			if _, err := tx.CreateBucketIfNotExists(name); err != nil {
				return err
			}
		}
		meta := tx.Bucket(bucketMeta)
		switch format := string(meta.Get(keyFormat)); format {
		case boltFormat:
			return nil
		case "":
			return meta.Put(keyFormat, []byte(boltFormat))
		default:
			return fmt.Errorf("its format is %q; this program reads %s", format, boltFormat)
		}
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open the store %s: %w", path, err), db.Close())
	}
	return &Bolt{db: db, watches: map[*boltWatch]bool{}}, nil
}

// Close implements Store.
func (b *Bolt) Close() error {
	b.mu.Lock()
	if b.closed {
		b.mu.Unlock()
		return nil
	}
	b.closed = true
	for w := range b.watches {
		w.tell()
	}
	b.mu.Unlock()
	return b.db.Close()
}

// Snapshot implements Store.
func (b *Bolt) Snapshot(ctx context.Context, prefix string) (Snapshot, error) {
	s := Snapshot{Records: map[string]Record{}}
	err := b.db.View(func(tx *bbolt.Tx) error {
		s.Revision = revisionOf(tx)
		c := tx.Bucket(bucketData).Cursor()
		for k, v := c.Seek([]byte(prefix)); bytes.HasPrefix(k, []byte(prefix)); k, v = c.Next() {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			if k == nil {
				break
			}
			s.Records[string(k)] = Record{Value: bytes.Clone(v[8:]), Revision: binary.BigEndian.Uint64(v)}
		}
		return nil
	})
	if err != nil {
		return Snapshot{}, boltError("read", err)
	}
	return s, nil
}

// Commit implements Store.
func (b *Bolt) Commit(ctx context.Context, t Txn) (revision uint64, err error) {
	keys, err := t.keys()
	if err != nil {
		return 0, err
	}
	if ctx.Err() != nil {
		return 0, context.Cause(ctx)
	}
	b.writing.Lock()
	defer b.writing.Unlock()
	err = b.db.Update(func(tx *bbolt.Tx) error {
		data := tx.Bucket(bucketData)
		for _, c := range t.If {
			have := uint64(0)
			if v := data.Get([]byte(c.Key)); v != nil {
				have = binary.BigEndian.Uint64(v)
			}
			if have != c.Revision {
				return fmt.Errorf("%s: %w", c.Key, ErrConflict)
			}
		}
		revision = revisionOf(tx) + 1
		at := binary.BigEndian.AppendUint64(nil, revision)
		for k, v := range t.Put {
			if err := data.Put([]byte(k), append(slices.Clone(at), v...)); err != nil {
				return err
			}
		}
		for _, k := range t.Delete {
			if err := data.Delete([]byte(k)); err != nil {
				return err
			}
		}
		if err := remember(tx, revision, keys); err != nil {
			return err
		}
		return tx.Bucket(bucketMeta).Put(keyRevision, at)
	})
	if err != nil {
		return 0, boltError("write to", err)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	for w := range b.watches {
		if of := withPrefix(keys, w.prefix); len(of) > 0 {
			if w.behind = append(w.behind, Commit{Revision: revision, Keys: of}); len(w.behind) > HistoryMax {
				w.behind, w.lost = nil, true
			}
			w.tell()
		}
	}
	return revision, nil
}

func (w *boltWatch) tell() {
	select {
	case w.news <- struct{}{}:
	default:
	}
}

// withPrefix are those of sorted keys that begin with a prefix.
func withPrefix(keys []string, prefix string) []string {
	from, _ := slices.BinarySearch(keys, prefix)
	to := from
	for to < len(keys) && strings.HasPrefix(keys[to], prefix) {
		to++
	}
	return slices.Clone(keys[from:to])
}

// remember adds a commit to the history, and forgets the one that is too many.
func remember(tx *bbolt.Tx, revision uint64, keys []string) error {
	h := tx.Bucket(bucketHistory)
	list, err := json.Marshal(keys)
	if err != nil {
		return err
	}
	if err := h.Put(binary.BigEndian.AppendUint64(nil, revision), list); err != nil {
		return err
	}
	if revision <= HistoryMax {
		return nil
	}
	return h.Delete(binary.BigEndian.AppendUint64(nil, revision-HistoryMax))
}

// Watch implements Store.
func (b *Bolt) Watch(ctx context.Context, prefix string, after uint64, f func(Commit) error) error {
	w := &boltWatch{prefix: prefix, news: make(chan struct{}, 1)}
	// What was committed by now is in the file, and what comes is told.
	b.writing.Lock()
	b.mu.Lock()
	closed := b.closed
	b.watches[w] = true
	b.mu.Unlock()
	var commits []Commit
	var err error
	if !closed {
		commits, err = b.since(prefix, after)
	}
	b.writing.Unlock()
	defer func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		delete(b.watches, w)
	}()
	if closed {
		return ErrClosed
	}
	if err != nil {
		return boltError("watch", err)
	}
	for {
		for _, c := range commits {
			if c.Revision <= after || ctx.Err() != nil { // after may be ahead of the store
				continue
			}
			if err := f(c); err != nil {
				return err
			}
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-w.news:
		}
		b.mu.Lock()
		var lost bool
		commits, lost, closed = w.behind, w.lost, b.closed
		w.behind = nil
		b.mu.Unlock()
		switch {
		case closed:
			return ErrClosed
		case lost:
			return ErrCompacted
		}
	}
}

// since is the history behind a revision.
func (b *Bolt) since(prefix string, after uint64) (commits []Commit, err error) {
	err = b.db.View(func(tx *bbolt.Tx) error {
		if revisionOf(tx) > after+HistoryMax {
			return ErrCompacted
		}
		c := tx.Bucket(bucketHistory).Cursor()
		for k, v := c.Seek(binary.BigEndian.AppendUint64(nil, after+1)); k != nil; k, v = c.Next() {
			var keys []string
			if err := json.Unmarshal(v, &keys); err != nil {
				return fmt.Errorf("its history is damaged: %w", err)
			}
			if keys = withPrefix(keys, prefix); len(keys) > 0 {
				commits = append(commits, Commit{Revision: binary.BigEndian.Uint64(k), Keys: keys})
			}
		}
		return nil
	})
	return commits, err
}

func revisionOf(tx *bbolt.Tx) uint64 {
	v := tx.Bucket(bucketMeta).Get(keyRevision)
	if v == nil {
		return 0
	}
	return binary.BigEndian.Uint64(v)
}

func boltError(did string, err error) error {
	if errors.Is(err, bbolt.ErrDatabaseNotOpen) {
		return ErrClosed
	}
	if errors.Is(err, ErrConflict) || errors.Is(err, ErrCompacted) {
		return err
	}
	return &Failure{did, err}
}
