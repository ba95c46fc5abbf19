package netfilter

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/waystamp/waystamp/internal/host"
)

// origin says where a line of a script comes from. The zero value: from here.
type origin struct {
	line     int    // of a ruleset's text, from 1
	argument string // that the line defines
}

// script is what one run of nft reads: one transaction.
type script struct {
	text    strings.Builder
	origins []origin // of each line
}

func (t *script) line(text string, from origin) {
	t.text.WriteString(text)
	t.text.WriteByte('\n')
	t.origins = append(t.origins, from)
}

// linef adds a line of our own.
func (t *script) linef(format string, args ...any) { t.line(fmt.Sprintf(format, args...), origin{}) }

// table adds a table with a body of our own.
func (t *script) table(name, body string) {
	t.linef("table inet %s {", name)
	for line := range strings.Lines(body) {
		t.line(strings.TrimSuffix(line, "\n"), origin{})
	}
	t.linef("}")
}

// refusal is what nft has against a script. There is at least one message.
type refusal struct{ messages []message }

// message is one error of nft.
type message struct {
	origin origin
	column int // in bytes, from 1
	text   string
	kernel bool // the kernel says so, not nft's parser
}

func (r *refusal) Error() string {
	var b strings.Builder
	b.WriteString("nft: ")
	for i, m := range r.messages {
		if i > 0 {
			b.WriteString("; ")
		}
		b.WriteString(m.text)
	}
	return b.String()
}

// byKernel tells whether nft's parser had nothing against the script.
func (r *refusal) byKernel() bool { return r.messages[0].kernel }

// aboutRules tells whether it is about a ruleset's text or arguments, not about what
// was written around it.
func (r *refusal) aboutRules() bool {
	return slices.ContainsFunc(r.messages, func(m message) bool { return m.origin != origin{} })
}

// run has nft do a script in a namespace: all of it or nothing. The error is a
// *refusal if nft or the kernel does not take it.
func (t *script) run(ctx context.Context, ns *host.NetNS) error {
	_, err := nft(ctx, ns, t.text.String(), "-f", "-")
	var said *nftError
	if !errors.As(err, &said) {
		return err
	}
	if r := t.refusal(said.text); r != nil {
		return r
	}
	return err
}

var (
	reMessage = regexp.MustCompile(`^[^:]*:(\d+):(\d+)-\d+: Error: (.*)$`)
	byKernel  = "Could not process rule: "
)

// refusal reads the errors that nft prints; nil if there are none with a place.
func (t *script) refusal(said string) *refusal {
	r := &refusal{}
	for line := range strings.Lines(said) {
		m := reMessage.FindStringSubmatch(strings.TrimSuffix(line, "\n"))
		if m == nil {
			continue
		}
		n, err := strconv.Atoi(m[1])
		column, err2 := strconv.Atoi(m[2])
		if errors.Join(err, err2) != nil {
			continue
		}
		out := message{column: column, text: m[3]}
		if n >= 1 && n <= len(t.origins) {
			out.origin = t.origins[n-1]
		}
		if why, ok := strings.CutPrefix(m[3], byKernel); ok {
			out.kernel, out.text = true, "the kernel refuses this: "+why
			// Its word for a name that it does not know.
			if why == "No such file or directory" {
				out.text += "; is what this names, such as a chain, set or counter, defined in these rules?"
			}
		}
		r.messages = append(r.messages, out)
	}
	if len(r.messages) == 0 {
		return nil
	}
	return r
}

// nftError is a run of nft that failed.
type nftError struct {
	err  error
	text string // what nft printed as errors
}

func (e *nftError) Error() string {
	if e.text == "" {
		return fmt.Sprintf("nft: %v", e.err)
	}
	return "nft: " + strings.TrimSpace(e.text)
}

func (e *nftError) Unwrap() error { return e.err }

// nft runs nft in a namespace, and returns what it prints.
func nft(ctx context.Context, ns *host.NetNS, stdin string, args ...string) (string, error) {
	if err := host.RequireNft(); err != nil {
		return "", err
	}
	cmd := host.Command(ctx, ns, "nft", args...)
	cmd.Stdin = strings.NewReader(stdin)
	cmd.Env = append(os.Environ(), "LC_ALL=C") // its messages are read here
	var out, said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &said
	err := cmd.Run()
	switch {
	case err == nil:
		return out.String(), nil
	case ctx.Err() != nil:
		return "", context.Cause(ctx)
	case errors.As(err, new(*exec.ExitError)):
		return "", &nftError{err, said.String()}
	}
	return "", fmt.Errorf("run nft: %w", err)
}
