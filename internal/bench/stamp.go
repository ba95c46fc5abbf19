package bench

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/srv6"
)

// stampRounds is how many runs of one packet a sample of `stamp` is the median
// of.
const stampRounds = 2000

// Stamp measures programs alone, by BPF_PROG_TEST_RUN.
func Stamp(ctx context.Context, c Config) (Result, error) {
	c.separate = true
	r := c.begin("stamp",
		"A program alone: BPF_PROG_TEST_RUN of the programs that ship, on packets that they take. The kernel copies the packet in once per call and measures the program's own time; a program that stamps would find its own stamp the second time. So every call runs it once, and a sample is the median of many calls.",
		"The time of one run has the kernel's clock in it (stamp/pass: the same program on a packet that is none of its business), which is taken off in the net column.",
		"The programs have no way without a proof. The least of them is pot: a look-up that all need, and one multiplication; it is the baseline, and what other schemes cost is the difference. What an egress pays per hop is the difference between numbers of segments.",
	)
	c.note = r.note
	var subjects []subject
	add := func(h hop, name, baseline string, params map[string]float64) {
		s := Series{Name: name, Unit: "ns/run", Better: Less, Baseline: baseline, Params: params}
		if h.task != taskDrop {
			s.Floor = "stamp/pass/" + string(h.by)
		}
		subjects = append(subjects, subject{Series: s, prepare: func() (*trial, error) { return h.prepareRun(c) }})
	}
	base := hop{size: 512, chains: 1, scheme: model.SchemeKeyed}
	for _, who := range []by{byXDP, byTC} {
		segments := []int{2, 3, 8, 16}
		if c.Quick || who == byTC {
			segments = []int{3, 16}
		}
		h := base
		h.by, h.segments, h.task = who, hopSegments, taskDrop
		add(h, "stamp/pass/"+string(who), "", nil)
		for _, t := range []task{taskEnd, taskHeadend, taskEgress} {
			for _, s := range []model.Scheme{model.SchemePoT, model.SchemeOPoT, model.SchemeKeyed, model.SchemeKeyedFlow} {
				if c.Quick && (who == byTC || s == model.SchemeKeyedFlow) {
					continue
				}
				for _, n := range segments {
					h.task, h.scheme, h.segments = t, s, n
					if t == taskHeadend && who == byXDP && srv6.OuterLen(n) > headroom {
						continue // XDP leaves it to TC
					}
					name := func(s model.Scheme) string { return fmt.Sprintf("stamp/%s-%s/%s/segments-%d", t, s, who, n) }
					baseline := name(model.SchemePoT)
					if s == model.SchemePoT {
						baseline = ""
					}
					add(h, name(s), baseline, map[string]float64{"segments": float64(n)})
				}
			}
		}
	}
	var err error
	if r.Figures, err = c.rounds(ctx, "stamp", subjects); err != nil {
		return Result{}, err
	}
	r.end()
	return r, nil
}

// headroom is how many bytes XDP can put before a frame at most: what the kernel
// keeps free there (XDP_PACKET_HEADROOM), less its own struct xdp_frame.
const headroom = 256 - 40

// verdicts of programs on packets that they send on, and that they let pass, of
// <linux/bpf.h> and <linux/pkt_cls.h>.
var verdicts = map[by]struct{ redirect, pass uint32 }{
	byXDP: {4, 2},
	byTC:  {7, 1<<32 - 1},
}

func (h hop) prepareRun(c Config) (_ *trial, err error) {
	w, err := newWorld(h.spec())
	if err != nil {
		return nil, err
	}
	r, err := newRig(h.cpus(c)...)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = joinClose(err, r)
		}
	}()
	pass := h.task == taskDrop
	want := verdicts[h.by].redirect
	if pass {
		h.task, want = taskEnd, verdicts[h.by].pass
	}
	if err := h.setUp(r, w); err != nil {
		return nil, err
	}
	frame, head, err := h.frame(w, 0, r.mac)
	if err != nil {
		return nil, err
	}
	h.needNumbers(warmUp + stampRounds)
	fields, err := h.fields(w, r.mac, frame, head)
	if err != nil {
		return nil, err
	}
	if err := r.generate(frame, head, fields...); err != nil {
		return nil, err
	}
	runs := make([][]byte, h.count())
	for i := range runs {
		if runs[i], _, err = h.frame(w, i, r.mac); err != nil {
			return nil, err
		}
		if h.by == byTC {
			clear(runs[i][:6]) // the kernel runs TC programs as if on lo, whose address is zero
		}
	}
	if pass {
		runs[0][12], runs[0][13] = 0x08, 0x06 // ARP
	}
	role := model.RoleCore
	if h.task == taskHeadend {
		role = model.RoleEdge
	}
	return &trial{close: r.close, measure: func(ctx context.Context) (float64, error) {
		var times []float64
		for tries := 0; ; tries++ {
			// The real way, so that the next hop is known. It may have been known
			// for a while, and expire before its time is over: then once more.
			if h.task == taskEgress {
				if err := r.dp.ForgetWindows(); err != nil {
					return 0, err
				}
			}
			if _, _, err := r.run(256); err != nil {
				return 0, err
			}
			times = times[:0]
			var unexpected error
			err := in(r.node, func() error {
				return pinned(r.cpus[0], func() error {
					start := time.Now()
					for len(times) < stampRounds && time.Since(start) < 60*time.Millisecond {
						each, verdict, err := r.dp.TestRun(role, h.by == byXDP, runs[len(times)%len(runs)], 1)
						if err != nil {
							return err
						}
						if verdict != want {
							unexpected = fmt.Errorf("the program's verdict is %d, want %d", verdict, want)
							return nil
						}
						times = append(times, float64(each.Nanoseconds()))
					}
					return nil
				})
			})
			if err == nil && unexpected == nil {
				break
			}
			if err != nil || tries == 3 {
				return 0, errors.Join(err, unexpected)
			}
		}
		return Median(times), ctx.Err()
	}}, nil
}
