package cli

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/waystamp/waystamp/internal/command"
)

func runRouting(t *testing.T, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	root := &cobra.Command{Use: "waystamp", SilenceErrors: true, SilenceUsage: true}
	root.AddCommand(NewPlanCommand(), NewRoutingCommand())
	var out, errs bytes.Buffer
	code = command.Run(t.Context(), root, args, strings.NewReader(""), &out, &errs)
	return out.String(), errs.String(), code
}

// internal/routing has the golden file.
func TestRoutingFRRPrintsTheConfigurationOfANode(t *testing.T) {
	want, err := os.ReadFile("../routing/testdata/routing-r2.conf")
	if err != nil {
		t.Fatal(err)
	}
	out, stderr, code := runRouting(t, "routing", "frr", "r2", "-f", planRouting)
	if code != 0 || out != string(want) || stderr != "" {
		t.Errorf("exit code %d, %s\n%s", code, stderr, out)
	}
	page, err := os.ReadFile("../../docs/how-to/routing.md")
	if err != nil {
		t.Fatal(err)
	}
	head := strings.Join(strings.SplitAfter(out, "\n")[:6], "")
	if shown := "$ waystamp routing frr r2 -f examples/routing.yaml | head -6\n" + head + "```"; !strings.Contains(string(page), shown) {
		t.Errorf("docs/how-to/routing.md does not show\n%s", shown)
	}

	out, _, code = runRouting(t, "routing", "frr", "r2", "-f", planRouting, "--as", "65002", "--neighbour", "eth0", "--neighbour", "eth1")
	for _, line := range []string{"router bgp 65002", " neighbor eth0 interface peer-group core", " neighbor eth1 interface peer-group core", " set large-community 65002:32771:133671751"} {
		if code != 0 || !strings.Contains(out, "\n"+line+"\n") {
			t.Errorf("exit code %d, and no line %q:\n%s", code, line, out)
		}
	}
	if strings.Contains(out, "r2-r1") || strings.Contains(out, "4200000002") {
		t.Errorf("flags do not take the place of what is in the file:\n%s", out)
	}
}

// Chains that come and go leave plans with other SIDs than a first plan has.
func TestRoutingFRRHasTheSIDsOfThePlans(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "domain.yaml")
	b, err := os.ReadFile(planRouting)
	if err != nil {
		t.Fatal(err)
	}
	first := strings.Replace(string(b), "chains:\n", `chains:
  - name: before
    ingress: [r1]
    functions: [fw]
    egress: r6
    match: {destination: "2001:db8::/64"}
`, 1)
	sids := regexp.MustCompile(`(?m)^ipv6 prefix-list waystamp-32771-fw seq \d+ permit (\S+)`)
	for _, text := range []string{first, string(b)} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, stderr, code := runRouting(t, "plan", "-f", file, "--out", filepath.Join(dir, "plans")); code != 0 {
			t.Fatal(stderr)
		}
	}
	plain, _, _ := runRouting(t, "routing", "frr", "r2", "-f", file)
	kept, stderr, code := runRouting(t, "routing", "frr", "r2", "-f", file, "--paths", filepath.Join(dir, "plans", "paths.json"))
	if code != 0 {
		t.Fatal(stderr)
	}
	a, k := sids.FindAllString(plain, -1), sids.FindAllString(kept, -1)
	if len(a) != 2 || len(k) != 2 || strings.Join(a, "") == strings.Join(k, "") {
		t.Errorf("SIDs of a first plan %q, of the plans that are there %q; want two each, and others", a, k)
	}
}

func TestRoutingFRRRefuses(t *testing.T) {
	for want, args := range map[string][]string{
		"-f is missing":                       {"r2"},
		"0 nodes are named; name one, as in":  {"-f", planRouting},
		`no node "r9"; it has r1, r2, r3, r6`: {"r9", "-f", planFunctions},
		`--neighbour "a b"`:                   {"r2", "-f", planFunctions, "--neighbour", "a b"},
		"--neighbour \"a\\n":                  {"r2", "-f", planFunctions, "--neighbour", "a\nb"},
		"read the paths":                      {"r2", "-f", planFunctions, "--paths", "none.json"},
	} {
		out, stderr, code := runRouting(t, append([]string{"routing", "frr"}, args...)...)
		if code != command.ExitUsage || out != "" || !strings.Contains(stderr, want) {
			t.Errorf("%q: exit code %d, %q on standard output, and\n%s\nwant exit code 2 and %q", args, code, out, stderr, want)
		}
	}
}
