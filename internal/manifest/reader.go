package manifest

import (
	"bytes"
	"encoding"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/parser"

	"github.com/waystamp/waystamp/internal/yamlfile"
)

// reader walks the tree of a YAML document and collects problems. It does not
// decode into structs: their decoders stop at the first error and lose places.
type reader struct {
	name     string   // of the file
	lines    []string // of the file
	problems []Problem
	warnings []Problem
	compared int // references that name nothing

	outline *outline // not nil: the reader lists its fields and reads no file
}

// place is where in the file something stands.
type place struct {
	path         string
	line, column int
}

func (p place) problem(message string) Problem {
	return Problem{Path: p.path, Line: p.line, Column: p.column, Message: message}
}

// item is a value with its place. Without ok it is missing, or a problem was
// reported already, and no other rule looks at it.
type item[T any] struct {
	value T
	at    place
	ok    bool
}

// given reports whether the file has the value, right or wrong.
func (i item[T]) given() bool { return i.at != place{} }

// cursor is a node of the tree.
type cursor struct {
	r    *reader
	node ast.Node
	at   place
}

// document parses the source into its only document. It also returns the lines,
// for messages.
func (r *reader) document(src []byte) (lines []string, root cursor, ok bool) {
	start := place{line: 1, column: 1}
	if len(src) > SourceMax {
		r.problemf(start, "the file has %d bytes; at most %d are read", len(src), SourceMax)
		return nil, root, false
	}
	src = withoutReturns(src)
	lines = strings.Split(strings.TrimRight(string(src), "\n"), "\n")
	r.lines = lines
	for i, line := range lines {
		if !utf8.ValidString(line) {
			r.problemf(place{line: i + 1, column: 1}, "this line is not UTF-8 text")
		} else if c := strings.IndexFunc(line, func(c rune) bool { return c < ' ' && c != '\t' || c == 0x7f }); c >= 0 {
			r.problemf(place{line: i + 1, column: utf8.RuneCountInString(line[:c]) + 1}, "this line has a control character")
		}
	}
	if len(r.problems) > 0 {
		return lines, root, false
	}

	file, err := yamlfile.Parse(string(src), parser.AllowDuplicateMapKey())
	if err != nil {
		at := start
		message := err.Error()
		if e, ok := errors.AsType[*yamlfile.Error](err); ok {
			at, message = place{line: min(e.Line, len(lines)), column: e.Column}, e.Message
		}
		r.problemf(at, "not YAML: %s", message)
		return lines, root, false
	}
	docs := slices.DeleteFunc(file.Docs, func(d *ast.DocumentNode) bool { return d.Body == nil || d.Body.Type() == ast.DirectiveType })
	switch {
	case len(docs) == 0 || docs[0].Body.Type() == ast.NullType:
		r.problemf(start, `the file is empty; it starts with "version: 1"`)
		return lines, root, false
	case len(docs) > 1:
		r.problemf(where("", docs[1].Body), "a second document; the file is one")
		return lines, root, false
	}
	return lines, cursor{r: r, node: docs[0].Body, at: where("", docs[0].Body)}, true
}

// withoutReturns is a file without a byte order mark and with one kind of line end.
func withoutReturns(src []byte) []byte {
	src = bytes.TrimPrefix(src, []byte("\ufeff"))
	src = bytes.ReplaceAll(src, []byte("\r\n"), []byte("\n"))
	return bytes.ReplaceAll(src, []byte("\r"), []byte("\n"))
}

// where is the place of a node: where it starts.
func where(path string, n ast.Node) place {
	t := n.GetToken()
	if m, ok := n.(*ast.MappingNode); ok && !m.IsFlowStyle && len(m.Values) > 0 {
		t = m.Values[0].Key.GetToken() // a block mapping's own token is its first colon
	}
	if t == nil || t.Position == nil {
		return place{path: path, line: 1, column: 1}
	}
	return place{path: path, line: max(1, t.Position.Line), column: max(1, t.Position.Column)}
}

// field is one field that a mapping may have.
type field struct {
	name     string
	required bool
	read     func(cursor)
}

// fields reads a mapping. It reports unknown, repeated and missing fields, and
// calls read for the others.
func (c cursor) fields(fields ...field) {
	if c.r.outline != nil {
		c.outlineFields(fields)
		return
	}
	m, ok := c.node.(*ast.MappingNode)
	if !ok {
		c.wrong("expect " + names(fields))
		return
	}
	seen := map[string]bool{}
	for _, v := range m.Values {
		key, plain := v.Key.(*ast.StringNode)
		var name string
		if plain {
			name = key.Value
		}
		path := name
		if c.at.path != "" {
			path = c.at.path + "." + name
		}
		i := slices.IndexFunc(fields, func(f field) bool { return f.name == name })
		switch {
		case !plain:
			c.r.problemf(where(c.at.path, v.Key), "%s is not a field here; expect %s", quote(v.Key.GetToken().Value), names(fields))
		case i < 0:
			c.r.problemf(where(c.at.path, v.Key), "%s is not a field here; expect %s", quote(name), names(fields))
		case seen[name]:
			c.r.problemf(where(path, v.Key), "given twice; a field is given once")
		default:
			seen[name] = true
			at := where(path, v.Key)
			if v.Value == nil || v.Value.Type() == ast.NullType {
				c.r.problemf(at, "is empty; give it a value or leave it out")
				continue
			}
			fields[i].read(cursor{r: c.r, node: v.Value, at: where(path, v.Value)})
		}
	}
	for _, f := range fields {
		if f.required && !seen[f.name] {
			c.r.problemf(c.at, "%q is missing; it is required here", f.name)
		}
	}
}

// entries reads a mapping whose keys are names that the file chooses.
func (c cursor) entries(read func(name string, c cursor)) {
	m, ok := c.node.(*ast.MappingNode)
	if !ok {
		c.wrong("expect a mapping of names to values")
		return
	}
	seen := map[string]bool{}
	for _, v := range m.Values {
		name := v.Key.GetToken().Value
		path := c.at.path + "." + yamlfile.Shorten(64, name)
		at := where(path, v.Key)
		switch {
		case seen[name]:
			c.r.problemf(at, "%s is given twice", quote(name))
		case v.Value == nil || v.Value.Type() == ast.NullType:
			c.r.problemf(at, "is empty; give it a value or leave it out")
		default:
			read(name, cursor{r: c.r, node: v.Value, at: where(path, v.Value)})
		}
		seen[name] = true
	}
}

// indentAfter is the column, from 1, at which the text of a block begins that is below
// a line.
func (r *reader) indentAfter(line int) int {
	for _, l := range r.lines[min(line, len(r.lines)):] {
		if text := strings.TrimLeft(l, " "); text != "" {
			return len(l) - len(text) + 1
		}
	}
	return 1
}

// each reads a list.
func (c cursor) each(read func(cursor)) {
	if c.r.outline != nil {
		c.outlineList(read)
		return
	}
	s, ok := c.node.(*ast.SequenceNode)
	if !ok {
		c.wrong("expect a list")
		return
	}
	for i, n := range s.Values {
		path := fmt.Sprintf("%s[%d]", c.at.path, i)
		if n == nil || n.Type() == ast.NullType {
			at := c.at
			if n != nil {
				at = where(path, n)
			}
			at.path = path
			c.r.problemf(at, "is empty; give it a value or leave it out")
			continue
		}
		read(cursor{r: c.r, node: n, at: where(path, n)})
	}
}

// wrong reports a node that is not what belongs here.
func (c cursor) wrong(expected string) {
	is := "is of an unexpected kind"
	switch n := c.node.(type) {
	case *ast.MappingNode, *ast.MappingValueNode:
		is = "is a mapping"
	case *ast.SequenceNode:
		is = "is a list"
	case *ast.NullNode:
		is = "is empty"
	case *ast.AnchorNode, *ast.AliasNode, *ast.TagNode:
		is, expected = "uses an anchor, an alias or a tag", "write the value out"
	case *ast.LiteralNode:
		is = "is a block of text"
	case ast.ScalarNode:
		is = quote(n.GetToken().Value)
	}
	if strings.HasPrefix(is, `"`) {
		is += " is a single value"
	}
	c.r.problemf(c.at, "%s; %s", is, expected)
}

// textMax is the length in bytes of the longest value on a line of its own: far above
// that of names, addresses and numbers, and short enough to be shown.
const textMax = 256

// text is a scalar as it is written, whether YAML would take it for a number or
// not. One that is too long is none.
func (c cursor) text() item[string] {
	if c.r.outline != nil {
		return item[string]{}
	}
	t := c.scalar()
	if n := len(t.value); t.ok && n > textMax {
		c.r.problemf(c.at, "%s has %d bytes; a value has at most %d", quote(t.value), n, textMax)
		return item[string]{at: c.at}
	}
	return t
}

func (c cursor) scalar() item[string] {
	switch n := c.node.(type) {
	case *ast.StringNode:
		return item[string]{value: n.Value, at: c.at, ok: true}
	case *ast.IntegerNode, *ast.FloatNode, *ast.BoolNode, *ast.InfinityNode, *ast.NanNode:
		return item[string]{value: n.GetToken().Value, at: c.at, ok: true}
	}
	c.wrong("expect a single value")
	return item[string]{at: c.at}
}

// texts is a list of scalars.
func (c cursor) texts() (list []item[string]) {
	c.each(func(c cursor) { list = append(list, c.text()) })
	return list
}

// lines is a scalar that may have many lines.
func (c cursor) lines(most int) item[string] {
	if c.takes("text, also of many lines; at most %d bytes", most) {
		return item[string]{}
	}
	t := item[string]{at: c.at, ok: true}
	if n, ok := c.node.(*ast.LiteralNode); ok && n.Value != nil {
		t.value = n.Value.Value
	} else {
		t = c.scalar()
	}
	if t.ok && len(t.value) > most {
		c.r.problemf(c.at, "has %d bytes; at most %d are read", len(t.value), most)
		t.ok = false
	}
	return t
}

// boolean is true or false.
func (c cursor) boolean() item[bool] {
	if c.takes("true or false") {
		return item[bool]{}
	}
	t := c.text()
	if t.ok && t.value != "true" && t.value != "false" {
		c.r.problemf(c.at, "%s is neither true nor false", quote(t.value))
		t.ok = false
	}
	return item[bool]{value: t.value == "true", at: c.at, ok: t.ok}
}

// duration is a time with its unit, within bounds.
func (c cursor) duration(low, high time.Duration) item[time.Duration] {
	if c.takes("time with its unit, from %s to %s", low, high) {
		return item[time.Duration]{}
	}
	t := c.text()
	d, err := time.ParseDuration(t.value)
	switch {
	case !t.ok:
	case err != nil:
		c.r.problemf(c.at, "%s is not a time with its unit, such as 5ms or 1s", quote(t.value))
		t.ok = false
	case d < low || d > high:
		c.r.problemf(c.at, "%s is not from %s to %s", quote(t.value), low, high)
		t.ok = false
	}
	return item[time.Duration]{value: d, at: c.at, ok: t.ok}
}

// checked is a scalar that keeps a rule of its own.
func (c cursor) checked(what string, rule func(string) error) item[string] {
	if c.takes("%s", what) {
		return item[string]{}
	}
	t := c.text()
	if t.ok {
		if err := rule(t.value); err != nil {
			c.r.problemf(c.at, "%s %v", quote(t.value), err)
			t.ok = false
		}
	}
	return t
}

// integer is a whole number within bounds.
func (c cursor) integer(low, high int) item[int] {
	if c.takes("whole number from %d to %d", low, high) {
		return item[int]{}
	}
	t := c.text()
	n, err := strconv.Atoi(t.value)
	if t.ok && (err != nil || n < low || n > high) {
		c.r.problemf(c.at, "%s is not a whole number from %d to %d", quote(t.value), low, high)
		t.ok = false
	}
	return item[int]{value: n, at: c.at, ok: t.ok}
}

// address is an IP address that keeps a rule.
func (c cursor) address(rule func(netip.Addr) error) item[netip.Addr] {
	if c.takes("IPv6 address") {
		return item[netip.Addr]{}
	}
	return parsed(c, netip.ParseAddr, "is not an IPv6 address", rule)
}

// prefix is an IP prefix that keeps a rule; what says which.
func (c cursor) prefix(what string, rule func(netip.Prefix) error) item[netip.Prefix] {
	if c.takes("%s", what) {
		return item[netip.Prefix]{}
	}
	return parsed(c, netip.ParsePrefix, "is not an IPv6 prefix such as 2001:db8::/64", rule)
}

func parsed[T any](c cursor, parse func(string) (T, error), not string, rule func(T) error) item[T] {
	t := c.text()
	if !t.ok {
		return item[T]{at: c.at}
	}
	v, err := parse(t.value)
	if err != nil {
		err = errors.New(not) // the cause repeats the value in other words
	} else {
		err = rule(v)
	}
	if err != nil {
		c.r.problemf(c.at, "%s %v", quote(t.value), err)
		return item[T]{at: c.at}
	}
	return item[T]{value: v, at: c.at, ok: true}
}

// enum is one of the names that the type knows.
func enum[T any, P interface {
	*T
	encoding.TextUnmarshaler
}](c cursor) item[T] {
	var v T
	if c.takes("%s", expected(P(&v).UnmarshalText(nil))) {
		return item[T]{}
	}
	t := c.text()
	if t.ok {
		if err := P(&v).UnmarshalText([]byte(t.value)); err != nil {
			c.r.problemf(c.at, "%v", err)
			t.ok = false
		}
	}
	return item[T]{value: v, at: c.at, ok: t.ok}
}

// into makes the read function of a scalar field.
func into[T any](dst *item[T], read func(cursor) item[T]) func(cursor) {
	return func(c cursor) { *dst = read(c) }
}

func names(fields []field) string {
	list := make([]string, len(fields))
	for i, f := range fields {
		list[i] = f.name
	}
	return oneOf(list)
}

// oneOf is "a, b or c".
func oneOf(list []string) string {
	if len(list) < 2 {
		return strings.Join(list, "")
	}
	return strings.Join(list[:len(list)-1], ", ") + " or " + list[len(list)-1]
}

// quote shortens what would bury the message.
func quote(s string) string { return strconv.Quote(yamlfile.Shorten(64, s)) }
