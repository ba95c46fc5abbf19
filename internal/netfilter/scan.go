package netfilter

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"unicode"
)

// What can be said about a ruleset without nft: above all that it stays in its table.

// tokenKind says what a token is.
type tokenKind uint8

const (
	tokenWord     tokenKind = iota // identifier, number, address
	tokenVariable                  // $name, without the $
	tokenOpen                      // {
	tokenClose                     // }
	tokenEnd                       // of a statement: line break or semicolon
	tokenOther
)

// token is a piece of nft's language, at its line and column in characters.
type token struct {
	kind         tokenKind
	text         string
	line, column int
}

// tokens cuts text as nft's scanner does, as far as that matters here. It leaves out
// comments, what is between quotes, and line breaks behind a backslash.
func tokens(text string) []token {
	var out []token
	r := []rune(text)
	line, column := 1, 1
	step := func(i int) int {
		if r[i] == '\n' {
			line, column = line+1, 1
		} else {
			column++
		}
		return i + 1
	}
	for i := 0; i < len(r); {
		t := token{kind: tokenOther, line: line, column: column}
		switch c := r[i]; {
		case c == '#':
			for i < len(r) && r[i] != '\n' {
				i = step(i)
			}
			continue
		case c == '"':
			for i = step(i); i < len(r) && r[i] != '"'; {
				i = step(i)
			}
			if i < len(r) {
				i = step(i)
			}
			out = append(out, t)
			continue
		case c == '\\' && i+1 < len(r) && r[i+1] == '\n':
			i = step(step(i))
			continue
		case c == '\n' || c == ';':
			t.kind = tokenEnd
		case c == '{':
			t.kind = tokenOpen
		case c == '}':
			t.kind = tokenClose
		case c == '$' || inWord(c):
			t.kind = tokenWord
			if c == '$' {
				t.kind = tokenVariable
				i = step(i)
			}
			start := i
			for i < len(r) && inWord(r[i]) {
				i = step(i)
			}
			t.text = string(r[start:i])
			out = append(out, t)
			continue
		case unicode.IsSpace(c):
			i = step(i)
			continue
		}
		i = step(i)
		out = append(out, t)
	}
	return out
}

func inWord(c rune) bool {
	return c == '_' || c == '-' || c == '.' || c == '/' || c >= '0' && c <= '9' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z'
}

// scan looks for what nft would not object to, or not clearly.
func (s Ruleset) scan() *Error {
	if !functionName.MatchString(s.Function) {
		return s.wrong(fmt.Sprintf("%q names no table; a function's name is 1 to 64 letters, digits, hyphens, underscores and dots", s.Function))
	}
	names := slices.Sorted(maps.Keys(s.Arguments))
	for _, name := range names {
		if !variableName.MatchString(name) {
			return s.wrong(fmt.Sprintf("argument %q cannot be a variable of nft; a name is a letter, then up to 63 letters, digits, hyphens, underscores and dots", name))
		}
	}
	var ps []Problem
	problem := func(t token, format string, args ...any) {
		ps = append(ps, Problem{t.line, t.column, fmt.Sprintf(format, args...)})
	}
	ts := tokens(s.Text)
	defined := map[string]bool{"bypass": s.Bypass != 0}
	for i, t := range ts {
		if i+1 < len(ts) && t.kind == tokenWord && t.text == "define" {
			defined[ts[i+1].text] = true
		}
	}
	var open []token
	start := true // of a statement
	for i, t := range ts {
		switch t.kind {
		case tokenOpen:
			open = append(open, t)
		case tokenClose:
			if len(open) == 0 {
				problem(t, "this brace closes the function's table; rules are the body of one table")
				return s.problems(ps)
			}
			open = open[:len(open)-1]
		case tokenVariable:
			if _, ok := s.Arguments[t.text]; !ok && !defined[t.text] {
				have := "the function has no arguments"
				if len(names) > 0 {
					have = "arguments are " + strings.Join(names, ", ")
				}
				problem(t, "$%s is not an argument of the function, and nothing defines it; %s", t.text, have)
			}
		case tokenWord:
			if !start {
				break
			}
			next := ""
			if i+1 < len(ts) {
				next = ts[i+1].text
			}
			switch t.text {
			case "include":
				problem(t, "include reads a file that the plan does not have; put its rules here")
			case "flags":
				if len(open) == 0 {
					problem(t, "the function's table has no flags of its own")
				}
			case "define", "redefine", "undefine":
				if _, ok := s.Arguments[next]; ok {
					problem(t, "%s changes %s, an argument of the function; use another name", t.text, next)
				}
			}
		}
		start = t.kind == tokenEnd || t.kind == tokenOpen || t.kind == tokenClose
	}
	if len(open) > 0 {
		problem(open[len(open)-1], "nothing closes this brace")
	}
	if strings.ContainsRune(s.Text, 0) {
		return s.wrong("it has a zero byte")
	}
	if ps == nil {
		return nil
	}
	return s.problems(ps)
}

// TranslatesAddresses finds a chain of type nat: its line, from 1; 0: there is none.
func TranslatesAddresses(text string) int {
	ts := tokens(text)
	for i := 2; i < len(ts); i++ {
		if ts[i-2].text == "type" && ts[i-1].text == "nat" && ts[i].text == "hook" {
			return ts[i].line
		}
	}
	return 0
}
