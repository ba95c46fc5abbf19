package yamlfile

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/goccy/go-yaml/parser"
	"pgregory.net/rapid"
)

func refused(t *testing.T, src, message string, line, column int) {
	t.Helper()
	_, err := Parse(src)
	e, ok := errors.AsType[*Error](err)
	if !ok || e.Message != message || e.Line != line || e.Column != column {
		t.Errorf("%.60q: got %v, want %d:%d: %s", src, err, line, column, message)
	}
}

// nested is text in which so many lists or mappings are in one another.
func nested(style string, depth int) string {
	var b strings.Builder
	for i := range depth {
		switch style {
		case "brackets":
			b.WriteString("[")
		case "braces":
			b.WriteString("{a: ")
		case "brackets over lines":
			b.WriteString("[\n")
		case "dashes":
			b.WriteString("- ")
		case "questions":
			b.WriteString("? ")
		case "indentation":
			b.WriteString(strings.Repeat(" ", i) + "a:\n")
		case "indented dashes":
			b.WriteString(strings.Repeat(" ", i) + "-\n")
		case "dashes and keys":
			if i%2 == 0 {
				b.WriteString(strings.Repeat(" ", i) + "- a:\n")
			}
		}
	}
	indent := strings.Repeat(" ", depth)
	switch style {
	case "brackets":
		return b.String() + "x" + strings.Repeat("]", depth)
	case "braces":
		return b.String() + "x" + strings.Repeat("}", depth)
	case "brackets over lines":
		return b.String() + "x" + strings.Repeat("]\n", depth)
	case "indentation", "indented dashes", "dashes and keys":
		return b.String() + indent + "x\n"
	}
	return b.String() + "x"
}

func TestNestingIsBounded(t *testing.T) {
	const message = "nested deeper than 64"
	for style, place := range map[string][2]int{
		"brackets": {1, 65}, "braces": {1, 257}, "brackets over lines": {65, 1}, "dashes": {1, 129}, "questions": {1, 129},
		"indentation": {65, 66}, "indented dashes": {65, 65}, "dashes and keys": {33, 65},
	} {
		if _, err := Parse(nested(style, NestingMax)); err != nil && style != "questions" { // of which the parser takes few
			t.Errorf("%s, %d deep: %v", style, NestingMax, err)
		}
		for _, depth := range []int{NestingMax + 2, 400} { // an even number has a key to each dash
			_, err := Parse(nested(style, depth))
			if e, ok := errors.AsType[*Error](err); !ok || e.Message != message || e.Line != place[0] || e.Column != place[1] {
				t.Errorf("%s, %d deep: got %v, want %d:%d: %s", style, depth, err, place[0], place[1], message)
			}
		}
	}
	refused(t, "é: "+strings.Repeat("[", 64), message, 1, 67) // columns are of characters
}

// What the parser takes too long for, or too much memory.
func TestWhatTheParserCannotBearIsRefused(t *testing.T) {
	refused(t, strings.Repeat("a:\n", 65), "more than 64 fields in one mapping", 65, 2)
	refused(t, "{"+strings.Repeat("a: b, ", 65)+"}", "more than 64 fields in one mapping", 1, 384)
	refused(t, strings.Repeat("---\n", 65), "more than 64 documents", 65, 1)
	refused(t, strings.Repeat("- !t a\n", 257), "more than 256 tags, anchors and aliases", 257, 3)
	refused(t, strings.Repeat("- &t a\n", 257), "more than 256 tags, anchors and aliases", 257, 3)
	refused(t, "["+strings.Repeat("{a: },", 100)+"]", "more than 64 values that are empty in front of this", 1, 390)
	refused(t, strings.Repeat("-\n", 100), "more than 64 values that are empty in front of this", 66, 1)
	refused(t, "[- a]", "a dash in brackets: lists there have commas", 1, 2)
	refused(t, "a: |\n  b\n"+strings.Repeat("\n", 10000), "too many empty lines at the end of a block of text", 8193, 1)
	refused(t, `a: "`+strings.Repeat("\t", 10000)+`"`, `too many tabs in long lines in double quotes; write them as \t`, 1, 4268)
	refused(t, "["+strings.Repeat("a,", SignsMax)+"]", fmt.Sprintf("the file is too large: more than %d brackets, commas, colons and dashes", SignsMax), 1, 2*SignsMax+1)
}

// None of these may take long. A quadratic one of this size takes minutes.
func TestHostileTextsTakeLinearTime(t *testing.T) {
	const size = 1 << 20
	begun := time.Now()
	for _, c := range [][3]string{
		{"", "[", ""}, {"", "{a: ", ""}, {"", "- ", ""}, {"", "? ", ""}, {"", ": ", ""}, {"", "a: ", ""}, {"", "a:\n", ""}, {"", "<<: ", ""},
		{"", "]", ""}, {"x: [\n", "a: ", ""}, {"", "*a ", ""}, {"", "&a ", ""}, {"", "&a\n", ""}, {"", "!t ", ""}, {"", "!t\n", ""},
		{"", "- !t\n", ""}, {"[", "{a: },", "]"}, {"[", "{a},", "]"}, {"", "- a:\n", ""}, {"", "- \n", ""}, {"[", "- ", ""},
		{"", "---\n", ""}, {"", "...\n", ""}, {"a: |\n", "\n", ""}, {"a: >\n", "\n", ""}, {"a: >\n", " \n", ""}, {"a: b\n  - c\n", "\n", ""},
		{`a: "`, "\t", ""}, {`a: "`, "\ta", `"`}, {"a: '", "\n", "'"}, {"", "- a\n", ""}, {"", "#\n", ""}, {"a: ", "b", ""},
	} {
		src := c[0] + strings.Repeat(c[1], size/len(c[1])) + c[2]
		_, err := Parse(src)
		if err != nil && utf8.RuneCountInString(err.Error()) > messageMax+40 {
			t.Errorf("%q: a message of %d bytes", c, len(err.Error()))
		}
	}
	if d := time.Since(begun); d > 5*time.Minute {
		t.Errorf("they took %s", d)
	}
}

// A node of a tree, and how it is written.
type node struct {
	kind     string // scalar, list, mapping
	text     string
	children []*node
}

// Text that looks like signs, where it is none.
var texts = []string{
	"a", "a-b", "it's", `a "b`, "2001:db8::1", "x]y", "x[y", "x{y", "a#b", "http://x", `"[[[[ {{ - - - #"`, "'it''s [[[ - - a: b'", `"\"[[[["`,
	"'{'", `"a: - b"`, "-1", "x,y",
}

// Within brackets and braces these would be signs.
func plainInBrackets(s string) bool {
	return s[0] == '"' || s[0] == '\'' || !strings.ContainsAny(s, "[]{},")
}

func genNode(t *rapid.T, depth int) *node {
	if depth == 0 || rapid.IntRange(0, 5).Draw(t, "leaf") == 0 {
		return &node{kind: "scalar", text: rapid.SampledFrom(texts).Draw(t, "text")}
	}
	n := &node{kind: rapid.SampledFrom([]string{"list", "mapping"}).Draw(t, "kind")}
	for range rapid.IntRange(1, 3).Draw(t, "children") {
		n.children = append(n.children, genNode(t, depth-1))
	}
	return n
}

func depthOf(n *node) int {
	d := 0
	for _, c := range n.children {
		d = max(d, depthOf(c))
	}
	if n.kind != "scalar" {
		d++
	}
	return d
}

// flow writes a node in brackets.
func flow(t *rapid.T, b *strings.Builder, n *node) {
	space := func() {
		b.WriteString(rapid.SampledFrom([]string{"", " ", "\n ", " # [[[ { ' \"\n "}).Draw(t, "space"))
	}
	switch n.kind {
	case "scalar":
		if plainInBrackets(n.text) {
			b.WriteString(n.text)
		} else {
			b.WriteString("z")
		}
	case "list":
		b.WriteString("[")
		for i, c := range n.children {
			if i > 0 {
				b.WriteString(",")
				space()
			}
			flow(t, b, c)
		}
		b.WriteString("]")
	case "mapping":
		b.WriteString("{")
		for i, c := range n.children {
			if i > 0 {
				b.WriteString(", ")
				space()
			}
			fmt.Fprintf(b, "k%d: ", i)
			flow(t, b, c)
		}
		b.WriteString("}")
	}
}

// block writes a node by indentation, behind a dash or a colon.
func block(t *rapid.T, b *strings.Builder, n *node, indent int) {
	pad := strings.Repeat(" ", indent)
	if n.kind == "scalar" {
		switch rapid.IntRange(0, 3).Draw(t, "scalar") {
		case 0:
			fmt.Fprintf(b, " |\n%s [[[[ - - - {\n\n%s  ' \"\n", pad, pad)
		case 1:
			fmt.Fprintf(b, " %s # ' \" [[[[\n", n.text)
		case 2:
			fmt.Fprintf(b, " word\n%s [[[[ - goes on {{\n", pad)
		default:
			fmt.Fprintf(b, " %s\n", n.text)
		}
		return
	}
	if rapid.IntRange(0, 4).Draw(t, "brackets") == 0 {
		b.WriteString(" ")
		flow(t, b, n)
		b.WriteString("\n")
		return
	}
	b.WriteString("\n")
	for i, c := range n.children {
		if rapid.IntRange(0, 6).Draw(t, "comment") == 0 {
			b.WriteString("# - - - [[[[ { '\n\n")
		}
		if n.kind == "list" {
			b.WriteString(pad + "-")
		} else {
			b.WriteString(pad + rapid.SampledFrom([]string{"k%d", `"k%d"`, "'k%d'"}).Draw(t, "key"))
			s := b.String()
			b.Reset()
			b.WriteString(strings.Replace(s, "%d", fmt.Sprint(i), 1) + ":")
		}
		block(t, b, c, indent+1+rapid.IntRange(0, 2).Draw(t, "more"))
	}
}

// The scan counts as the parser does: it refuses no text for its nesting that is not
// nested so deep, and lets none through that is.
func TestScanCountsWhatIsNestedAndNothingElse(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := genNode(t, rapid.IntRange(1, 6).Draw(t, "depth"))
		if n.kind == "scalar" {
			n = &node{kind: "list", children: []*node{n}}
		}
		// Put into so many lists that it is at the limit.
		around := NestingMax - depthOf(n)
		write := func(around int) string {
			var b strings.Builder
			for i := range around {
				b.WriteString(strings.Repeat(" ", i) + "-\n")
			}
			s := strings.TrimSuffix(b.String(), "\n")
			b.Reset()
			block(t, &b, n, around)
			if around == 0 {
				return strings.TrimPrefix(b.String(), "\n")
			}
			return s + b.String()
		}
		within := write(around)
		if _, err := parser.ParseBytes([]byte(within), 0); err != nil {
			t.Skip("not YAML to the parser") // its own shortcomings
		}
		if _, err := Parse(within); err != nil {
			t.Fatalf("%d deep, and refused: %v\n%s", NestingMax, err, within)
		}
		if err := newScan(write(around + 1)).run(); err == nil {
			t.Fatalf("%d deep, and the scan takes it", NestingMax+1)
		}
	})
}

// Whatever the text, both agree that it is too much, and a text that is taken is
// within the limits.
func FuzzParse(f *testing.F) {
	for _, s := range []string{"a: [b, {c: d}]\n", "- |\n  x\n\n- 'y'\n", "a: \"b\n  c\"\n", "? a\n: - b\n  - c\n", "a: b\n  - c\n# d\n", "a: &x !t b\n*x : c\n"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, src string) {
		if len(src) > 1<<16 {
			return
		}
		_, err := Parse(src)
		if e, ok := errors.AsType[*Error](err); err != nil && (!ok || e.Line < 1 || e.Column < 1 || e.Message == "") {
			t.Fatalf("error %#v", err)
		}
	})
}

func TestLongTextIsShownInPart(t *testing.T) {
	if got := Shorten(3, "äöüß"); got != "äöü…" {
		t.Errorf("shortened to %q", got)
	}
	if got := Shorten(4, "äöüß"); got != "äöüß" {
		t.Errorf("shortened to %q", got)
	}
	long := strings.Repeat("a", 500) + "X" + strings.Repeat("b", 500)
	for _, column := range []int{0, 10, 79, 80, 81, 500, 921, 1000, 1001} {
		line, at := Around(long, column)
		want := 'X'
		if column < len(long) {
			want = rune(long[column])
		} else if at != len(line) {
			t.Errorf("column %d: at %d of %d", column, at, len(line))
			continue
		}
		if len(line) > LineMax+2 || column < len(long) && line[at] != want {
			t.Errorf("column %d: %q at %d", column, string(line), at)
		}
	}
}
