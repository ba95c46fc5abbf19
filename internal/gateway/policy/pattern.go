package policy

import (
	"fmt"
	"slices"
	"strings"

	"github.com/waystamp/waystamp/internal/model"
)

// pattern is a list of segments between separators. "*" stands for one that is not empty,
// "**" at the end for one or more, also for one that is empty.
type pattern struct {
	separator string
	segments  []string
}

func (p pattern) matches(s string) bool {
	i := 0
	for rest, more := s, true; ; i++ {
		switch {
		case i == len(p.segments):
			return !more
		case !more:
			return false
		case p.segments[i] == "**":
			return true
		}
		var segment string
		segment, rest, more = strings.Cut(rest, p.separator)
		if p.segments[i] == "*" && segment != "" || p.segments[i] == segment {
			continue
		}
		return false
	}
}

// covers reports whether p matches all that o matches.
func (p pattern) covers(o pattern) bool {
	if p.separator != o.separator {
		return len(p.segments) == 1 && p.segments[0] == "**"
	}
	for i, s := range p.segments {
		switch {
		case i >= len(o.segments):
			return false
		case s == "**":
			return true
		case o.segments[i] == "**":
			return false
		case s == "*" && o.segments[i] != "", s == o.segments[i]:
		default:
			return false
		}
	}
	return len(p.segments) == len(o.segments)
}

// split makes a pattern. Stars are segments of their own.
func split(s, separator string) (pattern, error) {
	p := pattern{separator, strings.Split(s, separator)}
	for i, segment := range p.segments {
		switch {
		case segment == "**" && i == len(p.segments)-1, segment == "*":
		case segment == "**":
			return p, fmt.Errorf("%q: ** stands at the end alone", s)
		case strings.Contains(segment, "*"):
			return p, fmt.Errorf("%q: a star stands for whole segments, as in a/*/c or a/**", s)
		}
	}
	return p, nil
}

// whoPattern reads who a rule is for. It is ** for everybody, or
//
//	spiffe, uri: spiffe://staff.example/ops/*, segments between slashes
//	email:       *@example.org, or an address
//	dns:         *.example.org, for one label, or a name
func whoPattern(s string, kind model.IdentityKind) (pattern, error) {
	if s == "**" {
		return pattern{"/", []string{"**"}}, nil
	}
	wrong := func(example string) error {
		return fmt.Errorf("who %q is not an identity of kind %s; expect one such as %s", s, kind, example)
	}
	switch kind {
	case model.IdentitySPIFFE:
		domain, _, _ := strings.Cut(strings.TrimPrefix(s, "spiffe://"), "/")
		if !strings.HasPrefix(s, "spiffe://") || domain == "" || strings.Contains(domain, "*") {
			return pattern{}, wrong("spiffe://staff.example/ops/* or spiffe://staff.example/**")
		}
		return split(s, "/")
	case model.IdentityURI:
		if !strings.Contains(s, ":") {
			return pattern{}, wrong("https://id.example.org/users/*")
		}
		return split(s, "/")
	case model.IdentityEmail:
		local, domain, ok := strings.Cut(s, "@")
		if !ok || local == "" || domain == "" || strings.Contains(domain, "*") || domain != strings.ToLower(domain) {
			return pattern{}, wrong("*@example.org, its domain in small letters")
		}
		return split(s, "@")
	case model.IdentityDNS:
		p, err := split(s, ".")
		if err != nil || s != strings.ToLower(s) || slices.Contains(p.segments, "**") || slices.Contains(p.segments, "") || slices.Contains(p.segments[1:], "*") {
			return pattern{}, wrong("host.example.org or *.example.org, in small letters")
		}
		return p, nil
	}
	return pattern{}, fmt.Errorf("identities of kind %q are not known here", kind)
}

func pathPattern(s string) (pattern, error) {
	clean, err := Clean(strings.ReplaceAll(s, "*", "x"))
	if err != nil {
		return pattern{}, fmt.Errorf("path %q: %w", s, err)
	}
	if clean != strings.ReplaceAll(s, "*", "x") {
		return pattern{}, fmt.Errorf("path %q is not as requests have it once they are decoded: write it without dot segments and percent signs", s)
	}
	return split(s, "/")
}
