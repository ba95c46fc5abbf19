package store

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/waystamp/waystamp/test/etcdtest"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		etcdtest.Stop()
		os.Exit(code)
	}), goleak.IgnoreAnyFunction("github.com/waystamp/waystamp/test/etcdtest.start.func1"))
}

// implementations are all stores; open opens the one that is kept in a directory, or under its name.
var implementations = map[string]func(t *testing.T, dir string) (Store, error){
	"bolt": func(_ *testing.T, dir string) (Store, error) { return OpenBolt(filepath.Join(dir, "store")) },
	"etcd": func(t *testing.T, dir string) (Store, error) { return OpenEtcd(t.Context(), etcdOf(t, dir)) },
	"sealed bolt": func(_ *testing.T, dir string) (Store, error) {
		s, err := OpenBolt(filepath.Join(dir, "store"))
		return Seal(s, sealKey(1)), err
	},
	"sealed etcd": func(t *testing.T, dir string) (Store, error) {
		s, err := OpenEtcd(t.Context(), etcdOf(t, dir))
		return Seal(s, sealKey(1)), err
	},
}

func etcdOf(t *testing.T, dir string) EtcdConfig {
	return EtcdConfig{Endpoints: []string{etcdtest.Shared(t).Endpoint}, Prefix: "test" + dir, Lease: 2 * time.Second}
}

// each runs a test on every implementation. open opens the same store each time.
func each(t *testing.T, f func(t *testing.T, open func() Store)) {
	for name, open := range implementations {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			f(t, func() Store {
				s, err := open(t, dir)
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { s.Close() })
				return s
			})
		})
	}
}

func commit(t *testing.T, s Store, x Txn) uint64 {
	t.Helper()
	r, err := s.Commit(t.Context(), x)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func snapshot(t *testing.T, s Store, prefix string) Snapshot {
	t.Helper()
	snap, err := s.Snapshot(t.Context(), prefix)
	if err != nil {
		t.Fatal(err)
	}
	return snap
}

func put(kv ...string) map[string][]byte {
	m := map[string][]byte{}
	for i := 0; i < len(kv); i += 2 {
		m[kv[i]] = []byte(kv[i+1])
	}
	return m
}

func TestASnapshotIsOfOneRevisionAndOnePrefix(t *testing.T) {
	each(t, func(t *testing.T, open func() Store) {
		s := open()
		if snap := snapshot(t, s, ""); snap.Revision != 0 || len(snap.Records) != 0 {
			t.Fatalf("a new store has %+v", snap)
		}
		one := commit(t, s, Txn{Put: put("a/1", "x", "a/2", "", "b/1", "z")})
		two := commit(t, s, Txn{Put: put("a/1", "y"), Delete: []string{"b/1", "never"}})
		if one != 1 || two != 2 {
			t.Errorf("revisions %d, %d; want 1, 2", one, two)
		}
		snap := snapshot(t, s, "a/")
		want := map[string]Record{"a/1": {[]byte("y"), 2}, "a/2": {[]byte{}, 1}}
		same := func(a, b Record) bool { return bytes.Equal(a.Value, b.Value) && a.Revision == b.Revision }
		if snap.Revision != 2 || !maps.EqualFunc(snap.Records, want, same) {
			t.Errorf("got %+v, want %+v at 2", snap, want)
		}
		snap.Records["a/1"].Value[0] = 'Z' // the caller's own
		if v := snapshot(t, s, "a/1").Records["a/1"].Value; string(v) != "y" {
			t.Errorf("the store has %q now", v)
		}
	})
}

func TestACommitIsAllOrNothing(t *testing.T) {
	each(t, func(t *testing.T, open func() Store) {
		s := open()
		commit(t, s, Txn{Put: put("a", "1", "b", "1")}) // 1
		commit(t, s, Txn{Put: put("a", "2")})           // 2
		for name, c := range map[string]struct {
			conditions []Condition
			holds      bool
		}{
			"as written last":         {[]Condition{{"a", 2}, {"b", 1}}, true},
			"absent":                  {[]Condition{{"c", 0}}, true},
			"written since":           {[]Condition{{"b", 1}, {"a", 1}}, false},
			"there, though not to be": {[]Condition{{"a", 0}}, false},
			"not there":               {[]Condition{{"c", 1}}, false},
			"of the future":           {[]Condition{{"a", 99}}, false},
		} {
			t.Run(name, func(t *testing.T) {
				before := snapshot(t, s, "")
				_, err := s.Commit(t.Context(), Txn{If: c.conditions, Put: put("x-"+name, "1"), Delete: []string{"d"}})
				after := snapshot(t, s, "")
				if c.holds && (err != nil || after.Revision != before.Revision+1 || len(after.Records) != len(before.Records)+1) {
					t.Errorf("got %v, revision %d after %d", err, after.Revision, before.Revision)
				}
				if !c.holds && (!errors.Is(err, ErrConflict) || after.Revision != before.Revision || len(after.Records) != len(before.Records)) {
					t.Errorf("got %v, revision %d after %d; want a conflict that changes nothing", err, after.Revision, before.Revision)
				}
			})
		}
		if _, err := s.Commit(t.Context(), Txn{Put: put("a", "9"), Delete: []string{"a"}}); err == nil {
			t.Error("a key was put and deleted at once")
		}
	})
}

// Of those who count up what they have read, none loses a step.
func TestCompareAndSwapLosesNoWrite(t *testing.T) {
	each(t, func(t *testing.T, open func() Store) {
		s := open()
		const writers, times = 4, 20
		var group sync.WaitGroup
		errs := make(chan error, writers)
		for range writers {
			group.Go(func() {
				for done := 0; done < times; {
					snap, err := s.Snapshot(context.Background(), "n")
					if err != nil {
						errs <- err
						return
					}
					have := snap.Records["n"]
					_, err = s.Commit(context.Background(), Txn{If: []Condition{{"n", have.Revision}}, Put: map[string][]byte{"n": append(have.Value, 'x')}})
					switch {
					case err == nil:
						done++
					case !errors.Is(err, ErrConflict):
						errs <- err
						return
					}
				}
			})
		}
		group.Wait()
		close(errs)
		for err := range errs {
			t.Error(err)
		}
		if n := len(snapshot(t, s, "n").Records["n"].Value); n != writers*times {
			t.Errorf("%d steps are in the record, %d were committed", n, writers*times)
		}
	})
}

func TestWhatWasCommittedIsThereWhenTheStoreIsOpenedAgain(t *testing.T) {
	each(t, func(t *testing.T, open func() Store) {
		s := open()
		commit(t, s, Txn{Put: put("a", "1")})
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Commit(t.Context(), Txn{Put: put("a", "2")}); !errors.Is(err, ErrClosed) {
			t.Errorf("a closed store says %v", err)
		}
		if _, err := s.Snapshot(t.Context(), ""); !errors.Is(err, ErrClosed) {
			t.Errorf("a closed store says %v", err)
		}
		s = open()
		snap := snapshot(t, s, "")
		if snap.Revision != 1 || string(snap.Records["a"].Value) != "1" {
			t.Errorf("got %+v", snap)
		}
		if r := commit(t, s, Txn{Put: put("a", "2")}); r != 2 {
			t.Errorf("revision %d; it only grows", r)
		}
	})
}

var errEnough = errors.New("enough")

// watched are the commits that a watch tells, until it has told n.
func watched(t *testing.T, s Store, prefix string, after uint64, n int) (all []Commit) {
	t.Helper()
	err := s.Watch(t.Context(), prefix, after, func(c Commit) error {
		if all = append(all, c); len(all) == n {
			return errEnough
		}
		return nil
	})
	if !errors.Is(err, errEnough) {
		t.Fatalf("watch: %v after %v", err, all)
	}
	return all
}

func TestAWatchTellsEachCommitOnceAndInOrder(t *testing.T) {
	each(t, func(t *testing.T, open func() Store) {
		s := open()
		for i := range 5 {
			commit(t, s, Txn{Put: put(fmt.Sprintf("a/%d", i), "", "b", fmt.Sprint(i))})
		}
		commit(t, s, Txn{Put: put("b", "none of a/")})
		commit(t, s, Txn{Delete: []string{"a/3", "a/0"}})
		got := watched(t, s, "a/", 2, 4)
		want := []Commit{{3, []string{"a/2"}}, {4, []string{"a/3"}}, {5, []string{"a/4"}}, {7, []string{"a/0", "a/3"}}}
		if !slices.EqualFunc(got, want, func(a, b Commit) bool { return a.Revision == b.Revision && slices.Equal(a.Keys, b.Keys) }) {
			t.Errorf("got %v, want %v", got, want)
		}

		// What comes while it watches, too.
		told := make(chan Commit)
		ctx, cancel := context.WithCancelCause(t.Context())
		ended := make(chan error)
		go func() {
			ended <- s.Watch(ctx, "a/", 7, func(c Commit) error { told <- c; return nil })
		}()
		for i := range 3 {
			r := commit(t, s, Txn{Put: put("a/new", fmt.Sprint(i))})
			if c := <-told; c.Revision != r {
				t.Errorf("told of %d, want %d", c.Revision, r)
			}
		}
		why := errors.New("the test is done")
		cancel(why)
		if err := <-ended; !errors.Is(err, why) {
			t.Errorf("ended by %v", err)
		}
	})
}

func TestAWatchThatIsTooLateIsToldSo(t *testing.T) {
	each(t, func(t *testing.T, open func() Store) {
		s := open()
		for range HistoryMax + 2 {
			commit(t, s, Txn{Put: put("a", "")})
		}
		if err := s.Watch(t.Context(), "", 1, func(Commit) error { return errEnough }); !errors.Is(err, ErrCompacted) {
			t.Errorf("got %v, want %v", err, ErrCompacted)
		}
		if got := watched(t, s, "", 2, HistoryMax); got[0].Revision != 3 {
			t.Errorf("the first is %d, want 3", got[0].Revision)
		}
	})
}

func TestCloseEndsAWatch(t *testing.T) {
	each(t, func(t *testing.T, open func() Store) {
		s := open()
		commit(t, s, Txn{Put: put("a", "")})
		begun, ended := make(chan struct{}), make(chan error)
		go func() {
			ended <- s.Watch(t.Context(), "", 0, func(Commit) error { close(begun); return nil })
		}()
		<-begun
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		if err := <-ended; !errors.Is(err, ErrClosed) {
			t.Errorf("ended by %v", err)
		}
	})
}

// A store does what a map does.
func TestAStoreIsAMapWithRevisions(t *testing.T) {
	each(t, func(t *testing.T, open func() Store) {
		s := open()
		model, last := map[string]Record{}, uint64(0)
		rapid.Check(t, func(rt *rapid.T) {
			x := Txn{Put: map[string][]byte{}}
			for _, k := range rapid.SliceOfNDistinct(rapid.StringMatching("[ab]/[0-3]"), 0, 4, rapid.ID[string]).Draw(rt, "keys") {
				if rapid.Bool().Draw(rt, "put") {
					x.Put[k] = rapid.SliceOfN(rapid.Byte(), 0, 4).Draw(rt, "value")
				} else {
					x.Delete = append(x.Delete, k)
				}
			}
			holds := true
			for _, k := range rapid.SliceOfN(rapid.StringMatching("[ab]/[0-3]"), 0, 2).Draw(rt, "conditions") {
				c := Condition{k, model[k].Revision + uint64(rapid.IntRange(0, 1).Draw(rt, "off"))}
				holds = holds && c.Revision == model[k].Revision
				x.If = append(x.If, c)
			}
			r, err := s.Commit(context.Background(), x)
			if holds != (err == nil) || err != nil && !errors.Is(err, ErrConflict) {
				rt.Fatalf("commit: %v; conditions hold: %v", err, holds)
			}
			if holds {
				if r != last+1 {
					rt.Fatalf("revision %d after %d", r, last)
				}
				last = r
				for k, v := range x.Put {
					model[k] = Record{v, r}
				}
				for _, k := range x.Delete {
					delete(model, k)
				}
			}
			snap, err := s.Snapshot(context.Background(), "")
			if err != nil || snap.Revision != last || !maps.EqualFunc(snap.Records, model, func(a, b Record) bool {
				return bytes.Equal(a.Value, b.Value) && a.Revision == b.Revision
			}) {
				rt.Fatalf("got %v, %v; want %v at %d", snap, err, model, last)
			}
		})
	})
}

func TestABoltFileIsItsOwnersAlone(t *testing.T) {
	path := filepath.Join(t.TempDir(), "store")
	s, err := OpenBolt(path)
	if err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	if _, err := OpenBolt(path); err == nil || !strings.Contains(err.Error(), "another process has it open") {
		t.Errorf("opened twice: %v", err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if err := os.Chmod(path, 0o640); err != nil {
		t.Fatal(err)
	}
	if _, err := OpenBolt(path); err == nil || !strings.Contains(err.Error(), "chmod 600") {
		t.Errorf("a file that others can read: %v", err)
	}
}
