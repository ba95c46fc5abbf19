package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
)

const (
	// memoryAgents are the members of the controller whose memory is measured.
	memoryAgents = 30
	// unitMemory is of memory that is held, which other load does not make more.
	unitMemory = "KB"
	// memoryAhead are changes before those that count: as many as there are epochs.
	memoryAhead = 256
	// memoryChanges are those that count, and memoryQuick those of a quick run.
	memoryChanges = 10_000
	memoryQuick   = 500
)

// holder is something that changes again and again, and holds memory.
type holder struct {
	name   string // of its figures
	what   string // how its files are called there; "": it has none
	start  func(context.Context) error
	change func(context.Context) error
	quiet  func(context.Context) error // nothing is under way any more
	file   func() string               // that it writes to
	close  func() error
}

// memorySubjects are the figures of memory, those of each holder together.
func memorySubjects(quick bool) (subjects []subject, changes int) {
	changes = memoryChanges
	if quick {
		changes = memoryQuick
	}
	for _, of := range []struct{ name, files string }{{"controller", "store"}, {"node", ""}} {
		for _, what := range []string{"heap", "resident", of.files} {
			if what == "" {
				continue
			}
			base := fmt.Sprintf("control/memory/%s-%s/changes-0", of.name, what)
			for _, n := range []int{0, changes} {
				s := Series{Name: fmt.Sprintf("control/memory/%s-%s/changes-%d", of.name, what, n), Unit: unitMemory, Better: Less, Params: map[string]float64{"changes": float64(n)}}
				if n > 0 {
					s.Baseline = base
				}
				subjects = append(subjects, subject{Series: s})
			}
		}
	}
	return subjects, changes
}

// memory measures what controller and node hold before and behind so many changes. There is one history of each: what is measured in each round follows one more change.
func (c Config) memory(ctx context.Context, subjects []subject, changes int, r *Result) (figures []Figure, err error) {
	if c.skips(subjects) {
		return nil, nil
	}
	wanted := map[string]bool{}
	for _, s := range c.wanted(subjects) {
		wanted[s.Name] = true
	}
	of := map[string]*Series{}
	var names []string
	for _, s := range subjects {
		if wanted[s.Name] {
			of[s.Name], names = &s.Series, append(names, s.Name)
		}
	}
	for _, h := range []*holder{controllerHolder(r), nodeHolder()} {
		if err := c.memoryOf(ctx, h, changes, of); err != nil {
			return nil, fmt.Errorf("measure the memory of the %s: %w", h.name, err)
		}
	}
	var series []Series
	for _, name := range names {
		series = append(series, *of[name])
	}
	return Figures(series)
}

// memoryOf adds the samples of one holder to its series, if one of them is wanted.
func (c Config) memoryOf(ctx context.Context, h *holder, changes int, of map[string]*Series) (err error) {
	at := func(what string, n int) *Series {
		return of[fmt.Sprintf("control/memory/%s-%s/changes-%d", h.name, what, n)]
	}
	kinds := []string{"heap", "resident", h.what}
	some := false
	for _, what := range kinds {
		some = some || at(what, changes) != nil
	}
	if !some {
		return nil
	}
	p := newProgress(c.Progress, "control, memory", memoryAhead+2*c.Runs+changes)
	defer p.done()
	p.say("prepare " + h.name)
	if err := h.start(ctx); err != nil {
		return errors.Join(err, h.close())
	}
	defer func() { err = errors.Join(err, h.close()) }()
	change := func() error {
		if err := ctx.Err(); err != nil {
			return err
		}
		p.step(h.name)
		return h.change(ctx)
	}
	sample := func(n int) error {
		if err := errors.Join(change(), h.quiet(ctx)); err != nil {
			return err
		}
		held, err := heldNow(h.file())
		if err != nil {
			return err
		}
		for i, what := range kinds {
			if s := at(what, n); s != nil {
				s.Samples = append(s.Samples, held[i]/1000)
			}
		}
		return nil
	}
	for range memoryAhead {
		if err := change(); err != nil {
			return err
		}
	}
	for range c.Runs {
		if err := sample(0); err != nil {
			return err
		}
	}
	for range changes {
		if err := change(); err != nil {
			return err
		}
	}
	for range c.Runs {
		if err := sample(changes); err != nil {
			return err
		}
	}
	return nil
}

// heldNow is the heap, resident memory, and size of a file if there is one, in bytes.
func heldNow(file string) (held [3]float64, err error) {
	debug.FreeOSMemory() // collects, and gives back what is free
	debug.FreeOSMemory() // what finalizers have let go, and pools
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	held[0] = float64(m.HeapAlloc)
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return held, fmt.Errorf("read how much memory is resident: %w", err)
	}
	for line := range strings.Lines(string(status)) {
		if kb, ok := strings.CutPrefix(line, "RssAnon:"); ok {
			n, err := strconv.ParseUint(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(kb), "kB")), 10, 64)
			if err != nil {
				return held, fmt.Errorf("read how much memory is resident: %w", err)
			}
			held[1] = float64(n) * 1024
		}
	}
	if held[1] == 0 {
		return held, errors.New("read how much memory is resident: /proc/self/status does not say")
	}
	if file != "" {
		info, err := os.Stat(file)
		if err != nil {
			return held, fmt.Errorf("measure the store: %w", err)
		}
		held[2] = float64(info.Size())
	}
	return held, nil
}

// memoryDir is a directory in memory, so that ten thousand changes do not wait for a disk as often; "": there is none.
func memoryDir() string {
	const dir = "/dev/shm"
	if st, err := os.Stat(dir); err == nil && st.IsDir() {
		return dir
	}
	return ""
}

// controllerHolder is a controller with its members.
func controllerHolder(r *Result) *holder {
	var f *fleet
	n := 0
	return &holder{
		name: "controller", what: "store",
		start: func(ctx context.Context) (err error) {
			f, err = newFleet(ctx, memoryDir(), memoryAgents, r)
			return err
		},
		change: func(ctx context.Context) error {
			chain := n / 2 % chainsOf(memoryAgents)
			n++
			if n%2 == 0 {
				return f.rotate(ctx, chain)
			}
			f.turned[chain]++
			return f.apply(ctx)
		},
		quiet: func(ctx context.Context) error { return f.quiet(ctx) },
		file:  func() string { return filepath.Join(f.dir, "store") },
		close: func() error {
			if f == nil {
				return nil
			}
			return f.close()
		},
	}
}

// nodeHolder is a data path that is the egress of one path, and has the kernel.
func nodeHolder() *holder {
	var t *trial
	return &holder{
		name: "node",
		start: func(context.Context) (err error) {
			t, err = prepareChange(1)
			return err
		},
		change: func(ctx context.Context) error {
			_, err := t.measure(ctx)
			return err
		},
		quiet: func(context.Context) error { return nil },
		file:  func() string { return "" },
		close: func() error {
			if t == nil {
				return nil
			}
			return t.close()
		},
	}
}
