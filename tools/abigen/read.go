package main

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// contract is what the headers say.
type contract struct {
	Constants []constant
	Enums     []enum
	Structs   []structure
	// ReasonText holds the sentence of every enumerator of enum ws_reason, by
	// its C name, and ReasonMarks what the header says behind it, of reasonMarks.
	ReasonText  map[string]string
	ReasonMarks map[string][]string
	// FilePath holds the path of every enumerator of enum ws_file but the first,
	// by its C name.
	FilePath map[string]string
}

// constant is a #define of a number.
type constant struct {
	C       string // WS_SEGS_MAX
	Value   uint64
	Comment string // what the header says above it; may be empty
}

type enum struct {
	C       string // ws_scheme
	Comment string
	Values  []enumerator
}

type enumerator struct {
	C       string // WS_SCHEME_POT
	Value   uint64
	Comment string // on the same line
}

var (
	reDefine = regexp.MustCompile(`(?m)^#define (WS_[A-Z0-9_]+)[ \t]+\S`)
	reEnum   = regexp.MustCompile(`(?s)((?:/\*(?:[^*]|\*[^/])*\*/\s*)?)enum (ws_\w+)\s*\{(.*?)\};`)
	// One enumerator; its value is asked from clang.
	reEnumerator = regexp.MustCompile(`(?s)\b(WS_\w+)\b(?:\s*=[^,/]*)?\s*(?:,|$|/)`)
	reReason     = regexp.MustCompile(`wsabi_reason\s+(\w+)((?:\s*"(?:[^"\\]|\\.)*")+)(?:\s*,\s*(\w+(?:\s*\|\s*\w+)*))?`)
	reFile       = regexp.MustCompile(`wsabi_file\s+(\w+)((?:\s*"(?:[^"\\]|\\.)*")+)`)
	reString     = regexp.MustCompile(`"(?:[^"\\]|\\.)*"`)
	reComment    = regexp.MustCompile(`(?s)/\*.*?\*/`)
	reValue      = regexp.MustCompile(`(?m)^@wsabi_value_(WS_\w+) = .*constant i64 (-?\d+)`)
)

// readContract asks clang for the names, texts and values in
// include/waystamp/{abi,reasons}.h.
func readContract(clang, include string) (contract, error) {
	src, err := os.ReadFile(filepath.Join(include, "waystamp", "abi.h"))
	if err != nil {
		return contract{}, fmt.Errorf("read the contract: %w", err)
	}
	var c contract

	// Names and comments of numbers come from the header, since the
	// preprocessor forgets the comments; their values come from clang below.
	for _, m := range reDefine.FindAllSubmatchIndex(src, -1) {
		c.Constants = append(c.Constants, constant{
			C:       string(src[m[2]:m[3]]),
			Comment: commentAbove(src[:m[0]]),
		})
	}

	// Enums as the compiler sees them, X-macros expanded; -C keeps comments.
	out, err := runClang(clang, include, "#include <waystamp/abi.h>\n", "-E", "-C", "-P")
	if err != nil {
		return contract{}, err
	}
	for _, m := range reEnum.FindAllSubmatch(out, -1) {
		e := enum{C: string(m[2]), Comment: commentText(string(m[1]))}
		e.Values = enumerators(string(m[3]))
		if len(e.Values) == 0 {
			return contract{}, fmt.Errorf("enum %s has no enumerator", e.C)
		}
		c.Enums = append(c.Enums, e)
	}
	if len(c.Enums) == 0 || len(c.Constants) == 0 {
		return contract{}, fmt.Errorf("%s/waystamp/abi.h has %d enums and %d constants; expect some of both",
			include, len(c.Enums), len(c.Constants))
	}

	if c.Structs, err = readStructs(clang, include, src); err != nil {
		return contract{}, err
	}
	if err = readReasons(&c, clang, include); err != nil {
		return contract{}, err
	}
	if err = readFiles(&c, clang, include); err != nil {
		return contract{}, err
	}
	return c, fillValues(&c, clang, include)
}

// enumerators cuts the body of an enum, comments included, into its parts.
func enumerators(body string) []enumerator {
	var vs []enumerator
	bare := reComment.ReplaceAllStringFunc(body, func(s string) string {
		return strings.Repeat(" ", len(s))
	})
	ms := reEnumerator.FindAllStringSubmatchIndex(bare, -1)
	for i, m := range ms {
		end := len(body)
		if i+1 < len(ms) {
			end = ms[i+1][2]
		}
		comment := reComment.FindString(body[m[3]:end])
		vs = append(vs, enumerator{C: body[m[2]:m[3]], Comment: commentText(comment)})
	}
	return vs
}

// reasonMarks may stand behind a reason's text; reasons.h says what they mean.
var reasonMarks = []string{"REPORT", "AUDIT", "SEVERAL", "SPENT"}

// readReasons expands the X-macro of reasons.h.
func readReasons(c *contract, clang, include string) error {
	out, err := runClang(clang, include,
		"#include <waystamp/reasons.h>\n#define X(name, ...) wsabi_reason name __VA_ARGS__\nWS_REASONS(X)\n",
		"-E", "-P")
	if err != nil {
		return err
	}
	c.ReasonText, c.ReasonMarks = map[string]string{}, map[string][]string{}
	for _, m := range reReason.FindAllSubmatch(out, -1) {
		name := "WS_REASON_" + string(m[1])
		text, err := joined(m[2])
		if err != nil {
			return fmt.Errorf("text of %s: %w", name, err)
		}
		if text == "" {
			return fmt.Errorf("reasons.h: %s has no text", name)
		}
		c.ReasonText[name] = text
		for _, mark := range strings.Fields(strings.ReplaceAll(string(m[3]), "|", " ")) {
			if !slices.Contains(reasonMarks, mark) {
				return fmt.Errorf("reasons.h: %s says %s; only %s may stand behind the text", name, mark, strings.Join(reasonMarks, ", "))
			}
			c.ReasonMarks[name] = append(c.ReasonMarks[name], mark)
		}
	}
	return nil
}

// readFiles expands the X-macro of places.h.
func readFiles(c *contract, clang, include string) error {
	out, err := runClang(clang, include,
		"#include <waystamp/places.h>\n#define X(name, folder, file) wsabi_file name folder file\nWS_FILES(X)\n",
		"-E", "-P")
	if err != nil {
		return err
	}
	c.FilePath = map[string]string{}
	for _, m := range reFile.FindAllSubmatch(out, -1) {
		name := "WS_FILE_" + string(m[1])
		if c.FilePath[name], err = joined(m[2]); err != nil {
			return fmt.Errorf("path of %s: %w", name, err)
		}
	}
	return nil
}

// joined is the text of C string literals one after the other.
func joined(literals []byte) (string, error) {
	var text strings.Builder
	for _, lit := range reString.FindAll(literals, -1) {
		s, err := strconv.Unquote(string(lit))
		if err != nil {
			return "", err
		}
		text.WriteString(s)
	}
	return text.String(), nil
}

// fillValues lets clang compute every number: implicit enumerators, and
// expressions in #defines.
func fillValues(c *contract, clang, include string) error {
	var names []string
	for _, k := range c.Constants {
		names = append(names, k.C)
	}
	for _, e := range c.Enums {
		for _, v := range e.Values {
			names = append(names, v.C)
		}
	}
	var src strings.Builder
	src.WriteString("#include <waystamp/abi.h>\n")
	for _, n := range names {
		fmt.Fprintf(&src, "const __u64 wsabi_value_%s = %s;\n", n, n)
	}
	out, err := runClang(clang, include, src.String(), "-S", "-emit-llvm", "-O0")
	if err != nil {
		return err
	}
	values := map[string]uint64{}
	for _, m := range reValue.FindAllSubmatch(out, -1) {
		v, err := strconv.ParseInt(string(m[2]), 10, 64)
		if err != nil {
			return fmt.Errorf("value of %s: %w", m[1], err)
		}
		values[string(m[1])] = uint64(v) // LLVM prints i64 as signed
	}
	for _, n := range names {
		if _, ok := values[n]; !ok {
			return fmt.Errorf("clang gave no value for %s; is it a number?", n)
		}
	}
	for i := range c.Constants {
		c.Constants[i].Value = values[c.Constants[i].C]
	}
	for i := range c.Enums {
		for j := range c.Enums[i].Values {
			v := &c.Enums[i].Values[j]
			v.Value = values[v.C]
		}
	}
	return nil
}

// runClang compiles source, given on standard input, and returns what clang
// writes to standard output. No header of the build machine is seen.
func runClang(clang, include, source string, args ...string) ([]byte, error) {
	args = slices.Concat([]string{"-target", "bpf", "-nostdinc", "-Wall", "-Werror", "-I", include},
		args, []string{"-x", "c", "-o", "-", "-"})
	cmd := exec.Command(clang, args...)
	cmd.Stdin = strings.NewReader(source)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("run %s: %w\n%s", strings.Join(cmd.Args, " "), err, stderr.Bytes())
	}
	return stdout.Bytes(), nil
}

// commentAbove returns the text of a comment that ends in the line right above.
func commentAbove(src []byte) string {
	s := strings.TrimSuffix(string(src), "\n")
	if !strings.HasSuffix(s, "*/") {
		return ""
	}
	i := strings.LastIndex(s, "/*")
	if i < 0 {
		return ""
	}
	return commentText(s[i:])
}

// commentText takes the stars and line ends out of a C comment.
func commentText(s string) string {
	s = strings.TrimSpace(s)
	s = strings.TrimSuffix(strings.TrimPrefix(s, "/*"), "*/")
	var words []string
	for line := range strings.Lines(s) {
		line = strings.TrimPrefix(strings.TrimSpace(line), "*")
		words = append(words, strings.Fields(line)...)
	}
	return strings.Join(words, " ")
}
