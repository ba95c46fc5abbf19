package netfilter

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/waystamp/waystamp/internal/host"
)

var update = flag.Bool("update", false, "write the golden files anew")

func guests(text string) Ruleset {
	return Ruleset{
		Function:  "fw",
		Text:      text,
		At:        Source{File: "domain.yaml", Line: 41, Column: 7},
		Arguments: map[string]uint32{"guest": 1, "staff": 1<<32 - 1},
		Zones:     [][]uint32{{1}, {1<<32 - 1}},
	}
}

const goodRules = `counter guest_https {
}
set blocked {
	type ipv4_addr; flags dynamic; timeout 1h;
}
chain forward {
	type filter hook forward priority filter; policy drop; # a } in a comment
	ct state established,related accept
	iif waystamp-in meta mark $guest tcp dport 443 counter name guest_https accept
	meta mark $staff log prefix "a } in a string" \
		accept
}
`

func TestGoodRulesAreTaken(t *testing.T) {
	for name, s := range map[string]Ruleset{
		"whole":               guests(goodRules),
		"no text":             {Function: "fw"},
		"no final newline":    {Function: "fw", Text: "chain c {\n\taccept\n}"},
		"a define of its own": {Function: "fw", Text: "define web = { 80, 443 }\nchain c {\n\ttcp dport $web accept\n}\n"},
		"a device of a hook":  {Function: "fw", Interfaces: []string{"eth0"}, Text: "chain c {\n\ttype filter hook ingress device eth0 priority 0;\n}\n"},
	} {
		t.Run(name, func(t *testing.T) {
			if err := Check(soon(t), s); err != nil {
				t.Error(err)
			}
		})
	}
}

// Each mistake is told at its place. The golden file has what a user sees of those that
// are found without nft; nft's words differ between its versions, its places here do
// not.
func TestMistakesAreToldAtTheirPlace(t *testing.T) {
	for _, c := range []struct {
		name, text   string
		line, column int    // of the text
		says         string // a part
		nft          bool   // finds it
	}{
		{"escape", "chain c {\n\taccept\n}\n}\ntable ip other {\n", 4, 1, "closes the function's table", false},
		{"escape-within-a-line", "chain c {\n\taccept } } \n", 2, 11, "closes the function's table", false},
		{"open", "chain c {\n\taccept\n", 1, 9, "nothing closes this brace", false},
		{"unknown-argument", "chain c {\n\tmeta mark $guest accept\n\tmeta mark $gast accept\n}\n", 3, 12, "$gast is not an argument of the function, and nothing defines it; arguments are guest, staff", false},
		{"include", "chain c {\n}\n  include \"/etc/passwd\"\n", 3, 3, "include reads a file", false},
		{"flags", "flags owner\n", 1, 1, "no flags of its own", false},
		{"define-of-an-argument", "chain c {\n\tredefine guest = 5\n}\n", 2, 2, "redefine changes guest", false},
		{"syntax", "chain c {\n\ttcp dport 22 frobnicate\n}\n", 2, 25, "syntax error", true},
		{"junk-behind-umlauts", "chain c {\n\tlog prefix \"ä€𝄞\" ü\n}\n", 2, 19, "syntax error", true},
		{"unknown-chain", "chain c {\n\tip saddr 192.0.2.1 jump nowhere\n}\n", 2, 26, "the kernel refuses this: No such file or directory; is what this names, such as a chain, set or counter, defined", true},
		{"unknown-counter", "chain c {\n\ttype filter hook forward priority 0;\n\tcounter name nothing accept\n}\n", 3, 15, "the kernel refuses this: No such file or directory; is what this names, such as a chain, set or counter, defined", true},
		{"wrong-type", "chain c {\n\tip saddr 2001:db8::1 accept\n}\n", 2, 11, "", true},
		{"no-such-interface", "chain c {\n\tiif nix0 accept\n}\n", 2, 6, "Interface does not exist", true},
	} {
		t.Run(c.name, func(t *testing.T) {
			err := Check(soon(t), guests(c.text))
			var e *Error
			if !errors.As(err, &e) {
				t.Fatalf("got %v, want an *Error", err)
			}
			p := e.Problems[0]
			if p.Line != 40+c.line || p.Column != 6+c.column || !strings.Contains(p.Message, c.says) {
				t.Errorf("got %d:%d: %s\nwant %d:%d: …%s…", p.Line, p.Column, p.Message, 40+c.line, 6+c.column, c.says)
			}
			lines := strings.Split(err.Error(), "\n")
			// The caret is under the character that the column names.
			at, caret := "", ""
			for i, l := range lines {
				if strings.HasPrefix(l, "> ") {
					at, caret = l, lines[i+1]
					break
				}
			}
			if a, c := len([]rune(at)), len([]rune(caret)); c == 0 || c > a+1 {
				t.Errorf("the caret is under nothing:\n%s", err)
			}
			if !c.nft {
				golden(t, c.name, err.Error())
			}
		})
	}
}

func golden(t *testing.T, name, got string) {
	t.Helper()
	file := filepath.Join("testdata", name+".golden")
	if *update {
		must(t, os.WriteFile(file, []byte(got+"\n"), 0o644))
	}
	want, err := os.ReadFile(file)
	must(t, err)
	if got+"\n" != string(want) {
		t.Errorf("got\n%s\nwant\n%s\nif that is right: go test ./internal/netfilter -run TestMistakes -update", got, want)
	}
}

func TestMistakesAboutTheWholeRulesetAreTold(t *testing.T) {
	for name, c := range map[string]struct {
		set  func(*Ruleset)
		says string
	}{
		"a word of nft's": {func(s *Ruleset) { s.Arguments = map[string]uint32{"accept": 7} }, "rules of function fw: nft does not take accept as the name of an argument"},
		"no variable":     {func(s *Ruleset) { s.Arguments = map[string]uint32{"a b": 7} }, `argument "a b" cannot be a variable`},
		"no table":        {func(s *Ruleset) { s.Function = "fw {" }, `"fw {" names no table`},
		"two zones":       {func(s *Ruleset) { s.Zones = [][]uint32{{1, 2}, {3, 2}} }, "argument 2 is in two conntrack zones"},
	} {
		t.Run(name, func(t *testing.T) {
			s := guests("")
			c.set(&s)
			err := Check(soon(t), s)
			if !errors.As(err, new(*Error)) || !strings.Contains(err.Error(), c.says) {
				t.Errorf("got %v, want …%s…", err, c.says)
			}
		})
	}
}

// A check that could not be made is no mistake in the rules, and no mistake is
// missed for it that needs no nft.
func TestMissingNftIsNoMistakeInTheRules(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	err := Check(soon(t), guests(goodRules))
	if !errors.As(err, new(*NotCheckedError)) || !errors.Is(err, host.ErrNoNft) || errors.As(err, new(*Error)) {
		t.Errorf("got %v, want a *NotCheckedError for %v", err, host.ErrNoNft)
	}
	if err := Check(soon(t), guests("}\n")); !errors.As(err, new(*Error)) {
		t.Errorf("got %v, want an *Error", err)
	}
}

// The test binary runs again as a user who may not make namespaces.
func TestMissingRightIsNoMistakeInTheRules(t *testing.T) {
	exe, err := os.Open("/proc/self/exe")
	must(t, err)
	defer exe.Close()
	cmd := exec.CommandContext(soon(t), "/proc/self/fd/3")
	cmd.ExtraFiles = []*os.File{exe} // the folder it is in is closed to that user
	cmd.Env = append(os.Environ(), asChild+"=check")
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534, NoSetGroups: true}}
	out, err := cmd.CombinedOutput()
	if got, want := string(out), "not checked, for want of permission: true"; err != nil || got != want {
		t.Errorf("got %q, %v; want %q", got, err, want)
	}
}

// checkAsChild is what the test binary does as that user.
func checkAsChild() {
	err := Check(context.Background(), guests(goodRules))
	if errors.As(err, new(*NotCheckedError)) {
		fmt.Print("not checked, for want of permission: ", errors.Is(err, fs.ErrPermission))
		return
	}
	fmt.Print(err)
}

// fakeNft puts a program before the real nft.
func fakeNft(t *testing.T, script string) {
	t.Helper()
	real, err := exec.LookPath("nft")
	must(t, err)
	dir := t.TempDir()
	must(t, os.WriteFile(filepath.Join(dir, "nft"), []byte("#!/bin/sh\nreal="+real+"\n"+script), 0o755))
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
}

// A kernel without connection tracking answers so; this one has it.
func TestZonesWithoutConnectionTrackingAreTold(t *testing.T) {
	fakeNft(t, `text=$(cat)
case $text in
*"ct zone set"*)
	n=$(echo "$text" | grep -n "ct zone set" | cut -d: -f1)
	echo "/dev/stdin:$n:3-50: Error: Could not process rule: No such file or directory" >&2
	exit 1 ;;
esac
echo "$text" | $real "$@"
`)
	s := guests("chain c {\n}\n")
	err := Check(soon(t), s)
	if !errors.As(err, new(*Error)) || !errors.Is(err, ErrNoZones) {
		t.Errorf("got %v, want an *Error for %v", err, ErrNoZones)
	}
	s.Zones = nil
	if err := Check(soon(t), s); err != nil {
		t.Errorf("without zones: %v", err)
	}
}

func TestKernelWithoutTablesIsNoMistakeInTheRules(t *testing.T) {
	fakeNft(t, "echo 'netlink: Error: cache initialization failed: Protocol not supported' >&2\nexit 1\n")
	err := Check(soon(t), guests(goodRules))
	if !errors.As(err, new(*NotCheckedError)) || !strings.Contains(err.Error(), "Protocol not supported") {
		t.Errorf("got %v, want a *NotCheckedError with nft's words", err)
	}
}
