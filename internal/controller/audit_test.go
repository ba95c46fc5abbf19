package controller

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestTheAuditFileIsPutAsideWhenItIsLarge(t *testing.T) {
	path := filepath.Join(t.TempDir(), "audit")
	writeFile(t, path, []byte("what was there\n"))
	a, err := OpenAudit(path)
	if err != nil {
		t.Fatal(err)
	}
	a.max = 200
	const lines = 30
	for i := range lines {
		if err := a.write(auditLine{Who: "x", Call: fmt.Sprintf("call-%02d.", i)}); err != nil {
			t.Fatal(err)
		}
	}
	if err := a.Close(); err != nil {
		t.Error(err)
	}
	// What is kept are the last lines, without a gap.
	all := ""
	for i := auditKept; i >= 0; i-- {
		name := path
		if i > 0 {
			name = fmt.Sprint(path, ".", i)
		}
		b := readFile(t, name)
		if info, err := os.Stat(name); err != nil || len(b) > 200 || info.Mode().Perm() != 0o600 {
			t.Errorf("%s has %d bytes, mode %v, %v", name, len(b), info.Mode(), err)
		}
		all += string(b)
	}
	if _, err := os.Stat(fmt.Sprint(path, ".", auditKept+1)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("one more is kept: %v", err)
	}
	first := lines - strings.Count(all, "\n")
	for i := first; i < lines; i++ {
		if !strings.Contains(all, fmt.Sprintf("call-%02d.", i)) {
			t.Errorf("call %d is missing:\n%s", i, all)
		}
	}
	if first == 0 || first == lines {
		t.Errorf("%d lines are kept", lines-first)
	}
	if err := os.Chmod(path, 0o622); err != nil {
		t.Fatal(err)
	}
	if _, err := OpenAudit(path); err == nil || !strings.Contains(err.Error(), "chmod 600") {
		t.Errorf("a file that others can change: %v", err)
	}
}
