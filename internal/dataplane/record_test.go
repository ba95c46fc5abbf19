package dataplane

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// What the system says of a record is told in the same words each time, whatever the
// temporary file was called: the agent tells news once. The advice is another than
// for a damaged one, which is not to be removed because the disk is full.
func TestTroubleWithRecordsIsToldInTheSameWords(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "record.json")
	if err := os.MkdirAll(filepath.Join(path, "not empty"), 0o700); err != nil {
		t.Fatal(err)
	}
	open, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer open.Close()
	for _, of := range []func(error) error{
		func(err error) error { return &NumbersError{path, err} },
		func(err error) error { return &WindowsError{path, err} },
	} {
		var said []string
		for range 2 {
			err := replaceSynced(open, path, []byte("{}\n"))
			if err == nil {
				t.Fatal("a directory was replaced")
			}
			said = append(said, of(err).Error())
		}
		if said[0] != said[1] || !strings.Contains(said[0], "file exists") || !strings.Contains(said[0], "room for it") || strings.Contains(said[0], "remove it") {
			t.Errorf("said first: %s\nand then: %s", said[0], said[1])
		}
		if text := of(errors.New("is damaged")).Error(); !strings.Contains(text, "restore the file, or remove it after") {
			t.Error(text)
		}
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 1 {
		t.Errorf("left: %v, %v", left, err)
	}
}

type testEntry struct {
	A int `json:"a"`
}

// A record begins with what it is, in which version, and in which boot it was written.
// What another version has written is named as that, and stays as it is, whatever
// fields it has.
func TestRecordHasAHeader(t *testing.T) {
	r := record[testEntry]{filepath.Join(t.TempDir(), "state", "test.json"), "tests", 3}
	if entries, err := r.read(); err != nil || entries != nil {
		t.Errorf("without a file: %v, %v", entries, err)
	}
	put := func(e ...testEntry) error {
		return r.update(func([]testEntry) ([]testEntry, bool, error) { return e, true, nil })
	}
	if err := put(testEntry{1}, testEntry{2}); err != nil {
		t.Fatal(err)
	}
	boot, err := bootID()
	if err != nil {
		t.Fatal(err)
	}
	want := `{"record":"tests","version":3,"boot":"` + boot + `","entries":[{"a":1},{"a":2}]}` + "\n"
	if b, err := os.ReadFile(r.path); err != nil || string(b) != want {
		t.Errorf("written: %s, %v; want %s", b, err, want)
	}
	if entries, err := r.read(); err != nil || !slices.Equal(entries, []testEntry{{1}, {2}}) {
		t.Errorf("read: %v, %v", entries, err)
	}
	for _, x := range []struct{ what, content, says string }{
		{"an older version", strings.NewReplacer(`"version":3`, `"version":2`, "entries", "then").Replace(want), "has version 2, and this waystamp reads version 3"},
		{"another record", strings.Replace(want, "tests", "others", 1), `no record of tests: it says "others"`},
		{"no header", `{}`, "no record of tests"},
		{"an unknown field", strings.Replace(want, `"a":2`, `"b":2`, 1), "damaged"},
		{"two of them", want + want, "damaged"},
		{"nothing", "", "damaged"},
	} {
		if err := os.WriteFile(r.path, []byte(x.content), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := r.read(); err == nil || !strings.Contains(err.Error(), x.says) {
			t.Errorf("%s: read says %v; want %q", x.what, err, x.says)
		}
		if err := put(); err == nil || !strings.Contains(err.Error(), x.says) {
			t.Errorf("%s: update says %v; want %q", x.what, err, x.says)
		}
		if b, err := os.ReadFile(r.path); err != nil || string(b) != x.content {
			t.Errorf("%s: the file was changed to %q, %v", x.what, b, err)
		}
	}
}

// What has not changed is not written, and what cannot be changed neither.
func TestRecordIsWrittenOnlyWhenItChanges(t *testing.T) {
	r := record[testEntry]{filepath.Join(t.TempDir(), "test.json"), "tests", 1}
	broken := errors.New("broken off by the test")
	for _, x := range []struct {
		changed bool
		err     error
	}{{false, nil}, {true, broken}} {
		err := r.update(func([]testEntry) ([]testEntry, bool, error) { return []testEntry{{1}}, x.changed, x.err })
		if !errors.Is(err, x.err) {
			t.Errorf("got %v; want %v", err, x.err)
		}
		if _, err := os.Stat(r.path); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%+v: the file is there: %v", x, err)
		}
	}
}
