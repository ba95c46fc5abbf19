package main

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"time"
)

// pageKey is a row of the page.
type pageKey struct{ kernel, step string }

// pageRow is what a step came to on a kernel, when it ran last as a whole.
type pageRow struct {
	passed, failed, skipped int
	seconds                 float64
	date                    string // of the run, YYYY-MM-DD
	version                 string // of the kernel's package
	reasons                 []string
	inRow                   int       // runs that have passed, one after the other, up to this one
	run                     time.Time // that has entered it; zero: it was read
}

// page is the table of docs/reference/kernels.md.
type page map[pageKey]pageRow

// machineRow is the row of faults that are no test's: of the kernel, or of its first process.
const machineRow = "machine"

const pageHead = `<!-- Written by go run ./test/kernels -page docs/reference/kernels.md. Do not edit. -->

# Kernels

The steps of ` + "`make test-kernels`" + ` on Debian's kernels, in qemu without KVM. A row is what its step came to when it last ran as a whole; steps
run by themselves too (` + "`make test-kernels KERNEL=6.1 STEP=host`" + `), so rows may have different dates. *In a row* counts the runs that passed since one failed.
Each CPU is emulated: the seconds say nothing of the speed of waystamp. Every change is also held against the programs' loads and their packets on 6.1, 6.12 and the newest kernel (` + "`make check-kernels`" + `).

| kernel | package | step | passed | failed | skipped | seconds | date | in a row |
|---|---|---|---:|---:|---:|---:|---|---:|
`

// readPage reads a page of before; none if there is no file, or no name.
func readPage(file string) (page, error) {
	p := page{}
	if file == "" {
		return p, nil
	}
	text, err := os.ReadFile(file)
	if errors.Is(err, os.ErrNotExist) {
		return p, nil
	}
	if err != nil {
		return nil, err
	}
	if !strings.HasPrefix(string(text), pageHead[:strings.Index(pageHead, "\n")]) {
		return nil, fmt.Errorf("%s is no page of these tests; name another file with -page, or none that exists", file)
	}
	n := 0
	for line := range strings.Lines(string(text)) {
		n++
		line = strings.TrimSpace(line)
		if reason, ok := strings.CutPrefix(line, "- "); ok {
			// KERNEL STEP: REASON
			at, _, _ := strings.Cut(reason, ": ")
			kernel, step, _ := strings.Cut(at, " ")
			k := pageKey{kernel, step}
			row, there := p[k]
			if !there {
				return nil, fmt.Errorf("%s:%d: a reason for %q, which is in no row", file, n, at)
			}
			row.reasons = append(row.reasons, strings.TrimPrefix(reason, at+": "))
			p[k] = row
			continue
		}
		f := strings.Split(strings.Trim(line, "| "), " | ")
		if !strings.HasPrefix(line, "| ") || f[0] == "kernel" {
			continue
		}
		if len(f) != 9 {
			return nil, fmt.Errorf("%s:%d: expect a row of nine columns, got %q", file, n, line)
		}
		row := pageRow{version: f[1], date: f[7]}
		if _, err := fmt.Sscan(strings.Join(append(f[3:7:7], f[8]), " "), &row.passed, &row.failed, &row.skipped, &row.seconds, &row.inRow); err != nil {
			return nil, fmt.Errorf("%s:%d: expect a row of kernel, package, step, three counts, seconds, a date and how many passed in a row, got %q", file, n, line)
		}
		p[pageKey{f[0], f[2]}] = row
	}
	return p, nil
}

// add enters what the steps of a run came to, that began at a time. It may be called again for the same run.
func (p page) add(kernel, version string, at time.Time, r *report) page {
	for _, c := range r.came {
		k := pageKey{kernel, c.step}
		row := pageRow{passed: c.passed, failed: c.failed, skipped: c.skipped, seconds: c.seconds, date: at.UTC().Format(time.DateOnly), version: version, run: at}
		switch before := p[k]; {
		case c.failed > 0:
		case before.run.Equal(at) || c.passed == 0: // entered already, or all was skipped
			row.inRow = before.inRow
		default:
			row.inRow = before.inRow + 1
		}
		i := slices.IndexFunc(r.steps, func(s step) bool { return s.name == c.step })
		for _, s := range r.skips {
			if s.kernel == kernel && s.pkg == r.steps[i].pkg && r.steps[i].has(s.test) {
				row.reasons = append(row.reasons, s.test+": "+s.reason)
			}
		}
		p[k] = row
	}
	if n := len(r.problem); n > 0 {
		p[pageKey{kernel, machineRow}] = pageRow{failed: n, date: at.UTC().Format(time.DateOnly), version: version}
	} else {
		delete(p, pageKey{kernel, machineRow})
	}
	return p
}

func (p page) write(file string) error {
	var w, why strings.Builder
	w.WriteString(pageHead)
	order := map[string]int{}
	for i, s := range allSteps() {
		order[s.name] = i
	}
	for _, k := range slices.SortedFunc(maps.Keys(p), func(a, b pageKey) int {
		return cmp.Or(slices.Compare(numbersOf(a.kernel), numbersOf(b.kernel)), cmp.Compare(a.kernel, b.kernel), cmp.Compare(order[a.step], order[b.step]), cmp.Compare(a.step, b.step))
	}) {
		row := p[k]
		fmt.Fprintf(&w, "| %s | %s | %s | %d | %d | %d | %.0f | %s | %d |\n", k.kernel, row.version, k.step, row.passed, row.failed, row.skipped, row.seconds, row.date, row.inRow)
		for _, r := range row.reasons {
			fmt.Fprintf(&why, "- %s %s: %s\n", k.kernel, k.step, r)
		}
	}
	if why.Len() > 0 {
		w.WriteString("\n## What was skipped, and why\n\n" + why.String())
	}
	return os.WriteFile(file, []byte(w.String()), 0o644)
}

// numbersOf are the numbers of a series, so that 6.1 comes before 6.12.
func numbersOf(series string) (out []int) {
	for s := range strings.FieldsFuncSeq(series, func(r rune) bool { return r < '0' || r > '9' }) {
		n := 0
		for _, c := range s {
			n = n*10 + int(c-'0')
		}
		out = append(out, n)
	}
	return out
}
