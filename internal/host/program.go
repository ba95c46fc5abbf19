package host

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// Program finds another program of waystamp: in the folder of the running one, or else in PATH.
// The error names both.
func Program(name string) (string, error) {
	self, err := os.Executable()
	if err != nil {
		return "", fmt.Errorf("find the running program: %w", err)
	}
	if to, err := filepath.EvalSymlinks(self); err == nil {
		self = to
	}
	beside := filepath.Join(filepath.Dir(self), name)
	if p, err := exec.LookPath(beside); err == nil { // a path with slashes is only checked
		return p, nil
	}
	p, err := exec.LookPath(name)
	if err != nil {
		return "", fmt.Errorf("the program %s is neither in %s nor in PATH", name, filepath.Dir(self))
	}
	return p, nil
}
