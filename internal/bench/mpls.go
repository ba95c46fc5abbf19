package bench

import (
	"context"
	"fmt"

	"github.com/waystamp/waystamp/internal/model"
)

// labelled is a node under load whose packets have labels, or the same with SRv6.
type labelled struct{ hop }

func (l labelled) name() string {
	over := "srv6"
	if l.labels {
		over = "labels"
	}
	name := fmt.Sprintf("mpls/%s-%s-%s/%s", l.task, l.scheme, l.by, over)
	if l.segments != hopSegments {
		name += fmt.Sprintf("/segments-%d", l.segments)
	}
	return name
}

// mplsInner is the inner packet of all, in bytes: frames over labels are shorter.
const mplsInner = 128

func labelledCases(quick bool) (list []labelled) {
	schemes := []model.Scheme{model.SchemeOPoT, model.SchemeKeyed}
	if quick {
		schemes = schemes[1:]
	}
	both := func(h hop) {
		h.inner = mplsInner
		list = append(list, labelled{h})
		h.labels = true
		list = append(list, labelled{h})
	}
	for _, t := range []task{taskEnd, taskHeadend, taskEgress} {
		for _, s := range schemes {
			for _, who := range []by{byXDP, byTC} {
				h := hopBase
				h.task, h.by, h.scheme = t, who, s
				both(h)
			}
		}
	}
	if !quick {
		h := hopBase
		h.task, h.by, h.segments = taskHeadend, byXDP, model.SegmentsMax
		both(h)
	}
	return list
}

// MPLS measures labels beside SRv6.
func MPLS(ctx context.Context, c Config) (Result, error) {
	c.separate = true
	r := c.begin("mpls",
		fmt.Sprintf("One node under load on CPU %d, as in `hop`: generator, node and sink joined by veth pairs, ours on XDP with an XDP sink, on TC with a TC sink and GRO on at the node. The inner packet has %d bytes and the list %d segments where the name says nothing else; frames over labels are shorter, as labels are. Each is held against SRv6 at the same place, with the same scheme.", c.cpu(), mplsInner, hopSegments),
		fmt.Sprintf("What a headend puts before a packet has to fit into the room of its buffer: %d segments of labels fit on veth, of SRv6 they do not and go by TC. Headends over labels have the interfaces that cut super-packets; frames do not pass them.", model.SegmentsMax),
	)
	c.note = r.note
	var subjects []subject
	for _, l := range labelledCases(c.Quick) {
		s := Series{Name: l.name(), Unit: "ns/packet", Better: Less}
		if l.labels {
			l := l
			l.labels = false
			s.Baseline = l.name()
		}
		subjects = append(subjects, subject{s, func() (*trial, error) { return l.prepare(c, &r) }})
	}
	figures, err := c.rounds(ctx, "mpls", subjects)
	if err != nil {
		return Result{}, err
	}
	r.Figures = figures
	r.end()
	return r, nil
}
