package yamlfile

import (
	"fmt"
	"strings"
)

// LineMax is how many characters of a line are shown.
const LineMax = 160

// Shorten cuts text to so many characters, and an ellipsis.
func Shorten(most int, s string) string {
	n := 0
	for i := range s {
		if n++; n > most {
			return s[:i] + "…"
		}
	}
	return s
}

// Around cuts a line to LineMax characters around a column, from 0, and says which
// column that is then.
func Around(line string, column int) ([]rune, int) {
	r := []rune(line)
	if len(r) <= LineMax {
		return r, column
	}
	from := max(0, min(column-LineMax/2, len(r)-LineMax))
	to := min(len(r), from+LineMax)
	var out []rune
	if from > 0 {
		out = append(out, '…')
		column++
	}
	out = append(out, r[from:to]...)
	if to < len(r) {
		out = append(out, '…')
	}
	return out, column - from
}

// Lines of the text before the one at fault.
const contextLines = 2

// Caret draws a line of a text with a caret below a column, and up to two lines
// before it, each after a line break. Lines have the numbers of their file: first is
// the number of lines[0]. line and column are numbers of that kind, the column in
// characters from 1. A line that is not in the text is not drawn.
func Caret(lines []string, first, line, column int) string {
	at := line - first
	if at < 0 || at >= len(lines) {
		return ""
	}
	var b strings.Builder
	for i := max(0, at-contextLines); i < at; i++ {
		fmt.Fprintf(&b, "\n  %4d | %s", first+i, visible(Shorten(LineMax, lines[i])))
	}
	text, column := Around(lines[at], column-1)
	fmt.Fprintf(&b, "\n> %4d | %s\n       | ", line, visible(string(text)))
	for _, c := range text[:min(column, len(text))] {
		if c != '\t' { // keep tabs, so that the caret stands where the eye looks
			c = ' '
		}
		b.WriteRune(c)
	}
	b.WriteByte('^')
	return b.String()
}

// visible keeps a file from sending anything but text to a terminal.
func visible(line string) string {
	return strings.Map(func(c rune) rune {
		if c != '\t' && (c < ' ' || c >= 0x7f && c < 0xa0) {
			return '\ufffd'
		}
		return c
	}, line)
}
