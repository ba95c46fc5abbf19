package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/await"
	"github.com/waystamp/waystamp/internal/command"
	"github.com/waystamp/waystamp/internal/controller"
	v1 "github.com/waystamp/waystamp/internal/rpc/waystampv1"
	"github.com/waystamp/waystamp/internal/store"
)

// controlled runs a controller in this process, and gives a function that runs an operator's
// command.
func controlled(t *testing.T) func(args ...string) (stdout, stderr string, code int) {
	t.Helper()
	run, _, _ := controlledOverTCP(t)
	return run
}

// controlledOverTCP is the same, with the address for callers over TLS, and the audit file.
func controlledOverTCP(t *testing.T) (run func(args ...string) (stdout, stderr string, code int), address, audit string) {
	t.Helper()
	dir := t.TempDir()
	audit = filepath.Join(dir, "audit.jsonl")
	trail, err := controller.OpenAudit(audit)
	if err != nil {
		t.Fatal(err)
	}
	over, err := controller.Listen("tcp:127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s, err := store.OpenBolt(filepath.Join(dir, "store"))
	if err != nil {
		t.Fatal(err)
	}
	c, err := controller.New(t.Context(), controller.Config{Store: s, Audit: trail})
	if err != nil {
		t.Fatal(err)
	}
	l, err := controller.Listen("unix:" + filepath.Join(dir, "s"))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- c.Run(ctx, l, over) }()
	t.Cleanup(func() {
		cancel()
		if err := errors.Join(<-ended, s.Close(), trail.Close()); err != nil {
			t.Error(err)
		}
	})
	t.Setenv(controllerVariable, "unix:"+filepath.Join(dir, "s"))
	return func(args ...string) (string, string, int) {
		var out, errs bytes.Buffer
		code := command.Run(t.Context(), NewRootCommand(), args, strings.NewReader(""), &out, &errs)
		return out.String(), errs.String(), code
	}, "tcp:" + over.Addr().String(), audit
}

// What a domain without agents has to tell.
func TestDescribeAndEvents(t *testing.T) {
	run, _, _ := controlledOverTCP(t)
	for _, c := range []struct {
		args   string
		code   int
		stdout []string
		stderr string
	}{
		{"describe chain web", 2, nil, "there is no chain web"},
		{"apply -f " + planPaper, 0, []string{"+ chain web"}, ""},
		{"describe chain web", 0, []string{"chain web", "way ", "r1 -> fw (r2) -> ", "Nodes", "r2 ", "expected", "waystamp node token r2", "WAITING FOR"}, ""},
		{"describe node r2", 0, []string{"node r2", "functions", "fw", "Chains"}, ""},
		{"describe function fw -o yaml", 0, []string{"kind: function", "name: fw", "value: forward"}, ""},
		{"describe function", 2, nil, "accepts 1 arg"},
		{"describe router r1", 2, nil, "router"},
		{"get events", 0, []string{"TIME", "call", "Apply", "change  begin", "request 1"}, ""},
		{"get events nothing -o json", 0, []string{`"events":[]`}, ""},
		{"watch --chain web --once", 0, nil, ""},
		{"watch --chain web --lab x", 2, nil, "--lab is for agents of this machine"},
		{"trace web --lab none", 1, nil, "none"},
		{"trace web --direction up", 2, nil, `expect forward, reverse or both, have "up"`},
		{"trace web --packets 0", 2, nil, "--packets: expect 1 to 16, have 0"},
		{"trace web --packets 17", 2, nil, "--packets: expect 1 to 16, have 17"},
		{"trace web --timeout 500ms", 2, nil, "--timeout: expect 1s to 1h, have 500ms"},
		{"trace web -o xml", 2, nil, "xml"},
		{"trace web --flow any,fc00:8::1", 2, nil, "--flow: \"any,fc00:8::1\" has 2 fields; expect SRC,DST,PROTO or SRC,DST,PROTO,SPORT,DPORT, with any for a field that does not matter"},
		{"trace web --flow fc00:7::1/64,any,tcp", 2, nil, "--flow: source: fc00:7::1/64 has bits set behind its length; expect fc00:7::/64, or the address alone"},
		{"trace web --flow 192.0.2.1,fc00:8::1,tcp", 2, nil, "--flow: has a source and a destination of different versions of IP, which no packet has"},
		{"trace web --flow any,fc00:8::1,icmpv6,any,443", 2, nil, "--flow: has ports, and protocol icmpv6; expect one of tcp, udp"},
		{"trace web --flow any,any,any", 2, nil, "--flow: selects all packets; name an address, a protocol or a port"},
		{"trace web --flow=", 2, nil, "--flow: \"\" has 1 fields"},
		{"trace web --flow any,2001:db8::1,tcp", 2, nil, "chain web, forward takes destination fc00:8::/64, and no packet of flow any,2001:db8::1,tcp; name a flow that it takes"},
		{"trace web --direction reverse --flow any,2001:db8::1,tcp", 2, nil, "chain web, reverse takes source fc00:8::/64, and no packet of flow 2001:db8::1,any,tcp"},
		{"trace web --flow any,fc00:8::1,tcp,any,443", 2, nil, "chain web, forward: no packet can be traced: its headend r1 has no connection to the controller"},
		{"trace", 2, nil, "accepts 1 arg"},
		{"trace web", 2, nil, "chain web, forward: no packet can be traced: its headend r1 has no connection to the controller"},
		{"trace wob -o json", 2, nil, `no chain "wob" is in force`},
		{"__complete trace ", 0, []string{"web\n"}, ""},
		{"__complete trace web --direction ", 0, []string{"both\n"}, ""},
		{"explain --chain web", 0, nil, "no node has told the controller of a refused packet"},
		{"explain --chain web --paths x", 2, nil, "leave out --paths"},
		{"__complete describe chain ", 0, []string{"web\n"}, ""},
		{"__complete node revoke ", 0, []string{"r2\n"}, ""},
		{"__complete rotate web ", 0, nil, "NoFileComp"},
	} {
		args := strings.Split(c.args, " ")
		stdout, stderr, code := run(args...)
		if args[0] == "apply" {
			for began := time.Now(); ; time.Sleep(10 * time.Millisecond) { // the change begins by itself
				if out, _, _ := run("get", "chains"); strings.Contains(out, "web") {
					break
				} else if time.Since(began) > time.Minute {
					t.Fatalf("the change does not begin:\n%s", out)
				}
			}
		}
		if code != c.code || !strings.Contains(stderr, c.stderr) {
			t.Errorf("waystamp %s: exit code %d\n%s%s\nwant %d and %q", c.args, code, stdout, stderr, c.code, c.stderr)
		}
		for _, part := range c.stdout {
			if !strings.Contains(stdout, part) {
				t.Errorf("waystamp %s says\n%s\nwithout %q", c.args, stdout, part)
			}
		}
	}
	if stdout, _, _ := run("__complete", "rotate", "web", ""); strings.Contains(stdout, "web\n") {
		t.Errorf("web is offered twice:\n%s", stdout)
	}
}

// An operator on another machine may do what his role says, until he is removed, and each call is on record.
func TestOperatorsOverTheNetwork(t *testing.T) {
	run, at, audit := controlledOverTCP(t)
	dir := t.TempDir()
	reader, admin, again := filepath.Join(dir, "reader.json"), filepath.Join(dir, "admin.json"), filepath.Join(dir, "again.json")
	as := func(file string) string { return " --controller " + at + " --identity " + file }
	for _, c := range []struct {
		args           string
		code           int
		stdout, stderr string // parts
	}{
		{"operator add alice --role reader --out " + reader, 0, "", "for operator alice, reader, until"},
		{"operator add alice --role reader --out " + reader, 1, "", "is there already"},
		{"operator add carol --role admin --out " + admin, 0, "", "for operator carol, admin, until"},
		{"get nodes" + as(reader), 0, "NAME", ""},
		{"diff -f " + planPaper + as(reader), 3, "+ chain web", ""},
		{"apply -f " + planPaper + as(reader), 1, "", "operator alice is a reader, and this takes an admin"},
		{"node token r1" + as(reader), 1, "", "takes an admin"},
		{"trace web" + as(reader), 1, "", "operator alice is a reader, and this takes an admin"},
		{"controller backup " + filepath.Join(dir, "b") + as(reader), 1, "", "takes an admin"},
		{"operator add eve --role admin --out " + filepath.Join(dir, "e") + as(reader), 1, "", "takes an admin"},
		{"apply -f " + planPaper + as(admin), 0, "+ chain web", ""},
		{"node token r1" + as(admin), 0, "ws1.", ""},
		{"operator list" + as(reader), 0, "alice  reader", ""},
		// A role is changed, and the file before is void.
		{"operator add alice --role admin --out " + again + as(admin), 0, "", "admin"},
		{"get nodes" + as(reader), 1, "", "operator alice was given another key since"},
		{"rotate --all" + as(again), 0, "", ""},
		{"operator remove alice" + as(admin), 0, "", ""},
		{"get nodes" + as(again), 1, "", "operator alice was removed"},
		{"get nodes --controller unix:/nowhere," + at + " --identity " + admin, 0, "NAME", ""},
		{"get nodes --controller " + at + " --identity " + planPaper, 1, "", "read the operator's identity"},
	} {
		stdout, stderr, code := run(strings.Fields(c.args)...)
		if code != c.code || !strings.Contains(stdout, c.stdout) || !strings.Contains(stderr, c.stderr) {
			t.Errorf("waystamp %s: exit code %d\n%s%s\nwant %d, %q and %q", c.args, code, stdout, stderr, c.code, c.stdout, c.stderr)
		}
	}
	if info, err := os.Stat(reader); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the identity has mode %v, %v", info.Mode(), err)
	}
	b, err := os.ReadFile(audit)
	if err != nil {
		t.Fatal(err)
	}
	type line struct{ Who, Call, About, Result string }
	var lines []line
	for _, text := range strings.Split(strings.TrimSpace(string(b)), "\n") {
		var l line
		if err := json.Unmarshal([]byte(text), &l); err != nil {
			t.Fatalf("%q: %v", text, err)
		}
		lines = append(lines, l)
	}
	const service = "/waystamp.v1.Admin/"
	for _, want := range []line{
		{"operator alice", service + "Get", "", "done"},
		{"operator alice", service + "Apply", "paper.yaml", "permission_denied"},
		{"operator alice", service + "Backup", "", "permission_denied"},
		{"operator carol", service + "CreateToken", "r1", "done"},
		{"operator carol", service + "AddOperator", "alice as admin", "done"},
		{"operator alice", service + "Rotate", "all chains", "done"},
		{"operator alice", service + "Get", "", "permission_denied"},
	} {
		if !slices.ContainsFunc(lines, func(l line) bool {
			return l.Who == want.Who && l.Call == want.Call && strings.HasSuffix(l.About, want.About) && l.Result == want.Result
		}) {
			t.Errorf("the audit file has no line %+v:\n%s", want, b)
		}
	}
	for _, secret := range []string{"ws1.", "PRIVATE"} {
		if strings.Contains(string(b), secret) {
			t.Errorf("the audit file has %q", secret)
		}
	}
}

// eventually runs a command that changes nothing until it says so, for what the controller does next.
func eventually(run func(...string) (string, string, int), said func(stdout, stderr string, code int) bool, args ...string) (stdout, stderr string, code int) {
	for deadline := time.Now().Add(await.Limit(time.Minute)); ; {
		stdout, stderr, code = run(args...)
		if said(stdout, stderr, code) || time.Now().After(deadline) {
			return stdout, stderr, code
		}
	}
}

func TestOperatorsCommands(t *testing.T) {
	run := controlled(t)
	other := filepath.Join(t.TempDir(), "other.yaml")
	text, err := os.ReadFile(planPaper)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(other, bytes.Replace(text, []byte("[fw, dpi]"), []byte("[dpi, fw]"), 1), 0o600); err != nil {
		t.Fatal(err)
	}
	wrong := filepath.Join(t.TempDir(), "wrong.yaml")
	if err := os.WriteFile(wrong, bytes.Replace(text, []byte("egress: r6"), []byte("egress: r7"), 1), 0o600); err != nil {
		t.Fatal(err)
	}
	const all = "+ domain fc00::/48\n+ node r1\n+ node r2\n+ node r3\n+ node r6\n+ function fw\n+ function dpi\n+ chain web\n"
	for _, c := range []struct {
		args   string
		code   int
		stdout string // whole, if it ends in a line's end; else a part
		stderr string // a part
	}{
		{"get nodes", 0, "NAME", ""},
		{"apply -f " + planPaper + " --dry-run", 0, all, ""},
		{"diff -f " + planPaper, 3, all, ""}, // the dry run has changed nothing
		{"apply -f " + planPaper, 0, all, ""},
		{"diff -f " + planPaper, 0, "\n", ""},
		{"diff -f " + other, 3, "~ chain web\n", ""},
		{"apply -f " + wrong, 2, "\n", "r7"},
		{"apply", 2, "\n", "-f is missing"},
		{"get nodes", 0, "expected", "waiting for r1, r2, r3, r6"},
		{"get chains", 0, "preparing", ""},
		{"get changes", 0, "prepare  r1    expected", ""},
		{"get epochs", 0, "web    reverse        1  preparing", ""},
		{"node token r1", 0, "ws1.", "for node r1, once, until"},
		{"node token ../r1", 2, "\n", "../r1"},
		{"node token r1 --valid 200h", 2, "\n", "at most"},
		{"node revoke r3", 2, "\n", "add --yes"},
		{"node revoke r9 --yes", 2, "\n", "there is no node r9"},
		{"node revoke r3 --yes", 0, "chain web: blocked\n", ""},
		{"node token r3", 2, "\n", "--reinstate"},
		{"get nodes", 0, "revoked", ""},
		{"rotate", 2, "\n", "name chains, or give --all"},
		{"rotate nope", 2, "\n", "there is no chain nope"},
		{"rotate --all", 0, "\n", ""},
		{"delete nope", 2, "\n", "there is no chain nope"},
		{"delete web", 0, "\n", ""},
		{"diff -f " + planPaper, 3, "+ chain web\n", ""},
		{"get chains --controller [::1]:7", 2, "\n", "expect unix:/PATH"},
		{"get chains --controller tcp:[::1]", 2, "\n", "expect unix:/PATH"},
		{"get chains --controller tcp:[::1]:7", 2, "\n", "name the file that waystamp operator add has made"},
		{"operator add bob --role king --out @/bob.json", 2, "\n", "expect reader or admin"},
		{"operator add bob", 2, "\n", "--role and --out are needed"},
		{"operator remove bob", 2, "\n", "there is no operator bob"},
		{"get chains --controller unix:/nowhere", 1, "\n", "no controller answers at unix:/nowhere"},
		{"get nodes --controller unix:/nowhere,%", 0, "NAME", ""}, // the next one is asked
	} {
		args := strings.Fields(strings.ReplaceAll(c.args, "%", os.Getenv(controllerVariable)))
		said := func(stdout, stderr string, code int) bool {
			whole := strings.HasSuffix(c.stdout, "\n")
			return code == c.code && (!whole || stdout == strings.TrimPrefix(c.stdout, "\n")) && (whole || strings.Contains(stdout, c.stdout)) && strings.Contains(stderr, c.stderr)
		}
		once := run
		if args[0] == "get" {
			once = func(args ...string) (string, string, int) { return eventually(run, said, args...) }
		}
		if stdout, stderr, code := once(args...); !said(stdout, stderr, code) {
			t.Errorf("waystamp %s: exit code %d\n%s%s\nwant %d, %q and %q", c.args, code, stdout, stderr, c.code, c.stdout, c.stderr)
		}
	}
	stdout, stderr, _ := run("get", "nodes", "-o", "json")
	var out api.NodesOutput
	if err := json.Unmarshal([]byte(stdout), &out); err != nil || len(out.Nodes) != 4 || out.Version != api.Version {
		t.Errorf("%q, %q: %v", stdout, stderr, err)
	}
}

func TestABackupComesBack(t *testing.T) {
	run := controlled(t)
	file, data := filepath.Join(t.TempDir(), "backup"), filepath.Join(t.TempDir(), "data")
	damaged := filepath.Join(t.TempDir(), "damaged")
	for _, c := range []struct {
		args   string
		code   int
		stderr string
	}{
		{"apply -f " + planPaper, 0, ""},
		{"get nodes", 0, "waiting for r1, r2, r3, r6"},
		{"node revoke r3 --yes", 0, ""},
		{"controller backup " + file, 0, ""},
		{"controller backup " + file, 1, "file exists"},
		{"controller restore " + damaged + " --data " + data, 1, "it is no backup, or not whole"},
		{"controller restore " + file + " --data " + data, 0, "revoked nodes in the backup: r3; revoke again the nodes that were revoked later\nthe controller will wait for the reports of these nodes: r1, r2, r6\n"},
		{"controller restore " + file + " --data " + data, 1, "restore into an empty one"},
	} {
		if strings.Contains(c.args, damaged) {
			b, err := os.ReadFile(file)
			if err == nil {
				err = os.WriteFile(damaged, b[:len(b)-10], 0o600)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		args := strings.Fields(c.args)
		said := func(_, stderr string, code int) bool { return code == c.code && strings.Contains(stderr, c.stderr) }
		once := run
		if args[0] == "get" {
			once = func(args ...string) (string, string, int) { return eventually(run, said, args...) }
		}
		if stdout, stderr, code := once(args...); !said(stdout, stderr, code) {
			t.Errorf("waystamp %s: exit code %d\n%s%s\nwant %d and %q", c.args, code, stdout, stderr, c.code, c.stderr)
		}
	}
	if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the backup has mode %v, %v", info.Mode(), err)
	}
}

func TestAnAgentHasOneSourceOfPlans(t *testing.T) {
	for args, says := range map[string]string{
		"agent":                                             "--plan or --controller is missing",
		"agent --plan x --controller [::1]:7":               "exclude each other",
		"agent --plan x --join ws1.x":                       "--join goes with --controller",
		"agent --detach --controller [::1]:7":               "--detach needs no controller",
		"agent --controller [::1]:7 --state-dir %":          "has not joined yet",
		"agent --controller [::1]:7 --join x --state-dir %": "it is not a token",
		"agent --owner root":                                "--owner goes with --move-pins",
		"agent --move-pins /x --detach":                     "--detach and --move-pins exclude each other",
		"agent --move-pins /x --plan y":                     "--move-pins takes no --plan",
		"agent --move-pins /x --owner no-such-user":         "--owner: user: unknown user no-such-user",
		"agent --move-pins /x --instance no-such-instance":  "no-such-instance",
	} {
		var out, errs bytes.Buffer
		code := command.Run(t.Context(), NewRootCommand(), strings.Fields(strings.ReplaceAll(args, "%", t.TempDir())), strings.NewReader(""), &out, &errs)
		if code == 0 || !strings.Contains(errs.String(), says) {
			t.Errorf("waystamp %s: exit code %d, %q; want %q", args, code, errs.String(), says)
		}
	}
}

func TestAControllerThatCannotStartSaysWhy(t *testing.T) {
	dir := t.TempDir()
	for _, c := range []struct {
		args, says string
		mode       os.FileMode
		code       int
	}{
		{"--listen tcp:[::1]:0 --trust-domain a/b", "--trust-domain", 0o700, command.ExitUsage},
		{"--listen [::1]:7443", "expect unix:/PATH for operators", 0o700, command.ExitUsage},
		{"--listen unix:relative", "expect unix:/PATH for operators", 0o700, command.ExitUsage},
		{"--store bolt:x --listen tcp:[::1]:7443", "it does not begin with etcd://", 0o700, command.ExitUsage},
		{"--store etcd://[fd00::2]:2379 --listen tcp:[::1]:7443", "give the CA of etcd's certificates", 0o700, command.ExitFailed},
		{"--store etcd://[::1]:2379", "add --listen tcp:HOST:PORT", 0o700, command.ExitUsage},
		{"--store etcd://[::1]:2379 --listen tcp:[::]:7443", "name one that the other controllers reach; or say --advertise", 0o700, command.ExitUsage},
		{"--store etcd://[::1]:2379 --listen tcp:[::]:7443 --advertise 7", "--advertise", 0o700, command.ExitUsage},
		{"--advertise tcp:[::1]:7443", "go with --store", 0o700, command.ExitUsage},
		{"--rotate-every 5s", "expect 10s or more", 0o700, command.ExitUsage},
		{"--metrics :9464", "expect HOST:PORT", 0o700, command.ExitUsage},
		{"--etcd-ca x", "go with --store", 0o700, command.ExitUsage},
		{"", "chmod go-w", 0o777, command.ExitFailed},
	} {
		if err := os.Chmod(dir, c.mode); err != nil {
			t.Fatal(err)
		}
		var out, errs bytes.Buffer
		code := command.Run(t.Context(), NewRootCommand(), append([]string{"controller", "--data", dir}, strings.Fields(c.args)...), strings.NewReader(""), &out, &errs)
		if code != c.code || !strings.Contains(errs.String(), c.says) {
			t.Errorf("waystamp controller %s: exit code %d, %q; want %d and %q", c.args, code, errs.String(), c.code, c.says)
		}
	}
}

func TestChangesSayWhenTheClockRotates(t *testing.T) {
	at := time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)
	r := readChanges(&v1.State{NextRotation: timestamppb.New(at)})
	if want := []any{"rotate", "-", "due", at.Local().Format(time.DateTime), "by the controller's clock"}; len(r.rows) != 1 || !slices.Equal(r.rows[0], want) {
		t.Errorf("rows %v, want %v", r.rows, want)
	}
	if out := r.output.(api.ChangesOutput); out.NextRotation == nil || !out.NextRotation.Equal(at) {
		t.Errorf("output %+v", out)
	}
	if r := readChanges(&v1.State{}); len(r.rows) != 0 || r.output.(api.ChangesOutput).NextRotation != nil {
		t.Errorf("without a clock: %+v", r)
	}
}
