package demo

import (
	"context"
	"encoding/binary"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/mpls"
	"github.com/waystamp/waystamp/internal/plan"
)

const labelsPrologue = `
== a chain over labels, through a core that speaks IPv4 alone ==

    h1 --- r1 --- r4 --- r2 (fw) --- r3 (dpi) --- r5 --- r6 --- h2     chain web6, both ways

Between nodes there is no IPv6: r1 puts a stack of MPLS labels around packets in place of
an SRv6 header, with the same proof behind it. r4 and r5 pass labels on.
`

func (s *stage) labelScenes() []scene {
	s.chain = "web6"
	web := s.path(model.Forward)
	return []scene{
		{"Traffic takes its chain over labels",
			fmt.Sprintf("h1 pinged h2 %d times, then downloaded %d MB from it by HTTP", pings, functionBytes/1_000_000),
			func(ctx context.Context) ([]string, error) {
				saw, err := s.flow(ctx, functionBytes)
				return append([]string{stackOf(web)}, saw...), err
			}},
		{"One function is left out",
			"r1's plan was edited: its labels now say r3 and r6 alone; then h1 pinged h2; then the plan was put right",
			func(ctx context.Context) ([]string, error) { return s.withoutFirst(ctx, web) }},
		{"A host sends labels",
			"h1 sent the labels of the chain's last visit, with a packet behind them",
			func(ctx context.Context) ([]string, error) { return s.sendsLabels(ctx, web) }},
	}
}

// stackOf is the labels of a path, as its headend puts them on.
func stackOf(p plan.Path) string {
	var visits []string
	for _, h := range p.Hops[1:] {
		name := h.Node
		if h.Function != "" {
			name += " (" + h.Function + ")"
		}
		visits = append(visits, fmt.Sprintf("%d %d for %s", h.NodeLabel, h.ServiceLabel, name))
	}
	return "the plan's labels: " + strings.Join(visits, ", ")
}

// withoutFirst takes the first visit out of r1's plan, and puts it back.
func (s *stage) withoutFirst(ctx context.Context, web plan.Path) (saw []string, err error) {
	edit := func(change func(h *plan.Headend)) error {
		n, err := s.lab.NodePlan("r1")
		if err != nil {
			return err
		}
		for i := range n.Headends {
			if n.Headends[i].Path == web.Path {
				change(&n.Headends[i])
			}
		}
		return s.follow(ctx, n)
	}
	var was plan.Headend
	saw, err = s.refused(func(context.Context) error {
		return edit(func(h *plan.Headend) {
			was = *h
			h.Segments, h.NodeLabels = h.Segments[1:], h.NodeLabels[1:]
		})
	}, "proof", "r2 (fw) never stamped this packet")(ctx)
	if err != nil {
		return saw, err
	}
	return saw, edit(func(h *plan.Headend) { *h = was })
}

// sendsLabels is a frame that a host has no business to send.
func (s *stage) sendsLabels(ctx context.Context, web plan.Path) (saw []string, err error) {
	r1, err := s.lab.Net("r1")
	if err != nil {
		return nil, err
	}
	defer r1.Close()
	to, err := r1.HardwareAddress("r1-h1")
	if err != nil {
		return nil, err
	}
	link, err := host.OpenFrames(s.h1, "h1-r1", unix.ETH_P_MPLS_UC)
	if err != nil {
		return nil, err
	}
	defer link.Close()
	last := web.Hops[len(web.Hops)-1]
	packet, err := mpls.Outer([]mpls.Visit{{Node: last.NodeLabel, Service: last.ServiceLabel}}, [24]byte{})
	if err != nil {
		return nil, err
	}
	frame := append(append([]byte{}, to[:]...), link.MAC[:]...)
	frame = append(binary.BigEndian.AppendUint16(frame, unix.ETH_P_MPLS_UC), packet...)
	return s.refusal(ctx, "r1", "outside-mpls", 1, "from outside", func(context.Context) (string, error) {
		return fmt.Sprintf("a frame of %d bytes left h1", len(frame)), link.Send(frame)
	})
}
