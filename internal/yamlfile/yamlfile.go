// Package yamlfile parses YAML that may have been written to do harm. The parser
// that it calls is not made for that: it takes time in the square of the nesting
// and of the fields of a mapping, recurses into both, and takes some hundred bytes
// for each sign. So all of these are bounded before it sees the text. What the
// text means is its callers' matter: internal/manifest and internal/pot.
package yamlfile

import (
	"errors"
	"fmt"
	"strings"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/lexer"
	"github.com/goccy/go-yaml/parser"
	"github.com/goccy/go-yaml/token"
)

// What a file may have. Of the last three its callers take none, and only say where
// they are.
const (
	NestingMax   = 64      // lists and mappings in one another
	FieldsMax    = 64      // of one mapping
	SignsMax     = 1 << 21 // brackets, commas, colons and dashes that YAML goes by
	DocumentsMax = 64      // lines --- and ...
	TagsMax      = 256     // tags, anchors and aliases
	EmptyMax     = 64      // values that are not there
)

// messageMax is how many characters of what the parser says are told: it may repeat
// the text.
const messageMax = 300

// Error is what is wrong with a text, and where.
type Error struct {
	Line    int // from 1
	Column  int // from 1, in characters
	Message string
}

func (e *Error) Error() string { return fmt.Sprintf("%d:%d: %s", e.Line, e.Column, e.Message) }

// Parse parses a text whose length its caller has bounded. Line ends may be LF,
// CR LF or CR. The error is an *Error.
func Parse(src string, options ...parser.Option) (file *ast.File, err error) {
	// The parser counts lines wrongly where they end in CR LF.
	src = strings.ReplaceAll(src, "\r\n", "\n")
	src = strings.ReplaceAll(src, "\r", "\n")
	if e := newScan(src).run(); e != nil {
		return nil, e
	}
	defer func() {
		if p := recover(); p != nil {
			file, err = nil, &Error{1, 1, fmt.Sprintf("the parser gave up: %v", p)}
		}
	}()
	tokens := lexer.Tokenize(src)
	if e := check(tokens); e != nil {
		return nil, e
	}
	file, err = parser.Parse(tokens, 0, options...)
	if err != nil {
		return nil, located(err)
	}
	return file, nil
}

// located takes the place from the parser's error, and never its text: that
// repeats the file, and takes time in the square of it.
func located(err error) *Error {
	var y yaml.Error
	if !errors.As(err, &y) {
		return &Error{1, 1, err.Error()}
	}
	if t := y.GetToken(); t != nil && t.Position != nil {
		return at(t, Shorten(messageMax, y.GetMessage()))
	}
	return &Error{1, 1, Shorten(messageMax, y.GetMessage())}
}

func at(t *token.Token, message string) *Error {
	return &Error{max(1, t.Position.Line), max(1, t.Position.Column), message}
}

// level is a list or a mapping that is open.
type level struct {
	column int // where its lines start; of one in brackets: -1
	list   bool
	fields int
	colon  bool // in brackets: the field has one
}

// levels are those in one another; the last is the innermost.
type levels []level

// block opens a list or a mapping at a column, or goes on with the one there.
func (l *levels) block(column int, list bool) {
	for n := len(*l); n > 0; n-- {
		top := (*l)[n-1]
		// A list may be at the column of the mapping that it is in.
		if top.column < column || top.column == column && (top.list == list || list) {
			break
		}
		*l = (*l)[:n-1]
	}
	if n := len(*l); n == 0 || (*l)[n-1].column != column || (*l)[n-1].list != list {
		*l = append(*l, level{column: column, list: list})
	}
	(*l)[len(*l)-1].fields++
}

// bracket opens a list or a mapping in brackets.
func (l *levels) bracket(list bool) { *l = append(*l, level{column: -1, list: list, fields: 1}) }

func (l levels) inBrackets() bool { return len(l) > 0 && l[len(l)-1].column < 0 }

// comma goes on in brackets.
func (l levels) comma() {
	l[len(l)-1].fields++
	l[len(l)-1].colon = false
}

// close closes what was opened in brackets.
func (l *levels) close() { *l = (*l)[:len(*l)-1] }

// indent is the column that whatever belongs to the innermost level is right of.
func (l levels) indent() int {
	if len(l) == 0 {
		return -1
	}
	return l[len(l)-1].column
}

// tooMuch says what of the limits is passed; "": none.
func (l levels) tooMuch() string {
	if len(l) > NestingMax {
		return fmt.Sprintf("nested deeper than %d", NestingMax)
	}
	if n := len(l); n > 0 && !l[n-1].list && l[n-1].fields > FieldsMax {
		return fmt.Sprintf("more than %d fields in one mapping", FieldsMax)
	}
	return ""
}

// check holds the limits on what the parser will see. The scan before it has seen
// nearly the same; where the two differ, this one counts.
func check(tokens token.Tokens) *Error {
	var l levels
	var before *token.Token // not a comment
	key := 0                // column where the node before started
	tags := 0               // anchors and aliases, too
	documents, empty := 0, 0
	for _, t := range tokens {
		if t.Type == token.CommentType {
			continue
		}
		if t.Type == token.TagType || t.Type == token.AnchorType || t.Type == token.AliasType {
			if tags++; tags > TagsMax {
				return at(t, fmt.Sprintf("more than %d tags, anchors and aliases", TagsMax))
			}
		}
		if l.lacksValue(before, t, key) {
			if empty++; empty > EmptyMax {
				return at(t, fmt.Sprintf("more than %d values that are empty in front of this", EmptyMax))
			}
		}
		column := t.Position.Column
		switch brackets := l.inBrackets(); t.Type {
		case token.SequenceStartType, token.MappingStartType:
			if !brackets {
				key = column
			}
			l.bracket(t.Type == token.SequenceStartType)
		case token.SequenceEndType, token.MappingEndType:
			if brackets {
				l.close()
			}
		case token.CollectEntryType:
			if brackets {
				l.comma()
			}
		case token.SequenceEntryType, token.MappingKeyType:
			if brackets && t.Type == token.SequenceEntryType {
				return at(t, "a dash in brackets: lists there have commas")
			}
			if !brackets {
				l.block(column, t.Type == token.SequenceEntryType)
			}
		case token.MappingValueType:
			if brackets {
				l[len(l)-1].colon = true
				break
			}
			if before == nil || before.Position.Line != t.Position.Line {
				key = column // no key in front of it
			}
			l.block(key, false)
		case token.DocumentHeaderType, token.DocumentEndType:
			l = nil
			if documents++; documents > DocumentsMax {
				return at(t, fmt.Sprintf("more than %d documents", DocumentsMax))
			}
		default:
			if !brackets {
				key = column
			}
		}
		if s := l.tooMuch(); s != "" {
			return at(t, s)
		}
		before = t
	}
	return nil
}

// lacksValue: is there no value between the two tokens, where one belongs? key is the
// column of the key that may be before them.
func (l levels) lacksValue(before, t *token.Token, key int) bool {
	if before == nil {
		return false
	}
	if l.inBrackets() {
		switch t.Type {
		case token.CollectEntryType, token.MappingEndType, token.SequenceEndType:
		default:
			return false
		}
		top := l[len(l)-1]
		alone := !top.list && !top.colon && before.Type != token.CollectEntryType && before.Type != token.MappingStartType
		return alone || before.Type == token.MappingValueType
	}
	switch before.Type {
	case token.SequenceEntryType, token.MappingKeyType:
		key = before.Position.Column
	case token.MappingValueType:
		if t.Type == token.SequenceEntryType && t.Position.Column == key {
			return false
		}
	default:
		return false
	}
	return t.Position.Line > before.Position.Line && t.Position.Column <= key
}
