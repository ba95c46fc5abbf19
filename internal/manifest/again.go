package manifest

import (
	"slices"
	"strings"

	"github.com/goccy/go-yaml/ast"

	"github.com/waystamp/waystamp/internal/yamlfile"
)

// Parsed is what is remembered of a file, so that one that differs from it in some chains alone is read by what differs.
type Parsed struct {
	lines  []string
	chains []chain // as they were read
	starts []int   // of each chain the first line, from 0; none: the chains are not a list of one chain below the other
	end    int     // the line behind the last chain
}

// ParseAfter is Parse of a file of which most was read before: last is of that time, or nil. It reads the chains in which the texts
// differ, with all that stands before and behind the chains, and takes the others as they were read; and then checks the whole as Parse does. again says that it
// did so. If there is something to complain about, it reads all, since the others' places may be different ones.
func ParseAfter(last *Parsed, name string, src []byte) (m Manifest, p *Parsed, again bool, err error) {
	if last != nil && len(src) <= SourceMax {
		if m, p, ok := last.parse(name, src); ok {
			return m, p, true, nil
		}
	}
	r := &reader{name: name}
	m, p, err = r.parse(src)
	return m, p, false, err
}

// parse reads a file that differs in some chains; false: it has to be read as a whole.
func (p *Parsed) parse(name string, src []byte) (m Manifest, next *Parsed, ok bool) {
	if len(p.starts) == 0 {
		return m, nil, false
	}
	whole := string(withoutReturns(src))
	signs := 0 // which document bounds, of the whole file
	for _, sign := range []string{"[", "]", "{", "}", ",", ":", "-", "?", "!", "&", "*"} {
		signs += strings.Count(whole, sign)
	}
	if signs > yamlfile.SignsMax {
		return m, nil, false
	}
	trimmed := strings.TrimRight(whole, "\n")
	lines := strings.Split(trimmed, "\n")
	least := min(len(lines), len(p.lines))
	head := 0 // lines that are the same
	for head < least && lines[head] == p.lines[head] {
		head++
	}
	tail := 0
	for tail < least-head && lines[len(lines)-1-tail] == p.lines[len(p.lines)-1-tail] {
		tail++
	}
	was := len(p.lines) - tail // where the old lines are the same again
	moved := len(lines) - len(p.lines)
	if head < p.starts[0] || was > p.end {
		return m, nil, false
	}
	// A chain that begins before the first other line ends where the lines say so, and the first chain that begins behind the last one shows
	// that it does not end later than before.
	from, _ := slices.BinarySearch(p.starts, head)
	from = max(from-1, 0)
	to, _ := slices.BinarySearch(p.starts, was)
	text := slices.Clone(lines)
	for i := p.starts[0]; i < p.starts[from]; i++ {
		text[i] = ""
	}
	if to+1 < len(p.starts) {
		for i := p.starts[to+1]; i < p.end; i++ {
			text[i+moved] = ""
		}
	}
	r := &reader{name: name}
	_, root, ok := r.document([]byte(strings.Join(text, "\n") + whole[len(trimmed):]))
	if !ok || !r.version(root) {
		return m, nil, false
	}
	f := r.file(root)
	starts, end, ok := chainLines(root, text)
	if !ok || len(r.problems) > 0 || len(starts) != len(f.chains.value) || end != p.end+moved {
		return m, nil, false
	}
	read := f.chains.value
	next = &Parsed{lines: lines, end: end}
	next.starts = append(next.starts, p.starts[:from]...)
	if to < len(p.starts) { // the last one that was read is as before
		if len(starts) == 0 || starts[len(starts)-1] != p.starts[to]+moved {
			return m, nil, false
		}
		read, starts = read[:len(read)-1], starts[:len(starts)-1]
	}
	next.starts = append(next.starts, starts...)
	for _, s := range p.starts[to:] {
		next.starts = append(next.starts, s+moved)
	}
	next.chains = slices.Concat(p.chains[:from], read, p.chains[to:])
	f.chains.value = slices.Clone(next.chains)
	m = r.check(f)
	return m, next, len(r.problems) == 0 && len(r.warnings) == 0
}

// chainLines are the lines on which the chains of a file begin, from 0, and the one behind the last; false: they do not each begin on a line of their own, with the dash of
// a list at the same column.
func chainLines(root cursor, lines []string) (starts []int, end int, ok bool) {
	top, ok := root.node.(*ast.MappingNode)
	if !ok {
		return nil, 0, false
	}
	for i, v := range top.Values {
		if key, plain := v.Key.(*ast.StringNode); !plain || key.Value != "chains" {
			continue
		}
		list, ok := v.Value.(*ast.SequenceNode)
		if !ok || list.IsFlowStyle || len(list.Values) == 0 {
			return nil, 0, false
		}
		dash := -1
		for _, n := range list.Values {
			if n == nil {
				return nil, 0, false
			}
			at := where("", n).line - 1
			if at >= len(lines) || len(starts) > 0 && at <= starts[len(starts)-1] {
				return nil, 0, false
			}
			text := strings.TrimLeft(lines[at], " ")
			column := len(lines[at]) - len(text)
			if !strings.HasPrefix(text, "- ") || dash >= 0 && column != dash {
				return nil, 0, false
			}
			dash, starts = column, append(starts, at)
		}
		end = len(lines)
		if i+1 < len(top.Values) {
			end = where("", top.Values[i+1].Key).line - 1
		}
		return starts, end, end > starts[len(starts)-1]
	}
	return nil, 0, false
}
