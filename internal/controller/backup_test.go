package controller

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"connectrpc.com/connect"

	"github.com/waystamp/waystamp/internal/plan"
	v1 "github.com/waystamp/waystamp/internal/rpc/waystampv1"
	"github.com/waystamp/waystamp/internal/store"
)

func (w *world) backup() []byte {
	w.Helper()
	stream, err := w.admin.Backup(w.Context(), connect.NewRequest(&v1.BackupRequest{}))
	w.must(err)
	defer stream.Close()
	var all []byte
	for stream.Receive() {
		all = append(all, stream.Msg().Part...)
	}
	w.must(stream.Err())
	return all
}

// restore puts a backup in the place of the records of a controller that has ended.
func (w *world) restore(b []byte) Restored {
	w.Helper()
	w.must(os.Remove(filepath.Join(w.dir, "store")))
	s, err := store.OpenBolt(filepath.Join(w.dir, "store"))
	w.must(err)
	r, err := Restore(w.Context(), s, b)
	w.must(err)
	w.must(s.Close())
	return r
}

// secretsByEpoch checks that no node was ever sent two secrets of one path and epoch, nor revisions that go back.
func secretsByEpoch(t *testing.T, agents map[string]*fake) {
	t.Helper()
	type epoch struct {
		node string
		path uint32
		of   uint8
	}
	keys := map[epoch]string{}
	for name, a := range agents {
		last := uint64(0)
		for _, p := range a.plans() {
			if p.Revision <= last {
				t.Errorf("%s: revision %d behind %d", name, p.Revision, last)
			}
			last = p.Revision
			see := func(id plan.PathID, key [16]byte) {
				at := epoch{name, id.Path, id.Epoch}
				if was, ok := keys[at]; ok && was != string(key[:]) {
					t.Errorf("%s had two secrets of epoch %d of %s", name, id.Epoch, id)
				}
				keys[at] = string(key[:])
			}
			for _, h := range p.Headends {
				see(h.PathID, h.Share.Key)
			}
			for _, e := range p.Endpoints {
				see(e.PathID, e.Share.Key)
			}
			for _, e := range p.Egresses {
				see(e.PathID, e.Verifier.Keys[0])
			}
		}
	}
}

// Nodes have gone on behind a backup: the controller goes on above what they hold, and not before all have said it.
func TestARestoredControllerGoesOnAboveWhatNodesHold(t *testing.T) {
	w, agents := domain(t)
	w.until("drained", drained)
	unused := w.token("r2")
	old := w.backup()
	for range 3 {
		w.until("rotated", settled(w.rotate()))
		w.until("drained", drained)
	}
	var before []plan.Node
	for _, name := range []string{"r1", "r2", "r3"} {
		before = append(before, agents[name].now())
	}
	w.stop()
	agents["r2"].stop()
	r := w.restore(old)
	if !slices.Equal(r.Waits, []string{"r1", "r2", "r3"}) || len(r.Revoked) != 0 {
		t.Errorf("restored %+v", r)
	}
	w.start()
	s := w.until("r2 is waited for", func(s *v1.State) bool { return strings.Contains(s.Problem, "hold since: r2;") })
	if s.Settled || !strings.HasPrefix(s.Problem, "it waits: the records are of a backup of 20") {
		t.Errorf("state %v", s)
	}
	serial := w.rotate() // it is one behind
	if r1 := agents["r1"].now(); r1.Revision != before[0].Revision || nodeIn(w.state(), "r1").State == nodeRefusing {
		t.Errorf("r1 was sent revision %d before r2 has told what it holds", r1.Revision)
	}
	if p, _, err := w.ctl.planOf(t.Context(), "r1"); err != nil || p.Revision != 0 {
		t.Errorf("r1 would be sent revision %d of the backup, %v", p.Revision, err)
	}
	// A controller that dies meanwhile knows still who has told.
	w.stop()
	w.start()
	agents["r2"].run("")
	w.until("settled", settled(serial))
	w.until("drained", drained)
	at := func(name string) plan.Node { return agents[name].now() }
	if n := w.accepted(at, "r1", "r2", "r3"); n != 2 {
		t.Errorf("%d paths are sent into, want 2", n)
	}
	secretsByEpoch(t, agents)
	for _, was := range before {
		now := agents[was.Name].now()
		held := map[uint32]uint8{}
		for id := range was.PathIDs() {
			held[id.Path] = max(held[id.Path], id.Epoch)
		}
		for id := range now.PathIDs() {
			if id.Epoch <= held[id.Path] {
				t.Errorf("%s has epoch %d of %s, and had %d", was.Name, id.Epoch, id, held[id.Path])
			}
		}
		if now.Revision <= was.Revision+resumeBeyond {
			t.Errorf("%s has revision %d, and had %d", was.Name, now.Revision, was.Revision)
		}
	}
	if err := (&fake{w: w, dir: t.TempDir()}).try(unused, "r2"); code(err) != connect.CodePermissionDenied {
		t.Errorf("a token of the backup: %v", err)
	}
}

// A node that does not come back is revoked, and is waited for no more. The backup was made in the midst of a change.
func TestARestoredControllerGoesOnWithoutANodeThatIsRevoked(t *testing.T) {
	w, agents := domain(t)
	w.until("drained", drained)
	agents["r2"].hush()
	w.rotate()
	w.until("r2 is waited for", func(s *v1.State) bool { return slices.Equal(s.WaitingFor, []string{"r2"}) })
	old := w.backup()
	agents["r2"].speak()
	w.until("drained", drained)
	agents["r2"].stop()
	w.stop()
	w.restore(old)
	w.start()
	w.until("r2 is waited for", func(s *v1.State) bool { return strings.Contains(s.Problem, "hold since: r2;") })
	_, err := w.admin.Revoke(t.Context(), connect.NewRequest(&v1.RevokeRequest{Node: "r2"}))
	w.must(err)
	w.until("blocked", func(s *v1.State) bool { return drained(s) && s.Problem == "" && s.Chains[0].State == chainBlocked })
	secretsByEpoch(t, agents)
	if e := agents["r3"].now().Egresses; len(e) != 1 || e[0].Epoch <= 2 {
		t.Errorf("r3 ends %v", e)
	}
}

func TestABackupIsWholeOrRefused(t *testing.T) {
	w, _ := domain(t)
	good := w.backup()
	w.must(errors.Join(func() error { _, err := CheckBackup(good); return err }()))
	var f backupFile
	w.must(json.Unmarshal(good, &f))
	changed := func(change func(f *backupFile)) []byte {
		var f backupFile
		w.must(json.Unmarshal(good, &f))
		change(&f)
		return encode(f)
	}
	for name, c := range map[string]struct {
		backup []byte
		says   string
	}{
		"cut":             {good[:len(good)/2], "not whole"},
		"something else":  {[]byte(`{"a": 1}`), "its version is 0"},
		"of later":        {changed(func(f *backupFile) { f.Format++ }), "its version is 2"},
		"a byte differs":  {changed(func(f *backupFile) { f.Records[keyState][0]++ }), "its digest"},
		"a record is out": {changed(func(f *backupFile) { delete(f.Records, keyWanted) }), "its digest"},
	} {
		s, err := store.OpenBolt(filepath.Join(t.TempDir(), "store"))
		w.must(err)
		if _, err := Restore(t.Context(), s, c.backup); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: got %v, want %q", name, err, c.says)
		}
		if snap, err := s.Snapshot(t.Context(), ""); err != nil || len(snap.Records) != 0 {
			t.Errorf("%s: %d records were written, %v", name, len(snap.Records), err)
		}
		w.must(s.Close())
	}
	if _, err := Restore(t.Context(), w.store, good); err == nil || !strings.Contains(err.Error(), "an empty one") {
		t.Errorf("over other records: %v", err)
	}
	// One that was interrupted is no store to start from.
	s, err := store.OpenBolt(filepath.Join(t.TempDir(), "store"))
	w.must(err)
	t.Cleanup(func() { w.must(s.Close()) })
	half := &dying{Store: s, at: 2, behind: true, dead: make(chan struct{})}
	if _, err := Restore(t.Context(), half, good); !errors.Is(err, errDead) {
		t.Errorf("got %v", err)
	}
	if _, err := New(t.Context(), Config{Store: s}); !errors.Is(err, errHalfRestored) {
		t.Errorf("half of a backup: %v", err)
	}
}
