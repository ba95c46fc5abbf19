package command

import (
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/waystamp/waystamp/internal/model"
)

const netfilterDomain = `version: 1
domain: {block: "fd00:5::/48"}
nodes:
  - {name: a, address: "fd00:1::a", locator: "fd00:5:0:a00::/56", interfaces: [{name: eth0, role: edge}, {name: eth1, role: core}]}
  - {name: b, address: "fd00:1::b", locator: "fd00:5:0:b00::/56", interfaces: [{name: eth0, role: edge}, {name: eth1, role: core}]}
functions:
  - {name: fw, node: a, kind: netfilter, arguments: {guest: 1}, zones: argument, rules-file: sub/fw.nft, %}
chains:
  - {name: web, ingress: [a], functions: [{name: fw, argument: guest}], egress: b, match: {destination: "2001:db8::/64"}}
`

// readWith reads the domain with a file of rules beside it.
func readWith(t *testing.T, rules, more string) (text, warnings string, err error) {
	t.Helper()
	dir := t.TempDir()
	file := filepath.Join(dir, "domain.yaml")
	if err := os.Mkdir(filepath.Join(dir, "sub"), 0o755); err != nil {
		t.Fatal(err)
	}
	if rules != "" {
		if err := os.WriteFile(filepath.Join(dir, "sub/fw.nft"), []byte(rules), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	src := strings.Replace(netfilterDomain, ", %", more, 1)
	if err := os.WriteFile(file, []byte(src), 0o644); err != nil {
		t.Fatal(err)
	}
	var stderr strings.Builder
	m, err := ReadManifest(t.Context(), file, nil, &stderr)
	if err == nil {
		text = m.Domain.Functions[0].Netfilter.Rules
	}
	return text, strings.ReplaceAll(stderr.String(), dir+"/", ""), err
}

// Connections through an intrusive function keep their addresses, so that its rules may not change them.
func TestRulesOfAnIntrusiveFunctionDoNotTranslate(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("looked at only if the rules could be checked, which needs root")
	}
	for rules, want := range map[string]string{
		"chain c {\n\ttype nat hook postrouting priority srcnat;\n}\n":      "x.yaml:8: rules of function dpi have a chain of type nat; the connections through an intrusive function keep their addresses",
		"chain c {\n\ttype filter hook forward priority filter;\n}\n":       "",
		"chain c {\n\ttype filter hook forward priority filter;\n\tno\n}\n": "rules of function dpi",
	} {
		d := model.Domain{Functions: []model.Function{{Name: "dpi", Kind: model.KindStream, Intrusive: true,
			Netfilter: model.Netfilter{Namespace: model.NamespaceOwn, Rules: rules, RulesAt: model.Source{File: "x.yaml", Line: 7, Column: 1}}}}}
		err := completeRules(t.Context(), &d, "x.yaml", io.Discard)
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%q: %v; want %q", rules, err, want)
		}
	}
}

func TestRulesOfAFileAreReadAndChecked(t *testing.T) {
	const good = "chain c {\n\tmeta mark $guest accept\n}\n"
	text, warnings, err := readWith(t, good, "")
	if err != nil || text != good {
		t.Errorf("got the rules %q, %v; want %q", text, err, good)
	}
	// Who may not make a namespace is told that nobody has asked nft.
	if root := os.Geteuid() == 0; root != (warnings == "") {
		t.Errorf("warnings %q; as root: %t", warnings, root)
	}
	for name, c := range map[string]struct{ rules, more, want string }{
		"missing":        {"", "", "sub/fw.nft does not exist; a relative name starts from the folder of the domain's file"},
		"other argument": {"chain c {\n\tmeta mark $staff accept\n}\n", "", "sub/fw.nft:2:12: rules of function fw: $staff is not an argument of the function"},
		"nat":            {"chain c {\n\ttype nat hook postrouting priority srcnat;\n}\n", "", "sub/fw.nft:2: rules of function fw have a chain of type nat; set rewrites: true"},
		"too long":       {strings.Repeat("#", 1<<20+1), "", "has more than 1048576 bytes"},
	} {
		if _, _, err := readWith(t, c.rules, c.more); err == nil || !strings.Contains(err.Error(), c.want) {
			if name == "nat" && os.Geteuid() != 0 {
				continue // looked at only if the rules could be checked
			}
			t.Errorf("%s: got %v; want %q", name, err, c.want)
		}
	}
	if _, _, err := readWith(t, "chain c {\n\ttype nat hook postrouting priority srcnat;\n}\n", ", rewrites: true"); err != nil {
		t.Errorf("with rewrites: true: %v", err)
	}
}
