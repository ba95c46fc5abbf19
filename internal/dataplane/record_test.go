package dataplane

import (
	"errors"
	"os"
	"path/filepath"
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
