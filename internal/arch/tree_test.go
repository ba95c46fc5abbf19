package arch

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"unicode/utf8"
)

const module = "github.com/waystamp/waystamp"

// tree is the repository as the tests see it. Paths are relative to its top and
// have slashes.
type tree struct {
	top   string
	fset  *token.FileSet
	files []string
	gos   []goFile
}

type goFile struct {
	path      string
	test      bool
	generated bool
	ast       *ast.File
}

// dir is the folder of the file; in this module that is the package's path too.
func (f goFile) dir() string { return path.Dir(f.path) }

var load = sync.OnceValues(func() (*tree, error) {
	top, err := filepath.Abs("../..")
	if err != nil {
		return nil, err
	}
	t := &tree{top: top, fset: token.NewFileSet()}
	err = filepath.WalkDir(top, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(top, p)
		if err != nil {
			return err
		}
		rel = filepath.ToSlash(rel)
		if d.IsDir() {
			// What git does not hold: itself, what make built, fuzz finds, editors' folders.
			if slices.Contains([]string{".git", "bin", "dist", ".idea", ".vscode"}, rel) {
				return filepath.SkipDir
			}
			return nil
		}
		if d.Type().IsRegular() && rel != ".git" { // a file in a work tree of its own
			t.files = append(t.files, rel)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	for _, p := range t.files {
		if path.Ext(p) != ".go" || strings.Contains(p, "/testdata/") {
			continue
		}
		f, err := parser.ParseFile(t.fset, filepath.Join(top, p), nil, parser.ParseComments)
		if err != nil {
			return nil, err
		}
		t.gos = append(t.gos, goFile{path: p, test: strings.HasSuffix(p, "_test.go"), generated: ast.IsGenerated(f), ast: f})
	}
	return t, nil
})

func repository(t *testing.T) *tree {
	t.Helper()
	tr, err := load()
	if err != nil {
		t.Fatalf("read the repository: %v", err)
	}
	if len(tr.gos) < 10 || !slices.Contains(tr.files, "go.mod") {
		t.Fatalf("found %d Go files under %s; is this the repository?", len(tr.gos), tr.top)
	}
	return tr
}

func (tr *tree) read(t *testing.T, p string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(tr.top, p))
	if err != nil {
		t.Fatalf("read %s: %v", p, err)
	}
	return string(b)
}

// text gives all files that people read, with their text.
func (tr *tree) text(t *testing.T) map[string]string {
	t.Helper()
	m := map[string]string{}
	for _, p := range tr.files {
		if s := tr.read(t, p); utf8.ValidString(s) && !strings.ContainsRune(s, 0) {
			m[p] = s
		}
	}
	return m
}

func (tr *tree) at(n ast.Node) string {
	pos := tr.fset.Position(n.Pos())
	rel, err := filepath.Rel(tr.top, pos.Filename)
	if err != nil {
		rel = pos.Filename
	}
	pos.Filename = filepath.ToSlash(rel)
	return pos.String()
}

// lineOf turns an offset into a line number.
func lineOf(s string, offset int) int { return 1 + strings.Count(s[:offset], "\n") }
