package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
)

// verifierMark begins what TestVerifierHasRoom says of a program:
//
//	verifier: PROGRAM/CONFIGURATION N instructions, N states, N bytes of stack
const verifierMark = "verifier: "

// verifierKey is a program in one configuration on one kernel.
type verifierKey struct{ kernel, program string }

// verifierFigure is what a program takes the verifier: instructions and states that it goes
// through, and bytes of stack: of the function that has most, or of a chain of calls where the kernel
// tells that.
type verifierFigure struct{ instructions, states, stack int }

type verifierFigures map[verifierKey]verifierFigure

func (v *verifierFigures) add(kernel, line string) error {
	var f verifierFigure
	var program string
	if _, err := fmt.Sscanf(line, verifierMark+"%s %d instructions, %d states, %d bytes of stack", &program, &f.instructions, &f.states, &f.stack); err != nil {
		return fmt.Errorf("the guest says %q: %w", line, err)
	}
	if *v == nil {
		*v = verifierFigures{}
	}
	(*v)[verifierKey{kernel, program}] = f
	return nil
}

// readVerifier reads figures of before; none if there is no file.
func readVerifier(file string) (verifierFigures, error) {
	v := verifierFigures{}
	text, err := os.ReadFile(file)
	if errors.Is(err, os.ErrNotExist) {
		return v, nil
	}
	if err != nil {
		return nil, err
	}
	n := 0
	for line := range strings.Lines(string(text)) {
		n++
		if line = strings.TrimSpace(line); line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		var k verifierKey
		var f verifierFigure
		if _, err := fmt.Sscan(line, &k.kernel, &k.program, &f.instructions, &f.states, &f.stack); err != nil {
			return nil, fmt.Errorf("%s:%d: expect KERNEL PROGRAM INSTRUCTIONS STATES STACK, got %q", file, n, line)
		}
		v[k] = f
	}
	return v, nil
}

func (v verifierFigures) keys() []verifierKey {
	return slices.SortedFunc(maps.Keys(v), func(a, b verifierKey) int {
		return cmp.Or(cmp.Compare(a.kernel, b.kernel), cmp.Compare(a.program, b.program))
	})
}

func (v verifierFigures) write(file string) error {
	var w strings.Builder
	w.WriteString("# What each program takes the verifiers of make check-kernels: KERNEL PROGRAM INSTRUCTIONS STATES STACK.\n" +
		"# Written by go run ./test/kernels -gate -update.\n")
	for _, k := range v.keys() {
		fmt.Fprintf(&w, "%s %s %d %d %d\n", k.kernel, k.program, v[k].instructions, v[k].states, v[k].stack)
	}
	return os.WriteFile(file, []byte(w.String()), 0o644)
}

// compare prints the figures of a kernel beside those of before, and tells whether none has
// grown by more than a tenth, and all are there. own: somebody's own kernel, which need not have any; its tests
// have compared them with the kernel's limits.
func (v verifierFigures) compare(w io.Writer, before verifierFigures, kernel string, own bool) bool {
	ok := true
	fail := func(format string, args ...any) {
		ok = false
		fmt.Fprintf(w, "%-6s FAIL %s\n", kernel, fmt.Sprintf(format, args...))
	}
	const update = "if it must be so, run go run ./test/kernels -gate -update and commit test/kernels/verifier.golden"
	fmt.Fprintf(w, "%-6s      %-36s %12s %8s %8s %8s\n", kernel, "verifier", "instructions", "before", "states", "stack")
	for _, k := range v.keys() {
		if k.kernel != kernel {
			continue
		}
		f, b := v[k], before[k]
		fmt.Fprintf(w, "%-6s      %-36s %12d %8d %8d %8d\n", kernel, k.program, f.instructions, b.instructions, f.states, f.stack)
		switch {
		case b.instructions == 0 && own:
		case b.instructions == 0:
			fail("%s is not in the committed figures; %s", k.program, update)
		case f.instructions*10 > b.instructions*11 || f.states*10 > b.states*11:
			fail("%s takes the verifier %d instructions and %d states, more than a tenth above the %d and %d of before; %s",
				k.program, f.instructions, f.states, b.instructions, b.states, update)
		}
	}
	for _, k := range before.keys() {
		if _, there := v[k]; k.kernel == kernel && !there {
			fail("%s is in the committed figures and was not loaded; %s", k.program, update)
		}
	}
	return ok
}
