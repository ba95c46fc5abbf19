package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	"github.com/waystamp/waystamp/internal/event"
	"github.com/waystamp/waystamp/internal/explain"
	v1 "github.com/waystamp/waystamp/internal/rpc/waystampv1"
)

// addChain adds the flag for one chain's refused packets.
func (c *controllerFlag) addChain(cmd *cobra.Command, chain *string) {
	cmd.Flags().StringVar(chain, "chain", "", "`name` of a chain: ask the controller for packets whose proof names it, and for those without a proof that it requires")
	completeWith(cmd, "chain", func() []string { return c.names(contextOf(cmd), aboutChain) })
}

// told is a refused packet as the controller has it.
type told struct {
	event.Event
	Chain     string `json:"chain"` // that the proof names, or that requires the packet; or nothing
	Direction string `json:"direction"`
	Sentence  string `json:"sentence"` // what the packet shows; nothing if there were too many to explain
	Dropped   uint64 `json:"dropped"`  // refusals of the node before this one that the controller did not get
}

// refusals calls f with what the controller has kept, present behind that, and then f with new ones if follow is set.
func (c adminClient) refusals(ctx context.Context, chain string, follow bool, f func(told) error, present func()) error {
	stream, err := c.Refusals(ctx, connect.NewRequest(&v1.RefusalsRequest{Chain: chain, Follow: follow}))
	if err != nil {
		return err
	}
	defer stream.Close()
	for stream.Receive() {
		m := stream.Msg()
		if m.Present {
			present()
			continue
		}
		t := told{Chain: m.Refusal.Chain, Direction: m.Refusal.Direction, Sentence: m.Refusal.Sentence, Dropped: m.Refusal.Dropped}
		if err := json.Unmarshal(m.Refusal.Event, &t.Event); err != nil {
			return fmt.Errorf("the controller sends an event that is none: %w", err)
		}
		if err := f(t); err != nil {
			return err
		}
	}
	if err := stream.Err(); err != nil {
		return err
	}
	if follow && ctx.Err() == nil {
		return errors.New("the controller has ended the connection; run the command again")
	}
	return nil
}

// ask watches by the controller.
func (o *watchOptions) ask(cmd *cobra.Command, p *eventPrinter) (failed error) {
	closeCapture, err := p.captureTo(o.pcap)
	if err != nil {
		return err
	}
	defer func() { failed = errors.Join(failed, closeCapture()) }()
	ctx := cmd.Context()
	err = o.controller.with(ctx, func(c adminClient) error {
		return c.refusals(ctx, o.chain, !o.once, p.told, func() {
			if !o.once {
				p.note("--- end of the controller's history; new refusals follow ---")
			}
		})
	})
	return withoutCancel(ctx, err)
}

// told writes what the controller has sent.
func (p *eventPrinter) told(t told) error {
	x := explained{Event: t.Event}
	if t.Sentence != "" {
		x.Explanation = &explain.Explanation{Sentence: t.Sentence}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.capture != nil {
		return p.capture.Write(captured(x))
	}
	if !p.text {
		return json.NewEncoder(p.out).Encode(t)
	}
	if t.Dropped > 0 {
		if _, err := fmt.Fprintf(p.out, "    %d refusals of %s before the next one did not reach the controller\n", t.Dropped, t.Node); err != nil {
			return err
		}
	}
	pkt, names := readPacket(t.Packet), pathNames{chain: map[uint32]string{}}
	if t.Chain != "" {
		names.chain[pkt.path] = t.Chain
		if t.Direction != "" && t.Direction != "forward" {
			names.chain[pkt.path] += " (" + t.Direction + ")"
		}
	}
	return printEvent(p.out, x, pkt.text(names))
}

// ask prints the controller's explanations.
func (o *explainOptions) ask(cmd *cobra.Command) error {
	n := 0
	err := o.controller.with(cmd.Context(), func(c adminClient) error {
		return c.refusals(cmd.Context(), o.chain, false, func(t told) error {
			n++
			if o.output == "json" {
				return json.NewEncoder(cmd.OutOrStdout()).Encode(t)
			}
			return renderTold(cmd.OutOrStdout(), t)
		}, func() {})
	})
	if err == nil && n == 0 {
		fmt.Fprintln(cmd.ErrOrStderr(), "no node has told the controller of a refused packet")
	}
	return err
}

func renderTold(w io.Writer, t told) error {
	sentence := t.Sentence
	if sentence == "" {
		sentence = t.Text + " (not explained: too many at once)"
	}
	return renderExplanation(w, explain.Explanation{
		Sentence: sentence, Node: t.Node, Interface: t.Interface, Reason: event.ReasonName(t.Reason), Place: t.Place, Reported: t.Reported,
	})
}
