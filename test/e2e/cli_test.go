package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/agent"
	"github.com/waystamp/waystamp/internal/explain"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/lab"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/srv6"
)

// result is how a command ended.
type result struct {
	args           []string
	code           int
	stdout, stderr string
}

func (r result) String() string {
	return fmt.Sprintf("waystamp %s: exit code %d\nstdout: %sstderr: %s", strings.Join(r.args, " "), r.code, r.stdout, r.stderr)
}

// text is output that is read while it is written.
type text struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (t *text) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.b.Write(b)
}

func (t *text) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.b.String()
}

// process is a running waystamp.
type process struct {
	t              *testing.T
	cmd            *exec.Cmd
	stdout, stderr *text
}

func prepared(ctx context.Context, t *testing.T, args []string) *process {
	p := &process{t: t, cmd: exec.CommandContext(ctx, program, args...), stdout: &text{}, stderr: &text{}}
	p.cmd.Stdout, p.cmd.Stderr = p.stdout, p.stderr
	// Ctrl-C at the tests' terminal is the tests' matter.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	p.cmd.Cancel = func() error { return p.cmd.Process.Signal(unix.SIGINT) }
	p.cmd.WaitDelay = settleTime
	return p
}

func start(t *testing.T, args ...string) *process {
	t.Helper()
	p := prepared(soon(t), t, args)
	must(t, p.cmd.Start())
	return p
}

func (p *process) wait() result {
	p.t.Helper()
	err := p.cmd.Wait()
	if err != nil && !errors.As(err, new(*exec.ExitError)) {
		p.t.Fatal(err)
	}
	return result{p.cmd.Args[1:], p.cmd.ProcessState.ExitCode(), p.stdout.String(), p.stderr.String()}
}

func run(t *testing.T, args ...string) result {
	t.Helper()
	return start(t, args...).wait()
}

// runIn runs a command in a namespace.
func runIn(t *testing.T, ns *host.NetNS, args ...string) result {
	t.Helper()
	p := prepared(soon(t), t, args)
	must(t, ns.Do(p.cmd.Start))
	return p.wait()
}

// runAsNobody runs a command as nobody, who may do nothing.
func runAsNobody(t *testing.T, args ...string) result {
	t.Helper()
	const nobody = 65534
	p := prepared(soon(t), t, args)
	p.cmd.Dir = "/"
	p.cmd.SysProcAttr.Credential = &syscall.Credential{Uid: nobody, Gid: nobody}
	must(t, p.cmd.Start())
	return p.wait()
}

func write(t *testing.T, name, content string) string {
	t.Helper()
	path := filepath.Join(newDir(t), name)
	must(t, os.WriteFile(path, []byte(content), 0o600))
	return path
}

// What a command is asked wrongly it says in one sentence, and does nothing.
func TestWrongUsageIsToldInOneSentence(t *testing.T) {
	t.Parallel()
	missing := filepath.Join(newDir(t), "nothing")
	profile := write(t, "profile.yaml", "prime-number: 53\nvalidator-key: 10\nhops:\n"+
		"  - {secret-share: 28, lpc: 21, public-polynomial: 1}\n  - {secret-share: 17, lpc: 48, public-polynomial: 29}\n")
	composite := write(t, "composite.yaml", "prime-number: 55\nvalidator-key: 10\nhops:\n"+
		"  - {secret-share: 28, lpc: 21, public-polynomial: 1}\n  - {secret-share: 17, lpc: 48, public-polynomial: 29}\n")
	nolab := write(t, "nolab.yaml", paper[:strings.Index(paper, "\nlab:")+1])
	runDir := newDir(t)
	edited := func(name, old, text string) string {
		if !strings.Contains(functions, old) {
			t.Fatalf("examples/functions.yaml has no %q", old)
		}
		return write(t, name, strings.Replace(functions, old, text, 1))
	}
	unattached := edited("unattached.yaml", "    attach: {to: dpi-to, from: dpi-from}", "")
	ruleless := edited("ruleless.yaml", "tcp dport 23 counter drop", "tcp dport 23 counter dorp")
	for _, c := range []struct {
		args []string
		code int
		says string
	}{
		{[]string{"nonsense"}, 2, `"nonsense" is not a command of waystamp`},
		{[]string{"plan"}, 2, "-f is missing"},
		{[]string{"plan", "-f", missing}, 1, "no such file"},
		{[]string{"plan", "--frob"}, 2, "unknown flag: --frob"},
		{[]string{"agent"}, 2, "--plan or --controller is missing"},
		{[]string{"agent", "--yes", "--plan", missing}, 2, "--yes goes with --detach"},
		{[]string{"agent", "--plan", missing, "--run-dir", runDir}, 1, "no such file"},
		{[]string{"agent", "--instance", "../x", "--plan", missing}, 2, "--instance"},
		{[]string{"lab", "up", "-f", nolab, "--run-dir", runDir}, 1, "has no lab section"},
		{[]string{"lab", "up", "-f", missing, "--run-dir", runDir}, 1, "no such file"},
		{[]string{"lab", "up", "-f", unattached, "--run-dir", runDir}, 2, `"attach" is missing`},
		{[]string{"lab", "up", "-f", ruleless, "--run-dir", runDir}, 1, "load the ruleset of function fw: nft says: line 6:"},
		{[]string{"lab", "down", "--run-dir", runDir}, 1, "no lab is up"},
		{[]string{"lab", "down", "--prefix", "nonesuch", "--run-dir", runDir}, 1, "there is no lab nonesuch"},
		{[]string{"lab", "exec", "--run-dir", runDir, "h1", "--", "true"}, 1, "no lab is up"},
		{[]string{"get", "paths", "--socket", missing}, 1, "is it running?"},
		{[]string{"get", "nonsense"}, 2, `"nonsense" is not a command of waystamp get`},
		{[]string{"watch", "--socket", missing, "--once"}, 1, "is it running?"},
		{[]string{"explain"}, 2, "--paths is missing"},
		{[]string{"explain", "--paths", missing}, 2, "no such file"},
		{[]string{"pot", "eval"}, 2, "--profile is missing"},
		{[]string{"pot", "eval", "--profile", profile, "--rnd", "x"}, 2, "--rnd"},
		{[]string{"pot", "eval", "--profile", profile, "--rnd", "1", "--order", "1,9"}, 2, "--order"},
		{[]string{"pot", "eval", "--profile", composite, "--rnd", "1"}, 2, "prime"},
		{[]string{"demo", "--scheme", "rot13"}, 2, "--scheme"},
		{[]string{"demo", "--prefix", "no/such", "--run-dir", runDir}, 1, "no/such"},
	} {
		r := run(t, c.args...)
		if r.code != c.code || !strings.HasPrefix(lastError(r.stderr), "waystamp: ") || !strings.Contains(r.stderr, c.says) {
			t.Errorf("%s\nwant exit code %d and %q", r, c.code, c.says)
		}
		if r.stdout != "" && c.args[0] != "demo" {
			t.Errorf("%s\nwant nothing on stdout", r)
		}
	}
	if left := entries(t, runDir, ""); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}

// lastError is the line that starts with the program's name.
func lastError(stderr string) string {
	for line := range strings.Lines(stderr) {
		if strings.HasPrefix(line, "waystamp: ") {
			return line
		}
	}
	return ""
}

func TestWithoutPermissionNothingIsDone(t *testing.T) {
	t.Parallel()
	open := func(name, content string) string {
		path := write(t, name, content)
		must(t, os.Chmod(filepath.Dir(path), 0o755))
		must(t, os.Chmod(path, 0o644))
		return path
	}
	file := open("paper.yaml", paper)
	profile := open("profile.yaml", "prime-number: 53\nvalidator-key: 10\nhops:\n"+
		"  - {secret-share: 28, lpc: 21, public-polynomial: 1}\n  - {secret-share: 17, lpc: 48, public-polynomial: 29}\n")
	plans := newDir(t)
	if r := run(t, "plan", "-f", file, "--out", plans); r.code != 0 {
		t.Fatal(r)
	}
	secret := filepath.Join(plans, "nodes", "r1.json")
	b, err := os.ReadFile(secret)
	must(t, err)
	readable := open("r1.json", string(b))
	writable := newDir(t)
	must(t, os.Chmod(writable, 0o777))
	prefix := newPrefix()
	for _, c := range []struct {
		args []string
		says string
	}{
		{[]string{"demo", "--prefix", prefix, "--run-dir", writable}, "run as root"},
		{[]string{"lab", "up", "-f", file, "--prefix", prefix, "--run-dir", writable}, "run as root"},
		{[]string{"agent", "--plan", readable, "--instance", prefix + "-x", "--run-dir", writable}, "r1.json has mode 0644: others can read or change the keys in it; try: chmod 600 "},
		{[]string{"agent", "--plan", readable, "--insecure-plan", "--instance", prefix + "-x", "--run-dir", writable}, "run as root"},
		{[]string{"agent", "--plan", secret, "--instance", prefix + "-x", "--run-dir", writable}, "permission denied"},
		{[]string{"agent", "--detach", "--yes", "--instance", prefix + "-x", "--run-dir", writable}, "run as root"},
		{[]string{"pot", "eval", "--engine", "ebpf", "--profile", profile, "--rnd", "1"}, "run as root"},
	} {
		r := runAsNobody(t, c.args...)
		if r.code != 1 || lastError(r.stderr) == "" || !strings.Contains(r.stderr, c.says) {
			t.Errorf("%s\nwant exit code 1 and %q", r, c.says)
		}
	}
	leavesNothing(t, writable, prefix)
	// What needs no permission works without one.
	for _, args := range [][]string{{"plan", "-f", file}, {"version"}, {"pot", "eval", "--profile", profile, "--rnd", "1"}} {
		if r := runAsNobody(t, args...); r.code != 0 && r.code != 4 {
			t.Errorf("%s\nwant it to be done", r)
		}
	}
	// A plan file holds secrets.
	for _, f := range []string{secret, filepath.Join(plans, "paths.json")} {
		i, err := os.Stat(f)
		must(t, err)
		if i.Mode().Perm() != 0o600 {
			t.Errorf("%s has mode %v", f, i.Mode())
		}
	}
}

// All mistakes of a file come at once, each with its place.
func TestAMalformedFileIsToldWithLineAndCaret(t *testing.T) {
	t.Parallel()
	bad := strings.NewReplacer(
		"egress: r6", "egress: r9",
		"fc00:0:0:300::/56", "fc00:0:0:200::/56",
		"kind: forward}", "kind: forwards}",
	).Replace(paper)
	r := run(t, "plan", "-f", write(t, "bad.yaml", bad))
	if r.code != 2 || r.stdout != "" {
		t.Errorf("%s\nwant exit code 2 and nothing on stdout", r)
	}
	for _, want := range []string{`"r9"`, `"fc00:0:0:200::/56" overlaps`, `"forwards"`, "^", "bad.yaml:"} {
		if !strings.Contains(r.stderr, want) {
			t.Errorf("it does not say %q:\n%s", want, r.stderr)
		}
	}
}

// manyChains is a domain of that many chains.
func manyChains(n int) string {
	var b strings.Builder
	b.WriteString(`version: 1
domain: {block: "fd00:5::/48"}
nodes:
  - {name: a, address: fd00:1::a, locator: "fd00:5:0:8000::/49", cpus: 1, interfaces: [{name: eth0, role: edge}, {name: eth1, role: core}]}
  - {name: b, address: fd00:1::b, locator: "fd00:5:0:4000::/50", cpus: 1, interfaces: [{name: eth0, role: core}, {name: eth1, role: edge}]}
functions:
  - {name: fw, node: a, kind: forward}
chains:
`)
	for i := range n {
		fmt.Fprintf(&b, "  - {name: c%d, ingress: [a], functions: [fw], egress: b, match: {destination: \"2001:db8:%x:%x::/64\"}, proof: {window: 64}}\n", i, i>>8, i&255)
	}
	return b.String()
}

// A command that reads, or computes, ends when it is asked to.
func TestASignalEndsAPlanInTheMidstOfIt(t *testing.T) {
	t.Parallel()
	text := manyChains(16000) // takes seconds
	for _, c := range []struct {
		name  string
		close bool // the file has been read
		ask   unix.Signal
	}{{"reading", false, unix.SIGINT}, {"computing", true, unix.SIGINT}, {"computing", true, unix.SIGTERM}, {"computing", true, unix.SIGHUP}} {
		t.Run(fmt.Sprint(c.name, " ", c.ask), func(t *testing.T) {
			p := prepared(soon(t), t, []string{"plan", "-f", "-"})
			// Under nohup the tests ignore SIGHUP, and what they start would, too.
			env, err := exec.LookPath("env")
			must(t, err)
			p.cmd.Path, p.cmd.Args = env, slices.Concat([]string{"env", "--default-signal=HUP", program}, p.cmd.Args[1:])
			in, err := p.cmd.StdinPipe()
			must(t, err)
			must(t, p.cmd.Start())
			_, err = io.WriteString(in, text)
			must(t, err)
			if c.close {
				must(t, in.Close())
			}
			must(t, p.cmd.Process.Signal(c.ask))
			asked := time.Now()
			r := p.wait()
			t.Logf("it ended %s after %s", time.Since(asked).Round(time.Millisecond), c.ask)
			if r.code != 1 || r.stderr != "waystamp: interrupted\n" || r.stdout != "" {
				t.Errorf("%.500s\nwant exit code 1, and that it was interrupted", r)
			}
		})
	}
	r := start(t, "plan", "-f", write(t, "many.yaml", text), "-o", "json").wait()
	if n := strings.Count(r.stdout, `"chain":`); r.code != 0 || n != 16000 {
		t.Errorf("left alone: exit code %d, %d chains\n%.500s", r.code, n, r.stderr)
	}
}

// From a file to a lab, and what its agents tell, by commands alone.
func TestALabByCommands(t *testing.T) {
	t.Parallel()
	file := write(t, "star.yaml", star)
	prefix, runDir := newPrefix(), newDir(t)
	sweep(t, prefix, runDir)
	done := func(args ...string) result {
		t.Helper()
		r := run(t, args...)
		if r.code != 0 {
			t.Fatal(r)
		}
		return r
	}
	in := func(cmd string, args ...string) []string {
		return append([]string{"lab", cmd, "--prefix", prefix, "--run-dir", runDir}, args...)
	}
	r := done(in("up", "-f", file)...)
	if r.stdout != prefix+"\n" {
		t.Errorf("%s\nwant the prefix on stdout", r)
	}
	if r := done("lab", "ls", "--run-dir", runDir); !strings.Contains(r.stdout, prefix) {
		t.Errorf("%s\nwant the lab in it", r)
	}
	if r := run(t, in("up", "-f", file)...); r.code != 1 || !strings.Contains(r.stderr, "there is a lab "+prefix+" already") {
		t.Errorf("the same lab again: %s", r)
	}
	socket := func(node string) string { return agent.SocketPath(filepath.Join(runDir, prefix, "agents", node)) }
	paths := filepath.Join(runDir, prefix, "paths.json")

	// Nothing has happened yet.
	if r := done("watch", "--once", "--socket", socket("r6")); r.stdout != "" {
		t.Errorf("events of a new lab: %s", r)
	}
	if r := done("get", "refusals", "--socket", socket("r6"), "-o", "json"); !strings.Contains(r.stdout, `"refusals":[]`) {
		t.Errorf("refusals of a new lab: %s", r)
	}
	for node, want := range map[string]string{"r1": "headend", "r2": "endpoint", "r6": "egress"} {
		if r := done("get", "paths", "--socket", socket(node)); !strings.Contains(r.stdout, want) || !strings.HasPrefix(r.stdout, "CHAIN") {
			t.Errorf("paths of %s: %s\nwant it to be %s", node, r, want)
		}
	}
	var ifs struct {
		Version    int
		Node       string
		Interfaces []struct {
			Name string
			Role model.Role
			TC   bool
		}
	}
	must(t, json.Unmarshal([]byte(done("get", "interfaces", "--socket", socket("r6"), "-o", "json").stdout), &ifs))
	if ifs.Version != 1 || ifs.Node != "r6" || len(ifs.Interfaces) != 3 || !ifs.Interfaces[0].TC || ifs.Interfaces[0].Role != model.RoleEdge {
		t.Errorf("interfaces of r6: %+v", ifs)
	}

	// Traffic, and a command's own exit code.
	if r := run(t, in("exec", "h1", "--", "sh", "-c", "echo out; echo err >&2; exit 7")...); r.code != 7 || r.stdout != "out\n" || r.stderr != "err\n" {
		t.Errorf("%s\nwant it to end as the command did", r)
	}
	if r := run(t, in("exec", "nobody", "--", "true")...); r.code != 1 || !strings.Contains(r.stderr, `has no "nobody"`) {
		t.Errorf("%s", r)
	}

	// An outsider knocks; somebody watches.
	watcher := start(t, "watch", "--socket", socket("r1"), "--socket", socket("r6"), "--paths", paths)
	h1, err := host.OpenNamed(prefix + "-h1")
	must(t, err)
	defer h1.Close()
	r1, err := host.OpenNamed(prefix + "-r1")
	must(t, err)
	defer r1.Close()
	from, to := openPort(t, h1, "h1-r1", unix.ETH_P_IPV6), openPort(t, r1, "r1-h1", unix.ETH_P_IPV6)
	knock := srv6.Packet{
		Ethernet: &srv6.Ethernet{Destination: to.MAC, Source: from.MAC, Type: srv6.EtherTypeIPv6},
		Header:   srv6.Header{NextHeader: unix.IPPROTO_NONE, HopLimit: 9, Source: netip.MustParseAddr("fc00:7::2"), Destination: netip.MustParseAddr("fc00:0:0:200::")},
	}
	must(t, sendBy(from, knock))
	sentence := "a packet from fc00:7::2 to r2 (fw) was refused: a packet from outside is addressed to the SID block"
	eventually(t, func() error {
		if out := watcher.stdout.String(); !strings.Contains(out, "r1  r1-h1  refused  outside-sid") || !strings.Contains(out, sentence) {
			return fmt.Errorf("watch says\n%s%s", out, watcher.stderr)
		}
		return nil
	})
	must(t, watcher.cmd.Process.Signal(unix.SIGINT))
	if r := watcher.wait(); r.code != 0 {
		t.Errorf("watch after Ctrl-C: %s", r)
	}
	if r := done("get", "refusals", "--socket", socket("r1")); !strings.Contains(r.stdout, "outside-sid") {
		t.Errorf("%s", r)
	}
	// The same from the record, explained elsewhere.
	events := done("watch", "--once", "--socket", socket("r1"), "-o", "json").stdout
	var x explain.Explanation
	must(t, json.Unmarshal([]byte(done("explain", "--paths", paths, "-o", "json", write(t, "events", events)).stdout), &x))
	if x.Sentence != sentence || x.Node != "r1" || x.Reason != "outside-sid" {
		t.Errorf("explained: %+v", x)
	}

	sharkCaptures(t, runDir, prefix, "r1", "refused: outside-sid", sentence)

	started := time.Now()
	done(in("down")...)
	t.Logf("down in %s", time.Since(started).Round(time.Millisecond))
	leavesNothing(t, runDir, prefix)
	if r := run(t, in("down")...); r.code != 1 || !strings.Contains(r.stderr, "there is no lab") {
		t.Errorf("down again: %s", r)
	}
}

// sharkCaptures has tshark list a lab as an interface, and capture the first packet that was refused there,
// whose comment has the reason, and a sentence where the secrets of all paths are at hand. The same of one agent, and
// of all agents of the machine: one of the lab's is put where the machine's are. tshark of Debian 12 knows one extcap
// folder, of the system: a mount namespace has ours in its place.
func sharkCaptures(t *testing.T, runDir, prefix, node, reason, sentence string) {
	t.Helper()
	folder := t.TempDir()
	script, err := filepath.Abs("../../tools/wireshark/waystamp-extcap")
	must(t, err)
	must(t, os.Symlink(script, filepath.Join(folder, "waystamp")))
	shark := func(args ...string) string {
		t.Helper()
		const mount = `set -e; extcap=$(tshark -G folders | sed -n 's/^Extcap path:[[:space:]]*//p')
mount --bind "$1" "$extcap"; mount -t tmpfs none /run; mkdir -p "$3"; mount --bind "$2" "$3"
mkdir -p "/run/waystamp/${4##*/}"; mount --bind "$4" "/run/waystamp/${4##*/}"; shift 4; exec tshark "$@"`
		cmd := exec.CommandContext(soon(t), "unshare", append([]string{"-m", "sh", "-c", mount, "sh", folder, runDir, lab.DefaultRunDir, filepath.Join(runDir, prefix, "agents", node)}, args...)...)
		cmd.Env = append(os.Environ(), "WAYSTAMP="+program, "LC_ALL=C.UTF-8", "HOME="+folder)
		var said bytes.Buffer
		cmd.Stderr = &said
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("tshark %q: %v\n%s", args, err, said.String())
		}
		return string(out)
	}
	list := shark("-D")
	for name, c := range map[string]struct {
		shown   string
		comment []string
	}{
		"waystamp-lab-" + prefix: {"Refused packets of waystamp lab " + prefix, []string{reason, sentence}},
		"waystamp-agent-" + node: {"Refused packets of waystamp agent " + node, []string{reason}},
		"waystamp":               {"Refused packets of all waystamp agents", []string{reason}},
	} {
		if !strings.Contains(list, name+" ("+c.shown+")") {
			t.Errorf("tshark has no %s among\n%s", name, list)
		}
		out := shark("-i", name, "-c", "1", "-T", "fields", "-e", "ipv6.dst", "-e", "frame.comment")
		for _, want := range append(c.comment, "fc00:0:0:200::") {
			if !strings.Contains(out, want) {
				t.Errorf("tshark captured %q at %s, want %q", out, name, want)
			}
		}
	}
}

// The draft's example and the protocol's vectors, by hand and by the programs that ship.
func TestPotEvalAgreesOnBothEngines(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		profile  string
		args     []string
		code     int
		verified string
	}{
		{"draft-08-3.3", []string{"--rnd", "45"}, 0, `"verified": true`},
		{"draft-08-3.3", []string{"--rnd", "45", "--order", "1,2"}, 4, `"reason": "proof"`},
		{"draft-08-3.3", []string{"--rnd", "0xffffffffffffffff"}, 4, `"reason": "range"`},
		{"keyed", []string{"--rnd", "0x0001000000000001"}, 0, `"wire_cml": "0xf360ecccc44e1fc0"`},
		{"keyed", []string{"--rnd", "0x0001000000000001", "--order", "1,3"}, 4, `"reason": "proof"`},
		{"keyed-flow", []string{"--rnd", "0x0001000000000001"}, 0, `"wire_cml": "0x1ab97a18eb7405e6"`},
		{"keyed-flow", []string{"--rnd", "0x0001000000000001", "--order", "2,1,3"}, 4, `"reason": "proof"`},
	} {
		profile := filepath.Join("..", "..", "internal", "pot", "testdata", c.profile+".yaml")
		var said [2]result
		for i, engine := range []string{"model", "ebpf"} {
			said[i] = run(t, append([]string{"pot", "eval", "--profile", profile, "--engine", engine, "-o", "json"}, c.args...)...)
			if r := said[i]; r.code != c.code || !strings.Contains(r.stdout, c.verified) || r.stderr != "" {
				t.Errorf("%s\nwant exit code %d and %s", r, c.code, c.verified)
			}
		}
		if said[0].stdout != said[1].stdout {
			t.Errorf("the engines differ:\n%s\n%s", said[0], said[1])
		}
	}
}
