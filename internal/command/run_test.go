package command

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/waystamp/waystamp/internal/dataplane/object"
)

// hinted is an error with a next command to try.
type hinted struct{ error }

func (hinted) Hint() string { return "try: something else" }

// group is a command tree in which each leaf fails in its own way.
func group() *cobra.Command {
	g := &cobra.Command{Use: "group", Short: "commands that fail"}
	for name, err := range map[string]error{
		"fails":     errors.New("open the thing: no such thing\n"),
		"refused":   &ExitError{Code: ExitRefused, Err: errors.New("not verified")},
		"silent":    &ExitError{Code: ExitDifferent},
		"hinted":    hinted{errors.New("cannot")},
		"cancelled": context.Canceled,
		"bad-file":  Usagef("line 3: no"),
	} {
		c := &cobra.Command{Use: name, Args: NoArgs, RunE: func(*cobra.Command, []string) error { return err }}
		c.Flags().String("file", "", "a file")
		if name == "refused" {
			if err := c.MarkFlagRequired("file"); err != nil {
				panic(err)
			}
		}
		g.AddCommand(c)
	}
	return g
}

func TestMainPrintsAnErrorOnceAndReturnsItsCode(t *testing.T) {
	tests := []struct {
		args      string
		cancelled bool
		code      int
		stderr    string
	}{
		{args: "group fails", code: 1, stderr: "waystamp: open the thing: no such thing\n"},
		{args: "group refused --file x", code: 4, stderr: "waystamp: not verified\n"},
		{args: "group silent", code: 3},
		{args: "group hinted", code: 1, stderr: "waystamp: cannot\ntry: something else\n"},
		{args: "group bad-file", code: 2, stderr: "waystamp: line 3: no\n"},
		{args: "group cancelled", code: 1, stderr: "waystamp: context canceled\n"},
		{args: "group cancelled", cancelled: true, code: 1, stderr: "waystamp: interrupted\n"},
		{args: "group", code: 0},
		{args: "", code: 0},

		{args: "nonesuch", code: 2, stderr: "waystamp: \"nonesuch\" is not a command of waystamp\ntry: waystamp --help\n"},
		{args: "nonesuch --help", code: 2, stderr: "waystamp: \"nonesuch\" is not a command of waystamp\ntry: waystamp --help\n"},
		{args: "versoin", code: 2, stderr: "waystamp: \"versoin\" is not a command of waystamp; did you mean version?\ntry: waystamp --help\n"},
		{args: "group fail", code: 2, stderr: "waystamp: \"fail\" is not a command of waystamp group; did you mean fails?\ntry: waystamp group --help\n"},
		{args: "--nonesuch", code: 2, stderr: "waystamp: unknown flag: --nonesuch\ntry: waystamp --help\n"},
		{args: "group fails --nonesuch", code: 2, stderr: "waystamp: unknown flag: --nonesuch\ntry: waystamp group fails --help\n"},
		{args: "group fails more", code: 2, stderr: "waystamp: waystamp group fails takes no argument, and there is \"more\"; did you mean --file more?\ntry: waystamp group fails --help\n"},
		{args: "group fails more --file x", code: 2, stderr: "waystamp: waystamp group fails takes no argument, and there is \"more\"\ntry: waystamp group fails --help\n"},
		{args: "versoin -o json", code: 2, stderr: "waystamp: \"versoin\" is not a command of waystamp; did you mean version?\ntry: waystamp --help\n"},
		{args: "group fail --file x", code: 2, stderr: "waystamp: \"fail\" is not a command of waystamp group; did you mean fails?\ntry: waystamp group --help\n"},
		{args: "group refused", code: 2, stderr: "waystamp: required flag(s) \"file\" not set\ntry: waystamp group refused --help\n"},
		{args: "group fails --file", code: 2, stderr: "waystamp: flag needs an argument: --file\ntry: waystamp group fails --help\n"},
		{args: "version -o xml", code: 2, stderr: "waystamp: --output is \"xml\"; expect text or json\n"},
	}
	for _, tt := range tests {
		t.Run(tt.args, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			if tt.cancelled {
				cancel()
			}
			root := NewRoot("", group())
			var stdout, stderr bytes.Buffer
			code := Run(ctx, root, strings.Fields(tt.args), strings.NewReader(""), &stdout, &stderr)
			if code != tt.code || stderr.String() != tt.stderr {
				t.Errorf("code %d and %q on standard error; want %d and %q", code, stderr.String(), tt.code, tt.stderr)
			}
			if help := tt.code == 0; help != strings.Contains(stdout.String(), "Usage:") {
				t.Errorf("standard output is %q; want help only where nothing was wrong", stdout.String())
			}
		})
	}
}

func TestVersion(t *testing.T) {
	for args, want := range map[string]string{
		"version":         "waystamp " + version + " (go",
		"--version":       "waystamp " + version + " (go",
		"version -o json": `{"version":1,"waystamp":"` + version + `","go":"go`,
	} {
		var stdout, stderr bytes.Buffer
		code := Run(t.Context(), NewRoot(""), strings.Fields(args), strings.NewReader(""), &stdout, &stderr)
		if code != ExitDone || !strings.HasPrefix(stdout.String(), want) || stderr.Len() > 0 {
			t.Errorf("%s: code %d, %q, %q; want 0 and %q…", args, code, stdout.String(), stderr.String(), want)
		}
		if programs := strings.Count(stdout.String(), "ws_"); args != "--version" && programs != len(object.All)+len(object.Alone) {
			t.Errorf("%s names %d programs; want all", args, programs)
		}
	}
}
