package yamlfile

import (
	"fmt"
	"math"
	"strings"
	"unicode/utf8"
)

// none is a column that nothing is right of.
const none = math.MaxInt

// tabsMax bounds what the parser does for tabs in double quotes: for each it looks
// at the rest of the line.
const tabsMax = 1 << 25

// emptyMax bounds the same for empty lines at the end of a block of text: for each
// it copies the block.
const emptyMax = 1 << 26

// scan walks through a text and holds its limits, without any memory for it. It
// takes YAML apart only as far as to know what is a sign and what is text: quoted,
// in a block, a comment, or plain over several lines. What is wrong with the text
// besides it leaves to the parser.
type scan struct {
	src    string
	pos    int
	line   int // from 1
	start  int // of the line
	levels levels
	signs  int
	tags   int
	tabs   int
	empty  int
	files  int // documents that begin or end

	literal int // a block of text lasts as long as lines are right of this column
	block   int // bytes of it
	ending  int // empty lines at its end, up to here
	plain   int // plain text goes on where a line is right of this column
}

func newScan(src string) *scan { return &scan{src: src, line: 1, literal: none, plain: none} }

func (s *scan) run() *Error {
	for s.pos < len(s.src) {
		s.start = s.pos
		text := s.src[s.pos:s.end()]
		indent := len(text) - len(strings.TrimLeft(text, " "))
		rest := text[indent:]
		marker := isMarker(text)
		switch {
		case strings.TrimLeft(rest, " \t") == "":
			s.block += len(text) + 1
			s.ending++
			if s.literal != none && s.empty+s.ending*s.block > emptyMax {
				return s.errorf("too many empty lines at the end of a block of text")
			}
			s.skipLine()
			continue
		case !marker && indent > s.literal:
			s.block += len(text) + 1
			s.ending = 0
			s.skipLine()
			continue
		}
		if s.literal != none {
			s.empty += s.ending * s.block
		}
		s.literal = none
		switch {
		case marker:
			s.levels, s.plain = nil, none
			if s.files++; s.files > DocumentsMax {
				return s.errorf("more than %d documents", DocumentsMax)
			}
			s.pos += 3
		case rest[0] == '#':
			s.plain = none
			s.skipLine()
			continue
		case indent > s.plain:
			s.skipLine()
			continue
		default:
			s.pos += indent
		}
		s.plain = none
		if err := s.nodes(); err != nil {
			return err
		}
	}
	return nil
}

// isMarker: does a document start or end here?
func isMarker(line string) bool {
	return (strings.HasPrefix(line, "---") || strings.HasPrefix(line, "...")) && (len(line) == 3 || line[3] == ' ' || line[3] == '\t')
}

// end is where the line ends.
func (s *scan) end() int {
	if i := strings.IndexByte(s.src[s.pos:], '\n'); i >= 0 {
		return s.pos + i
	}
	return len(s.src)
}

func (s *scan) skipLine() {
	s.pos = s.end()
	s.newline()
}

// newline steps over the end of a line, at which the scan is, or over the end of the
// text.
func (s *scan) newline() {
	if s.pos < len(s.src) {
		s.pos++
		s.line++
		s.start = s.pos
	}
}

// blank: is there nothing at i, or white space?
func (s *scan) blank(i int) bool { return i >= len(s.src) || strings.IndexByte(" \t\n", s.src[i]) >= 0 }

func (s *scan) column() int { return s.pos - s.start }

func (s *scan) errorf(format string, args ...any) *Error {
	return &Error{s.line, utf8.RuneCountInString(s.src[s.start:min(s.pos, len(s.src))]) + 1, fmt.Sprintf(format, args...)}
}

// sign counts one, and holds the limits behind it.
func (s *scan) sign() *Error {
	if s.signs++; s.signs > SignsMax {
		return s.errorf("the file is too large: more than %d brackets, commas, colons and dashes", SignsMax)
	}
	if m := s.levels.tooMuch(); m != "" {
		return s.errorf("%s", m)
	}
	return nil
}

// nodes walks to the end of the line, and of what it opens in brackets or quotes.
func (s *scan) nodes() *Error {
	for {
		for s.pos < len(s.src) && (s.src[s.pos] == ' ' || s.src[s.pos] == '\t') {
			s.pos++
		}
		if s.pos >= len(s.src) || s.src[s.pos] == '\n' || s.src[s.pos] == '#' {
			s.skipLine()
			return nil
		}
		column := s.column()
		var err *Error
		switch c := s.src[s.pos]; {
		case (c == '-' || c == '?' || c == ':') && s.blank(s.pos+1):
			s.levels.block(column, c == '-')
			err = s.sign()
			s.pos++
		case c == '!' || c == '&' || c == '*':
			if s.tags++; s.tags > TagsMax {
				return s.errorf("more than %d tags, anchors and aliases", TagsMax)
			}
			err = s.sign()
			for !s.blank(s.pos) {
				s.pos++
			}
		case c == '[' || c == '{':
			if err = s.brackets(); err == nil {
				err = s.key(column)
			}
		case c == '"' || c == '\'':
			if err = s.quoted(); err == nil {
				err = s.key(column)
			}
		case c == '|' || c == '>':
			s.literal, s.block, s.ending = s.levels.indent(), 0, 0
			s.skipLine()
			return nil
		case c == '%' && column == 0:
			s.skipLine()
			return nil
		default:
			more, e := s.text(column)
			if !more {
				return e
			}
			err = e
		}
		if err != nil {
			return err
		}
	}
}

// key: is what started at the column, and ends here, a key?
func (s *scan) key(column int) *Error {
	i := s.pos
	for i < len(s.src) && (s.src[i] == ' ' || s.src[i] == '\t') {
		i++
	}
	if i >= len(s.src) || s.src[i] != ':' {
		return nil
	}
	s.levels.block(column, false)
	err := s.sign()
	s.pos = i + 1
	return err
}

// text walks over plain text, which may be a key. more: there is more in the line.
func (s *scan) text(column int) (more bool, err *Error) {
	for ; s.pos < len(s.src) && s.src[s.pos] != '\n'; s.pos++ {
		switch c := s.src[s.pos]; {
		case c == ':' && s.blank(s.pos+1):
			s.levels.block(column, false)
			err = s.sign()
			s.pos++
			return true, err
		case c == '#' && s.pos > s.start && s.blank(s.pos-1):
			s.skipLine()
			return false, nil
		}
	}
	s.plain = s.levels.indent()
	s.newline()
	return false, nil
}

// brackets walks to the one that closes the one here.
func (s *scan) brackets() *Error {
	fresh := true // a value may start here
	outer := len(s.levels)
	for s.pos < len(s.src) {
		c := s.src[s.pos]
		switch {
		case c == '\n':
			s.newline()
			continue
		case c == '[' || c == '{':
			s.levels.bracket(c == '[')
			if err := s.sign(); err != nil {
				return err
			}
			fresh = true
		case c == ']' || c == '}':
			s.levels.close()
			s.signs++
			if len(s.levels) == outer {
				s.pos++
				return nil
			}
			fresh = false
		case c == ',':
			s.levels.comma()
			if err := s.sign(); err != nil {
				return err
			}
			fresh = true
		case c == ':' && (fresh || s.blank(s.pos+1) || strings.IndexByte(",[]{}", s.src[s.pos+1]) >= 0):
			if err := s.sign(); err != nil {
				return err
			}
			fresh = true
		case c == '#' && s.blank(s.pos-1):
			s.skipLine()
			continue
		case c == '-' && fresh && s.blank(s.pos+1):
			return s.errorf("a dash in brackets: lists there have commas")
		case (c == '"' || c == '\'') && fresh:
			if err := s.quoted(); err != nil {
				return err
			}
			if s.pos < len(s.src) && s.src[s.pos] == ':' { // as in JSON
				s.pos++
				s.signs++
				fresh = true
				continue
			}
			fresh = false
			continue
		case c != ' ' && c != '\t':
			fresh = false
		}
		s.pos++
	}
	return nil
}

// quoted walks over text in quotes.
func (s *scan) quoted() *Error {
	quote := s.src[s.pos]
	end := 0 // of the line
	for s.pos++; s.pos < len(s.src); s.pos++ {
		switch c := s.src[s.pos]; {
		case c == '\n':
			s.line++
			s.start = s.pos + 1
		case c == '\\' && quote == '"':
			if s.pos+1 < len(s.src) && s.src[s.pos+1] != '\n' {
				s.pos++
			}
		case c == '\t' && quote == '"':
			if end <= s.pos {
				end = s.end()
			}
			if s.tabs += end - s.pos; s.tabs > tabsMax {
				return s.errorf(`too many tabs in long lines in double quotes; write them as \t`)
			}
		case c != quote:
		case quote == '\'' && s.pos+1 < len(s.src) && s.src[s.pos+1] == '\'':
			s.pos++
		default:
			s.pos++
			return nil
		}
	}
	return nil
}
