package tutorial

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// machine is a network and a mount namespace with nothing of this machine's in the directories that waystamp uses. It ends
// with its process.
type machine struct {
	t    *testing.T
	name string
	cmd  *exec.Cmd
	root string // what is at /root there
}

// pages are the blocks of a page that a test runs, in order.
type pages struct {
	t     *testing.T
	name  string
	steps []step
}

// next is the next block, which must begin so.
func (p *pages) next(begins string) step {
	p.t.Helper()
	if len(p.steps) == 0 {
		p.t.Fatalf("%s has no block of commands any more that begins with %q", p.name, begins)
	}
	s := p.steps[0]
	p.steps = p.steps[1:]
	if !strings.HasPrefix(s.commands, begins) {
		p.t.Fatalf("%s:%d: the next block begins with %q; the test has %q there", p.name, s.line, s.commands, begins)
	}
	p.t.Logf("%s:%d: %s", p.name, s.line, strings.TrimSuffix(s.commands, "\n"))
	return s
}

func newMachine(t *testing.T, ctx context.Context, name, path string) *machine {
	t.Helper()
	m := &machine{t: t, name: name, root: t.TempDir()}
	m.cmd = exec.CommandContext(ctx, "unshare", "--net", "--mount", "--propagation", "private", "bash", "-ec", `
		mount -t sysfs sysfs /sys
		mount -t bpf bpf /sys/fs/bpf
		mount -t tmpfs tmpfs /run
		mount -t tmpfs tmpfs /var/lib
		mount --bind "$1" /root
		ip link set dev lo up
		sysctl -qw net.ipv6.conf.all.forwarding=1 net.ipv6.conf.default.accept_dad=0 net.ipv6.conf.all.accept_dad=0
		echo up
		exec sleep infinity`, "bash", m.root)
	m.cmd.Env = append(os.Environ(), "PATH="+path, "LC_ALL=C")
	m.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	out, err := m.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	m.cmd.Stderr = os.Stderr
	if err := m.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		m.cmd.Process.Kill() //nolint:errcheck // it may have ended
		m.cmd.Wait()         //nolint:errcheck // the signal is its error
	})
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "up\n" {
		t.Fatalf("machine %s is not up: %q, %v", name, line, err)
	}
	return m
}

// link joins two machines by a veth pair.
func (m *machine) link(ctx context.Context, device string, other *machine, peer string, mtu int) {
	m.t.Helper()
	m.run(ctx, fmt.Sprintf("ip link add %s mtu %d type veth peer name %s netns %d mtu %[2]d", device, mtu, peer, other.cmd.Process.Pid))
	m.run(ctx, "ip link set dev "+device+" up")
	other.run(ctx, "ip link set dev "+peer+" up")
}

// process is a command that runs on a machine, with all that it has written so far.
type process struct {
	cmd *exec.Cmd
	mu  sync.Mutex
	out bytes.Buffer
}

func (p *process) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.out.Write(b)
}

func (p *process) said() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.out.String()
}

// end ends it as Ctrl-C does.
func (p *process) end() {
	syscall.Kill(-p.cmd.Process.Pid, syscall.SIGINT) //nolint:errcheck // it may have ended
	p.cmd.Wait()                                     //nolint:errcheck // as its program says
}

// start runs commands in a shell of their own.
func (m *machine) start(ctx context.Context, commands string) *process {
	m.t.Helper()
	p := &process{cmd: exec.CommandContext(ctx, "nsenter", "-t", fmt.Sprint(m.cmd.Process.Pid), "--net", "--mount", "bash", "-c", "cd /root\n"+commands)}
	p.cmd.Env = append(m.cmd.Env, "HOME=/root")
	p.cmd.Stdout, p.cmd.Stderr = p, p
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	p.cmd.Cancel = func() error { return syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL) }
	if err := p.cmd.Start(); err != nil {
		m.t.Fatal(err)
	}
	m.t.Cleanup(p.end)
	return p
}

// run runs commands until they end, and fails unless each is a success.
func (m *machine) run(ctx context.Context, commands string) string {
	m.t.Helper()
	p := m.start(ctx, "set -e\n"+commands)
	if err := p.cmd.Wait(); err != nil {
		m.t.Fatalf("on %s: %v\n%s\n%s", m.name, err, commands, p.said())
	}
	return p.said()
}

// until waits until a process has said something.
func (m *machine) until(ctx context.Context, p *process, what string) {
	m.t.Helper()
	for !strings.Contains(p.said(), what) {
		select {
		case <-ctx.Done():
			m.t.Fatalf("on %s %v does not say %q; it says\n%s", m.name, p.cmd.Args, what, p.said())
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// eventually runs commands that change nothing until they say something.
func (m *machine) eventually(ctx context.Context, commands string, is func(said string) bool) string {
	m.t.Helper()
	for {
		p := m.start(ctx, commands)
		err := p.cmd.Wait()
		if err == nil && is(p.said()) {
			return p.said()
		}
		select {
		case <-ctx.Done():
			m.t.Fatalf("on %s: %s\nlast %v, and said\n%s", m.name, commands, err, p.said())
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// built is a folder with the program.
func built(t *testing.T) string {
	t.Helper()
	bin := t.TempDir()
	if said, err := exec.Command("go", "build", "-buildvcs=false", "-o", bin+"/", "../../cmd/waystamp").CombinedOutput(); err != nil {
		t.Fatalf("build waystamp: %v\n%s", err, said)
	}
	return bin
}

// aboutSeveral parts docs/how-to/controller.md: the section about several controllers, and all others.
func aboutSeveral(t *testing.T, page string) (others, section string) {
	t.Helper()
	before, behind, found := strings.Cut(page, "\n## Several controllers\n")
	section, after, found2 := strings.Cut(behind, "\n## ")
	if !found || !found2 {
		t.Fatal("the page has no section about several controllers, with another one behind")
	}
	return before + "\n## " + after, section
}

// The commands of docs/how-to/controller.md, as they stand there, run a domain of three nodes with a controller, each on a machine of its
// own: from the first start, over tokens, a file, a rotation, an operator on another machine, a backup that is restored after nodes have gone on,
// and a change of the root, to a node that is thrown out and another that stops. Several controllers are the next test's, and the package's unit those of guests.
func TestTheControllersPageDoesWhatItSays(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("this test makes namespaces and loads programs: run it as root")
	}
	const name = "docs/how-to/controller.md"
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(root, name))
	if err != nil {
		t.Fatal(err)
	}
	file, err := os.ReadFile(filepath.Join(root, "examples/minimal.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	bin := built(t)
	one, _ := aboutSeveral(t, string(text))
	page := &pages{t, name, steps(one)}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)

	// The smallest domain, with the names of the page.
	domain := strings.NewReplacer("name: a ", "name: r1 ", "name: b ", "name: r2 ", "name: c ", "name: r3 ", "[a]", "[r1]", "node: b,", "node: r2,", "egress: c", "egress: r3").Replace(string(file))
	for _, was := range []string{"name: a ", "name: b ", "name: c "} {
		if !strings.Contains(string(file), was) {
			t.Fatalf("examples/minimal.yaml has no %q", was)
		}
	}
	at := map[string]*machine{}
	for _, name := range []string{"controller", "alice", "r1", "r2", "r3", "h1", "h2", "switch"} {
		at[name] = newMachine(t, ctx, name, bin+":"+os.Getenv("PATH"))
	}
	at["h1"].link(ctx, "eth0", at["r1"], "eth0", 1500)
	at["r3"].link(ctx, "eth1", at["h2"], "eth0", 1500)
	at["switch"].run(ctx, "ip link add name br0 mtu 1700 type bridge forward_delay 0; ip link set dev br0 up")
	for name, device := range map[string]string{"controller": "eth0", "alice": "eth0", "r1": "eth1", "r2": "eth0", "r3": "eth0"} {
		at[name].link(ctx, device, at["switch"], "p-"+name, 1700)
		at["switch"].run(ctx, "ip link set dev p-"+name+" master br0")
	}
	// The network of docs/tutorial.md, and the controller's and the operator's addresses.
	for name, set := range map[string]string{
		"controller": "ip address add fd00::1/64 dev eth0; ip route add fd00:1::/64 dev eth0",
		"alice":      "ip address add fd00::7/64 dev eth0",
		"r1":         "ip address add 2001:db8:1::1/64 dev eth0; ip address add fd00:1::a/64 dev eth1; ip route add fd00::/64 dev eth1; ip route add 2001:db8:2::/64 via fd00:1::c; ip route add fd00:5:0:b00::/56 via fd00:1::b; ip route add fd00:5:0:c00::/56 via fd00:1::c",
		"r2":         "ip address add fd00:1::b/64 dev eth0; ip route add fd00::/64 dev eth0; ip route add fd00:5:0:c00::/56 via fd00:1::c",
		"r3":         "ip address add 2001:db8:2::1/64 dev eth1; ip address add fd00:1::c/64 dev eth0; ip route add fd00::/64 dev eth0; ip route add 2001:db8:1::/64 via fd00:1::a; ip route add fd00:5:0:b00::/56 via fd00:1::b",
		"h1":         "ip address add 2001:db8:1::2/64 dev eth0; ip route add default via 2001:db8:1::1",
		"h2":         "ip address add 2001:db8:2::2/64 dev eth0; ip route add default via 2001:db8:2::1",
	} {
		at[name].run(ctx, set)
	}
	pings := func() {
		t.Helper()
		at["h1"].run(ctx, "ping -c 5 -i 0.2 -W 10 2001:db8:2::2")
	}
	c := at["controller"]
	nodes := []string{"r1", "r2", "r3"}
	counts := func(word string, n int) func(string) bool {
		return func(said string) bool { return strings.Count(said, word) == n }
	}

	// Start it.
	first := page.next("waystamp controller --listen")
	running := c.start(ctx, first.commands)
	c.until(ctx, running, `{"ready":true}`)

	// Let nodes join.
	token, join := page.next("waystamp node token r1"), page.next("waystamp agent --controller")
	agents := map[string]*process{}
	for _, n := range nodes {
		printed := regexp.MustCompile(`(?m)^ws1\.\S+$`).FindString(c.run(ctx, strings.ReplaceAll(token.commands, "r1", n)))
		if err := os.WriteFile(filepath.Join(at[n].root, "token"), []byte(printed+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		p := at[n].start(ctx, join.commands)
		agents[n] = p
		t.Cleanup(func() {
			if t.Failed() {
				t.Logf("the agent of %s says\n%s", n, p.said())
			}
		})
	}

	// Apply a file, and change it.
	if err := os.WriteFile(filepath.Join(c.root, "domain.yaml"), []byte(domain), 0o600); err != nil {
		t.Fatal(err)
	}
	apply := page.next("waystamp diff -f domain.yaml")
	diff, rest, _ := strings.Cut(apply.commands, "\n")
	if said := c.run(ctx, "set +e\n"+diff+"\n[ $? = 3 ]"); !strings.Contains(said, "+ chain web") {
		t.Errorf("the difference is\n%s", said)
	}
	c.run(ctx, rest)
	for _, n := range nodes {
		at[n].until(ctx, agents[n], `{"ready":true}`)
	}
	pings()
	if said := c.run(ctx, page.next("waystamp get chains").commands); !strings.Contains(said, "active") || strings.Count(said, "ready") != 3 {
		t.Errorf("how far it is:\n%s", said)
	}
	if said := c.run(ctx, page.next("waystamp describe chain web").commands); !strings.Contains(said, "fw") || !strings.Contains(said, "Join") {
		t.Errorf("at one thing closely:\n%s", said)
	}

	// See why packets are refused: one comes to h2's network from the core.
	why := page.next("waystamp watch --chain web")
	watch, explain, _ := strings.Cut(why.commands, "\n")
	watching := c.start(ctx, watch)
	at["r2"].run(ctx, "ip route add 2001:db8:2::/64 via fd00:1::c; ! ping -c 1 -W 1 2001:db8:2::2")
	c.until(ctx, watching, "came without proof")
	watching.end()
	if said := c.run(ctx, explain); !strings.Contains(said, "came without proof") {
		t.Errorf("it is explained as\n%s", said)
	}

	// Follow packets from hop to hop.
	trace := page.next("waystamp trace web")
	load := at["h1"].start(ctx, "ping -i 0.2 2001:db8:2::2")
	said := c.run(ctx, trace.commands)
	if strings.Count(said, "has verified it") != 3 || strings.Count(said, "(headend)") != 3 {
		t.Errorf("a trace:\n%s\nwant three packets, verified", said)
	}
	said = c.run(ctx, page.next("waystamp trace web --packets 2 --flow").commands)
	load.end()
	if strings.Count(said, "has verified it") != 2 {
		t.Errorf("a trace of a flow:\n%s\nwant two packets, verified", said)
	}

	// Give chains fresh secrets.
	epoch := func() string { return c.run(ctx, "waystamp get epochs") }
	before := epoch()
	c.run(ctx, page.next("waystamp rotate --all").commands)
	c.eventually(ctx, "waystamp get epochs", func(said string) bool { return said != before && counts("active", 1)(said) })
	pings()

	// Operators on other machines.
	c.run(ctx, page.next("waystamp operator add alice").commands)
	if err := os.Rename(filepath.Join(c.root, "alice.json"), filepath.Join(at["alice"].root, "alice.json")); err != nil {
		t.Fatal(err)
	}
	if said := at["alice"].run(ctx, page.next("export WAYSTAMP_CONTROLLER").commands); strings.Count(said, "ready") != 3 {
		t.Errorf("alice sees\n%s", said)
	}

	// Back up and restore. The nodes go on behind the backup.
	c.run(ctx, page.next("waystamp controller backup").commands)
	c.run(ctx, "waystamp rotate --all --wait")
	running.end()
	pings() // without a controller
	restore := page.next("mv /var/lib/waystamp/controller/store")
	running = c.start(ctx, restore.commands)
	c.until(ctx, running, `{"ready":true}`)
	c.eventually(ctx, "waystamp get nodes", counts("ready", 3))
	c.eventually(ctx, "waystamp get chains", counts("active", 1))
	pings()

	// Replace the root, and throw a node out. On the page it is the other way round.
	revoke := page.next("waystamp node revoke r2 --yes")
	roots := func() string { return c.run(ctx, "waystamp get roots") }
	was := roots()
	c.run(ctx, page.next("waystamp controller rotate-ca").commands)
	c.eventually(ctx, "waystamp get roots", func(said string) bool {
		return said != was && !strings.Contains(said, "coming") && !strings.Contains(said, "going")
	})
	c.run(ctx, "waystamp rotate --all --wait")
	pings()
	if said := c.run(ctx, revoke.commands); !strings.Contains(said, "web: blocked") {
		t.Errorf("without r2:\n%s", said)
	}
	c.eventually(ctx, "waystamp get chains", func(said string) bool { return strings.Contains(said, "on node r2, which was revoked") })
	// The controller says so before all nodes have the plan.
	for arrives := true; arrives; {
		p := at["h1"].start(ctx, "ping -c 2 -i 0.2 -W 1 2001:db8:2::2")
		arrives = p.cmd.Wait() == nil
		if ctx.Err() != nil {
			t.Fatalf("packets of a blocked chain arrive:\n%s", p.said())
		}
	}

	// Stop an agent for good.
	detach := page.next("waystamp agent --detach --yes")
	for _, n := range nodes {
		agents[n].end()
		at[n].run(ctx, detach.commands)
	}
	if len(page.steps) > 0 {
		t.Errorf("%s:%d: no test runs this block:\n%s", name, page.steps[0].line, page.steps[0].commands)
	}
	if err := errors.Join(context.Cause(ctx)); err != nil {
		t.Error(err)
	}
}

// The commands about several controllers run three, each on a machine of its own beside an etcd that lets in who has a certificate. The one that
// leads is killed; operators and a node go on with the others.
func TestSeveralControllersAreAsThePageSays(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("this test makes namespaces and loads programs: run it as root")
	}
	const name = "docs/how-to/controller.md"
	text, err := os.ReadFile(filepath.Join("../..", name))
	if err != nil {
		t.Fatal(err)
	}
	others, section := aboutSeveral(t, string(text))
	join := steps(others)[slices.IndexFunc(steps(others), func(s step) bool { return strings.Contains(s.commands, "--join") })].commands
	page := &pages{t, name, steps(section)}
	start, agent := page.next("waystamp controller --listen").commands, page.next("waystamp agent --controller").commands
	if len(page.steps) > 0 {
		t.Errorf("no test runs this block:\n%s", page.steps[0].commands)
	}
	file, err := os.ReadFile("../../examples/minimal.yaml")
	if err != nil {
		t.Fatal(err)
	}

	bin := built(t)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	at := map[string]*machine{}
	controllers := []string{"c1", "c2", "c3"}
	address := map[string]string{"a": "fd00::a", "c1": "fd00::1", "c2": "fd00::2", "c3": "fd00::3"}
	at["switch"] = newMachine(t, ctx, "switch", bin+":"+os.Getenv("PATH"))
	at["switch"].run(ctx, "ip link add name br0 type bridge forward_delay 0; ip link set dev br0 up")
	for name, a := range address {
		at[name] = newMachine(t, ctx, name, bin+":"+os.Getenv("PATH"))
		at[name].link(ctx, "eth0", at["switch"], "p-"+name, 1500)
		at["switch"].run(ctx, "ip link set dev p-"+name+" master br0")
		at[name].run(ctx, "ip address add "+a+"/64 dev eth0")
	}
	// Certificates by a CA that is etcd's alone.
	pki := t.TempDir()
	sign := `set -e; cd "$1"; shift
		openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN=etcd -keyout ca-key.pem -out ca.pem
		for a in "$@"; do
			openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=controller -keyout key-$a -out request-$a
			printf 'subjectAltName=IP:%s\nextendedKeyUsage=serverAuth,clientAuth\n' "$a" > extensions
			openssl x509 -req -in request-$a -CA ca.pem -CAkey ca-key.pem -CAcreateserial -days 1 -extfile extensions -out cert-$a
		done`
	if said, err := exec.CommandContext(ctx, "bash", "-c", sign, "bash", pki, address["c1"], address["c2"], address["c3"]).CombinedOutput(); err != nil {
		t.Fatalf("openssl: %v\n%s", err, said)
	}
	give := func(to *machine, name string, b []byte) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(to.root, name), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	tell := func(what string, p *process) *process {
		t.Cleanup(func() {
			if t.Failed() {
				t.Logf("%s says\n%s", what, p.said())
			}
		})
		return p
	}
	var cluster []string
	for _, c := range controllers {
		cluster = append(cluster, c+"=http://["+address[c]+"]:2380")
	}
	for _, c := range controllers {
		for from, to := range map[string]string{"ca.pem": "ca.pem", "cert-" + address[c]: "controller.pem", "key-" + address[c]: "controller-key.pem"} {
			b, err := os.ReadFile(filepath.Join(pki, from))
			if err != nil {
				t.Fatal(err)
			}
			give(at[c], to, b)
		}
		give(at[c], "domain.yaml", file)
		a := "[" + address[c] + "]"
		tell("etcd of "+c, at[c].start(ctx, "exec etcd --name "+c+" --data-dir /var/lib/etcd --log-level error"+
			" --listen-client-urls https://"+a+":2379 --advertise-client-urls https://"+a+":2379 --listen-peer-urls http://"+a+":2380 --initial-advertise-peer-urls http://"+a+":2380 --initial-cluster "+strings.Join(cluster, ",")+
			" --cert-file controller.pem --key-file controller-key.pem --trusted-ca-file ca.pem --client-cert-auth"))
	}
	running := map[string]*process{}
	for _, c := range controllers {
		// The page's command, at this machine's address, and with metrics, which tell the one that leads.
		commands := strings.TrimSuffix(strings.ReplaceAll(start, "tcp:[fd00::1]", "tcp:["+address[c]+"]"), "\n") + " --metrics '[::1]:9464'"
		running[c] = tell("the controller of "+c, at[c].start(ctx, "exec "+commands))
	}
	for _, c := range controllers {
		at[c].until(ctx, running[c], `{"ready":true}`)
	}

	// Any of them takes calls: one a file, another makes a token.
	at["c2"].run(ctx, "waystamp apply -f domain.yaml")
	give(at["a"], "token", []byte(regexp.MustCompile(`(?m)^ws1\.\S+$`).FindString(at["c3"].run(ctx, "waystamp node token a"))+"\n"))
	joined := tell("the agent that joined", at["a"].start(ctx, "exec "+join))
	connected := func(c string) {
		t.Helper()
		at[c].eventually(ctx, "waystamp get nodes", regexp.MustCompile(`(?m)^a +(behind|ready|refusing) `).MatchString)
	}
	connected("c1")
	joined.end()
	tell("the agent", at["a"].start(ctx, "exec "+agent))
	connected("c2")

	// The one that leads is killed.
	was := ""
	for _, c := range controllers {
		if strings.Contains(at[c].run(ctx, "curl -sS 'http://[::1]:9464/metrics'"), "\nwaystamp_controller_leads 1\n") {
			was += c
		}
	}
	if at[was] == nil {
		t.Fatalf("%q lead, want one", was)
	}
	syscall.Kill(-running[was].cmd.Process.Pid, syscall.SIGKILL) //nolint:errcheck // it runs
	for _, c := range controllers {
		if c != was { // until the lead of the other has ended operators are told to try again
			at[c].eventually(ctx, "waystamp rotate --all", func(string) bool { return true })
			connected(c)
		}
	}
}
