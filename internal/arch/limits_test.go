package arch

import (
	"go/ast"
	"go/constant"
	"go/parser"
	"go/token"
	"strings"
	"testing"
	"time"
)

// emulated are the packages outside of tests whose deadlines an emulated machine must be able to meet.
var emulated = []string{"internal/attack", "internal/demo", "internal/lab", "test"}

// limitLeast: a wait that is not longer is a pause between two looks, or meant to end.
const limitLeast = time.Second

// TestLimitsGrowWithPatience: a test's deadline that is a number fits the machine of whoever wrote it.
// internal/await multiplies it by WAYSTAMP_PATIENCE, which test/kernels sets for its guests.
func TestLimitsGrowWithPatience(t *testing.T) {
	tr := repository(t)
	byDir := map[string][]goFile{}
	for _, f := range tr.gos {
		if f.test || within(f.dir(), emulated) {
			byDir[f.dir()] = append(byDir[f.dir()], f)
		}
	}
	for _, files := range byDir {
		for _, n := range nakedLimits(files) {
			t.Errorf("%s: the limit is a number; give it to await.Limit, which multiplies it on slow machines", tr.at(n))
		}
	}
}

func TestNakedLimitsAreFound(t *testing.T) {
	const head = "package p\nimport (\n\"context\"\n\"net\"\n\"net/http\"\n\"time\"\n)\nconst wait = time.Minute\nvar scaled = await.Limit(wait)\n"
	for body, want := range map[string]int{
		`context.WithTimeout(ctx, 2*time.Minute)`:                                              1,
		`context.WithTimeoutCause(ctx, wait, err)`:                                             1,
		`context.WithTimeout(ctx, await.Limit(2*time.Minute))`:                                 0,
		`context.WithTimeout(ctx, scaled)`:                                                     0,
		`context.WithTimeout(ctx, 50*time.Millisecond)`:                                        0,
		`<-time.After(10 * time.Second)`:                                                       1,
		`<-time.After(10 * time.Millisecond)`:                                                  0,
		`time.AfterFunc(wait, f)`:                                                              1,
		`net.DialTimeout("tcp", a, time.Minute)`:                                               1,
		`c.SetDeadline(time.Now().Add(time.Minute))`:                                           1,
		`c.SetReadDeadline(time.Now().Add(scaled))`:                                            0,
		`(&net.Dialer{Timeout: wait}).Dial("tcp", a)`:                                          1,
		`_ = http.Client{Timeout: 2 * wait}`:                                                   1,
		`for end := time.Now().Add(wait); time.Now().Before(end); {}`:                          1,
		`end := time.Now().Add(wait); for { if time.Now().After(end) { break } }`:              1,
		`end := time.Now().Add(await.Limit(wait)); for { if time.Now().After(end) { break } }`: 0,
		`cert.NotAfter = time.Now().Add(time.Hour)`:                                            0,
		`began := time.Now().Add(-time.Hour); _ = e.Before(began)`:                             0,
		`const short = 2*time.Second; context.WithTimeout(ctx, short)`:                         1,
	} {
		f, err := parser.ParseFile(token.NewFileSet(), "p_test.go", head+"func f() {\n"+body+"\n}\n", 0)
		if err != nil {
			t.Fatalf("%s: %v", body, err)
		}
		if got := nakedLimits([]goFile{{path: "p/p_test.go", test: true, ast: f}}); len(got) != want {
			t.Errorf("%s: found %d, want %d", body, len(got), want)
		}
	}
}

// limitArguments are the functions that wait, and which of their arguments says how long.
var limitArguments = map[string]int{
	"context.WithTimeout": 1, "context.WithTimeoutCause": 1, "time.After": 0, "time.NewTimer": 0, "time.AfterFunc": 0, "net.DialTimeout": 2,
}

// limitFields are fields that do so, of which any type may have the name.
var limitFields = []string{"net.Dialer", "net/http.Client", module + "/internal/lab.PingConfig"}

// nakedLimits are the limits in files of one package that are numbers.
func nakedLimits(files []goFile) (naked []ast.Node) {
	known := map[string]time.Duration{}
	for _, f := range files {
		ast.Inspect(f.ast, func(n ast.Node) bool {
			if d, ok := n.(*ast.GenDecl); ok && d.Tok == token.CONST {
				for _, s := range d.Specs {
					v := s.(*ast.ValueSpec)
					for i, name := range v.Names {
						if i < len(v.Values) {
							if value, ok := duration(v.Values[i], known); ok {
								known[name.Name] = value
							}
						}
					}
				}
			}
			return true
		})
	}
	add := func(e ast.Expr) {
		if d, ok := duration(e, known); ok && d > limitLeast {
			naked = append(naked, e)
		}
	}
	for _, f := range files {
		calls := map[ast.Node]string{}
		selectors(f, func(name string, n ast.Node) { calls[n] = name })
		// fromNow is what a call of time.Now().Add is given; nil: e is none.
		fromNow := func(e ast.Expr) ast.Expr {
			c, ok := e.(*ast.CallExpr)
			if !ok || len(c.Args) != 1 {
				return nil
			}
			s, ok := c.Fun.(*ast.SelectorExpr)
			if !ok || s.Sel.Name != "Add" {
				return nil
			}
			if now, ok := s.X.(*ast.CallExpr); !ok || calls[now.Fun] != "time.Now" {
				return nil
			}
			return c.Args[0]
		}
		for _, d := range f.ast.Decls {
			fn, ok := d.(*ast.FuncDecl)
			if !ok {
				continue
			}
			compared := comparedWithNow(fn, calls)
			ast.Inspect(fn, func(n ast.Node) bool {
				switch n := n.(type) {
				case *ast.CallExpr:
					if i, ok := limitArguments[calls[n.Fun]]; ok && i < len(n.Args) {
						add(n.Args[i])
					}
					if s, ok := n.Fun.(*ast.SelectorExpr); ok && strings.HasPrefix(s.Sel.Name, "Set") && strings.HasSuffix(s.Sel.Name, "Deadline") && len(n.Args) == 1 {
						if by := fromNow(n.Args[0]); by != nil {
							add(by)
						}
					}
				case *ast.AssignStmt:
					for i, l := range n.Lhs {
						if name, ok := l.(*ast.Ident); ok && i < len(n.Rhs) && compared[name.Name] {
							if by := fromNow(n.Rhs[i]); by != nil {
								add(by)
							}
						}
					}
				case *ast.CompositeLit:
					for _, of := range limitFields {
						if n.Type == nil || calls[n.Type] != of {
							continue
						}
						for _, e := range n.Elts {
							if kv, ok := e.(*ast.KeyValueExpr); ok {
								if key, ok := kv.Key.(*ast.Ident); ok && key.Name == "Timeout" {
									add(kv.Value)
								}
							}
						}
					}
				}
				return true
			})
		}
	}
	return naked
}

// comparedWithNow are the variables of a function that it compares with the time: its deadlines.
func comparedWithNow(fn *ast.FuncDecl, calls map[ast.Node]string) map[string]bool {
	compared := map[string]bool{}
	ast.Inspect(fn, func(n ast.Node) bool {
		c, ok := n.(*ast.CallExpr)
		if !ok || len(c.Args) != 1 {
			return true
		}
		s, ok := c.Fun.(*ast.SelectorExpr)
		if !ok || s.Sel.Name != "Before" && s.Sel.Name != "After" {
			return true
		}
		if now, ok := s.X.(*ast.CallExpr); !ok || calls[now.Fun] != "time.Now" {
			return true
		}
		if name, ok := c.Args[0].(*ast.Ident); ok {
			compared[name.Name] = true
		}
		return true
	})
	return compared
}

var units = map[string]time.Duration{
	"Nanosecond": time.Nanosecond, "Microsecond": time.Microsecond, "Millisecond": time.Millisecond,
	"Second": time.Second, "Minute": time.Minute, "Hour": time.Hour,
}

// duration is what an expression of numbers, units and known constants comes to.
func duration(e ast.Expr, known map[string]time.Duration) (time.Duration, bool) {
	switch e := e.(type) {
	case *ast.ParenExpr:
		return duration(e.X, known)
	case *ast.BasicLit:
		n, exact := constant.Int64Val(constant.ToInt(constant.MakeFromLiteral(e.Value, e.Kind, 0)))
		return time.Duration(n), exact
	case *ast.Ident:
		d, ok := known[e.Name]
		return d, ok
	case *ast.SelectorExpr:
		x, ok := e.X.(*ast.Ident)
		return units[e.Sel.Name], ok && x.Name == "time" && units[e.Sel.Name] != 0
	case *ast.BinaryExpr:
		x, ok1 := duration(e.X, known)
		y, ok2 := duration(e.Y, known)
		if !ok1 || !ok2 {
			return 0, false
		}
		switch e.Op {
		case token.MUL:
			return x * y, true
		case token.ADD:
			return x + y, true
		case token.SUB:
			return x - y, true
		case token.QUO:
			return x / max(y, 1), true
		}
	}
	return 0, false
}
