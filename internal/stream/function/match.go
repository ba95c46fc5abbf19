package function

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
)

// match looks for literals and patterns in the bytes of a direction.
type match struct {
	dfa       *dfa
	bytes     int64   // looked at from the beginning; 0: all
	then      Verdict // at a match: Reset or Done
	otherwise Verdict // without one, in these bytes or to the end: Reset or Done
	event     *atomic.Uint64
}

func parseMatch(raw json.RawMessage) (Entry, error) {
	set := struct {
		Literals  []string `json:"literals"`
		Patterns  []string `json:"patterns"`
		Bytes     int64    `json:"bytes"`
		Then      string   `json:"then"`
		Otherwise string   `json:"otherwise"`
	}{Then: "reset", Otherwise: "pass"}
	if err := settingsOf(raw, &set); err != nil {
		return Entry{}, err
	}
	var errs []error
	var alternatives []string
	for i, l := range set.Literals {
		if l == "" {
			errs = append(errs, fmt.Errorf("literals[%d] is empty, and would match everything", i))
			continue
		}
		var quoted strings.Builder
		for _, b := range []byte(l) {
			fmt.Fprintf(&quoted, `\x%02x`, b)
		}
		alternatives = append(alternatives, quoted.String())
	}
	for i, p := range set.Patterns {
		if _, err := compile(p); err != nil {
			errs = append(errs, fmt.Errorf("patterns[%d]: %w", i, err))
			continue
		}
		alternatives = append(alternatives, "(?:"+p+")")
	}
	m := match{bytes: set.Bytes, then: Done, otherwise: Done}
	switch set.Then {
	case "reset":
		m.then = Reset
	case "mark", "pass":
	default:
		errs = append(errs, fmt.Errorf("then is %q; expect pass, reset or mark", set.Then))
	}
	switch set.Otherwise {
	case "reset":
		m.otherwise = Reset
	case "pass":
		if set.Then == "pass" {
			errs = append(errs, errors.New("then and otherwise are both pass, so the match has no effect; set otherwise to reset, or then to mark"))
		}
	default:
		errs = append(errs, fmt.Errorf("otherwise is %q; expect pass or reset", set.Otherwise))
	}
	if set.Bytes < 0 {
		errs = append(errs, fmt.Errorf("bytes is %d; expect 0, for all, or more", set.Bytes))
	}
	if len(set.Literals)+len(set.Patterns) == 0 {
		errs = append(errs, errors.New("there are no literals and no patterns; give one"))
	}
	if len(errs) > 0 {
		return Entry{}, errors.Join(errs...)
	}
	prog, err := compile(strings.Join(alternatives, "|"))
	if err != nil {
		return Entry{}, fmt.Errorf("all together: %w", err)
	}
	return itself("match", func(s Surroundings) (Function, error) {
		f := m
		f.dfa, f.event = newDFA(prog), s.Event
		return &f, nil
	}), nil
}

func (m *match) Open(Connection) Handler { return Handler{Inspector: &matching{m: m, at: m.dfa.first}} }

// matching is the search in one direction of one connection.
type matching struct {
	m    *match
	at   *dfaState
	seen int64
}

func (s *matching) Inspect(p []byte, at Moment) Verdict {
	last := false
	if left := s.m.bytes - s.seen; s.m.bytes > 0 && int64(len(p)) >= left {
		p, last = p[:left], true
	}
	s.seen += int64(len(p))
	for i := 0; i < len(p); {
		was := s.at
		s.at = s.m.dfa.step(was, p[i])
		i++
		if s.at.matched {
			return s.found()
		}
		if s.at == was {
			i += s.m.dfa.skip(s.at, p[i:])
		}
	}
	switch {
	case at == End || last:
		// What is behind the bytes that count does not: they end here.
		if s.m.dfa.matchesAtEnd(s.at) {
			return s.found()
		}
		return s.m.otherwise
	}
	return Continue
}

func (s *matching) found() Verdict {
	if s.m.event != nil {
		s.m.event.Add(1)
	}
	return s.m.then
}
