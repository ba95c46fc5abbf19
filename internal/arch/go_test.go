package arch

import (
	"go/ast"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// level orders the packages: one may import only those of a lower level. A
// folder counts for those below it, unless they are listed.
var level = map[string]int{
	"internal/abi":              0,
	"internal/await":            0,
	"internal/model":            0,
	"internal/pcapng":           0,
	"internal/yamlfile":         0,
	"internal/api":              1,
	"internal/event":            1,
	"internal/rpc":              1,
	"internal/pot":              1,
	"internal/seal":             1,
	"internal/srv6":             1,
	"internal/mpls":             1,
	"internal/identity":         2,
	"internal/manifest":         2,
	"internal/plan":             2,
	"internal/dataplane/object": 3,
	"internal/host":             3,
	"internal/planfile":         3,
	"internal/routing":          3,
	"internal/scrape":           3,
	"internal/signer":           3,
	"internal/store":            3,
	"internal/metrics":          1,
	"internal/ipfix":            1,
	"internal/flowrecords":      4,
	"internal/tables":           3,
	"internal/dataplane":        4,
	"internal/netfilter":        4,
	"internal/stream":           4,
	"internal/gateway":          4,
	"internal/gateway/policy":   1,
	"internal/gateway/worker":   5,
	"internal/stream/function":  1,
	"internal/stream/sandbox":   3,
	"internal/agent":            6,
	"internal/controller":       6,
	"internal/doctor":           5,
	"internal/explain":          5,
	"internal/lab":              5,
	"internal/member":           5,
	"internal/attack":           7,
	"internal/demo":             7,
	"internal/bench":            7,
	"internal/bench/meter":      5,
	"internal/command":          7,
	"internal/cli":              8,
	"internal/labcli":           8,
	"cmd":                       9,
	"examples":                  0,
	"tools":                     0,
	"tools/refgen":              9,
	"internal/arch":             10, // tests only
	"test":                      10, // tests only
}

// program is the package that has the commands of each program.
var program = map[string]string{"cmd/waystamp": "internal/cli", "cmd/waystamp-lab": "internal/labcli"}

// onlyTests are packages that nothing but tests may import.
var onlyTests = []string{"internal/tables/xtest", "test"}

// pure are the packages that do no I/O and know nothing of the kernel.
var pure = []string{
	"internal/abi", "internal/api", "internal/event", "internal/explain", "internal/flowrecords", "internal/gateway/policy", "internal/ipfix", "internal/manifest", "internal/metrics", "internal/model", "internal/mpls", "internal/pcapng", "internal/plan",
	"internal/pot", "internal/routing", "internal/srv6", "internal/stream/function", "internal/tables", "internal/yamlfile",
}

// impure is what they therefore do not import.
var impure = []string{
	"net", "net/http", "os", "os/exec", "syscall", "golang.org/x/sys", "github.com/cilium/ebpf",
	"github.com/vishvananda",
}

// home names the only packages that may import something.
var home = map[string][]string{
	"github.com/vishvananda/netlink":   {"internal/host"},
	"github.com/cilium/ebpf":           {"internal/dataplane", "internal/bench/meter", "tools/abigen"},
	"github.com/spf13/cobra":           {"internal/cli", "internal/command", "internal/labcli", "tools/refgen"},
	"go.etcd.io/bbolt":                 {"internal/store"},
	"go.etcd.io/etcd":                  {"internal/store"},
	"go.uber.org/zap":                  {"internal/store"},
	"connectrpc.com/connect":           {"internal/cli", "internal/bench", "internal/controller", "internal/member", "internal/rpc"},
	"google.golang.org/protobuf":       {"internal/controller", "internal/rpc", "tools/protogen"},
	"github.com/bufbuild/protocompile": {"tools/protogen"},
	"github.com/spiffe/go-spiffe":      {"internal/identity"},
	"github.com/goccy/go-yaml":         {"internal/manifest", "internal/pot", "internal/yamlfile"},
	"unsafe":                           {"internal/host", "internal/dataplane", "internal/stream/sandbox"}, // the ethtool ioctl; memory that others write, too; Landlock and seccomp
}

// banned names imports that no code outside tests may have, and what to do.
var banned = map[string]string{
	"math/rand":    "secrets come from crypto/rand, through the io.Reader that a function is given",
	"math/rand/v2": "secrets come from crypto/rand, through the io.Reader that a function is given",
	"C":            "the binary is built without cgo",
	"plugin":       "the binary is built without cgo",
}

func levelOf(dir string) (int, bool) {
	for d := dir; d != "."; d = path.Dir(d) {
		if l, ok := level[d]; ok {
			return l, true
		}
	}
	return 0, false
}

func within(dir string, of []string) bool {
	return slices.ContainsFunc(of, func(o string) bool { return dir == o || strings.HasPrefix(dir, o+"/") })
}

func imports(f goFile) map[string]*ast.ImportSpec {
	m := map[string]*ast.ImportSpec{}
	for _, i := range f.ast.Imports {
		if p, err := strconv.Unquote(i.Path.Value); err == nil {
			m[p] = i
		}
	}
	return m
}

func TestImportsPointDown(t *testing.T) {
	tr := repository(t)
	seen := map[string]bool{}
	for _, f := range tr.gos {
		from, ok := levelOf(f.dir())
		if !ok {
			t.Errorf("%s: package %s has no level; give it one in internal/arch/go_test.go, as ARCHITECTURE.md draws it", f.path, f.dir())
			continue
		}
		for d := f.dir(); d != "."; d = path.Dir(d) {
			seen[d] = true
		}
		if f.test {
			continue
		}
		for p, spec := range imports(f) {
			dir, ours := strings.CutPrefix(p, module+"/")
			if !ours {
				continue
			}
			if to, ok := levelOf(dir); ok && to >= from && !strings.HasPrefix(f.dir(), dir+"/") {
				t.Errorf("%s: %s (level %d) imports %s (level %d); imports point down: move what both need below them, or hand it in as an interface", tr.at(spec), f.dir(), from, dir, to)
			}
			if within(dir, onlyTests) {
				t.Errorf("%s: %s is for tests only; take the import out", tr.at(spec), dir)
			}
			if has, ok := program[f.dir()]; ok && dir != has && dir != "internal/command" {
				t.Errorf("%s: %s only ties the process to %s; move what it needs there", tr.at(spec), f.dir(), has)
			}
		}
	}
	for d := range level {
		if !seen[d] {
			t.Errorf("internal/arch gives a level to %s, where no Go file is; take it out", d)
		}
	}
}

func TestEachDependencyHasItsHome(t *testing.T) {
	tr := repository(t)
	used := map[string]bool{}
	for _, f := range tr.gos {
		for p, spec := range imports(f) {
			for dep, homes := range home {
				if p != dep && !strings.HasPrefix(p, dep+"/") {
					continue
				}
				if within(f.dir(), homes) {
					used[dep] = true
				} else if !f.test && !f.generated && !within(f.dir(), onlyTests) {
					t.Errorf("%s: only %s may import %s; call it instead", tr.at(spec), strings.Join(homes, ", "), dep)
				}
			}
		}
	}
	for dep := range home {
		if !used[dep] {
			t.Errorf("internal/arch gives %s a home, yet nothing imports it; take it out", dep)
		}
	}
}

func TestPurePackagesDoNoInputOrOutput(t *testing.T) {
	tr := repository(t)
	for _, f := range tr.gos {
		if f.test || !within(f.dir(), pure) {
			continue
		}
		for p, spec := range imports(f) {
			for _, dep := range impure {
				if p == dep || strings.Contains(dep, ".") && strings.HasPrefix(p, dep+"/") {
					t.Errorf("%s: %s is pure and does not import %s; let its caller do that and pass the result", tr.at(spec), f.dir(), p)
				}
			}
		}
	}
}

func TestBannedImports(t *testing.T) {
	tr := repository(t)
	for _, f := range tr.gos {
		if f.test || f.generated {
			continue
		}
		for p, spec := range imports(f) {
			if why, ok := banned[p]; ok {
				t.Errorf("%s: import of %s: %s", tr.at(spec), p, why)
			}
			if spec.Name != nil && (spec.Name.Name == "_" || spec.Name.Name == ".") && !mayEmbed(f) {
				t.Errorf("%s: import %s %q works behind the reader's back; import by name and call what you need", tr.at(spec), spec.Name.Name, p)
			}
		}
	}
}

// selectors walks a file and gives every selector of an imported package, as
// "path.Name".
func selectors(f goFile, visit func(name string, n ast.Node)) {
	byName := map[string]string{}
	for p, spec := range imports(f) {
		name := path.Base(p)
		if spec.Name != nil {
			name = spec.Name.Name
		}
		byName[name] = p
	}
	ast.Inspect(f.ast, func(n ast.Node) bool {
		if s, ok := n.(*ast.SelectorExpr); ok {
			// An identifier that resolves to something in this file is no package.
			if x, ok := s.X.(*ast.Ident); ok && x.Obj == nil && byName[x.Name] != "" {
				visit(byName[x.Name]+"."+s.Sel.Name, n)
			}
		}
		return true
	})
}

// restricted names what only some packages may use, and the remedy.
var restricted = map[string]struct {
	in   []string
	why  string
	test bool // holds for tests too
}{
	"runtime.LockOSThread":             {[]string{"internal/host", "internal/stream"}, "work in a namespace goes through internal/host; only event loops have threads", true},
	"runtime.UnlockOSThread":           {[]string{"internal/host", "internal/stream"}, "work in a namespace goes through internal/host; only event loops have threads", true},
	"golang.org/x/sys/unix.AF_NETLINK": {[]string{"internal/host"}, "only internal/host talks netlink; ask it", false},
	"net.IP":                           {[]string{"internal/host"}, "use netip.Addr; only the netlink edge converts", false},
	"net.IPNet":                        {[]string{"internal/host"}, "use netip.Prefix; only the netlink edge converts", false},
	"net.IPMask":                       {[]string{"internal/host"}, "use netip.Prefix; only the netlink edge converts", false},
	"net.ParseIP":                      {nil, "use netip.ParseAddr", false},
	"net.ParseCIDR":                    {nil, "use netip.ParsePrefix", false},
	"log.Print":                        {nil, "take a *slog.Logger from the caller", false},
	"log.Printf":                       {nil, "take a *slog.Logger from the caller", false},
	"log.Println":                      {nil, "take a *slog.Logger from the caller", false},
	"log.Fatal":                        {nil, "return an error", false},
	"log.Fatalf":                       {nil, "return an error", false},
	"log.Default":                      {nil, "take a *slog.Logger from the caller", false},
	"log/slog.Default":                 {nil, "take a *slog.Logger from the caller", false},
	"log/slog.SetDefault":              {nil, "hand the logger to who needs it", true},
	"log/slog.Debug":                   {nil, "take a *slog.Logger from the caller", false},
	"log/slog.Info":                    {nil, "take a *slog.Logger from the caller", false},
	"log/slog.Warn":                    {nil, "take a *slog.Logger from the caller", false},
	"log/slog.Error":                   {nil, "take a *slog.Logger from the caller", false},
	"os.Exit":                          {[]string{"cmd", "tools"}, "return an error; the main packages alone end the process", false},
}

func TestRestrictedCalls(t *testing.T) {
	tr := repository(t)
	for _, f := range tr.gos {
		if f.generated {
			continue
		}
		selectors(f, func(name string, n ast.Node) {
			r, ok := restricted[name]
			if ok && (r.test || !f.test && !within(f.dir(), onlyTests)) && !within(f.dir(), r.in) {
				t.Errorf("%s: %s: %s", tr.at(n), name, r.why)
			}
		})
	}
}

// mayEmbed: files go into the binary as generated code does it, from examples/,
// and into tests.
func mayEmbed(f goFile) bool {
	return f.test || f.generated || f.dir() == "examples" || within(f.dir(), onlyTests)
}

func TestNoInitFunctions(t *testing.T) {
	tr := repository(t)
	for _, f := range tr.gos {
		if f.generated {
			continue
		}
		for _, d := range f.ast.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok && fn.Recv == nil && fn.Name.Name == "init" {
				t.Errorf("%s: no init functions outside generated code; do it where it is needed, or in a constructor", tr.at(fn))
			}
		}
		for _, g := range f.ast.Comments {
			for _, c := range g.List {
				if mayEmbed(f) {
					continue
				}
				for _, directive := range []string{"//go:linkname", "//go:embed", "//go:noescape"} {
					if strings.HasPrefix(c.Text, directive) {
						t.Errorf("%s: no %s outside generated code", tr.at(c), directive)
					}
				}
			}
		}
	}
}

func TestEveryPackageSaysWhatItIs(t *testing.T) {
	tr := repository(t)
	docs := map[string][]string{} // by folder
	for _, f := range tr.gos {
		if f.test {
			continue
		}
		docs[f.dir()] = append(docs[f.dir()], "")
		if f.ast.Doc == nil {
			continue
		}
		text := f.ast.Doc.Text()
		docs[f.dir()][len(docs[f.dir()])-1] = text
		want := "Package " + f.ast.Name.Name + " "
		if f.ast.Name.Name == "main" {
			want = "Command " + path.Base(f.dir()) + " "
		}
		if !f.generated && !strings.HasPrefix(text, want) {
			t.Errorf("%s: the package comment starts %.30q; want %q", f.path, text, want)
		}
	}
	for _, dir := range slices.Sorted(maps.Keys(docs)) {
		n := 0
		for _, text := range docs[dir] {
			if text != "" {
				n++
			}
			if text != "" && len(strings.Fields(text)) < 15 {
				t.Errorf("%s: the package comment is short; say what the package is, what not, and who calls it", dir)
			}
		}
		if n != 1 {
			t.Errorf("%s: %d files have a package comment; want exactly one", dir, n)
		}
	}
}
