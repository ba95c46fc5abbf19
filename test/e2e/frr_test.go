package e2e

import (
	"path/filepath"
	"strings"
	"testing"
)

// The shell of FRR, which knows the commands of all its daemons, takes what
// internal/routing writes.
func TestFRRTakesItsConfiguration(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("../../internal/routing/testdata/*.conf")
	must(t, err)
	if len(files) < 5 {
		t.Fatalf("%d configurations are there; want 5 or more", len(files))
	}
	for _, f := range files {
		if said := string(tool(t, "vtysh", "-C", "-f", f)); strings.TrimSpace(said) != "" {
			t.Errorf("%s: vtysh says\n%s", f, said)
		}
	}
}
