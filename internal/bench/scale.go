package bench

import (
	"context"
	"fmt"

	"github.com/waystamp/waystamp/internal/model"
)

// Scale measures what a packet costs as chains, rules and segments grow in
// number.
func Scale(ctx context.Context, c Config) (Result, error) {
	c.separate = true
	r := c.begin("scale", append(hopSetup(c),
		fmt.Sprintf("Chains: packets go round all of them, one after the other, each with its own SID, path, secrets, rule and destination. The generator's own tables grow with them; scale/drop shows what that costs. Each visit of a node has a /64 of its own, and a /48, the one length of blocks that NEXT-C-SID's 16 bits allow, has 65535 of them: no domain can have more than 32767 chains, with one function each. The nodes of this one have a quarter of the block each, so that it goes to %d.", chainsMax),
		"Rules: as many chains, each chosen by a rule with a priority, a destination and a protocol; packets go round all of them.",
		"Headends put as much before a frame as its buffer has room for; on veth that is 9 segments. Longer lists go by TC, and take as long.",
		"Segments: keyed verifies a tag per hop, opot the same work for any number.",
	)...)
	c.note = r.note
	chains := []int{1, 256, 4096, chainsMax}
	segments := []int{2, 4, 8, 16}
	if c.Quick {
		chains = []int{1, 256, 4096}
		segments = []int{2, 16}
	}
	sweep := func(what string, n []int, tasks []task, vary func(*hop, int)) error {
		var subjects []subject
		for _, t := range tasks {
			for _, s := range []model.Scheme{model.SchemeOPoT, model.SchemeKeyed} {
				if what != "segments" && s == model.SchemeOPoT && t != taskDrop {
					continue // the same tables
				}
				if t == taskDrop && s == model.SchemeKeyed {
					continue
				}
				first := ""
				for _, x := range n {
					h := hop{task: t, by: byXDP, scheme: s, size: 512, segments: 2, chains: 1}
					vary(&h, x)
					name := fmt.Sprintf("scale/%s-%s/%s-%d", t, s, what, x)
					if t == taskDrop {
						name = fmt.Sprintf("scale/drop/%s-%d", what, x)
					}
					series := Series{Name: name, Unit: "ns/packet", Better: Less, Baseline: first, Params: map[string]float64{what: float64(x)}}
					if first == "" {
						first = name
					}
					subjects = append(subjects, subject{Series: series, prepare: func() (*trial, error) { return h.prepare(c, &r) }})
				}
			}
		}
		if c.skips(subjects) {
			return nil
		}
		figures, err := c.rounds(ctx, "scale, "+what, subjects)
		r.Figures = append(r.Figures, figures...)
		return err
	}
	if err := sweep("segments", segments, []task{taskEnd, taskHeadend, taskEgress}, func(h *hop, n int) { h.segments = n }); err != nil {
		return Result{}, err
	}
	if err := sweep("chains", chains, []task{taskDrop, taskEnd, taskHeadend, taskEgress}, func(h *hop, n int) { h.chains = n }); err != nil {
		return Result{}, err
	}
	rules := []int{1, 16, 64, model.OrderedMax}
	if err := sweep("rules", rules, []task{taskHeadend, taskEgress}, func(h *hop, n int) { h.chains, h.ordered = n, true }); err != nil {
		return Result{}, err
	}
	if len(r.Figures) == 0 {
		return Result{}, &NoCaseError{c.Only}
	}
	r.end()
	return r, nil
}
