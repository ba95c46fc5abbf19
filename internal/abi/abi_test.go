package abi

import (
	"encoding"
	"regexp"
	"strings"
	"testing"
)

type enum interface {
	String() string
	encoding.TextMarshaler
}

// Each enum, as value and as what UnmarshalText fills.
var enums = map[string]struct {
	names []string
	value func(uint8) enum
	parse func(string) (uint8, error)
}{
	"Reason":      enumOf[Reason](reasonNames[:]),
	"Scheme":      enumOf[Scheme](schemeNames[:]),
	"Behaviour":   enumOf[Behaviour](behaviourNames[:]),
	"OnViolation": enumOf[OnViolation](onViolationNames[:]),
	"Hook":        enumOf[Hook](hookNames[:]),
	"MatchAction": enumOf[MatchAction](matchActionNames[:]),
}

func enumOf[T interface {
	~uint8
	enum
}, P interface {
	*T
	encoding.TextUnmarshaler
}](names []string) struct {
	names []string
	value func(uint8) enum
	parse func(string) (uint8, error)
} {
	return struct {
		names []string
		value func(uint8) enum
		parse func(string) (uint8, error)
	}{
		names: names,
		value: func(v uint8) enum { return T(v) },
		parse: func(s string) (uint8, error) {
			var v T
			err := P(&v).UnmarshalText([]byte(s))
			return uint8(v), err
		},
	}
}

func TestEveryNumberOfEveryEnumReadsBackWhatItPrints(t *testing.T) {
	name := regexp.MustCompile(`^[a-z0-9]+(-[a-z0-9]+)*$`)
	for typ, e := range enums {
		seen := map[string]bool{}
		for v := range 256 {
			s := e.value(uint8(v)).String()
			if known := v < len(e.names); known && !name.MatchString(s) {
				t.Errorf("%s %d is called %q; want lower-case words joined by hyphens", typ, v, s)
			} else if !known && !strings.HasPrefix(s, typ+"(") {
				t.Errorf("%s %d has no name, yet prints as %q", typ, v, s)
			}
			if seen[s] {
				t.Errorf("two numbers of %s print as %q", typ, s)
			}
			seen[s] = true

			text, err := e.value(uint8(v)).MarshalText()
			if err != nil || string(text) != s {
				t.Errorf("%s %d: MarshalText gives %q, %v; want %q", typ, v, text, err, s)
			}
			got, err := e.parse(s)
			if err != nil || got != uint8(v) {
				t.Errorf("%s %d prints as %q, which reads as %d, %v", typ, v, s, got, err)
			}
		}
	}
}

func TestUnmarshalRefusesWhatNothingPrints(t *testing.T) {
	for typ, e := range enums {
		for _, s := range []string{"", "NONE", " none", "nonesuch", typ + "(0)", typ + "(256)", typ + "(-1)", typ + "(0255)"} {
			if v, err := e.parse(s); err == nil {
				t.Errorf("%s: %q reads as %d; want an error", typ, s, v)
			}
		}
	}
}

func TestEveryReasonHasASentence(t *testing.T) {
	seen := map[string]Reason{}
	for r := range Reason(ReasonCount) {
		text := r.Text()
		if len(text) < 5 || strings.Contains(text, "a reason that this version") {
			t.Errorf("reason %s has no text: %q", r, text)
		}
		if text != strings.TrimSpace(text) || strings.HasSuffix(text, ".") {
			t.Errorf("reason %s: %q; want no space around it and no full stop", r, text)
		}
		if other, ok := seen[text]; ok {
			t.Errorf("reasons %s and %s have the same text", r, other)
		}
		seen[text] = r
	}
	if got := Reason(ReasonCount).Text(); !strings.Contains(got, "a reason that this version") {
		t.Errorf("a reason without a name says %q", got)
	}
	if got := len(Reasons()); got != ReasonCount-1 || Reasons()[0] != ReasonNone+1 {
		t.Errorf("Reasons gives %d of %d, the first %s", got, ReasonCount-1, Reasons()[0])
	}
}
