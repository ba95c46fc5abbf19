package agent

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/waystamp/waystamp/internal/api"
)

// revokedName is a file in the state directory. It outlives the agent and a detached data path.
const revokedName = "gateway-revoked.json"

// revokedMost bounds the identities of the list.
const revokedMost = 10_000

// revokedList are the identities that an operator has revoked at this node's gateway. The zero value reads its file when it is
// asked for the first time.
type revokedList struct {
	changing sync.Mutex // over a change, and over handing it to the gateway

	mu   sync.Mutex
	path string // that list was read from
	list []api.RevokedIdentity
}

type revokedFile struct {
	Version    int                   `json:"version"`
	Identities []api.RevokedIdentity `json:"identities"`
}

// get reads the list. A gateway must not run without it.
func (r *revokedList) get(dir string) ([]api.RevokedIdentity, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	path := filepath.Join(dir, revokedName)
	if r.path == path {
		return r.list, nil
	}
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		r.path, r.list = path, nil
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the list of revoked identities: %w", err)
	}
	var f revokedFile
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(&f); err != nil {
		return nil, fmt.Errorf("the list of revoked identities %s is damaged: %w; the gateway does not run without it: restore it, or remove it and revoke them again", path, err)
	}
	if f.Version != 1 {
		return nil, fmt.Errorf("the list of revoked identities %s has version %d; expect 1", path, f.Version)
	}
	r.path, r.list = path, f.Identities
	return r.list, nil
}

// names gives the identities alone.
func (r *revokedList) names(dir string) (out []string, err error) {
	list, err := r.get(dir)
	for _, i := range list {
		out = append(out, i.Identity)
	}
	return out, err
}

// change adds an identity, or removes it, and writes the file. It reports whether that changed the list. The caller holds
// changing.
func (r *revokedList) change(dir string, q api.RevokeRequest, now time.Time) (changed bool, err error) {
	list, err := r.get(dir)
	if err != nil {
		return false, err
	}
	i, there := slices.BinarySearchFunc(list, q.Identity, func(a api.RevokedIdentity, b string) int { return strings.Compare(a.Identity, b) })
	if there != q.Undo {
		return false, nil
	}
	list = slices.Clone(list)
	switch {
	case q.Undo:
		list = slices.Delete(list, i, i+1)
	case len(list) >= revokedMost:
		return false, fmt.Errorf("%d identities are revoked, and no more are kept; put their certificates on their authority's list, and take them from this one", len(list))
	default:
		list = slices.Insert(list, i, api.RevokedIdentity{Identity: q.Identity, Since: now.UTC().Truncate(time.Second)})
	}
	text, err := json.MarshalIndent(revokedFile{1, list}, "", "\t")
	if err != nil {
		return false, err
	}
	if err := replaceFile(filepath.Join(dir, revokedName), append(text, '\n')); err != nil {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.path = "" // it may be there all the same: the file is read anew
		return false, fmt.Errorf("write the list of revoked identities: %w", err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.list = list
	return true, nil
}

// replaceFile writes a file that is there as a whole after a crash, or as it was before.
func replaceFile(path string, text []byte) (err error) {
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	next := path + ".new"
	f, err := os.OpenFile(next, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(text)
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := os.Rename(next, path); err != nil {
		return err
	}
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
