package routing_test

import (
	"crypto/rand"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/waystamp/waystamp/internal/manifest"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/routing"
)

var update = flag.Bool("update", false, "write the golden files")

func compiled(t *testing.T, example string) (model.Domain, []plan.Path) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("../../examples", example))
	if err != nil {
		t.Fatal(err)
	}
	m, err := manifest.Parse(example, b)
	if err != nil {
		t.Fatal(err)
	}
	d, err := plan.Compile(m.Domain, plan.NewKeyring(rand.Reader, nil))
	if err != nil {
		t.Fatal(err)
	}
	return m.Domain, d.Paths
}

// What the files say is also taken by FRR itself: TestFRRTakesItsConfiguration in
// test/e2e.
func TestConfigurationOfFRR(t *testing.T) {
	for golden, of := range map[string][2]string{
		"functions-r2.conf":  {"functions.yaml", "r2"},
		"functions-r3.conf":  {"functions.yaml", "r3"},
		"functions-r6.conf":  {"functions.yaml", "r6"},
		"compressed-r2.conf": {"compressed.yaml", "r2"},
		"compressed-r6.conf": {"compressed.yaml", "r6"},
		"paper-r1.conf":      {"paper.yaml", "r1"},
	} {
		t.Run(golden, func(t *testing.T) {
			d, paths := compiled(t, of[0])
			s, err := routing.New(d, paths, of[1])
			if err != nil {
				t.Fatal(err)
			}
			file := filepath.Join("testdata", golden)
			if *update {
				if err := os.WriteFile(file, []byte(s.FRR()), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(string(want), s.FRR()); d != "" {
				t.Errorf("the golden file (-), and what is written (+); -update writes it:\n%s", d)
			}
		})
	}
}

func TestEachSIDIsAnnouncedOnceByItsNodeWithItsBehaviour(t *testing.T) {
	for example, want := range map[string]map[string]string{
		"functions.yaml": {"fw": "End.AD", "dpi": "End.AD", "nat": "End.AD", "": "End.DT46"},
		"paper.yaml":     {"fw": "End", "dpi": "End", "": "End.DT46"},
	} {
		d, paths := compiled(t, example)
		sids := map[string]string{}
		for _, n := range d.Nodes {
			s, err := routing.New(d, paths, n.Name)
			if err != nil {
				t.Fatal(err)
			}
			for _, sid := range s.SIDs {
				if !n.Locator.Contains(sid.Prefix.Addr()) {
					t.Errorf("%s: %s announces %s, which is not in its locator", example, n.Name, sid.Prefix)
				}
				if other, ok := sids[sid.Prefix.String()]; ok {
					t.Errorf("%s: %s is announced by %s and %s", example, sid.Prefix, other, n.Name)
				}
				sids[sid.Prefix.String()] = n.Name
				if got := sid.Behaviour.String(); got != want[sid.Function] {
					t.Errorf("%s: %s of function %q is %s; want %s", example, sid.Prefix, sid.Function, got, want[sid.Function])
				}
			}
		}
		for _, p := range paths {
			for _, h := range p.Hops[1:] {
				if sid := h.SID.String() + "/64"; sids[sid] != h.Node {
					t.Errorf("%s: %s of %s is announced by %q", example, sid, h.Node, sids[sid])
				}
			}
		}
	}
}

func TestFunctionNumbersComeFromNames(t *testing.T) {
	// printf fw | sha256sum
	if got := routing.FunctionNumber("fw"); got != 133671751 {
		t.Errorf("fw has number %d", got)
	}
	if got := routing.FunctionNumber(""); got != 0 {
		t.Errorf("none has number %d; want 0", got)
	}
}

func TestUnknownNode(t *testing.T) {
	d, paths := compiled(t, "paper.yaml")
	_, err := routing.New(d, paths, "r9")
	if err == nil || !strings.Contains(err.Error(), `no node "r9"; it has r1, `) {
		t.Errorf("error is %v", err)
	}
}
