package manifest

import (
	"errors"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/waystamp/waystamp/internal/model"
)

var update = flag.Bool("update", false, "write the golden files")

// Every testdata/*.yaml is a file that is refused, with the message beside it.
func TestBadFilesAreRefusedWithTheirGoldenMessage(t *testing.T) {
	files, err := filepath.Glob("testdata/*.yaml")
	if err != nil || len(files) < 15 {
		t.Fatalf("%d bad files, %v; want more", len(files), err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".yaml"), func(t *testing.T) {
			src := read(t, file)
			_, err := Parse(filepath.Base(file), src)
			if err == nil {
				t.Fatal("accepted")
			}
			e, ok := errors.AsType[*Error](err)
			if !ok {
				t.Fatalf("the error is a %T; want *Error", err)
			}
			inFile(t, e, src)
			golden := strings.TrimSuffix(file, ".yaml") + ".golden"
			got := err.Error() + "\n"
			if *update {
				if err := os.WriteFile(golden, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			if diff := cmp.Diff(string(read(t, golden)), got); diff != "" {
				t.Errorf("message (-golden +got; -update writes it):\n%s", diff)
			}
		})
	}
}

// inFile holds that problems are in order and point into the file.
func inFile(t testing.TB, e *Error, src []byte) {
	t.Helper()
	if len(e.Problems) == 0 {
		t.Fatal("an error without problems")
	}
	lines := strings.Split(strings.NewReplacer("\r\n", "\n", "\r", "\n").Replace(string(src)), "\n")
	line := 0
	for _, p := range e.Problems {
		if p.Line < line {
			t.Errorf("line %d comes after line %d", p.Line, line)
		}
		line = p.Line
		if p.Line < 1 || p.Line > len(lines) || p.Column < 1 {
			t.Errorf("%q is at %d:%d, outside of the file", p, p.Line, p.Column)
		}
	}
}

func read(t testing.TB, file string) []byte {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func parse1(t testing.TB, file string) Manifest {
	t.Helper()
	m, err := Parse(filepath.Base(file), read(t, file))
	if err != nil {
		t.Fatal(err)
	}
	return m
}

var equal = cmp.Options{
	cmp.Comparer(func(a, b netip.Addr) bool { return a == b }),
	cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }),
	cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b }),
}

func TestPaperExampleMeansWhatItSays(t *testing.T) {
	addr, prefix := netip.MustParseAddr, netip.MustParsePrefix
	edge := func(name string) model.Interface { return model.Interface{Name: name, Role: model.RoleEdge} }
	core := func(name string) model.Interface {
		return model.Interface{Name: name, Role: model.RoleCore, MTU: 1700}
	}
	want := Manifest{
		Domain: model.Domain{
			Block: prefix("fc00::/48"),
			Nodes: []model.Node{
				{Name: "r1", Address: addr("fc00:1::1"), Locator: prefix("fc00:0:0:100::/56"), CPUs: 64,
					Interfaces: []model.Interface{edge("r1-h1"), core("r1-r2"), core("r1-r4")}},
				{Name: "r2", Address: addr("fc00:2::1"), Locator: prefix("fc00:0:0:200::/56"), CPUs: 64,
					Interfaces: []model.Interface{core("r2-r1"), core("r2-r3")}},
				{Name: "r3", Address: addr("fc00:3::1"), Locator: prefix("fc00:0:0:300::/56"), CPUs: 64,
					Interfaces: []model.Interface{core("r3-r2"), core("r3-r6")}},
				{Name: "r6", Address: addr("fc00:6::1"), Locator: prefix("fc00:0:0:600::/56"), CPUs: 64,
					Interfaces: []model.Interface{edge("r6-h2"), core("r6-r3"), core("r6-r5")}},
			},
			Functions: []model.Function{{Name: "fw", Node: "r2"}, {Name: "dpi", Node: "r3"}},
			Chains: []model.Chain{{
				Name:      "web",
				Ingress:   []string{"r1"},
				Functions: []string{"fw", "dpi"},
				Egress:    "r6",
				Match:     model.Match{Destination: prefix("fc00:8::/64")},
				Both:      true,
				Proof:     model.Proof{Scheme: model.SchemeKeyed, OnViolation: model.OnViolationDrop, Window: 1024},
			}},
		},
		Lab: &model.Lab{
			MTU: 1700,
			Hosts: []model.LabHost{
				{Name: "h1", Node: "r1", Prefix: prefix("fc00:7::/64")},
				{Name: "h2", Node: "r6", Prefix: prefix("fc00:8::/64")},
			},
			Routers: []model.LabRouter{
				{Name: "r4", Address: addr("fc00:4::1"), SIDs: []netip.Addr{addr("fc00:0:0:400::")}},
				{Name: "r5", Address: addr("fc00:5::1"), SIDs: []netip.Addr{addr("fc00:0:0:500::")}},
			},
			Links: []model.LabLink{
				{A: "r1", B: "r2"}, {A: "r2", B: "r3"}, {A: "r3", B: "r6"},
				{A: "r1", B: "r4"}, {A: "r4", B: "r5"}, {A: "r5", B: "r6"},
			},
		},
	}
	if diff := cmp.Diff(want, parse1(t, "../../examples/paper.yaml"), equal); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func TestEveryExampleIsAcceptedWithoutWarning(t *testing.T) {
	files, err := filepath.Glob("../../examples/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatalf("no examples: %v", err)
	}
	for _, file := range files {
		if m := parse1(t, file); len(m.Warnings) > 0 {
			t.Errorf("%s: %v", file, m.Warnings)
		}
	}
}

// everything uses each field and each value that the file knows.
const everything = `version: 1
domain: {block: "fd00:5::/48"}
nodes:
  - name: a
    address: fd00:1::a
    locator: fd00:5:0:a00::/56
    cpus: 4
    interfaces:
      - {name: eth0.100, role: edge, datapath: tc, unmatched: drop, mtu: 9000}
      - {name: eth1, role: core, datapath: xdp, mtu: 1800}
  - name: b
    address: fd00:1::b
    locator: fd00:5:0:b00::/64
    interfaces:
      - {name: eth0, role: core, datapath: auto}
      - {name: eth1, role: edge, unmatched: route, guard: off}
functions:
  - {name: 1, node: a, kind: forward}
  - {name: idle, node: b, kind: forward}
chains:
  - name: all
    ingress: [a]
    functions: ["1", {sid: "fd00:5:0:ff00::"}, 1]
    egress: b
    match: {source: "2001:db8::/32", destination: "::/0"}
    direction: forward
    proof: {scheme: opot, on-violation: report, window: 4096, rotate-every: 10m}
    guard: audit
`

func TestEveryFieldReachesTheModel(t *testing.T) {
	m, err := Parse("everything.yaml", []byte(everything))
	if err != nil {
		t.Fatal(err)
	}
	want := model.Domain{
		Block: netip.MustParsePrefix("fd00:5::/48"),
		Nodes: []model.Node{
			{Name: "a", Address: netip.MustParseAddr("fd00:1::a"), Locator: netip.MustParsePrefix("fd00:5:0:a00::/56"), CPUs: 4,
				Interfaces: []model.Interface{
					{Name: "eth0.100", Role: model.RoleEdge, Datapath: model.DatapathTC, Unmatched: model.UnmatchedDrop, MTU: 9000},
					{Name: "eth1", Role: model.RoleCore, Datapath: model.DatapathXDP, MTU: 1800},
				}},
			{Name: "b", Address: netip.MustParseAddr("fd00:1::b"), Locator: netip.MustParsePrefix("fd00:5:0:b00::/64"), CPUs: 64,
				Interfaces: []model.Interface{
					{Name: "eth0", Role: model.RoleCore, Datapath: model.DatapathAuto},
					{Name: "eth1", Role: model.RoleEdge, Unmatched: model.UnmatchedRoute, Guard: model.GuardOff},
				}},
		},
		Functions: []model.Function{{Name: "1", Node: "a"}, {Name: "idle", Node: "b"}},
		Chains: []model.Chain{{
			Name:      "all",
			Ingress:   []string{"a"},
			Functions: []string{"1", "1"},
			Waypoints: []model.Waypoint{{Before: 1, SID: netip.MustParseAddr("fd00:5:0:ff00::")}},
			Egress:    "b",
			Match:     model.Match{Source: netip.MustParsePrefix("2001:db8::/32")},
			Proof:     model.Proof{Scheme: model.SchemeOPoT, OnViolation: model.OnViolationReport, Window: 4096, RotateEvery: 10 * time.Minute},
			Guard:     model.GuardAudit,
		}},
	}
	if diff := cmp.Diff(want, m.Domain, equal); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	if m.Lab != nil {
		t.Errorf("a lab out of nothing: %+v", m.Lab)
	}
	wantWarnings := []Problem{{Path: "functions[1].name", Line: 19, Column: 12, Message: `"idle" is in no chain`}}
	if diff := cmp.Diff(wantWarnings, m.Warnings); diff != "" {
		t.Errorf("warnings (-want +got):\n%s", diff)
	}
}

// A problem's place must be where an editor puts the cursor, whatever the line
// ends are and whatever is in front.
func TestPlacesAreThoseOfTheText(t *testing.T) {
	lf := strings.Replace(everything, "functions: [", "# é, \u4e16 and \u03b8\n    functions: [nope-1, ", 1)
	lf = strings.Replace(lf, "{name: idle, node: b", "{\"name\": \"idle\", node: \"nope-2\"", 1)
	lf = strings.Replace(lf, "egress: b", "egress: 'nope-3' # é", 1)
	for name, src := range map[string]string{
		"LF":   lf,
		"CRLF": strings.ReplaceAll(lf, "\n", "\r\n"),
		"BOM":  "\ufeff" + lf,
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Parse("x.yaml", []byte(src))
			e, ok := errors.AsType[*Error](err)
			if !ok {
				t.Fatalf("error %v", err)
			}
			lines := strings.Split(lf, "\n")
			var at []string
			for _, p := range e.Problems {
				rest := string([]rune(lines[p.Line-1])[p.Column-1:])
				at = append(at, strings.TrimLeft(rest, `'"`)[:6])
			}
			if want := []string{"nope-2", "nope-1", "nope-3"}; !slices.Equal(at, want) {
				t.Errorf("problems point at %q; want %q", at, want)
			}
		})
	}
}

func TestLongMessagesAreCutShort(t *testing.T) {
	var b strings.Builder
	b.WriteString("version: 1\ndomain: {block: \"fc00::/48\"}\nnodes:\n")
	for range 100 {
		b.WriteString("  - x\n")
	}
	_, err := Parse("x.yaml", []byte(b.String()))
	e, ok := errors.AsType[*Error](err)
	if !ok || len(e.Problems) != 100 {
		t.Fatalf("error %v; want 100 problems", err)
	}
	if !strings.HasSuffix(err.Error(), "x.yaml: and 60 more problems") {
		t.Error("the message does not say how many problems it leaves out")
	}
}

func TestLargeDomainIsReadInTime(t *testing.T) {
	const chains = 5000
	var b strings.Builder
	b.WriteString(everything[:strings.Index(everything, "chains:")])
	b.WriteString("chains:\n")
	for i := range chains {
		fmt.Fprintf(&b, "  - {name: c%d, ingress: [a], functions: [idle, 1], egress: b, match: {destination: \"2001:db8:%x::/48\"}}\n", i, i)
	}
	src := strings.Replace(b.String(), "fd00:5:0:b00::/64", "fd00:5:0:8000::/49", 1)
	src = strings.Replace(src, "fd00:5:0:a00::/56", "fd00:5:0:4000::/50", 1)
	m, err := Parse("x.yaml", []byte(src))
	if err != nil {
		t.Fatal(err)
	}
	if len(m.Domain.Chains) != chains {
		t.Errorf("%d chains; want %d", len(m.Domain.Chains), chains)
	}
}

// Nothing of these may take long, nor be shown whole.
func TestHostileFilesAreRefusedInAFewLines(t *testing.T) {
	laughs := "version: 1\na0: &a0 [x, x]\n"
	for i := 1; i < 60; i++ {
		laughs += fmt.Sprintf("a%d: &a%d [*a%d, *a%d]\n", i, i, i-1, i-1)
	}
	long := strings.Repeat("x", 3_000_000)
	var typos strings.Builder
	typos.WriteString(everything)
	for i := range 20000 {
		fmt.Fprintf(&typos, "  - {name: c%d, ingress: [nope], functions: [none], egress: nowhere, match: {destination: \"2001:db8::/32\"}}\n", i)
	}
	for name, c := range map[string]struct{ src, want string }{
		"deep":         {"version: 1\nx: " + strings.Repeat("[", 250_000), "x.yaml:2:67: not YAML: nested deeper than 64"},
		"deep by line": {"version: 1\n" + strings.Repeat("a:\n", 250_000), "x.yaml:65:2: not YAML: more than 64 fields in one mapping"},
		"aliases":      {laughs, "is not a field here"},
		"anchor":       {strings.Replace(everything, "egress: b", "egress: &x b", 1), "uses an anchor, an alias or a tag; write the value out"},
		"merged":       {"version: 1\nx: &x {a: b}\n<<: *x\n", "is not a field here"},
		"long name":    {strings.Replace(everything, "name: all", "name: "+long, 1), "…\" has 3000000 bytes; a value has at most 256"},
		"long field":   {strings.Replace(everything, "direction:", long+":", 1), "…\" is not a field here"},
		"long kind":    {strings.Replace(everything, "kind: forward", "kind: "+long, 1), "…\" has 3000000 bytes"},
		"long egress":  {strings.Replace(everything, "egress: b", "egress: "+long, 1), "…\" has 3000000 bytes"},
		"long quotes":  {"version: 1\nx: \"\\q" + long + "\"\n", "not YAML: "},
		"long lines":   {"version: 1\n# " + long + "\nx: 1\n", "is not a field here"},
		"too long":     {strings.Repeat("#", SourceMax+1), "the file has 16777217 bytes; at most 16777216 are read"},
		"typos":        {typos.String(), "is not a function of this file; expect 1 or idle"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Parse("x.yaml", []byte(c.src))
			if err == nil {
				t.Fatal("accepted")
			}
			text := err.Error()
			if !strings.Contains(text, c.want) || len(text) > 60_000 || strings.Contains(text, strings.Repeat("x", 1000)) {
				t.Errorf("%d bytes, want a few, with %q:\n%.2000s", len(text), c.want, text)
			}
			if len(c.src) < SourceMax && !strings.Contains(text, "^") {
				t.Errorf("no caret:\n%.2000s", text)
			}
		})
	}
}

// Signs in text are none, however many.
func TestTextThatLooksNestedIsRead(t *testing.T) {
	hostile := strings.Repeat("[{ - ", 200)
	src := "# " + hostile + "\n---\n" + everything + "# " + hostile + "\n" + `lab:
  links:
    - {between: [a, b]}
  functions:
    - name: dpi
      kind: nftables
      ruleset: |
        # ` + hostile + `
        table inet f {

        }
    - name: fw # [[[[
      kind: nftables
      ruleset: "` + hostile + `"
`
	_, err := Parse("x.yaml", []byte(src))
	e, ok := errors.AsType[*Error](err)
	if !ok {
		t.Fatalf("error %v", err)
	}
	for _, p := range e.Problems { // there are no such functions, but all of it was read
		if strings.Contains(p.Message, "not YAML") {
			t.Error(p)
		}
	}
}

func FuzzParse(f *testing.F) {
	for _, pattern := range []string{"testdata/*.yaml", "../../examples/*.yaml"} {
		files, err := filepath.Glob(pattern)
		if err != nil {
			f.Fatal(err)
		}
		for _, file := range files {
			f.Add(read(f, file))
		}
	}
	f.Add([]byte(everything))
	f.Add([]byte(" \r00")) // a line ends with CR, too
	f.Fuzz(func(t *testing.T, src []byte) {
		m, err := Parse("fuzz.yaml", src)
		if err == nil {
			if m.Domain.Block.Bits() != 48 || len(m.Domain.Nodes) == 0 {
				t.Fatal("accepted without a block or nodes")
			}
			for _, f := range m.Domain.Functions {
				if err := f.Proxy.Check(); f.Kind == model.KindUnaware && err != nil {
					t.Fatalf("accepted, but function %s: %v", f.Name, err)
				}
			}
			return
		}
		e, ok := errors.AsType[*Error](err)
		if !ok {
			t.Fatalf("the error is a %T", err)
		}
		inFile(t, e, src)
		_ = e.Error()
	})
}
