// Command kernels runs waystamp's tests on the kernels that people have: it
// fetches Debian's kernel packages with apt-get (and installs none of them), makes an image of
// the tests, of the programs that they call and of the kernel's modules, boots it in qemu
// without KVM, and tells what each test came to. It needs no root. What a test wants and a
// kernel has not is in skips.golden, and is told; any other test that does not
// run is a failure. make test-kernels calls it.
// In the machine it is the first process.
//
//	kernels [-gate] [-arch arm64] [-only 6.1,6.12] [-step NAME,...] [-run PATTERN] [-deb FILE,...] [-page FILE]
//	kernels -shell -only 6.12
//
// With -page it writes what each step came to into a table, beside what it has of other kernels and steps. With -shell
// it boots one kernel for somebody to try things in.
//
// With -gate it does what every change must pass, make check-kernels: a few tests on three kernels,
// and how much of the verifier's limits the programs take, compared with verifier.golden (-update
// writes it). With -arch it does so on kernels of another architecture: the programs are the same, what
// their instructions become is not.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/waystamp/waystamp/internal/await"
)

// series are the kernels that are tried when nobody says which: the oldest that
// is supported, without tcx, and the long-term one that has it. Every change must also pass
// the newest.
var (
	series     = []string{"6.1", "6.12"}
	gateSeries = append(slices.Clone(series), newestSeries)
	// On another architecture.
	foreignSeries = []string{"6.1"}
)

type options struct {
	only, step, run, deb, skips, verifier, arch, page string
	gate, update, shell                               bool
}

func main() {
	if os.Getpid() == 1 {
		guest()
		return
	}
	var o options
	flag.BoolVar(&o.gate, "gate", false, "only what every change must pass, on "+strings.Join(gateSeries, ", "))
	flag.BoolVar(&o.update, "update", false, "write what the verifier says to the file of -verifier, instead of comparing")
	flag.StringVar(&o.arch, "arch", runtime.GOARCH, "`architecture` of the kernels, as Debian calls it: "+strings.Join(slices.Sorted(maps.Keys(machines)), ", ")+"; one that is not this machine's with -gate alone")
	flag.StringVar(&o.only, "only", "", "`series` of kernels, such as 6.1,newest (default "+strings.Join(series, ",")+"), with a flavour, such as 6.1-cloud or 6.12-16k")
	flag.StringVar(&o.step, "step", "", "run only these `steps`, such as xdp,own")
	flag.StringVar(&o.run, "run", "", "of each step only the tests that match this `pattern`")
	flag.StringVar(&o.deb, "deb", "", "the `packages` of a kernel to use for the one series of -only, with commas between: Ubuntu has its modules in packages of their own")
	flag.StringVar(&o.skips, "skips", "test/kernels/skips.golden", "`file` that lists what a kernel cannot, with reasons")
	flag.StringVar(&o.verifier, "verifier", "test/kernels/verifier.golden", "`file` with what the verifiers of before said")
	flag.StringVar(&o.page, "page", "", "`file` to write what the steps came to into, such as docs/reference/kernels.md")
	flag.BoolVar(&o.shell, "shell", false, "boot the one kernel of -only with a shell on this terminal, instead of tests")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	err := run(ctx, o)
	if err != nil {
		fmt.Fprintln(os.Stderr, "kernels:", err)
		os.Exit(1)
	}
}

// errTests says that the report has told what is wrong.
var errTests = errors.New("not all tests did what they must")

func run(ctx context.Context, o options) (err error) {
	work, err := os.MkdirTemp("", "waystamp-kernels-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(work)) }()
	skips, err := readSkips(o.skips)
	if err != nil {
		return err
	}
	m, ok := machines[o.arch]
	if !ok {
		return fmt.Errorf("-arch %s is not known; expect one of %s", o.arch, strings.Join(slices.Sorted(maps.Keys(machines)), ", "))
	}
	if m.foreign() && !o.gate {
		return fmt.Errorf("this machine is of %s: its programs, which the tests call, do not run on %s; say -gate, whose tests call none", runtime.GOARCH, o.arch)
	}
	kernels, all := series, allSteps()
	switch {
	case m.foreign():
		kernels, all = foreignSeries, gateSteps()
	case o.gate:
		kernels, all = gateSeries, gateSteps()
	}
	if o.only != "" {
		kernels = strings.Split(o.only, ",")
	}
	if o.deb != "" && len(kernels) != 1 {
		return fmt.Errorf("-deb is for one kernel; say with -only which of %s it is", strings.Join(kernels, ", "))
	}
	if o.shell && len(kernels) != 1 {
		return fmt.Errorf("-shell is for one kernel; say with -only which of %s it is", strings.Join(kernels, ", "))
	}
	if o.page != "" && (o.run != "" || o.gate || o.shell) {
		return errors.New("-page is for whole steps of make test-kernels; leave out -run, -gate and -shell")
	}
	golden, err := readVerifier(o.verifier)
	if err != nil {
		return err
	}
	shown, err := readPage(o.page)
	if err != nil {
		return err
	}
	steps, err := chosen(all, o.step)
	if err != nil {
		return err
	}
	built, err := buildTests(ctx, work, o.arch, steps)
	if err != nil {
		return err
	}
	failed := false
	for _, name := range kernels {
		ok, err := tryKernel(ctx, work, name, m, o, steps, built, skips, golden, shown)
		if err != nil {
			return fmt.Errorf("Linux %s: %w", m.label(name), err)
		}
		failed = failed || !ok
	}
	if failed {
		return errTests
	}
	return nil
}

// buildTests builds what the image has of ours, without cgo: the guest has no
// libraries for it.
func buildTests(ctx context.Context, work, arch string, steps []step) (map[string]string, error) {
	built := map[string]string{}
	build := func(to string, args ...string) error {
		out := filepath.Join(work, filepath.Base(to))
		cmd := exec.CommandContext(ctx, "go", slices.Concat(args[:1], []string{"-buildvcs=false", "-ldflags=-w"}, args[1:len(args)-1], []string{"-o", out}, args[len(args)-1:])...)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOARCH="+arch)
		if said, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w\n%s", strings.Join(cmd.Args, " "), err, said)
		}
		built[to] = out
		return nil
	}
	errs := []error{
		build("/init", "build", "./test/kernels"),
		build(guestProgram, "build", "./cmd/waystamp"),
		build(guestLab, "build", "./cmd/waystamp-lab"),
	}
	for _, s := range steps {
		if s.pkg != "" && built[s.binary()] == "" {
			errs = append(errs, build(s.binary(), "test", "-c", "-tags=stock", "./"+s.pkg))
		}
	}
	return built, errors.Join(errs...)
}

// tryKernel boots one kernel and tells what its tests came to.
func tryKernel(ctx context.Context, work, name string, m machine, o options, steps []step, built map[string]string, skips skipList, golden verifierFigures, shown page) (ok bool, err error) {
	dir := filepath.Join(work, name)
	if err := os.Mkdir(dir, 0o755); err != nil {
		return false, err
	}
	k, err := fetchKernel(ctx, dir, name, m, o.deb)
	if err != nil {
		return false, err
	}
	c := contents{top: ".", built: built}
	if !m.foreign() {
		c.programs = slices.Clone(programs)
	}
	for _, s := range steps {
		if !m.foreign() {
			c.programs = append(c.programs, s.more...)
		}
		c.steps = append(c.steps, s.forGuest(skips.of(m.label(name), s.pkg), o.run))
	}
	if o.shell {
		c.steps, c.also = []guestStep{shellStep(steps)}, shellPrograms
		steps = []step{{name: shellName}}
	}
	name = m.label(name)
	image := filepath.Join(dir, "image")
	if err := writeImage(image, k.modules, c); err != nil {
		return false, err
	}
	if err := fitsMemory(image); err != nil {
		return false, err
	}
	console := filepath.Join(dir, "console")
	fmt.Printf("== Linux %s (%s, %s)\n", name, k.name, k.version)
	begun := time.Now()
	r := newReport(os.Stdout, name, steps, skips, o.run != "")
	for _, s := range steps {
		run := func(step string) error {
			if o.shell {
				return bootShell(ctx, m, k.image, image, console, step, r)
			}
			return boot(ctx, m, k.image, image, console, step, r)
		}
		if err := tryStep(run, s.name, console, r); ctx.Err() != nil || err != nil && !r.begun() {
			return false, err
		} else if err != nil {
			r.problem = append(r.problem, fmt.Sprintf("%s: %v", s.name, err))
			r.at = -1
		}
		if o.page != "" {
			if err := shown.add(name, k.version, begun, r).write(o.page); err != nil {
				return false, err
			}
		}
	}
	ok = r.finish()
	if o.gate && o.step == "" && o.run == "" && len(r.verifier) == 0 {
		fmt.Printf("Linux %s: no test has told what the programs take of the verifier, so there is nothing to compare; the gate's steps name tests that are gone\n", name)
		ok = false
	}
	if len(r.verifier) > 0 {
		if o.update {
			maps.DeleteFunc(golden, func(k verifierKey, _ verifierFigure) bool { return k.kernel == name })
			maps.Copy(golden, r.verifier)
			err = golden.write(o.verifier)
		} else {
			ok = r.verifier.compare(os.Stdout, golden, name, o.deb != "") && ok
		}
	}
	fmt.Printf("== Linux %s: %d passed, %d failed, %d skipped in %.0f s\n", name, r.passed, r.failed, r.skipped, time.Since(begun).Seconds())
	return ok, err
}

// tryStep runs a step in a machine of its own, and again if what ended the machine is a fault of the emulator: a step
// of before is not lost with it. The error is why the step has not come to its end.
func tryStep(run func(step string) error, name, console string, r *report) error {
	for tries := 1; ; tries++ {
		before := *r
		err := run(name)
		said, readErr := os.ReadFile(console)
		if err == nil {
			if readErr == nil {
				r.console(string(said))
			}
			return readErr
		}
		why := ""
		switch {
		case staleBreakpoint(string(said)):
			why = "the emulator ran a breakpoint that the kernel had taken out of its code again"
		case !r.begunSince(before):
			// It takes a kernel that patches its own code on another CPU for broken, now and then, as long as it
			// boots; nothing of ours has run then.
			why = "the machine died before its first process"
		}
		if why == "" || tries == bootsMost || errors.Is(err, errInterrupted) {
			return err
		}
		*r = before
		r.forget()
		r.line("", fmt.Sprintf("%s: %s; it is booted again", name, why))
	}
}

// fitsMemory: the kernel unpacks the image into the memory that it is in, and tests want some, too.
func fitsMemory(image string) error {
	st, err := os.Stat(image)
	if err != nil {
		return err
	}
	const rest = 1024
	if mib := st.Size()>>20 + 1; 2*mib+rest > memory {
		return fmt.Errorf("the image has %d MiB, which a guest of %d MiB cannot unpack and leave %d MiB to tests; take modules or programs out of it, or change memory in test/kernels/machine.go", mib, memory, rest)
	}
	return nil
}

// errInterrupted: a Ctrl-C, or the SIGTERM of whoever gives up.
var errInterrupted = errors.New("interrupted")

// bootsMost is how often a machine is booted for a step that the emulator's faults end.
const bootsMost = 3

// silenceMost is how long a machine may say nothing. Its longest test takes a minute
// where nothing else runs.
const silenceMost = 10 * time.Minute

// heard starts the timer anew with each read that has something.
type heard struct {
	io.Reader
	silence *time.Timer
}

func (h heard) Read(b []byte) (int, error) {
	n, err := h.Reader.Read(b)
	if n > 0 {
		h.silence.Reset(await.Limit(silenceMost))
	}
	return n, err
}

// boot runs the machine for one step until it turns itself off, or says nothing for too long.
func boot(ctx context.Context, m machine, kernel, image, console, step string, r *report) error {
	before := *r
	alive, end := context.WithCancel(ctx)
	defer end()
	silence := time.AfterFunc(await.Limit(silenceMost), end)
	defer silence.Stop()
	args := m.command(kernel, image, console, step, "")
	cmd := exec.CommandContext(alive, args[0], args[1:]...)
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		return err
	}
	readErr := r.read(heard{out, silence})
	err = errors.Join(readErr, cmd.Wait())
	if ctx.Err() != nil {
		return errInterrupted
	}
	if alive.Err() != nil {
		return fmt.Errorf("the machine said nothing for %s, and was ended; its console says:\n%s", await.Limit(silenceMost), lastOf(console))
	}
	if err == nil && !r.endedSince(before) {
		err = fmt.Errorf("the machine ended before its tests; its console says:\n%s", lastOf(console))
	}
	return err
}

// bootShell runs the machine with its console on this terminal, until its shell ends.
func bootShell(ctx context.Context, m machine, kernel, image, console, step string, r *report) error {
	before, said := *r, console+".report"
	args := m.command(kernel, image, console, step, said)
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	if err := cmd.Run(); err != nil {
		return err
	}
	f, err := os.Open(said)
	if err != nil {
		return err
	}
	defer f.Close()
	err = r.read(f)
	if err == nil && !r.endedSince(before) {
		err = fmt.Errorf("the machine ended before its shell; its console says:\n%s", lastOf(console))
	}
	return err
}

// lastOf is the end of a console.
func lastOf(console string) []byte {
	said, _ := os.ReadFile(console)
	return said[max(0, len(said)-4000):]
}
