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
		b.WriteString(yamlfile.Caret(e.lines, 1, p.Line, p.Column))
	}
	return b.String()
}
