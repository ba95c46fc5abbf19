package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/agent"
)

// collected is what nfdump makes of the records that came, by the outer addresses.
type collected map[string]uint64

// nfdumps runs nfcapd in a node's namespace while f runs, and reads what it has got.
func (w *world) nfdumps(node string, port int, f func()) collected {
	w.t.Helper()
	dir := newDir(w.t)
	capd := exec.CommandContext(w.t.Context(), "nfcapd", "-b", "127.0.0.1", "-p", fmt.Sprint(port), "-w", dir, "-t", "3600")
	said := &text{}
	capd.Stdout, capd.Stderr, capd.SysProcAttr = said, said, &syscall.SysProcAttr{Setpgid: true}
	must(w.t, w.ns(node).Do(capd.Start))
	// socket is its line of /proc/net/udp.
	socket := func() []string {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/udp", capd.Process.Pid))
		must(w.t, err)
		for line := range strings.Lines(string(b)) {
			if f := strings.Fields(line); len(f) > 12 && f[1] == fmt.Sprintf("0100007F:%04X", port) {
				return f
			}
		}
		return nil
	}
	eventually(w.t, func() error {
		if socket() == nil {
			return fmt.Errorf("nfcapd does not listen: %s", said)
		}
		return nil
	})
	f()
	eventually(w.t, func() error {
		if s := socket(); s == nil || !strings.HasSuffix(s[4], ":00000000") || s[12] != "0" {
			return fmt.Errorf("nfcapd has not read all: %q", s)
		}
		return nil
	})
	must(w.t, capd.Process.Signal(unix.SIGTERM))
	if err := capd.Wait(); err != nil || !strings.Contains(said.String(), "Sequence Errors: 0, Bad Packets: 0") {
		w.t.Errorf("nfcapd ends with %v: %s", err, said)
	}
	b, err := exec.CommandContext(w.t.Context(), "nfdump", "-R", dir, "-o", "json").Output()
	must(w.t, err)
	var flows []struct {
		Packets uint64 `json:"in_packets"`
		Source  string `json:"src6_addr"`
		To      string `json:"dst6_addr"`
	}
	must(w.t, json.Unmarshal(b, &flows))
	out := collected{}
	for _, f := range flows {
		out[f.Source+" to "+f.To] += f.Packets
	}
	return out
}

// The flow records of a node at work, in a collector that we did not write: what its paths have carried, and what it has refused.
func TestFlowRecordsAreWhatANodeCounted(t *testing.T) {
	t.Parallel()
	w := build(t, star)
	const node, port = "r6", 4739
	must(t, w.StopAgent(soon(t), node))
	var want collected
	have := w.nfdumps(node, port, func() {
		p := prepared(t.Context(), t, []string{
			"agent", "--plan", w.NodePlanPath(node), "--instance", w.Instance(node), "--run-dir", w.AgentDir(node), "--state-dir", w.AgentDir(node),
			"--ipfix", fmt.Sprintf("127.0.0.1:%d", port), "--ipfix-every", "1h",
		})
		must(t, w.ns(node).Do(p.cmd.Start))
		socket := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", agent.SocketPath(w.AgentDir(node)))
		}}
		defer socket.CloseIdleConnections()
		// The first messages are what the later ones are compared with.
		eventually(t, func() error {
			r, err := (&http.Client{Transport: socket}).Get("http://agent/metrics")
			if err != nil {
				return fmt.Errorf("%w; it says: %s", err, p.stderr)
			}
			defer r.Body.Close()
			m, err := io.ReadAll(r.Body)
			if err != nil {
				return err
			}
			for line := range strings.Lines(string(m)) {
				if strings.HasPrefix(line, `waystamp_flow_messages_total{`) && strings.Contains(line, `what="sent"`) && !strings.HasSuffix(strings.TrimSpace(line), " 0") {
					return nil
				}
			}
			return fmt.Errorf("no message was sent")
		})
		before, err := w.counters(node)
		must(t, err)
		w.reaches("h1", "h2")
		must(t, w.StopAgent(soon(t), "r1"))
		if r := w.detach("r1", "--yes"); r.code != 0 {
			t.Fatalf("detach r1: %s", r)
		}
		w.isCutOff("h1", "h2", probes)
		must(t, w.StartAgent(soon(t), "r1"))
		w.refused(node, "unproven", probes)
		after, err := w.counters(node)
		must(t, err)
		want = collected{}
		for i, p := range after.Paths {
			n := p.Frames - before.Paths[i].Frames
			var source, to string
			for _, of := range w.plan.Nodes {
				for _, h := range of.Headends {
					if h.Path == p.Path {
						source, to = of.Address.String(), h.Segments[0].String()
					}
				}
			}
			if p.Role == "egress" {
				to = p.SID.String()
			}
			if n > 0 {
				want[source+" to "+to] += n
			}
		}
		for _, r := range after.Refusals {
			want[":: to ::"] += r.Dropped
		}
		must(t, p.cmd.Process.Signal(unix.SIGTERM))
		if r := p.wait(); r.code != 0 {
			t.Errorf("the agent: %s", r)
		}
	})
	must(t, w.StartAgent(soon(t), node))
	if len(want) != 3 || want[":: to ::"] < probes {
		t.Fatalf("the node has counted %v; want two paths and refusals", want)
	}
	if diff := cmp.Diff(want, have); diff != "" {
		t.Errorf("(-counted +collected):\n%s", diff)
	}
}
