package arch

import (
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/waystamp/waystamp/internal/cli"
	"github.com/waystamp/waystamp/internal/labcli"
)

// notOnANode is what the program of a node does without: by the beginning of a
// package's path, why.
var notOnANode = map[string]string{
	module + "/internal/attack":  "attacks are mounted in a lab",
	module + "/internal/bench":   "measurements are made in a lab",
	module + "/internal/demo":    "the demonstration is a lab's",
	module + "/internal/labcli":  "it hands these commands over",
	"gonum.org":                  "it plots",
	"golang.org/x/image":         "it draws",
	"codeberg.org/go-fonts":      "it draws",
	"codeberg.org/go-latex":      "it draws",
	"codeberg.org/go-pdf":        "it draws",
	"github.com/ajstarks":        "it draws",
	"github.com/golang/freetype": "it draws",
	"git.sr.ht/~sbinet":          "it draws",
}

func dependencies(t *testing.T, pkg string) []string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", "list", "-deps", pkg)
	cmd.Dir, cmd.Env = "../..", append(os.Environ(), "CGO_ENABLED=0")
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list -deps %s: %v", pkg, err)
	}
	return strings.Fields(string(out))
}

// The agent runs as root on every node: what only draws plots and builds labs is in
// another program.
func TestTheProgramOfANodeHasNoLaboratory(t *testing.T) {
	node, lab := dependencies(t, "./cmd/waystamp"), dependencies(t, "./cmd/waystamp-lab")
	for prefix, why := range notOnANode {
		is := func(dep string) bool { return dep == prefix || strings.HasPrefix(dep, prefix+"/") }
		if !slices.ContainsFunc(lab, is) {
			t.Errorf("waystamp-lab does not have %s either; take it out of the list", prefix)
		}
		if i := slices.IndexFunc(node, is); i >= 0 {
			t.Errorf("cmd/waystamp has %s (%s); go list -deps tells by which import; move that into internal/labcli", node[i], why)
		}
	}
}

func TestWaystampHandsOverAllThatTheLaboratoryHas(t *testing.T) {
	var have []cli.LabCommand
	for _, c := range labcli.NewRootCommand().Commands() {
		if c.Name() != "version" {
			have = append(have, cli.LabCommand{Name: c.Name(), Short: c.Short})
		}
	}
	for _, c := range have {
		if !slices.Contains(cli.InLab, c) {
			t.Errorf("waystamp does not hand over %q, %q; correct cli.InLab", c.Name, c.Short)
		}
	}
	if len(have) != len(cli.InLab) {
		t.Errorf("waystamp hands over %d commands, and waystamp-lab has %d; correct cli.InLab", len(cli.InLab), len(have))
	}
}
