package arch

import (
	"fmt"
	"net/url"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/waystamp/waystamp/internal/cli"
	"github.com/waystamp/waystamp/internal/command"
	"github.com/waystamp/waystamp/internal/labcli"
	"github.com/waystamp/waystamp/internal/manifest"
	"github.com/waystamp/waystamp/internal/pot"
)

// block is a fenced block of a Markdown file.
type block struct {
	file string
	line int // of its first line
	lang string
	text string
}

var (
	reFence    = regexp.MustCompile("(?ms)^```([a-z]*)[^\n]*\n(.*?)^```[ \t]*$")
	reLink     = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	reHeading  = regexp.MustCompile(`(?m)^#{1,6} (.+)$`)
	reInline   = regexp.MustCompile("`([^`\n]+)`")
	reCommand  = regexp.MustCompile(`^(?:\$ |# )?(?:sudo )?(?:\./)?(?:bin/)?waystamp(?: (.*))?$`)
	reMachine  = regexp.MustCompile(`(^|[\s"'=(:])/(home|root|Users|work|mnt|opt/go|build)/[\w.]`)
	reMakeWord = regexp.MustCompile(`^(?:\$ )?make(?: -\w+)* ([a-z-]+)`)
)

func (tr *tree) markdown(t *testing.T) map[string]string {
	t.Helper()
	m := map[string]string{}
	for _, p := range tr.files {
		if path.Ext(p) == ".md" {
			m[p] = tr.read(t, p)
		}
	}
	return m
}

func blocks(file, text string) []block {
	var bs []block
	for _, m := range reFence.FindAllStringSubmatchIndex(text, -1) {
		bs = append(bs, block{file: file, line: lineOf(text, m[4]), lang: text[m[2]:m[3]], text: text[m[4]:m[5]]})
	}
	return bs
}

func TestTheDocumentsAreThere(t *testing.T) {
	tr := repository(t)
	for _, p := range []string{
		"README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "LICENSE",
		"LICENSES/GPL-2.0-only.txt", "LICENSES/BSD-2-Clause.txt",
		"docs/reference/refusals.md", "docs/reference/domain-file.md", "docs/reference/commands.md", "docs/reference/glossary.md",
		"docs/tutorial.md", "docs/reference/json.md", "docs/how-to/functions.md", "docs/how-to/own-traffic-and-marks.md", "docs/how-to/mtu-and-mss.md",
		"docs/how-to/change-a-chain.md", "docs/how-to/troubleshoot.md",
	} {
		if !slices.Contains(tr.files, p) || len(tr.read(t, p)) < 500 {
			t.Errorf("%s is missing or all but empty; write it", p)
		}
	}
}

func TestLinksInDocumentsLeadSomewhere(t *testing.T) {
	tr := repository(t)
	docs := tr.markdown(t)
	for p, text := range docs {
		for _, m := range reLink.FindAllStringSubmatchIndex(text, -1) {
			u, err := url.Parse(text[m[2]:m[3]])
			if err != nil || u.Scheme != "" {
				continue // another site's
			}
			target := p
			if u.Path != "" {
				target = path.Join(path.Dir(p), u.Path)
			}
			isFile := slices.Contains(tr.files, target)
			isDir := slices.ContainsFunc(tr.files, func(f string) bool { return strings.HasPrefix(f, target+"/") })
			if path.IsAbs(u.Path) || !isFile && !isDir {
				t.Errorf("%s:%d: the link %s leads nowhere; make it relative to this file", p, lineOf(text, m[0]), u)
				continue
			}
			if u.Fragment != "" && !slices.Contains(anchors(docs[target]), u.Fragment) {
				t.Errorf("%s:%d: %s has no heading for #%s", p, lineOf(text, m[0]), target, u.Fragment)
			}
		}
	}
}

// anchors are what a page calls its headings: lower case, spaces as hyphens,
// no punctuation.
func anchors(text string) []string {
	var as []string
	for _, m := range reHeading.FindAllStringSubmatch(reFence.ReplaceAllString(text, ""), -1) {
		as = append(as, strings.Map(func(r rune) rune {
			switch {
			case r == ' ':
				return '-'
			case r == '-' || r == '_' || r >= '0' && r <= '9' || r >= 'a' && r <= 'z':
				return r
			}
			return -1
		}, strings.ToLower(m[1])))
	}
	return as
}

// Every command that a document shows, in a block or between backquotes,
// exists, with its flags.
func TestCommandsInDocumentsExist(t *testing.T) {
	tr := repository(t)
	root := command.Whole(cli.NewRootCommand(), labcli.NewRootCommand())
	targets := regexp.MustCompile(`(?m)^([a-z-]+):`).FindAllStringSubmatch(tr.read(t, "Makefile"), -1)
	checked := 0
	checkOne := func(file string, line int, command string) {
		if m := reMakeWord.FindStringSubmatch(command); m != nil {
			checked++
			if !slices.ContainsFunc(targets, func(tg []string) bool { return tg[1] == m[1] }) {
				t.Errorf("%s:%d: `make %s`: the Makefile has no such target", file, line, m[1])
			}
		}
		if m := reCommand.FindStringSubmatch(command); m != nil {
			checked++
			if why := wrong(root, m[1]); why != "" {
				t.Errorf("%s:%d: `%s`: %s; correct it, or say in words that it is not there yet", file, line, command, why)
			}
		}
	}
	check := func(file string, line int, command string) {
		for part := range strings.SplitSeq(command, " | ") {
			checkOne(file, line, part)
		}
	}
	for p, text := range tr.markdown(t) {
		for _, b := range blocks(p, text) {
			if b.lang == "yaml" || b.lang == "text" {
				continue
			}
			joined := strings.ReplaceAll(b.text, "\\\n", "  ") // a continued line is one
			for i, line := range strings.Split(joined, "\n") {
				check(p, b.line+i, strings.TrimSpace(line))
			}
		}
		prose := reFence.ReplaceAllStringFunc(text, func(s string) string { return strings.Repeat("\n", strings.Count(s, "\n")) })
		for _, m := range reInline.FindAllStringSubmatchIndex(prose, -1) {
			check(p, lineOf(prose, m[0]), prose[m[2]:m[3]])
		}
	}
	if checked == 0 {
		t.Error("no document shows a command; reCommand must be wrong")
	}
}

// wrong says why args are no command line of root; "" if they are. What follows
// a comment sign, a pipe or a redirection is the shell's.
func wrong(root *cobra.Command, args string) string {
	var words []string
	for _, w := range strings.Fields(args) {
		if strings.HasPrefix(w, "#") || strings.ContainsAny(w, "|&;<>") {
			break
		}
		if w != "…" && w != "..." {
			words = append(words, w)
		}
	}
	cmd := root
	for len(words) > 0 && !strings.HasPrefix(words[0], "-") {
		i := slices.IndexFunc(cmd.Commands(), func(c *cobra.Command) bool { return c.Name() == words[0] })
		if i < 0 {
			if !cmd.HasSubCommands() || words[0] == strings.ToUpper(words[0]) {
				break
			}
			return cmd.CommandPath() + " has no command " + words[0]
		}
		cmd, words = cmd.Commands()[i], words[1:]
	}
	for _, w := range words {
		if w == "--" {
			break
		}
		name, isLong := strings.CutPrefix(w, "--")
		name, _, _ = strings.Cut(name, "=")
		var f *pflag.Flag
		switch {
		case isLong && name == "help", w == "-h":
			continue
		case isLong:
			f = lookup(cmd, func(s *pflag.FlagSet) *pflag.Flag { return s.Lookup(name) })
		case len(w) > 1 && w[0] == '-' && (w[1] < '0' || w[1] > '9'):
			f = lookup(cmd, func(s *pflag.FlagSet) *pflag.Flag { return s.ShorthandLookup(w[1:2]) })
		default:
			continue
		}
		if f == nil {
			return cmd.CommandPath() + " has no flag " + w
		}
	}
	return ""
}

func lookup(cmd *cobra.Command, by func(*pflag.FlagSet) *pflag.Flag) *pflag.Flag {
	if f := by(cmd.Flags()); f != nil {
		return f
	}
	return by(cmd.InheritedFlags())
}

// Every domain file and every profile that a document or examples/ shows is one
// that the product takes.
func TestYAMLInDocumentsIsValid(t *testing.T) {
	tr := repository(t)
	var bs []block
	for p, text := range tr.markdown(t) {
		bs = append(bs, blocks(p, text)...)
	}
	for _, p := range tr.files {
		if path.Dir(p) == "examples" {
			bs = append(bs, block{file: p, lang: strings.TrimPrefix(path.Ext(p), "."), text: tr.read(t, p)})
		}
	}
	n := 0
	for _, b := range bs {
		if b.lang != "yaml" && b.lang != "yml" {
			continue
		}
		var err error
		switch {
		case strings.Contains(b.text, "prime-number:"):
			_, err = pot.ParseProfile(b.file, []byte(b.text))
		case regexp.MustCompile(`(?m)^version:`).MatchString(b.text):
			_, err = manifest.Parse(b.file, []byte(b.text))
		default:
			t.Errorf("%s:%d: a YAML block that is neither a whole domain file nor a profile cannot be checked; show the whole, or mark a part of one as ```text", b.file, b.line)
			continue
		}
		n++
		if err != nil {
			t.Errorf("%s:%d: this is shown as valid, but is not:\n%v", b.file, b.line, err)
		}
	}
	if n == 0 {
		t.Error("neither the documents nor examples/ show a domain file; a newcomer wants one")
	}
}

// The index of decisions names each of them as its own heading does.
func TestTheIndexOfDecisionsIsTheirHeadings(t *testing.T) {
	tr := repository(t)
	index := tr.read(t, "docs/adr/README.md")
	n := 0
	for _, p := range tr.files {
		name := path.Base(p)
		if path.Dir(p) != "docs/adr" || name == "README.md" || path.Ext(p) != ".md" {
			continue
		}
		n++
		number, title, ok := strings.Cut(strings.TrimPrefix(strings.SplitN(tr.read(t, p), "\n", 2)[0], "# "), " ")
		if !ok || number != name[:4] {
			t.Errorf("%s starts with another heading than # %s and what was decided", p, name[:4])
			continue
		}
		if line := "| [" + number + "](" + name + ") | " + title + " |\n"; !strings.Contains(index, line) {
			t.Errorf("docs/adr/README.md has no line %q", line)
		}
	}
	if n == 0 {
		t.Error("there are no decisions in docs/adr")
	}
}

// The page on zero trust names tests that are there, for each row that it ticks, and counts right.
func TestThePageOnZeroTrustNamesItsTests(t *testing.T) {
	tr := repository(t)
	tests := map[string]bool{}
	for _, p := range tr.files {
		if strings.HasSuffix(p, "_test.go") {
			for _, m := range regexp.MustCompile(`(?m)^func (Test\w+)\(`).FindAllStringSubmatch(tr.read(t, p), -1) {
				tests[m[1]] = true
			}
		}
	}
	const page = "docs/reference/zero-trust.md"
	text := tr.read(t, page)
	count := map[string]int{}
	for _, row := range regexp.MustCompile(`(?m)^\| ([A-Z][^|]*) \| \*+(yes|in part|no)\*+ \|.*\|([^|]*)\|$`).FindAllStringSubmatch(text, -1) {
		count[row[2]]++
		shown := reInline.FindAllStringSubmatch(row[3], -1)
		if row[2] != "no" && len(shown) == 0 {
			t.Errorf("%s: %q says %s, and names no test", page, row[1], row[2])
		}
		for _, s := range shown {
			if !tests[s[1]] {
				t.Errorf("%s: %q names %s, which is no test", page, row[1], s[1])
			}
		}
	}
	// The results are of the tests that the row names now.
	for _, row := range regexp.MustCompile(`(?m)^\| ([A-Z][^|]*) \| \*+(yes|in part|no)\*+ \|.*\|([^|]*)\|$`).FindAllStringSubmatch(text, -1) {
		n := len(reInline.FindAllStringSubmatch(row[3], -1))
		ran := regexp.MustCompile(`(?m)^\| ` + regexp.QuoteMeta(row[1]) + ` \| ([^|]*) \| (\d+) \|`).FindStringSubmatch(text)
		switch {
		case ran == nil || ran[2] != strconv.Itoa(n):
			t.Errorf("%s: the results have no line of %q with %d tests; run go run ./tools/zerotrust -row %q", page, row[1], n, row[1])
		case row[2] == "yes" && ran[1] != "passed" && ran[1] != "did not run":
			t.Errorf("%s: %q says yes, and its tests came to: %s", page, row[1], ran[1])
		}
	}
	if n := count["yes"] + count["in part"] + count["no"]; n != 16 {
		t.Errorf("%s has %d rows; the table has 16", page, n)
	}
	if want := fmt.Sprintf("%d of 16 are there as a whole, %d in part.", count["yes"], count["in part"]); !strings.Contains(text, want) {
		t.Errorf("%s does not say %q", page, want)
	}
}

// The smallest domain file is in the README, and in examples for who tries it.
func TestTheSmallestFileIsTheOneOfTheReadme(t *testing.T) {
	tr := repository(t)
	readme, file := tr.read(t, "README.md"), tr.read(t, "examples/minimal.yaml")
	if !strings.Contains(readme, "```yaml\n"+file+"```\n") {
		t.Error("examples/minimal.yaml is not a block of YAML in README.md; make them the same")
	}
}

// What a newcomer reads first stays short: more belongs into docs/, by its purpose.
func TestTheReadmeIsShort(t *testing.T) {
	const most = 150
	if n := strings.Count(repository(t).read(t, "README.md"), "\n"); n > most {
		t.Errorf("README.md has %d lines, and at most %d; move what one looks up to docs/reference, what one does to docs/how-to", n, most)
	}
}

func TestNoFileNamesAPlaceOnSomeonesMachine(t *testing.T) {
	tr := repository(t)
	for p, text := range tr.text(t) {
		if p == "internal/arch/docs_test.go" {
			continue // the pattern itself
		}
		if m := reMachine.FindStringIndex(text); m != nil {
			t.Errorf("%s:%d: %q is a path of one machine; say it relative to the repository", p, lineOf(text, m[1]-1), strings.TrimSpace(text[m[0]:min(m[1]+20, len(text))]))
		}
	}
}
