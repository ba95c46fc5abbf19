// Package policy decides requests: which rule of a service is the first to match an
// identity, a host, a method, a path and headers, and which chain it names. It cleans paths,
// so that gateway and origin mean the same by one. It does no I/O and knows no certificates;
// internal/gateway asks it for each request, internal/manifest when it reads a file.
package policy

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/waystamp/waystamp/internal/model"
)

// Request is what rules look at.
type Request struct {
	Identity string // as the clients' kind of identity writes it
	Host     string // lower case, without a port; in mode connect a destination, with its port
	Method   string // "": no request of HTTP, as Path
	Path     string // as Clean gave it
	// Header gives all values of a header. It gives none of one that does not go on, or is there under a second name that some read alike.
	Header func(name string) []string
}

// Rules of a service, in the order in which they are tried.
type Rules []Rule

// Rule is one that has been checked.
type Rule struct {
	who     pattern
	hosts   []string
	methods []string
	path    pattern
	headers []header
	chain   string
}

type header struct{ name, value string }

// Chain is the chain that requests of the rule take.
func (r Rule) Chain() string { return r.chain }

// Compile checks the rules of a service, whose clients' identities are of a kind.
func Compile(s model.Service, kind model.IdentityKind) (Rules, error) {
	rules := Rules{}
	for i, r := range s.Rules {
		more, err := rules.Append(r, s, kind)
		if hidden, ok := errors.AsType[*HiddenError](err); ok {
			return nil, fmt.Errorf("rule %d is never reached: rule %d takes all its requests before; put it in front, or remove it", i+1, hidden.By+1)
		}
		if err != nil {
			return nil, fmt.Errorf("rule %d: %w", i+1, err)
		}
		rules = more
	}
	return rules, nil
}

// HiddenError is that no request reaches a rule: an earlier one takes them all.
type HiddenError struct{ By int } // its index

func (e *HiddenError) Error() string { return fmt.Sprintf("hidden by rule %d", e.By+1) }

// Append checks one rule more of a service, and puts it behind the others; the service's own Rules
// are not looked at. The error is a HiddenError if no request reaches it.
func (rs Rules) Append(r model.ServiceRule, s model.Service, kind model.IdentityKind) (Rules, error) {
	c, err := compile(r, s, kind)
	if err != nil {
		return rs, err
	}
	if j := rs.hiddenBy(c); j >= 0 {
		return rs, &HiddenError{By: j}
	}
	return append(rs, c), nil
}

func compile(r model.ServiceRule, s model.Service, kind model.IdentityKind) (c Rule, err error) {
	if c.who, err = whoPattern(r.Who, kind); err != nil {
		return c, err
	}
	path := r.Path
	if path == "" {
		path = "/**"
	}
	if s.Mode == model.ModeConnect {
		if what := ofRequests(r); what != "" || len(r.Hosts) > 0 {
			return c, fmt.Errorf("%s: a proxy's rules look at what clients ask for; they have who, to and chain alone", cmp.Or(what, "hosts"))
		}
		if len(r.To) == 0 {
			return c, errors.New("to is missing: a rule of a proxy names what clients may ask for, as in [git.example.org:22]")
		}
		for _, name := range r.To {
			if _, ok := s.Destination(name); !ok {
				return c, fmt.Errorf("to: %q is none of the service's destinations", name)
			}
		}
		c.hosts, c.path, c.chain = r.To, pattern{"/", []string{"**"}}, r.Chain
		return c, nil
	}
	if len(r.To) > 0 {
		return c, errors.New("to: is for gateways in mode connect, whose clients name destinations")
	}
	if s.Opaque.On {
		if what := ofRequests(r); what != "" {
			return c, fmt.Errorf("%s: the service's protocol is tls, whose bytes the gateway does not read; rules of it have who, hosts and chain alone", what)
		}
		c.path = pattern{"/", []string{"**"}}
	} else if c.path, err = pathPattern(path); err != nil {
		return c, err
	}
	for _, h := range r.Hosts {
		if !slices.Contains(s.Hosts, h) {
			return c, fmt.Errorf("host %q is not one of the service", h)
		}
	}
	c.hosts = r.Hosts
	for _, m := range r.Methods {
		if err := CheckMethod(m); err != nil {
			return c, err
		}
	}
	c.methods = r.Methods
	for _, h := range r.Headers {
		if !isToken(h.Name) {
			return c, fmt.Errorf("header %q is not a name of a header", h.Name)
		}
		if slices.ContainsFunc(s.Headers.List(), func(name string) bool { return strings.EqualFold(name, h.Name) }) {
			return c, fmt.Errorf("header %q says to the origin who the client is, and comes from the gateway alone; use who", h.Name)
		}
		if hyphened := strings.ReplaceAll(h.Name, "_", "-"); hyphened != h.Name {
			return c, fmt.Errorf("header %q: many read an underscore as a hyphen, and no rule can tell the two apart; name %s", h.Name, hyphened)
		}
		c.headers = append(c.headers, header{h.Name, h.Value})
	}
	c.chain = r.Chain
	return c, nil
}

// ofRequests is the first setting of a rule that looks at requests of HTTP; "": there is none.
func ofRequests(r model.ServiceRule) string {
	switch {
	case len(r.Methods) > 0:
		return "methods"
	case r.Path != "":
		return "path"
	case len(r.Headers) > 0:
		return "headers"
	}
	return ""
}

// CheckMethod holds the rule for methods of rules. CONNECT and TRACE are answered by the
// gateway itself, with a refusal.
func CheckMethod(m string) error {
	switch {
	case !isToken(m) || strings.ToUpper(m) != m:
		return fmt.Errorf("method %q is not one of HTTP, in capital letters", m)
	case m == "CONNECT" || m == "TRACE":
		return fmt.Errorf("method %s is refused for everybody; leave it out", m)
	}
	return nil
}

// Decide finds the first rule that matches, by its index. -1: none does, and the request is refused.
func (rs Rules) Decide(r Request) int {
	return slices.IndexFunc(rs, func(rule Rule) bool { return rule.matches(r) })
}

// Knows reports whether some request of the identity could be let in.
func (rs Rules) Knows(identity string) bool {
	return slices.ContainsFunc(rs, func(rule Rule) bool { return rule.who.matches(identity) })
}

func (rule Rule) matches(r Request) bool { return rule.Misses(r) == "" }

// Misses is the first part of the rule that a request does not match: who, host, method, path or
// "header NAME". "": it matches all.
func (rule Rule) Misses(r Request) string {
	switch {
	case !rule.who.matches(r.Identity):
		return "who"
	case len(rule.hosts) > 0 && !slices.Contains(rule.hosts, r.Host):
		return "host"
	case len(rule.methods) > 0 && !slices.Contains(rule.methods, r.Method):
		return "method"
	case !rule.path.matches(r.Path):
		return "path"
	}
	for _, h := range rule.headers {
		// A header that is there twice means what its reader makes of it.
		if v := r.Header(h.name); len(v) != 1 || v[0] != h.value {
			return "header " + h.name
		}
	}
	return ""
}

// hiddenBy finds a rule that takes every request of r; -1: there is none. It finds one by one,
// not what several take together.
func (rs Rules) hiddenBy(r Rule) int {
	return slices.IndexFunc(rs, func(earlier Rule) bool {
		covers := func(wide, narrow []string) bool {
			return len(wide) == 0 || len(narrow) > 0 && !slices.ContainsFunc(narrow, func(s string) bool { return !slices.Contains(wide, s) })
		}
		return earlier.who.covers(r.who) && earlier.path.covers(r.path) && covers(earlier.hosts, r.hosts) && covers(earlier.methods, r.methods) &&
			!slices.ContainsFunc(earlier.headers, func(h header) bool {
				return !slices.ContainsFunc(r.headers, func(o header) bool { return strings.EqualFold(o.name, h.name) && o.value == h.value })
			})
	})
}

func isToken(s string) bool {
	return s != "" && !strings.ContainsFunc(s, func(c rune) bool {
		return c > '~' || c <= ' ' || strings.ContainsRune(`()<>@,;:\"/[]?={}`, c)
	})
}
