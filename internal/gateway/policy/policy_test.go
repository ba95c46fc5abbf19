package policy

import (
	"net/http"
	"net/url"
	"strings"
	"testing"

	"github.com/waystamp/waystamp/internal/model"
)

func TestPathsAreCleanedOrRefused(t *testing.T) {
	for raw, want := range map[string]string{
		"/": "/", "/a": "/a", "/a/": "/a/", "/a/b/../c": "/a/c", "/a/./b": "/a/b", "/a/..": "/", "/a/.": "/a/", "/%61": "/a", "/a%20b": "/a b",
		"/a/%2e%2e/b": "/b", "/...": "/...", "/.a": "/.a", "/%E4%BD%A0": "/\u4f60", "/100%25": "/100%", "/%25zz": "/%zz",
	} {
		if got, err := Clean(raw); err != nil || got != want {
			t.Errorf("Clean(%q) is %q, %v; want %q", raw, got, err, want)
		}
	}
	for _, raw := range []string{
		"", "a", "*", "/..", "/a/../..", "/%2f", "/a%2Fb", "/a%5cb", `/a\b`, "/%00", "/a%0ab", "/a%7f", "/%ff", "/%zz", "/%", "/a//b", "//", "/%252e", "/%252f", "/..;/a", "/.;a=b/c",
		"/%2e%2e;/a", "/a;x=1", "/a;/b", "/a%3bx", "/a%3Bx/b", "/a;", "/" + strings.Repeat("a", pathMax),
	} {
		if got, err := Clean(raw); err == nil {
			t.Errorf("Clean(%q) is %q; want a refusal", raw, got)
		}
	}
}

func FuzzACleanPathIsCleanedOnce(f *testing.F) {
	for _, s := range []string{"/", "/a/../b", "/%2e%2e/a", "/a;b/..;/c", "/a%3b", "/%25%32%65"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, raw string) {
		clean, err := Clean(raw)
		if err != nil {
			return
		}
		if again, err := Clean((&url.URL{Path: clean}).EscapedPath()); err != nil || again != clean {
			t.Fatalf("%q becomes %q, and that becomes %q, %v", raw, clean, again, err)
		}
		for _, s := range strings.Split(clean[1:], "/") {
			if s == "." || s == ".." || strings.ContainsAny(s, "\\\x00") {
				t.Fatalf("%q becomes %q", raw, clean)
			}
		}
	})
}

func TestPatternsMatchWholeSegments(t *testing.T) {
	for _, test := range []struct {
		kind    model.IdentityKind
		pattern string
		yes, no []string
	}{
		{model.IdentitySPIFFE, "spiffe://s.example/ops/*", []string{"spiffe://s.example/ops/a"},
			[]string{"spiffe://s.example/ops", "spiffe://s.example/ops/", "spiffe://s.example/ops/a/b", "spiffe://s.example/opsx/a", "spiffe://s.example.org/ops/a"}},
		{model.IdentitySPIFFE, "spiffe://s.example/**", []string{"spiffe://s.example/a", "spiffe://s.example/a/b"}, []string{"spiffe://s.example", "spiffe://s.example.org/a"}},
		{model.IdentityEmail, "*@example.org", []string{"a@example.org"}, []string{"a@b.example.org", "a@b@example.org", "@example.org", "a@example.orgs"}},
		{model.IdentityDNS, "*.example.org", []string{"a.example.org"}, []string{"example.org", "a.b.example.org", "a.example.org.x"}},
		{model.IdentityURI, "https://id.example.org/u/*", []string{"https://id.example.org/u/1"}, []string{"https://id.example.org/u/1/2", "http://id.example.org/u/1"}},
		{model.IdentityDNS, "**", []string{"a.example.org", "x"}, nil},
	} {
		p, err := whoPattern(test.pattern, test.kind)
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range test.yes {
			if !p.matches(s) {
				t.Errorf("%s does not match %s", test.pattern, s)
			}
		}
		for _, s := range test.no {
			if p.matches(s) {
				t.Errorf("%s matches %s", test.pattern, s)
			}
		}
	}
}

func TestTheFirstRuleThatMatchesDecides(t *testing.T) {
	rules, err := Compile(model.Service{Hosts: []string{"a.example.org", "b.example.org"}, Rules: []model.ServiceRule{
		{Who: "*@example.org", Methods: []string{"GET"}, Path: "/status", Chain: "light"},
		{Who: "root@example.org", Hosts: []string{"a.example.org"}, Headers: []model.ServiceHeader{{Name: "X-Env", Value: "test"}}, Chain: "test"},
		{Who: "root@example.org", Path: "/admin/*/log", Chain: "deep"},
	}}, model.IdentityEmail)
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		who, host, method, path string
		env                     []string
		want                    int
	}{
		{"x@example.org", "a.example.org", "GET", "/status", nil, 0},
		{"root@example.org", "a.example.org", "GET", "/status", []string{"test"}, 0},
		{"root@example.org", "a.example.org", "POST", "/status", []string{"test"}, 1},
		{"root@example.org", "b.example.org", "POST", "/status", []string{"test"}, -1},
		{"root@example.org", "a.example.org", "POST", "/status", []string{"test", "test"}, -1},
		{"root@example.org", "a.example.org", "POST", "/status", []string{"prod"}, -1},
		{"root@example.org", "a.example.org", "PUT", "/admin/x/log", nil, 2},
		{"root@example.org", "a.example.org", "PUT", "/admin//log", nil, -1},
		{"x@example.org", "a.example.org", "GET", "/", nil, -1},
	} {
		h := http.Header{"X-Env": test.env}
		if got := rules.Decide(Request{test.who, test.host, test.method, test.path, h.Values}); got != test.want {
			t.Errorf("%v is decided by rule %d; want %d", test, got, test.want)
		}
	}
	if !rules.Knows("x@example.org") || rules.Knows("x@example.net") {
		t.Error("the rules know other identities than they are for")
	}
}

func TestRulesThatMeanNothingAreRefused(t *testing.T) {
	rule := func(change func(*model.ServiceRule)) model.ServiceRule {
		r := model.ServiceRule{Who: "spiffe://s.example/a", Chain: "c"}
		change(&r)
		return r
	}
	for says, list := range map[string][]model.ServiceRule{
		"not an identity of kind spiffe":  {rule(func(r *model.ServiceRule) { r.Who = "a@example.org" })},
		"** stands at the end alone":      {rule(func(r *model.ServiceRule) { r.Who = "spiffe://s.example/**/a" })},
		"whole segments":                  {rule(func(r *model.ServiceRule) { r.Path = "/a*" })},
		"is not as requests have it":      {rule(func(r *model.ServiceRule) { r.Path = "/a/../b" })},
		"does not begin with a slash":     {rule(func(r *model.ServiceRule) { r.Path = "a" })},
		"in capital letters":              {rule(func(r *model.ServiceRule) { r.Methods = []string{"get"} })},
		"refused for everybody":           {rule(func(r *model.ServiceRule) { r.Methods = []string{"TRACE"} })},
		"not one of the service":          {rule(func(r *model.ServiceRule) { r.Hosts = []string{"x.example.org"} })},
		"tell the two apart":              {rule(func(r *model.ServiceRule) { r.Headers = []model.ServiceHeader{{Name: "X_Env"}} })},
		"comes from the gateway alone":    {rule(func(r *model.ServiceRule) { r.Headers = []model.ServiceHeader{{Name: "x-caller"}} })},
		"path parameters":                 {rule(func(r *model.ServiceRule) { r.Path = "/a;b" })},
		"not a name of a header":          {rule(func(r *model.ServiceRule) { r.Headers = []model.ServiceHeader{{Name: "a b"}} })},
		"rule 2 is never reached: rule 1": {rule(func(r *model.ServiceRule) { r.Who = "spiffe://s.example/*" }), rule(func(r *model.ServiceRule) { r.Path = "/x" })},
	} {
		if _, err := Compile(model.Service{Hosts: []string{"a.example.org"}, Rules: list, Headers: model.ClientHeaders{Identity: "X-Caller"}}, model.IdentitySPIFFE); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%v; want %q", err, says)
		}
	}
}

// A rule that is said to hide another one takes each request that the other takes, by trial.
func TestAHiddenRuleIsNeverReached(t *testing.T) {
	whos := []string{"spiffe://s.example/a", "spiffe://s.example/*", "spiffe://s.example/**", "spiffe://s.example/*/b", "**"}
	paths := []string{"/", "/a", "/*", "/**", "/a/**", "/a/*", "/*/b"}
	methods := [][]string{nil, {"GET"}, {"GET", "PUT"}}
	var all []Rule
	for _, w := range whos {
		for _, p := range paths {
			for _, m := range methods {
				r, err := compile(model.ServiceRule{Who: w, Path: p, Methods: m}, model.Service{}, model.IdentitySPIFFE)
				if err != nil {
					t.Fatal(err)
				}
				all = append(all, r)
			}
		}
	}
	var requests []Request
	for _, w := range []string{"spiffe://s.example/a", "spiffe://s.example/x", "spiffe://s.example/a/b", "spiffe://s.example/a/c", "spiffe://t.example/a"} {
		for _, p := range []string{"/", "/a", "/x", "/a/", "/a/b", "/x/b", "/a/b/c"} {
			for _, m := range []string{"GET", "PUT", "POST"} {
				requests = append(requests, Request{Identity: w, Path: p, Method: m})
			}
		}
	}
	hidden := 0
	for _, a := range all {
		for _, b := range all {
			only := true // b takes nothing that a does not
			for _, r := range requests {
				only = only && (!b.matches(r) || a.matches(r))
			}
			said := Rules{a}.hiddenBy(b) == 0
			if said {
				hidden++
			}
			if said && !only {
				t.Fatalf("%v is said to hide %v, and does not", a, b)
			}
		}
	}
	if hidden < len(all) {
		t.Errorf("%d of %d pairs are hidden; each hides itself at least", hidden, len(all)*len(all))
	}
}

// A rule of a service whose bytes are not read looks at who and host alone, and takes all else.
func TestRulesOfOpaqueServicesLookAtNoRequests(t *testing.T) {
	s := model.Service{Hosts: []string{"db.example.org", "other.example.org"}, Opaque: model.Opaque{On: true}}
	for what, r := range map[string]model.ServiceRule{
		"methods": {Methods: []string{"GET"}},
		"path":    {Path: "/**"},
		"headers": {Headers: []model.ServiceHeader{{Name: "X-Env", Value: "a"}}},
	} {
		r.Who, r.Chain = "**", "light"
		s.Rules = []model.ServiceRule{r}
		if _, err := Compile(s, model.IdentitySPIFFE); err == nil || !strings.Contains(err.Error(), "rule 1: "+what+": ") {
			t.Errorf("a rule with %s is refused with %v", what, err)
		}
	}
	s.Rules = []model.ServiceRule{
		{Who: "spiffe://staff.example/ops/*", Hosts: []string{"db.example.org"}, Chain: "light"},
		{Who: "spiffe://staff.example/ops/*", Chain: "deep"},
	}
	rules, err := Compile(s, model.IdentitySPIFFE)
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		who, host string
		want      int
	}{
		{"spiffe://staff.example/ops/a", "db.example.org", 0},
		{"spiffe://staff.example/ops/a", "other.example.org", 1},
		{"spiffe://staff.example/eng/a", "db.example.org", -1},
	} {
		if got := rules.Decide(Request{Identity: test.who, Host: test.host}); got != test.want {
			t.Errorf("%s to %s is decided by rule %d; want %d", test.who, test.host, got, test.want)
		}
	}
	s.Rules[0].Hosts = nil
	if _, err := Compile(s, model.IdentitySPIFFE); err == nil || !strings.Contains(err.Error(), "never reached") {
		t.Errorf("a rule behind one that takes all is refused with %v", err)
	}
}
