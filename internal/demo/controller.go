package demo

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/waystamp/waystamp/examples"
	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/lab"
	"github.com/waystamp/waystamp/internal/model"
)

const controllerPrologue = `
== one file in, and changes that lose nothing ==

                         r3 (dpi)
                        /        \
    h1 ---- r1 ---- r2 (fw)       r6 ---- h2      chain web, both ways: r1, fw, dpi, r6
                        \        /
                         r5 (spare)

A controller has the domain's file and all secrets. Agents have joined it, each with a token, and
each gets only the part of its node, over TLS with certificates on both sides.
`

// rotations is how often secrets change in the first scene, a second apart.
const rotations = 5

// playControlled builds the lab with a controller, which is given the file in a folder that scenes
// write others into.
func (s *stage) playControlled(ctx context.Context, play func(scenes func() []scene) error) error {
	folder, err := os.MkdirTemp("", "waystamp-demo-")
	if err != nil {
		return fmt.Errorf("make a directory for the domain's file: %w", err)
	}
	defer os.RemoveAll(folder)
	x := &governed{stage: s, file: filepath.Join(folder, "domain.yaml"), counts: map[counted]count{}}
	if err := x.write("dpi"); err != nil {
		return err
	}
	s.apply = x.file
	defer func() { s.apply = "" }()
	return play(x.scenes)
}

// governed is a lab that a controller governs.
type governed struct {
	*stage
	file string

	mu     sync.Mutex
	counts map[counted]count // of chain web, forward
}

// counted is what a node counts in one role of a path.
type counted struct {
	node, role, function string
	path                 uint32
}

// count goes on where a node has given up its role in a path, and taken it again.
type count struct{ last, all uint64 }

// write makes the domain's file one whose chain has this function behind fw.
func (x *governed) write(function string) error {
	text := examples.Spare
	if function == "spare" {
		dpi, list := []byte("  - {name: dpi, node: r3, kind: forward}\n"), []byte("functions: [fw, dpi]")
		text = bytes.Replace(text, dpi, append(dpi[:len(dpi):len(dpi)], "  - {name: spare, node: r5, kind: forward}\n"...), 1)
		text = bytes.Replace(text, list, []byte("functions: [fw, spare]"), 1)
	}
	if err := os.WriteFile(x.file, text, 0o600); err != nil {
		return fmt.Errorf("write the domain's file: %w", err)
	}
	return nil
}

func (x *governed) scenes() []scene {
	return []scene{
		{"Secrets change each second during downloads",
			fmt.Sprintf("waystamp rotate --all --wait, %d times, a second apart, while h1 downloaded %d MB from h2 again and again", rotations, downloadBytes/1_000_000),
			x.rotated},
		{"A function is replaced under traffic",
			"waystamp apply -f domain.yaml --wait, with spare in the place of dpi, while h1 downloaded",
			x.replaced},
		{"The controller is gone, and an agent is restarted",
			"the controller was killed (SIGKILL); r2's agent was stopped and started, while h1 downloaded; then the controller was started again, and secrets were rotated",
			x.alone},
		{"A node is revoked",
			"waystamp node revoke r5 --yes; then h1 pinged h2",
			x.revoked},
		{"The chain goes on without it",
			"waystamp apply -f domain.yaml --wait, with dpi again; then h1 pinged h2",
			x.without},
	}
}

// stamped is what nodes have counted of chain web, forward, with all epochs and SIDs together.
type stamped map[string]uint64

// stamped looks at what nodes count, of which the sum since the first look does not go down.
func (x *governed) stamped(ctx context.Context) (stamped, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, m := range x.lab.Members() {
		if m.Role != lab.RoleNode {
			continue
		}
		c, err := x.counters(ctx, m.Name)
		if err != nil {
			return nil, err
		}
		is := map[counted]uint64{}
		for _, p := range c.Paths {
			if p.Chain == "web" && p.Direction == model.Forward.String() {
				id := counted{node: m.Name, role: p.Role, function: p.Function, path: p.Path}
				is[id] += p.Frames
				if _, known := x.counts[id]; !known {
					x.counts[id] = count{}
				}
			}
		}
		for id, n := range x.counts {
			if id.node != m.Name {
				continue
			}
			if is[id] < n.last { // it has been given up, and perhaps been taken again
				n.last = 0
			}
			x.counts[id] = count{is[id], n.all + is[id] - n.last}
		}
	}
	out := stamped{}
	for id, n := range x.counts {
		out[id.node] += n.all
	}
	return out, nil
}

// lookAgain is how often nodes' counts are looked at meanwhile. An epoch that drains has none that changes in its last second.
const lookAgain = 200 * time.Millisecond

// look looks at nodes' counts until the context ends. An agent that is being restarted tells nothing.
func (x *governed) look(ctx context.Context) {
	for wait(ctx, lookAgain) == nil {
		_, _ = x.stamped(ctx)
	}
}

func (x *governed) counters(ctx context.Context, node string) (api.Counters, error) {
	client := x.client(node)
	defer client.Close()
	return client.Counters(ctx)
}

// refusals are all that nodes have refused, by node and reason.
func (x *governed) refusals(ctx context.Context) (map[string]uint64, error) {
	out := map[string]uint64{}
	for _, m := range x.lab.Members() {
		if m.Role != lab.RoleNode {
			continue
		}
		c, err := x.counters(ctx, m.Name)
		if err != nil {
			return nil, err
		}
		for _, r := range c.Refusals {
			out[m.Name+": "+r.Reason] = r.Dropped + r.Reported
		}
	}
	return out, nil
}

// lossless does something while h1 downloads from h2 again and again, and shows that no node has
// refused a packet meanwhile, and that all frames were stamped by all. The nodes' counts have to be
// of agents that go on counting.
func (x *governed) lossless(ctx context.Context, do func(context.Context) ([]string, error)) (saw []string, err error) {
	refused, err := x.refusals(ctx)
	if err != nil {
		return nil, err
	}
	before, err := x.stamped(ctx)
	if err != nil {
		return nil, err
	}
	content := lab.Content{Seed: 7, Size: downloadBytes}
	server, err := lab.Serve(x.h2, netip.AddrPortFrom(x.h2Addr(), 0), content)
	if err != nil {
		return nil, err
	}
	defer server.Close()
	type result struct {
		n       int
		longest time.Duration
		err     error
	}
	done, ended := make(chan struct{}), make(chan result, 1)
	go func() {
		var r result
		for r.err == nil {
			var t lab.Transfer
			if t, r.err = lab.Download(ctx, x.h1, server.Addr(), content); r.err == nil {
				r.n++
				r.longest = max(r.longest, t.Duration)
			}
			select {
			case <-done:
				ended <- r
				return
			default:
			}
		}
		ended <- r
	}()
	looking, stop := context.WithCancel(ctx)
	looked := make(chan struct{})
	go func() {
		defer close(looked)
		x.look(looking)
	}()
	defer func() {
		stop()
		<-looked
	}()
	saw, err = do(ctx)
	close(done)
	r := <-ended
	if err = errors.Join(err, r.err); err != nil {
		return saw, err
	}
	saw = append(saw, fmt.Sprintf("%d downloads, each as sent; the longest took %.2f s", r.n, r.longest.Seconds()))
	line, err := x.allStamped(ctx, before)
	saw = append(saw, line)
	if err != nil {
		return saw, err
	}
	now, err := x.refusals(ctx)
	if err != nil {
		return saw, err
	}
	for what, n := range now {
		if n != refused[what] {
			return saw, fmt.Errorf("refused: %s, %d times", what, n-refused[what])
		}
	}
	return append(saw, "no node has refused a packet"), nil
}

// allStamped waits until what r1 has sent since was stamped by fw, by dpi or spare, and verified by
// r6: packets may still be on their way.
func (x *governed) allStamped(ctx context.Context, before stamped) (line string, err error) {
	deadline := time.Now().Add(settleTime)
	for {
		now, err := x.stamped(ctx)
		if err != nil {
			return "", err
		}
		n := func(node string) uint64 { return now[node] - before[node] }
		line = fmt.Sprintf("r1 stamped %d, r2 (fw) stamped %d, r3 (dpi) stamped %d, r5 (spare) stamped %d, r6 verified %d frames", n("r1"), n("r2"), n("r3"), n("r5"), n("r6"))
		if n("r1") > 0 && n("r1") == n("r2") && n("r1") == n("r3")+n("r5") && n("r1") == n("r6") {
			return line, nil
		}
		if time.Now().After(deadline) {
			return line, errors.New("frames are missing")
		}
		if err := wait(ctx, 20*time.Millisecond); err != nil {
			return line, err
		}
	}
}

// epoch is the one that headends send of chain web, forward.
func (x *governed) epoch(ctx context.Context) (uint32, error) {
	out, err := x.lab.Operate(ctx, "get", "epochs", "-o", "json")
	if err != nil {
		return 0, err
	}
	var got api.EpochsOutput
	if err := json.Unmarshal([]byte(out), &got); err != nil {
		return 0, fmt.Errorf("read the epochs: %w", err)
	}
	for _, e := range got.Epochs {
		if e.Chain == "web" && e.Direction == model.Forward.String() && e.State == "active" {
			return e.Epoch, nil
		}
	}
	return 0, errors.New("chain web has no active epoch")
}

func (x *governed) rotated(ctx context.Context) (saw []string, err error) {
	return x.lossless(ctx, func(ctx context.Context) ([]string, error) {
		first, err := x.epoch(ctx)
		if err != nil {
			return nil, err
		}
		for range rotations {
			second := time.After(time.Second)
			if _, err := x.lab.Operate(ctx, "rotate", "--all", "--wait"); err != nil {
				return nil, err
			}
			select {
			case <-second:
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		}
		last, err := x.epoch(ctx)
		if err == nil && last-first != rotations {
			err = fmt.Errorf("chain web has gone on by %d epochs, want %d", last-first, rotations)
		}
		return []string{fmt.Sprintf("chain web went from epoch %d to %d", first, last)}, err
	})
}

// applied puts a file with this function in force.
func (x *governed) applied(ctx context.Context, function string) error {
	if err := x.write(function); err != nil {
		return err
	}
	_, err := x.lab.Operate(ctx, "apply", "-f", x.file, "--wait")
	return err
}

func (x *governed) replaced(ctx context.Context) (saw []string, err error) {
	before, err := x.stamped(ctx)
	if err != nil {
		return nil, err
	}
	saw, err = x.lossless(ctx, func(ctx context.Context) ([]string, error) { return nil, x.applied(ctx, "spare") })
	if err != nil {
		return saw, err
	}
	now, err := x.stamped(ctx)
	if err == nil && now["r5"] == before["r5"] {
		err = errors.New("spare has stamped nothing")
	}
	return saw, err
}

func (x *governed) alone(ctx context.Context) (saw []string, err error) {
	if err := x.lab.KillController(ctx); err != nil {
		return nil, err
	}
	saw, err = x.lossless(ctx, func(ctx context.Context) ([]string, error) {
		if err := x.lab.StopAgent(ctx, "r2"); err != nil {
			return nil, err
		}
		if err := x.lab.StartAgent(ctx, "r2"); err != nil {
			return nil, err
		}
		return []string{"r2's agent is ready, with the plan on its disk"}, nil
	})
	if err != nil {
		return saw, err
	}
	if err := x.lab.StartController(ctx); err != nil {
		return saw, err
	}
	after, err := x.lossless(ctx, func(ctx context.Context) ([]string, error) {
		_, err := x.lab.Operate(ctx, "rotate", "--all", "--wait")
		return []string{"the controller is back, and all nodes have fresh secrets"}, err
	})
	return append(saw, after...), err
}

func (x *governed) revoked(ctx context.Context) (saw []string, err error) {
	if _, err := x.lab.Operate(ctx, "node", "revoke", "r5", "--yes"); err != nil {
		return nil, err
	}
	reason, err := x.blocked(ctx)
	if err != nil {
		return nil, err
	}
	saw = append(saw, "chain web is blocked: "+reason)
	before, err := x.dropped(ctx, "r6", "unproven")
	if err != nil {
		return saw, err
	}
	line, err := x.unanswered(ctx)
	saw = append(saw, line)
	if err != nil {
		return saw, err
	}
	after, err := x.dropped(ctx, "r6", "unproven")
	if err != nil {
		return saw, err
	}
	saw = append(saw, fmt.Sprintf("r6 refused %d packets: unproven", after-before))
	if after-before != lostPings {
		return saw, fmt.Errorf("want %d", lostPings)
	}
	return saw, nil
}

// blocked waits until all nodes hold the plans in which chain web is blocked, and says why it is.
func (x *governed) blocked(ctx context.Context) (reason string, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, followTime, errors.New("the revocation does not come to an end"))
	defer cancel()
	for {
		var chains api.ChainsOutput
		var nodes api.NodesOutput
		for noun, into := range map[string]any{"chains": &chains, "nodes": &nodes} {
			out, err := x.lab.Operate(ctx, "get", noun, "-o", "json")
			if err == nil {
				err = json.Unmarshal([]byte(out), into)
			}
			if err != nil {
				return "", err
			}
		}
		done := len(chains.Chains) == 1 && chains.Chains[0].State == "blocked"
		for _, n := range nodes.Nodes {
			done = done && (n.State == "revoked" || n.State == "ready")
		}
		if done {
			return chains.Chains[0].Reason, nil
		}
		if err := wait(ctx, 50*time.Millisecond); err != nil {
			return "", context.Cause(ctx)
		}
	}
}

func (x *governed) without(ctx context.Context) (saw []string, err error) {
	if err := x.applied(ctx, "dpi"); err != nil {
		return nil, err
	}
	chains, err := x.lab.Operate(ctx, "get", "chains")
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(chains) {
		if fields := strings.Fields(line); len(fields) > 1 && fields[0] == "web" {
			saw = append(saw, "chain web is "+fields[1])
		}
	}
	r, err := x.ping(ctx, pings)
	if err != nil {
		return saw, err
	}
	saw = append(saw, fmt.Sprintf("%d of %d echo replies", r.Received, r.Sent))
	if r.Received != pings {
		return saw, fmt.Errorf("%d echo replies are missing", pings-r.Received)
	}
	return saw, nil
}
