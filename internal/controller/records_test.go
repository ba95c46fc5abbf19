package controller

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"connectrpc.com/connect"

	"github.com/waystamp/waystamp/internal/identity"
	v1 "github.com/waystamp/waystamp/internal/rpc/waystampv1"
	"github.com/waystamp/waystamp/internal/store"
)

// A later program may write what this one would drop with its next commit.
func TestAnEarlierProgramDoesNotLeadOverLaterRecords(t *testing.T) {
	w := newWorld(t)
	w.start()
	for _, name := range []string{"r1", "r2", "r3"} {
		w.join(name)
	}
	w.until("the first file", settled(w.apply(file)))
	b, err := w.ctl.store.Snapshot(t.Context(), keyState)
	w.must(err)
	var fields map[string]any
	w.must(json.Unmarshal(b.Records[keyState].Value, &fields))
	if fields["version"] != float64(recordsVersion) {
		t.Errorf("the state has version %v, want %d", fields["version"], recordsVersion)
	}

	// It goes on while the controller runs: this one ends.
	fields["version"], fields["not-known-yet"] = recordsVersion+1, "kept"
	later, err := json.Marshal(fields)
	w.must(err)
	_, err = w.ctl.store.Commit(t.Context(), store.Txn{Put: map[string][]byte{keyState: later, keyControl + "of-a-later-program": []byte("{}")}})
	w.must(err)
	if err := <-w.ended; !errors.Is(err, errLater) {
		t.Errorf("it ended with %v, want %v", err, errLater)
	}
	w.cancel()
	w.cancel = nil
	w.must(w.store.Close())

	bolt, err := store.OpenBolt(filepath.Join(w.dir, "store"))
	w.must(err)
	defer bolt.Close()
	if _, err := New(t.Context(), Config{Store: bolt}); !errors.Is(err, errLater) || !strings.Contains(err.Error(), fmt.Sprintf("%d, and this program writes %d", recordsVersion+1, recordsVersion)) {
		t.Errorf("a controller is made over later records: %v", err)
	}
	b, err = bolt.Snapshot(t.Context(), keyState)
	w.must(err)
	if string(b.Records[keyState].Value) != string(later) {
		t.Errorf("the record is %s, and was %s", b.Records[keyState].Value, later)
	}
}

// A call of a node may arrive behind one that it made later.
func TestALateAcknowledgementDoesNotReplaceANewerOne(t *testing.T) {
	w := newWorld(t)
	w.start()
	agents := map[string]*fake{}
	for _, name := range []string{"r1", "r2", "r3"} {
		agents[name] = w.join(name)
	}
	w.until("the first file", settled(w.apply(file)))
	w.until("all is drained", drained)
	first := agents["r1"].now()
	w.until("a rotation", settled(w.rotate()))
	w.until("it is drained", drained)
	last := agents["r1"].now()
	r, err := w.ctl.node(t.Context(), "r1")
	w.must(err)
	ctx := context.WithValue(t.Context(), callerKey{}, caller{peer: identity.Peer{ID: identity.ID{Node: "r1"}, KeyID: r.Key}})
	say := func(m *v1.AcknowledgeRequest) *v1.NodeState {
		t.Helper()
		_, err := node{w.ctl}.Acknowledge(ctx, connect.NewRequest(m))
		w.must(err)
		for _, n := range w.state().Nodes {
			if n.Name == "r1" {
				return n
			}
		}
		t.Fatal("there is no r1")
		return nil
	}
	for name, late := range map[string]*v1.AcknowledgeRequest{
		"it holds the plan before":   {Revision: first.Revision, Digest: "before"},
		"it refuses the plan before": {Refused: last.Revision - 1, Error: "too early"},
	} {
		if n := say(late); n.State != nodeReady || n.Revision != last.Revision {
			t.Errorf("%s: r1 is %s with revision %d, want %d", name, n.State, n.Revision, last.Revision)
		}
	}
	// What it says of the last plan counts, also if it cannot start from it any more.
	if n := say(&v1.AcknowledgeRequest{Refused: last.Revision, Error: "an interface is gone"}); n.State != nodeRefusing {
		t.Errorf("r1 is %s, want %s", n.State, nodeRefusing)
	}
	// And what it says of plans that were never made is no reason to take nothing more of it.
	if n := say(&v1.AcknowledgeRequest{Refused: last.Revision + 9, Error: "of another controller"}); n.State != nodeRefusing {
		t.Errorf("r1 is %s, want %s", n.State, nodeRefusing)
	}
	if n := say(&v1.AcknowledgeRequest{Revision: last.Revision, Digest: "another"}); n.State != nodeRefusing {
		t.Errorf("with another digest r1 is %s, want %s", n.State, nodeRefusing)
	}
}

// With a key no byte of the store has a secret: neither the CA's key, nor of any path, nor a token.
func TestASealedStoreHasNoSecret(t *testing.T) {
	w := newWorld(t)
	key := store.SealKey{1, 2, 3}
	w.wrap = func(s store.Store) store.Store { return store.Seal(s, key) }
	w.start()
	agents := map[string]*fake{}
	for _, name := range []string{"r1", "r2", "r3"} {
		agents[name] = w.join(name)
	}
	token := w.token("r4")
	w.until("the first file", settled(w.apply(file)))
	w.until("a rotation", settled(w.rotate()))
	w.until("it is drained", drained)
	secrets := map[string][]byte{"the token": []byte(token)}
	var err error
	secrets["the key of the CA"], err = w.ctl.ca().Key()
	w.must(err)
	for name, a := range agents {
		for _, p := range a.plans() {
			for i, s := range secretsOf(p) {
				secrets[fmt.Sprintf("%s, revision %d, %d", name, p.Revision, i)] = s
			}
		}
	}
	w.stop()
	b := readFile(t, filepath.Join(w.dir, "store"))
	for what, s := range secrets {
		for _, form := range []string{string(s), hex.EncodeToString(s), base64.StdEncoding.EncodeToString(s), base64.RawURLEncoding.EncodeToString(s)} {
			if bytes.Contains(bytes.ToLower(b), bytes.ToLower([]byte(form))) {
				t.Errorf("the store has %s", what)
			}
		}
	}
	if len(secrets) < 10 || !bytes.Contains(b, []byte("control/node/r1/id")) {
		t.Errorf("%d secrets were looked for in %d bytes, which have no record", len(secrets), len(b))
	}

	// It goes on with the key, and not without.
	bolt, err := store.OpenBolt(filepath.Join(w.dir, "store"))
	w.must(err)
	if _, err := New(t.Context(), Config{Store: bolt}); !errors.Is(err, store.ErrSealed) {
		t.Errorf("without the key: %v", err)
	}
	if _, err := New(t.Context(), Config{Store: store.Seal(bolt, store.SealKey{3})}); !errors.Is(err, store.ErrSealKey) {
		t.Errorf("with another key: %v", err)
	}
	w.must(bolt.Close())
	w.start()
	w.until("another rotation", settled(w.rotate()))
}
