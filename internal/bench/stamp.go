package bench

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/waystamp/waystamp/internal/model"
)

// stampRounds is how many runs of one packet a sample of `stamp` is the median
// of.
const stampRounds = 2000

// Stamp measures programs alone, by BPF_PROG_TEST_RUN.
func Stamp(ctx context.Context, c Config) (Result, error) {
	r := c.begin("stamp",
		"A program alone: BPF_PROG_TEST_RUN of the XDP programs that ship, on packets that they take. The kernel copies the packet in once per call and measures the program's own time; a program that stamps would find its own stamp the second time. So every call runs it once, and a sample is the median of many calls.",
		"The time of one run has the kernel's clock in it (stamp/pass/xdp: the same program on a packet that is none of its business), which is taken off in the net column.",
		"The cost of a proof is the difference between schemes and numbers of segments: the programs have no way without one.",
	)
	var subjects []subject
	add := func(h hop, suffix, baseline string, params map[string]float64) {
		name := fmt.Sprintf("stamp/%s-%s/%s%s", h.task, h.scheme, h.by, suffix)
		floor := "stamp/pass/xdp"
		if h.task == taskDrop {
			name, floor = floor, ""
		}
		subjects = append(subjects, subject{
			Series:  Series{Name: name, Unit: "ns/run", Better: Less, Baseline: baseline, Floor: floor, Params: params},
			prepare: func() (*trial, error) { return h.prepareRun(c) },
		})
	}
	base := hop{by: byXDP, size: 512, segments: hopSegments, chains: 1, scheme: model.SchemeKeyed}
	pass := base
	pass.task = taskDrop
	add(pass, "", "", nil)
	segments := []int{2, 3, 8, 16}
	if c.Quick {
		segments = []int{3, 16}
	}
	for _, t := range []task{taskEnd, taskHeadend, taskEgress} {
		for _, n := range segments {
			for _, s := range []model.Scheme{model.SchemePoT, model.SchemeOPoT, model.SchemeKeyed, model.SchemeKeyedFlow} {
				h := base
				h.task, h.scheme, h.segments = t, s, n
				if t == taskHeadend && model.OuterLen(n) > headroom {
					continue // XDP leaves it to TC
				}
				baseline := fmt.Sprintf("stamp/%s-%s/xdp/segments-%d", t, model.SchemePoT, n)
				if s == model.SchemePoT {
					baseline = ""
				}
				add(h, fmt.Sprintf("/segments-%d", n), baseline, map[string]float64{"segments": float64(n)})
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

// Verdicts of <linux/bpf.h>.
const (
	xdpPass     = 2
	xdpRedirect = 4
)

func (h hop) prepareRun(c Config) (_ *trial, err error) {
	w, err := newWorld(h.scheme, h.segments, 1, true)
	if err != nil {
		return nil, err
	}
	r, err := newRig(c.cpu())
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = joinClose(err, r)
		}
	}()
	pass := h.task == taskDrop
	want := uint32(xdpRedirect)
	if pass {
		h.task, want = taskEnd, xdpPass
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
				return pinned(r.cpu, func() error {
					start := time.Now()
					for len(times) < stampRounds && time.Since(start) < 60*time.Millisecond {
						each, verdict, err := r.dp.TestRun(role, true, runs[len(times)%len(runs)], 1)
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
