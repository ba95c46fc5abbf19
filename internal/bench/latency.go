package bench

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/bench/meter"
)

// The paper on SR-aware netfilter sends 10 000 packets a second and shows what each of them
// takes (Fig. 6).
const (
	latency       = "latency"
	latencyMedian = "latency-median"
	latencyEvery  = 100 * time.Microsecond
	latencyBurst  = 50 * time.Millisecond // a real-time task must leave others their share
	latencyWait   = time.Second           // for one packet, before it counts as lost
	latencySpin   = 200 * time.Microsecond
)

// latencyFigures are what is told of a run's packets, by the groups that figures have.
var latencyFigures = []struct {
	group string
	of    func([]float64) float64
}{
	{latencyMedian, Median},
	{"latency-mean", mean},
	{"latency-p99", func(x []float64) float64 { return Quantile(x, 0.99) }},
}

func mean(x []float64) (m float64) {
	for _, v := range x {
		m += v / float64(len(x))
	}
	return m
}

// latencyCases are the ways that one packet at a time takes through the node. On XDP there is
// none: veth makes a new packet there of what a socket has sent.
func latencyCases() (list []filtering) {
	for _, b := range []filterBy{filterByPlain, filterByEnd, filterByStatic, filterByOwn, filterByNode, filterByBypass} {
		list = append(list, filtering{by: b, param: latency, size: 256})
	}
	return list
}

// pacer sends one packet after the other through a node, and knows when each has arrived.
type pacer struct {
	*rig
	frame    []byte
	fd       int
	arrivals *meter.Tap
}

func (f filtering) preparePacer(c Config) (_ *pacer, err error) {
	r, err := newRig(c.cpu())
	if err != nil {
		return nil, err
	}
	p := &pacer{rig: r, fd: -1}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.close())
		}
	}()
	err = in(r.sink, func() error {
		p.arrivals, err = meter.NewArrivals(r.index.sink)
		return err
	})
	if err != nil {
		return nil, err
	}
	if _, p.frame, _, err = f.build(r); err != nil {
		return nil, err
	}
	p.fd, err = packetSocket(r.gen, devEnd, 0)
	return p, err
}

func (p *pacer) close() error {
	var err error
	if p.fd >= 0 {
		err = unix.Close(p.fd)
	}
	if p.arrivals != nil {
		err = errors.Join(err, p.arrivals.Close())
	}
	return errors.Join(err, p.rig.close())
}

// run sends for that long and returns what each packet took, in nanoseconds, from the call that
// sends it to the sink. The next is sent when one has arrived, and no earlier than latencyEvery
// behind it.
func (p *pacer) run(ctx context.Context, d time.Duration) (ns []float64, err error) {
	for left := max(1, int(d/latencyEvery)); left > 0; {
		n := min(left, int(latencyBurst/latencyEvery))
		err := in(p.gen, func() error {
			return pinned(p.cpus[0], func() error {
				next := time.Now()
				for range n {
					for time.Now().Before(next) {
					}
					took, err := p.one(ctx)
					if err != nil {
						return err
					}
					ns = append(ns, float64(took.Nanoseconds()))
					next = next.Add(latencyEvery)
				}
				return nil
			})
		})
		if err != nil {
			return nil, err
		}
		left -= n
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-time.After(floodRest):
		}
	}
	return ns, nil
}

// one sends one packet and waits for it. The kernel takes it to the sink within the call, but
// where it leaves that to a thread of its own, which then needs the CPU.
func (p *pacer) one(ctx context.Context) (time.Duration, error) {
	before, _, err := p.arrivals.Arrived()
	if err != nil {
		return 0, err
	}
	start := monotonic()
	if _, err := unix.Write(p.fd, p.frame); err != nil {
		return 0, fmt.Errorf("send a packet: %w", err)
	}
	for {
		n, at, err := p.arrivals.Arrived()
		switch waited := monotonic() - start; {
		case err != nil:
			return 0, err
		case n == before+1:
			return time.Duration(at) - start, nil
		case n != before:
			return 0, fmt.Errorf("%d packets have arrived where one was sent", n-before)
		case waited > latencyWait:
			return 0, fmt.Errorf("a packet has not arrived within %s", latencyWait)
		case waited > latencySpin:
			if err := context.Cause(ctx); err != nil {
				return 0, err
			}
			time.Sleep(latencySpin)
		}
	}
}

// filterLatency measures what one packet takes where the node has nothing else to do.
func (c Config) filterLatency(ctx context.Context) ([]Figure, error) {
	cases := latencyCases()
	runs := map[string][][]float64{} // of each case, counted ones
	var subjects []subject
	for _, f := range cases {
		name, warm := f.name(), true
		subjects = append(subjects, subject{
			Series: Series{Name: name, Unit: "ns", Better: Less, Baseline: f.baseline()},
			prepare: func() (*trial, error) {
				p, err := f.preparePacer(c)
				if err != nil {
					return nil, err
				}
				return &trial{measure: func(ctx context.Context) (float64, error) {
					ns, err := f.latencies(ctx, p, c.Duration)
					if err != nil {
						return 0, err
					}
					if !warm {
						runs[name] = append(runs[name], ns)
					}
					warm = false
					return Median(ns), nil
				}, close: p.close}, nil
			},
		})
	}
	if c.skips(subjects) {
		return nil, nil
	}
	figures, err := c.rounds(ctx, "nf, latency", subjects)
	if err != nil {
		return nil, err
	}
	return latencyOf(figures, runs)
}

// latencies is a run. Of ours, the data path must have taken every packet.
func (f filtering) latencies(ctx context.Context, p *pacer, d time.Duration) (ns []float64, err error) {
	err = f.goesPast(p.rig, func() error {
		if p.dp == nil {
			ns, err = p.run(ctx, d)
			return err
		}
		before, _, err := p.done()
		if err != nil {
			return err
		}
		if ns, err = p.run(ctx, d); err != nil {
			return err
		}
		after, _, err := p.done()
		if err == nil && after-before != uint64(len(ns)) {
			err = fmt.Errorf("of %d packets the data path stamped %d", len(ns), after-before)
		}
		return err
	})
	return ns, err
}

// latencyOf are the figures of all that is told of the runs. medians are those of the rounds.
func latencyOf(medians []Figure, runs map[string][][]float64) (out []Figure, err error) {
	for _, what := range latencyFigures {
		var series []Series
		as := func(name string) string { return strings.Replace(name, latencyMedian, what.group, 1) }
		for _, f := range medians {
			s := Series{Name: as(f.Name), Unit: f.Unit, Better: f.Better, Baseline: as(f.Baseline)}
			for _, ns := range runs[f.Name] {
				s.Samples = append(s.Samples, what.of(ns))
			}
			series = append(series, s)
		}
		figures, err := Figures(series)
		if err != nil {
			return nil, err
		}
		if what.group == latencyMedian {
			for i, f := range figures {
				box := BoxOf(slices.Concat(runs[f.Name]...))
				figures[i].Box = &box
			}
		}
		more, err := toEnd(figures)
		if err != nil {
			return nil, err
		}
		out = append(append(out, figures...), more...)
	}
	return out, nil
}
