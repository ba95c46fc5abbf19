package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"runtime"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/host"
)

// Config says how all commands measure.
type Config struct {
	Runs     int           // rounds; each has one run of every case
	Duration time.Duration // of a run
	CPU      int           // that the hop runs on; negative: the last one
	Quick    bool          // fewer cases
	Only     string        // cases whose names have this in them, and their baselines; "": all
	Binary   string        // as of lab.Config
	Progress io.Writer     // a terminal that is told how far things are; nil: none
	Log      *slog.Logger

	note     func(string) // takes what a reader must know; nil: nobody does
	warm     bool         // what is measured has been before: the first run counts
	separate bool         // subjects share nothing and can be prepared side by side
}

func (c Config) cpu() int {
	if c.CPU < 0 {
		return runtime.NumCPU() - 1
	}
	return c.CPU
}

// NoCaseError means that nothing is measured under the name that was asked for.
type NoCaseError struct{ Only string }

func (e *NoCaseError) Error() string {
	return fmt.Sprintf("no case has %q in its name", e.Only)
}

// subject is something that can be measured again and again.
type subject struct {
	Series
	prepare func() (*trial, error)
}

// trial is a subject that is set up.
type trial struct {
	measure func(context.Context) (float64, error)
	close   func() error
}

// rounds sets everything up, measures every subject once per round, one after
// the other, and takes everything down. Every second round goes the other way
// round, so that nobody always comes after the same one.
func (c Config) rounds(ctx context.Context, what string, subjects []subject) (_ []Figure, err error) {
	subjects = c.wanted(subjects)
	if len(subjects) == 0 {
		return nil, &NoCaseError{c.Only}
	}
	runs := c.Runs + 1
	if c.warm {
		runs = c.Runs
	}
	p := newProgress(c.Progress, what, runs*len(subjects))
	defer p.done()
	trials := make([]*trial, len(subjects))
	defer func() {
		for _, t := range trials {
			if t != nil && t.close != nil {
				err = errors.Join(err, t.close())
			}
		}
	}()
	if err := c.prepare(ctx, subjects, trials, p); err != nil {
		return nil, err
	}
	if !c.warm {
		// The first run fills caches and is not counted.
		for i, s := range subjects {
			p.step(s.Name)
			if _, err := c.again(ctx, s.Name, trials[i]); err != nil {
				return nil, err
			}
		}
	}
	series := make([]Series, len(subjects))
	for i, s := range subjects {
		series[i] = s.Series
	}
	for round := range c.Runs {
		for n := range subjects {
			i := n
			if round%2 == 1 {
				i = len(subjects) - 1 - n
			}
			if err := ctx.Err(); err != nil {
				return nil, err
			}
			p.step(subjects[i].Name)
			x, err := c.again(ctx, subjects[i].Name, trials[i])
			if err != nil {
				return nil, err
			}
			series[i].Samples = append(series[i].Samples, x)
		}
	}
	return Figures(series)
}

// triesMax is how often a run is tried: a lost ping does not end half an hour of
// measuring, and what fails always does.
const triesMax = 3

// again measures, and once more if that fails.
func (c Config) again(ctx context.Context, name string, t *trial) (x float64, err error) {
	for try := 1; ; try++ {
		if x, err = t.measure(ctx); err == nil {
			return x, nil
		}
		if err = fmt.Errorf("measure %s: %w", name, err); try == triesMax || ctx.Err() != nil {
			return 0, err
		}
		if c.note != nil {
			c.note(fmt.Sprintf("A run was not counted and tried again: %v.", err))
		}
	}
}

// prepare makes the trial of each subject: one after the other where they share
// networks, else as many at once as there are CPUs, since most of the time is the
// verifier's.
func (c Config) prepare(ctx context.Context, subjects []subject, trials []*trial, p *progress) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(1)
	if c.separate {
		g.SetLimit(runtime.NumCPU())
	}
	for i, s := range subjects {
		g.Go(func() (err error) {
			if err := ctx.Err(); err != nil {
				return err
			}
			p.say("prepare " + s.Name)
			if trials[i], err = s.prepare(); err != nil {
				return fmt.Errorf("prepare %s: %w", s.Name, err)
			}
			return nil
		})
	}
	return g.Wait()
}

// wanted are the subjects that were asked for and what they are held against.
func (c Config) wanted(all []subject) []subject {
	if c.Only == "" {
		return all
	}
	keep := map[string]bool{}
	for _, s := range all {
		if strings.Contains(s.Name, c.Only) {
			keep[s.Name], keep[s.Baseline], keep[s.Floor] = true, true, true
		}
	}
	// A baseline may have a floor of its own.
	for _, s := range all {
		if keep[s.Name] {
			keep[s.Floor] = true
		}
		if keep[s.Name] && s.Baseline != "" && !keep[s.Baseline] {
			keep[s.Baseline] = true
		}
	}
	var out []subject
	for _, s := range all {
		if keep[s.Name] {
			if !keep[s.Baseline] {
				s.Baseline = ""
			}
			out = append(out, s)
		}
	}
	return out
}

// begin starts a result.
func (c Config) begin(command string, setup ...string) Result {
	r := Result{
		Version: resultVersion, Command: command, Started: time.Now().UTC().Truncate(time.Second),
		Machine: machine(), Setup: setup, Notes: []string{},
	}
	err := keepOrphans()
	var u usage
	if err == nil {
		u, err = usageNow()
	}
	if err == nil {
		r.before = &u
	} else {
		r.note(fmt.Sprintf("Whether others used the machine beside the runs of %q is not known: %v.", command, err))
	}
	return r
}

func (r *Result) note(text string) { r.Notes = append(r.Notes, text) }

// end says how long the runs took, and marks their figures if others used the
// machine meanwhile.
func (r *Result) end() {
	r.Seconds = time.Since(r.Started).Round(time.Second).Seconds()
	if r.before == nil {
		return
	}
	now, err := usageNow()
	if err != nil {
		r.note(fmt.Sprintf("Whether others used the machine beside the runs of %q is not known: %v.", r.Command, err))
		return
	}
	r.judge(now.disturbed(*r.before, r.Machine.CPUs))
}

// judge marks figures if others took more of the CPUs' time than disturbedMost: all but those of memory, of
// which no more is held for it.
func (r *Result) judge(disturbed float64) {
	if disturbed <= disturbedMost {
		return
	}
	r.note(fmt.Sprintf("Others took %.0f %% of the CPUs' time during the runs of %q: times are too long and their spread too wide, so only figures of memory are judged. Run it again on a quiet machine.", 100*disturbed, r.Command))
	for i := range r.Figures {
		if r.Figures[i].Unit != unitMemory {
			r.Figures[i].Disturbed = disturbed
		}
	}
}

// pinned runs f on one CPU, before all other tasks there, on the calling thread,
// which must be locked to its goroutine. A real-time priority, since niceness
// counts only among the tasks of one session or group.
func pinned(cpu int, f func() error) error {
	before, err := unix.SchedGetAttr(0, 0)
	if err != nil {
		return fmt.Errorf("read the priority of the thread: %w", err)
	}
	return host.OnCPU(cpu, func() error {
		first := &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_FIFO, Priority: 1}
		if err := unix.SchedSetAttr(0, first, 0); err != nil {
			return fmt.Errorf("give the thread a real-time priority: %w", err)
		}
		return errors.Join(f(), unix.SchedSetAttr(0, before, 0))
	})
}

// progress is one line that is written again and again.
type progress struct {
	w    io.Writer
	what string

	mu    sync.Mutex
	total int
	at    int
	start time.Time
}

func newProgress(w io.Writer, what string, total int) *progress {
	return &progress{w: w, what: what, total: total}
}

// step begins another run.
func (p *progress) step(name string) {
	p.mu.Lock()
	if p.at == 0 {
		p.start = time.Now() // preparing is not what the rest takes
	}
	left := ""
	if p.at > 0 {
		each := time.Since(p.start) / time.Duration(p.at)
		left = fmt.Sprintf(", %s left", (each * time.Duration(p.total-p.at)).Round(time.Second))
	}
	text := fmt.Sprintf("%3d %%%s: %s", 100*p.at/p.total, left, name)
	p.at++
	p.mu.Unlock()
	p.say(text)
}

// say writes the line anew.
func (p *progress) say(text string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.w != nil {
		fmt.Fprintf(p.w, "\r\x1b[K%s %s", p.what, text)
	}
}

func (p *progress) done() {
	if p.w != nil {
		fmt.Fprint(p.w, "\r\x1b[K")
	}
}

// Terminal returns f if it is a terminal, else nil.
func Terminal(f any) io.Writer {
	file, ok := f.(*os.File)
	if !ok {
		return nil
	}
	if _, err := unix.IoctlGetTermios(int(file.Fd()), unix.TCGETS); err != nil {
		return nil
	}
	return file
}
