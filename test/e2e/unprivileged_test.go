package e2e

import (
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/agent"
	"github.com/waystamp/waystamp/internal/dataplane"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/lab"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
)

// The user that agents run as here, and all that it may do.
const nobody = 65534

var agentCapabilities = []uintptr{unix.CAP_BPF, unix.CAP_NET_ADMIN, unix.CAP_PERFMON}

// unprivileged is a world whose agents run as a user of their own.
type unprivileged struct {
	*world
	dir, pins string // the user's
	agents    map[string]*process
}

func buildUnprivileged(t *testing.T, text string, changes ...change) *unprivileged {
	t.Helper()
	w := buildFrom(t, parse(t, text, changes...), func(c *lab.Config) { c.WithoutAgents = true })
	u := &unprivileged{world: w, dir: newDir(t), pins: filepath.Join("/sys/fs/bpf", newPrefix()), agents: map[string]*process{}}
	must(t, os.Mkdir(u.pins, 0o700))
	t.Cleanup(func() {
		if err := os.Remove(u.pins); err != nil { // only if detaching has emptied it
			t.Error(err)
		}
	})
	for _, d := range []string{u.dir, u.pins} {
		must(t, os.Chown(d, nobody, nobody))
	}
	return u
}

// command is an agent of a node, as the user.
func (u *unprivileged) command(node string, more ...string) *process {
	at := filepath.Join(u.dir, node)
	p := prepared(u.t.Context(), u.t, append([]string{"agent", "--instance", node, "--pin-dir", u.pins, "--run-dir", at, "--state-dir", at}, more...))
	p.cmd.Dir = "/"
	p.cmd.SysProcAttr = &syscall.SysProcAttr{
		Setpgid: true, Credential: &syscall.Credential{Uid: nobody, Gid: nobody}, AmbientCaps: agentCapabilities,
	}
	return p
}

func (u *unprivileged) planPath(node string) string { return filepath.Join(u.dir, node+".json") }

// carry gives a node's agent a plan.
func (u *unprivileged) carry(n plan.Node) {
	u.t.Helper()
	must(u.t, u.WriteNodePlan(n.Name, n))
	b, err := os.ReadFile(u.NodePlanPath(n.Name))
	must(u.t, err)
	next := u.planPath(n.Name) + ".tmp"
	must(u.t, os.WriteFile(next, b, 0o600))
	must(u.t, os.Chown(next, nobody, nobody))
	must(u.t, os.Rename(next, u.planPath(n.Name)))
}

// inForce waits until an agent has the plan that it was given, without any problem.
func (u *unprivileged) inForce(node string) {
	u.t.Helper()
	b, err := os.ReadFile(u.planPath(node))
	must(u.t, err)
	c := agent.NewClient(agent.SocketPath(filepath.Join(u.dir, node)))
	defer c.Close()
	eventually(u.t, func() error {
		s, err := c.Status(soon(u.t))
		if err != nil {
			return fmt.Errorf("%w; it says: %s", err, u.agents[node].stderr)
		}
		if want := fmt.Sprintf("%x", sha256.Sum256(b)); !s.Ready || s.Plan != want || s.Error != "" || len(s.Problems) > 0 {
			return fmt.Errorf("%s has plan %.8s in force, want %.8s; error %q, problems %q", node, s.Plan, want, s.Error, s.Problems)
		}
		return nil
	})
}

func (u *unprivileged) start(node string) {
	u.t.Helper()
	p := u.command(node, "--plan", u.planPath(node))
	must(u.t, u.ns(node).Do(p.cmd.Start))
	u.agents[node] = p
	u.inForce(node)
}

func (u *unprivileged) stop(node string) {
	u.t.Helper()
	p := u.agents[node]
	delete(u.agents, node)
	must(u.t, p.cmd.Process.Signal(unix.SIGTERM))
	r := p.wait()
	if r.code != 0 || strings.Contains(r.stderr, "level=ERROR") || strings.Contains(strings.ToLower(r.stderr), "not permitted") {
		u.t.Errorf("the agent of %s: %s", node, r)
	}
}

// killedBeforeRename leaves the pins of what outer maps name as an agent does that is killed between two steps: under
// the name that they have before the outer map names them.
func (u *unprivileged) killedBeforeRename() {
	u.t.Helper()
	pins, err := filepath.Glob(filepath.Join(u.pins, "*", "gen-*", "ws_match-*"))
	must(u.t, err)
	if len(pins) == 0 {
		u.t.Fatal("no map of prefixes is pinned")
	}
	for _, p := range pins {
		must(u.t, os.Rename(p, p+"-next"))
	}
}

// An agent needs three capabilities and no user's rights, through all of its life: a start, another plan, another
// set of programs, a restart over what is pinned, and its end.
func TestAgentsNeedNoRoot(t *testing.T) {
	for name, how := range map[string]struct {
		text    string
		changes []change
	}{
		"TC":       {star, nil},
		"XDP":      {fast, nil},
		"function": {withFunction(routing, forwards), nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			u := buildUnprivileged(t, how.text, how.changes...)
			for _, n := range u.plan.Nodes {
				u.carry(n)
				u.start(n.Name)
			}
			u.reaches("h1", "h2")

			// Other secrets, other programs, and other rules.
			d := u.manifest.Domain
			d.Chains = append([]model.Chain{}, d.Chains...)
			for i := range d.Chains {
				d.Chains[i].Proof.Scheme = model.SchemeOPoT
			}
			next, err := plan.Compile(d, plan.NewKeyring(rand.Reader, u.plan.Paths))
			must(t, err)
			for _, n := range next.Nodes {
				u.carry(n)
			}
			for _, n := range next.Nodes {
				u.inForce(n.Name)
			}
			u.reaches("h1", "h2")

			for _, n := range u.nodes() {
				u.stop(n)
			}
			u.reaches("h1", "h2") // the data path is still there
			u.killedBeforeRename()
			for _, n := range u.nodes() {
				u.start(n)
			}
			u.reaches("h1", "h2")

			for _, n := range u.nodes() {
				u.stop(n)
			}
			detach := func(node string) {
				t.Helper()
				p := u.command(node, "--detach", "--yes")
				must(t, u.ns(node).Do(p.cmd.Start))
				if r := p.wait(); r.code != 0 {
					t.Errorf("detach %s: %s", node, r)
				}
			}
			detach("r1")
			u.isCutOff("h1", "h2", probes) // the guard at r6 stands
			for _, n := range u.nodes() {
				if n != "r1" {
					detach(n)
				}
			}
			u.reaches("h1", "h2")
		})
	}
}

// A data path that an agent of root has made is taken over by one without root: while its pins move, the same programs stay
// where they are, and packets go on.
func TestPinsOfRootMoveToAnAgentWithout(t *testing.T) {
	t.Parallel()
	u := buildUnprivileged(t, star)
	roots := filepath.Join("/sys/fs/bpf", newPrefix())
	must(t, os.Mkdir(roots, 0o700))
	t.Cleanup(func() {
		if err := os.Remove(roots); err != nil {
			t.Error(err)
		}
	})
	as := func(node string, more ...string) *process {
		at := filepath.Join(u.dir, node)
		p := prepared(t.Context(), t, append([]string{"agent", "--instance", node, "--pin-dir", roots, "--run-dir", at, "--state-dir", at}, more...))
		must(t, u.ns(node).Do(p.cmd.Start))
		return p
	}
	tcx, err := dataplane.HasTCX()
	must(t, err)
	attached := func() (programs []string) {
		for _, n := range u.plan.Nodes {
			for _, i := range n.Interfaces {
				l, err := u.net(n.Name).Link(i.Name)
				must(t, err)
				var ids []uint32
				must(t, u.ns(n.Name).Do(func() error {
					if !tcx {
						filters, err := u.net(n.Name).Filters(l.Index, false)
						for _, f := range filters {
							ids = append(ids, f.Program)
						}
						return err
					}
					q, err := link.QueryPrograms(link.QueryOptions{Target: l.Index, Attach: ebpf.AttachTCXIngress})
					if err != nil {
						return err
					}
					for _, p := range q.Programs {
						ids = append(ids, uint32(p.ID))
					}
					return nil
				}))
				if len(ids) == 0 {
					t.Errorf("no program is at %s of %s", i.Name, n.Name)
				}
				programs = append(programs, fmt.Sprint(n.Name, i.Name, ids))
			}
		}
		return programs
	}
	for _, n := range u.plan.Nodes {
		must(t, u.WriteNodePlan(n.Name, n))
		u.agents[n.Name] = as(n.Name, "--plan", u.NodePlanPath(n.Name))
		u.carry(n)
		u.inForce(n.Name)
	}
	u.reaches("h1", "h2")
	before := attached()
	if r := as("r1", "--move-pins", u.pins, "--owner", fmt.Sprint(nobody)).wait(); r.code != 1 || !strings.Contains(r.stderr, "another waystamp agent holds this instance") {
		t.Errorf("beside the agent: %s", r)
	}
	for _, n := range u.nodes() {
		u.stop(n)
		// As systemd does it with the directories of the unit.
		must(t, filepath.WalkDir(filepath.Join(u.dir, n), func(path string, _ os.DirEntry, err error) error {
			return errors.Join(err, os.Lchown(path, nobody, nobody))
		}))
	}
	stream := u.stream("h1", "h2")
	stream.more(1 << 20)
	for _, n := range u.nodes() {
		if r := as(n, "--move-pins", u.pins, "--owner", fmt.Sprint(nobody)).wait(); r.code != 0 || !strings.Contains(r.stdout, "pins moved to "+u.pins) {
			t.Errorf("move the pins of %s: %s", n, r)
		}
	}
	stream.more(1 << 20) // the data path is still there
	for _, n := range u.nodes() {
		u.start(n)
	}
	stream.more(1 << 20)
	stream.finish()
	if stream.lost != 0 {
		t.Errorf("of TCP's segments with data %d more were sent than the %d that came", stream.lost, stream.received)
	}
	if now := attached(); !slices.Equal(before, now) {
		t.Errorf("programs at the interfaces were %q, and are %q", before, now)
	}
	for _, n := range u.nodes() {
		u.stop(n)
		p := u.command(n, "--detach", "--yes")
		must(t, u.ns(n).Do(p.cmd.Start))
		if r := p.wait(); r.code != 0 {
			t.Errorf("detach %s: %s", n, r)
		}
	}
}

// A unit that lacks one of the three is told of that one, and that nothing was done.
func TestAnAgentNamesTheCapabilityThatItsUnitLacks(t *testing.T) {
	t.Parallel()
	m := parse(t, star)
	d, err := plan.Compile(m.Domain, nil)
	must(t, err)
	b, err := plan.EncodeNode(d.Nodes[0])
	must(t, err)
	ns, err := host.Anonymous()
	must(t, err)
	t.Cleanup(func() { ns.Close() })
	for missing, name := range map[uintptr]string{unix.CAP_BPF: "CAP_BPF", unix.CAP_NET_ADMIN: "CAP_NET_ADMIN", unix.CAP_PERFMON: "CAP_PERFMON"} {
		t.Run(name, func(t *testing.T) {
			dir, pins := newDir(t), filepath.Join("/sys/fs/bpf", newPrefix())
			must(t, os.Mkdir(pins, 0o700))
			t.Cleanup(func() {
				if err := os.Remove(pins); err != nil {
					t.Errorf("the agent has left pins: %v", err)
				}
			})
			file := filepath.Join(dir, "plan.json")
			must(t, os.WriteFile(file, b, 0o600))
			for _, f := range []string{dir, pins, file} {
				must(t, os.Chown(f, nobody, nobody))
			}
			p := prepared(soon(t), t, []string{"agent", "--instance", "r1", "--pin-dir", pins, "--run-dir", dir, "--state-dir", dir, "--plan", file})
			p.cmd.Dir = "/"
			p.cmd.SysProcAttr = &syscall.SysProcAttr{
				Setpgid: true, Credential: &syscall.Credential{Uid: nobody, Gid: nobody},
				AmbientCaps: slices.DeleteFunc(slices.Clone(agentCapabilities), func(c uintptr) bool { return c == missing }),
			}
			must(t, ns.Do(p.cmd.Start))
			r := p.wait()
			// What it logs comes before.
			lines := strings.Split(strings.TrimSpace(r.stderr), "\n")
			says := lines[len(lines)-1]
			if r.code != 1 || !strings.HasPrefix(says, "waystamp: no permission to ") || !strings.HasSuffix(says, name+" is missing; run as root") || strings.Count(r.stderr, "is missing") != 1 {
				t.Errorf("the agent ends so: %s; want one sentence that names %s", r, name)
			}
		})
	}
}
