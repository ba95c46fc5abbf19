package labcli

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// What is left of a command that was killed is told by the next, and shown by ls.
func TestLabsThatNobodyTakesDownAreTold(t *testing.T) {
	dir := t.TempDir()
	// Process 1 began at another time.
	record := `{"version": 1, "prefix": "ws-left", "created": "2026-01-02T03:04:05Z", "up": true, "binary": "/x", "members": [], "owner": {"pid": 1, "start": 1234567}}`
	for name, text := range map[string]string{"ws-left": record, "ws-stays": strings.NewReplacer("ws-left", "ws-stays", `, "owner": {"pid": 1, "start": 1234567}`, "").Replace(record)} {
		if err := os.Mkdir(filepath.Join(dir, name), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name, "lab.json"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	stdout, _, err := runLab(t, "ls", "--run-dir", dir)
	if err != nil || !strings.Contains(stdout, "ws-left   orphan") || !strings.Contains(stdout, "ws-stays  up") {
		t.Errorf("lab ls: %v\n%s", err, stdout)
	}
	// That this fails is no matter: there is such a lab.
	_, stderr, err := runLab(t, "up", "-f", paperFile, "--no-agents", "--run-dir", dir, "--prefix", "ws-left")
	want := "warning: an interrupted command left lab ws-left behind; remove it with: waystamp lab down --prefix ws-left --run-dir " + dir + "\n"
	if err == nil || stderr != want {
		t.Errorf("lab up: %v, says\n%swant\n%s", err, stderr, want)
	}
}
