package manifest

import (
	"fmt"
	"strings"

	"github.com/waystamp/waystamp/internal/yamlfile"
)

// Problem is one thing that is wrong with a file.
type Problem struct {
	Path    string // such as chains[0].functions[1]; "": the file as a whole
	Line    int    // from 1
	Column  int    // from 1, in characters
	Message string // names the value and the rule
}

func (p Problem) String() string {
	if p.Path == "" {
		return p.Message
	}
	return p.Path + ": " + p.Message
}

// Error is a file with problems. There is at least one.
type Error struct {
	Name     string
	Problems []Problem // in the order of the file

	lines []string
}

// Problems that one message shows. A file with more is not worth reading on.
const shownMax = 40

// Lines of the file before the one at fault.
const contextLines = 2

// Error shows each problem with the lines it is about.
func (e *Error) Error() string {
	var b strings.Builder
	for i, p := range e.Problems {
		if i == shownMax {
			fmt.Fprintf(&b, "\n%s: and %d more problems", e.Name, len(e.Problems)-i)
			break
		}
		if i > 0 {
			b.WriteByte('\n')
		}
		fmt.Fprintf(&b, "%s:%d:%d: %s", e.Name, p.Line, p.Column, p)
		e.annotate(&b, p)
	}
	return b.String()
}

// annotate draws the line at fault, with a caret below its column. Of long lines it
// shows what is around that column.
func (e *Error) annotate(b *strings.Builder, p Problem) {
	if p.Line > len(e.lines) {
		return
	}
	for n := max(1, p.Line-contextLines); n < p.Line; n++ {
		fmt.Fprintf(b, "\n  %4d | %s", n, visible(yamlfile.Shorten(yamlfile.LineMax, e.lines[n-1])))
	}
	line, column := yamlfile.Around(e.lines[p.Line-1], p.Column-1)
	fmt.Fprintf(b, "\n> %4d | %s\n       | ", p.Line, visible(string(line)))
	for _, c := range line[:min(column, len(line))] {
		if c != '\t' { // keep tabs, so that the caret stands where the eye looks
			c = ' '
		}
		b.WriteRune(c)
	}
	b.WriteByte('^')
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
