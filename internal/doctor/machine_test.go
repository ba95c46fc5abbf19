package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"

	"github.com/waystamp/waystamp/internal/await"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
)

func must(t *testing.T, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// soon is a deadline for what the kernel does by itself.
func soon(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), await.Limit(time.Minute))
	t.Cleanup(cancel)
	return ctx
}

// untilDown waits until the kernel says that an interface is down: up to a second after its other end (linkwatch).
func untilDown(t *testing.T, net *host.Net, name string) error {
	down := errors.New("it is down")
	err := net.Watch(soon(t), host.ChangeLinks, func() error {
		l, err := net.Link(name)
		if err == nil && !l.Up {
			return down
		}
		return err
	})
	if errors.Is(err, down) {
		return nil
	}
	return err
}

// node is r1 in a namespace of its own, as it should be.
func node(t *testing.T) Machine {
	t.Helper()
	ns, err := host.Anonymous()
	must(t, err)
	defer ns.Close()
	net, err := host.Open(ns)
	must(t, err)
	t.Cleanup(func() { net.Close() })
	must(t, net.SetUp("lo"), net.AddAddress("lo", netip.MustParsePrefix("fc00:1::1/128")))
	for _, name := range []string{"edge", "core", "far"} {
		must(t, net.AddVeth(host.Veth{Name: name, PeerName: name + "-peer"}))
		must(t, net.SetMTU(name, 1700), net.SetUp(name), net.SetUp(name+"-peer"), net.SetSysctl("net/ipv6/conf/"+name+"/forwarding", "1"))
	}
	must(t, net.WaitUp(soon(t), "edge", "core", "far"))
	d := model.Domain{
		Block: netip.MustParsePrefix("fc00::/48"),
		Nodes: []model.Node{
			{Name: "r1", Address: netip.MustParseAddr("fc00:1::1"), Locator: netip.MustParsePrefix("fc00:0:0:100::/56"), Interfaces: []model.Interface{
				{Name: "edge", Role: model.RoleEdge}, {Name: "core", Role: model.RoleCore, MTU: 1600}, {Name: "far", Role: model.RoleCore},
			}},
			{Name: "r2", Address: netip.MustParseAddr("fc00:2::1"), Locator: netip.MustParsePrefix("fc00:0:0:200::/56"), Interfaces: []model.Interface{{Name: "core", Role: model.RoleCore}}},
		},
		Functions: []model.Function{{Name: "fw", Node: "r2"}},
		Chains: []model.Chain{{
			Name: "web", Ingress: []string{"r1"}, Functions: []string{"fw"}, Egress: "r2",
			Match: model.Match{Destination: netip.MustParsePrefix("2001:db8::/32")},
		}},
	}
	c, err := plan.Compile(d, nil)
	must(t, err)
	dir := t.TempDir()
	must(t, net.AddRoute(host.Route{Destination: netip.MustParsePrefix("fc00:0:0:200::/56"), Device: "far"}))
	return Machine{Net: net, Plan: &c.Nodes[0], RunDir: filepath.Join(dir, "run"), StateDir: filepath.Join(dir, "state"), PinDir: "/sys/fs/bpf/waystamp"}
}

// wrong are the names of the checks that do not say yes.
func wrong(all []Finding) (out []string) {
	for _, f := range all {
		if f.Verdict != Yes {
			out = append(out, f.Check+" "+string(f.Verdict))
		}
	}
	return out
}

// Each fault is found by its check and by no other, and no more when it is mended.
func TestEachFaultOfANodeIsFound(t *testing.T) {
	m := node(t)
	set := func(key, value string) func() error {
		return func() error { return m.Net.SetSysctl("net/ipv6/conf/"+key, value) }
	}
	mtu := func(n int) func() error { return func() error { return m.Net.SetMTU("core", n) } }
	ip := func(args string) func() error { return func() error { return run(m, "ip", strings.Fields(args)...) } }
	gro := func(on bool) func() error { return func() error { return m.Net.Switch("core", "rx-gro-list", on) } }
	both := func(first, second func() error) func() error {
		return func() error { return errors.Join(first(), second()) }
	}
	var other func() error
	address := netip.MustParsePrefix("fc00:1::1/128")
	for name, c := range map[string]struct {
		hurt, mend func() error
		check      string
		says, how  string
	}{
		"no forwarding":     {set("core/forwarding", "0"), set("core/forwarding", "1"), "forwarding", "interface core does not forward IPv6", "sysctl -w net.ipv6.conf.core.forwarding=1"},
		"kernel's SRv6":     {both(set("all/seg6_enabled", "1"), set("edge/seg6_enabled", "1")), both(set("all/seg6_enabled", "0"), set("edge/seg6_enabled", "0")), "seg6", "segment routing is on, on interface edge", "sysctl -w net.ipv6.conf.edge.seg6_enabled=0"},
		"IPv6 off":          {set("core/disable_ipv6", "1"), set("core/disable_ipv6", "0"), "ipv6", "IPv6 is switched off on interface core", "sysctl -w net.ipv6.conf.core.disable_ipv6=0"},
		"narrower than due": {mtu(1599), mtu(1700), "mtu", "interface core has an MTU of 1599, and the plan counts on 1600", "ip link set core mtu 1600"},
		"down": {
			func() error { return errors.Join(m.Net.SetDown("edge-peer"), untilDown(t, m.Net, "edge")) },
			func() error { return errors.Join(m.Net.SetUp("edge-peer"), m.Net.WaitUp(soon(t), "edge")) },
			"interface", "edge interface edge is down", "ip link set edge up",
		},
		"in a bridge": {
			func() error { return m.Net.AddBridge("br0", "edge") }, func() error { return m.Net.DeleteLink("br0") },
			"master", "interface edge belongs to br0, of kind bridge", "ip link set edge nomaster",
		},
		"merges into lists": {gro(true), gro(false), "gro-list", "interface core merges packets into lists (rx-gro-list)", "ethtool -K core rx-gro-list off"},
		"longer super-packets": {
			ip("link set core gso_max_size 131072"), ip("link set core gso_max_size 65536"),
			"big-tcp", "interface core takes super-packets of up to 131072 bytes (BIG TCP)", "ip link set core gso_max_size 65536 gro_max_size 65536",
		},
		"another at XDP": {
			func() (err error) { other, err = atXDP(m, "edge"); return err }, func() error { return other() },
			"other-programs", "(other) is at XDP of interface edge and meets packets before waystamp", "ip link set edge xdp off",
		},
		"another before ours at TC": {
			func() (err error) { other, err = atTC(m, "core", "ws_core_tc", "other"); return err }, func() error { return other() },
			"other-programs", "(other) is at TC ingress of interface core and meets packets before waystamp", "tc filter show dev core ingress; bpftool net",
		},
		"no route to a function": {
			ip("-6 route del fc00:0:0:200::/56"), ip("-6 route add fc00:0:0:200::/56 dev far"),
			"route", "no route leads to fc00:0:0:200::, the first segment of chain web (forward)", "ip -6 route get fc00:0:0:200::",
		},
		"a route that refuses": {
			ip("-6 route replace prohibit fc00:0:0:200::/64"), ip("-6 route del prohibit fc00:0:0:200::/64"),
			"route", "no route leads to fc00:0:0:200::", "add a route to the locator of that node",
		},
		"a route past the core": {
			ip("-6 route add fc00:0:0:200::/64 dev edge"), ip("-6 route del fc00:0:0:200::/64 dev edge"),
			"route", "the route to fc00:0:0:200::, the first segment of chain web (forward), leads out by edge, which is no core interface of the plan", "write edge into the domain's file as a core interface of r1",
		},
		"address of another": {
			func() error { return m.Net.DeleteAddress("lo", address) }, func() error { return m.Net.AddAddress("lo", address) },
			"address", "no interface has the address fc00:1::1 of node r1", "ip address add fc00:1::1/128 dev lo",
		},
	} {
		t.Run(name, func(t *testing.T) {
			if got := wrong(m.node()); len(got) > 0 {
				t.Fatalf("before: %q", got)
			}
			must(t, c.hurt())
			found := m.node()
			must(t, c.mend())
			// An interface that is down takes its IPv6 settings with it or not, by kernel: ask for the one alone.
			got := wrong(found)
			if len(got) != 1 || got[0] != c.check+" no" {
				t.Fatalf("found %q, want %s", got, c.check)
			}
			for _, f := range found {
				if f.Verdict == No && (!strings.Contains(f.Says, c.says) || !strings.Contains(f.Mend, c.how) || f.Effect == "") {
					t.Errorf("says %q, so that %q: %q; want %q and %q", f.Says, f.Effect, f.Mend, c.says, c.how)
				}
			}
			if got := wrong(m.node()); len(got) > 0 {
				t.Errorf("mended, and it says %q", got)
			}
		})
	}
}

// run runs a program in the machine's namespace.
func run(m Machine, name string, args ...string) error {
	return m.Net.NetNS().Do(func() error {
		said, err := exec.Command(name, args...).CombinedOutput()
		if err != nil {
			return fmt.Errorf("%s %q: %w: %s", name, args, err, said)
		}
		return nil
	})
}

func passes(kind ebpf.ProgramType, name string, verdict int32) (*ebpf.Program, error) {
	return ebpf.NewProgram(&ebpf.ProgramSpec{Name: name, Type: kind, License: "MIT", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, verdict), asm.Return()}})
}

// atXDP attaches a program of somebody else.
func atXDP(m Machine, name string) (detach func() error, err error) {
	p, err := passes(ebpf.XDP, "other", 2)
	if err != nil {
		return nil, err
	}
	defer p.Close()
	dev, err := m.Net.Link(name)
	if err != nil {
		return nil, err
	}
	var l link.Link
	err = m.Net.NetNS().Do(func() (err error) {
		l, err = link.AttachXDP(link.XDPOptions{Program: p, Interface: dev.Index})
		return err
	})
	return func() error { return l.Close() }, err
}

// atTC attaches programs to the ingress of an interface, each in front of those before it: by tcx, or
// where there is none as filters of clsact.
func atTC(m Machine, name string, programs ...string) (detach func() error, err error) {
	dev, err := m.Net.Link(name)
	if err != nil {
		return nil, err
	}
	var links []link.Link
	var filters []host.Filter
	detach = func() (err error) {
		for _, l := range links {
			err = errors.Join(err, l.Close())
		}
		for _, f := range filters {
			err = errors.Join(err, m.Net.RemoveFilter(dev.Index, false, f))
		}
		return err
	}
	for i, n := range programs {
		p, err := passes(ebpf.SchedCLS, n, -1)
		if err != nil {
			return detach, err
		}
		defer p.Close()
		err = m.Net.NetNS().Do(func() error {
			l, err := link.AttachTCX(link.TCXOptions{Program: p, Attach: ebpf.AttachTCXIngress, Interface: dev.Index, Anchor: link.Head()})
			if err == nil {
				links = append(links, l)
			}
			return err
		})
		if errors.Is(err, ebpf.ErrNotSupported) {
			f := host.Filter{Preference: uint16(10 - i), Handle: 1, Kind: "bpf", Name: n}
			if err = m.Net.SetFilter(dev.Index, false, f, p.FD(), true); err == nil {
				filters = append(filters, f)
			}
		}
		if err != nil {
			return detach, err
		}
	}
	return detach, nil
}

// What is behind ours, or before an agent has attached ours, is nobody's fault.
func TestProgramsBehindOursAreNone(t *testing.T) {
	m := node(t)
	for _, order := range [][]string{{"other", "ws_core_tc"}, {"other", "another"}} {
		detach, err := atTC(m, "core", order...)
		must(t, err)
		if got := wrong(m.node()); len(got) > 0 {
			t.Errorf("%q: %q", order, got)
		}
		must(t, detach())
	}
}

func TestMissingInterfaceIsFound(t *testing.T) {
	m := node(t)
	must(t, m.Net.DeleteLink("core"))
	found := m.node()
	if got := wrong(found); len(got) != 1 || got[0] != "interface no" {
		t.Fatalf("found %q", got)
	}
	if r := (Report{Findings: found}); r.Fit() != No {
		t.Errorf("fit: %s", r.Fit())
	}
}

func TestTooNarrowForAChainIsFound(t *testing.T) {
	m := node(t)
	m.Plan.Interfaces[1].MTU = 0
	must(t, m.Net.SetMTU("core", 1320))
	found := m.node()
	if got := wrong(found); len(got) != 1 || got[0] != "chain-mtu no" {
		t.Fatalf("found %q", got)
	}
	if s := Wrong(found); !strings.Contains(s[0], "the headers of chain web take 104, so that the chain's packets can have only 1216 bytes on this interface, and IPv6 needs 1280: ip link set core mtu 1384") {
		t.Errorf("says %q", s)
	}
}

func TestPlacesAreTried(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	must(t, os.WriteFile(file, nil, 0o600))
	for name, c := range map[string]struct {
		got  Finding
		want Verdict
		says string
	}{
		"pins":                  {pins("/sys/fs/bpf/waystamp", ""), Yes, "is on a bpf file system"},
		"pins on disk":          {pins(dir, ""), No, "is not on a bpf file system"},
		"a file":                {directory("state-dir", filepath.Join(file, "x"), true), No, "is not a directory"},
		"to be made":            {directory("run-dir", filepath.Join(dir, "a", "b"), false), Yes, "does not exist, and the agent can make it"},
		"there":                 {directory("run-dir", dir, false), Yes, "can be written"},
		"in memory":             {directory("state-dir", "/dev/shm/x", true), No, "does not survive a reboot"},
		"in memory, and may be": {directory("run-dir", "/dev/shm/x", false), Yes, "the agent can make it"},
		"nothing to write to":   {directory("state-dir", "/proc/x", true), No, ""},
	} {
		if c.got.Verdict != c.want || !strings.Contains(c.got.Says, c.says) {
			t.Errorf("%s: %+v, want %s and %q", name, c.got, c.want, c.says)
		}
	}
	if pins(dir, "").fix != nil {
		t.Error("it would mount a file system over a directory of somebody else")
	}
}

// With --fix directories are made, with the rights that agents give them.
func TestMissingDirectoriesAreMade(t *testing.T) {
	dir := t.TempDir()
	m := Machine{RunDir: filepath.Join(dir, "run", "r1"), StateDir: filepath.Join(dir, "state", "r1"), PinDir: "/sys/fs/bpf/waystamp"}
	r := Report{Findings: m.place()}
	if r.Fit() != Yes {
		t.Fatalf("%+v", r)
	}
	var mends []string
	for _, f := range r.Fixable() {
		mends = append(mends, f.Mend)
		must(t, f.Fix())
	}
	if want := []string{"mkdir -p -m 0700 " + m.StateDir, "mkdir -p -m 0750 " + m.RunDir}; !slices.Equal(mends, want) {
		t.Errorf("it would %q, want %q", mends, want)
	}
	for at, mode := range map[string]os.FileMode{m.RunDir: 0o750, m.StateDir: 0o700} {
		if st, err := os.Stat(at); err != nil || st.Mode().Perm() != mode {
			t.Errorf("%s: %v, %v", at, st, err)
		}
	}
	if left := (Report{Findings: m.place()}).Fixable(); len(left) > 0 {
		t.Errorf("afterwards: %+v", left)
	}
}

// An agent that starts is refused what is fatal, is warned of the rest, and mends a missing mount by itself.
func TestAgentsStartWhereTheyCan(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	must(t, os.WriteFile(file, nil, 0o600))
	good := Machine{RunDir: filepath.Join(dir, "run"), StateDir: filepath.Join(dir, "state"), PinDir: "/sys/fs/bpf/waystamp"}
	for name, c := range map[string]struct {
		change  func(*Machine)
		warning string // one of them
		err     string
	}{
		"fit":             {func(*Machine) {}, "", ""},
		"state in a file": {func(m *Machine) { m.StateDir = filepath.Join(file, "x") }, file + " is not a directory, so that packet numbers and replay windows cannot be saved, headends refuse packets", ""},
		"nowhere to run":  {func(m *Machine) { m.RunDir = file }, "", file + " is not a directory, so that the agent cannot start: choose another one with --run-dir"},
		"pins on disk":    {func(m *Machine) { m.PinDir = dir }, "", dir + " is not on a bpf file system, so that the data path would end with the agent: choose a directory below /sys/fs/bpf with --pin-dir"},
	} {
		m := good
		c.change(&m)
		warnings, err := m.Start()
		if !strings.Contains(strings.Join(warnings, "\n"), c.warning) || (err == nil) != (c.err == "") || err != nil && err.Error()[:min(len(c.err), len(err.Error()))] != c.err {
			t.Errorf("%s: %q, %v; want %q, %q", name, warnings, err, c.warning, c.err)
		}
	}
}

// Functions of kind netfilter need the program nft.
func TestMissingProgramsAreFound(t *testing.T) {
	m := Machine{Plan: &plan.Node{Proxies: []plan.Proxy{{Function: "fw"}, {Function: "nat", Netfilter: &plan.Netfilter{}}}}}
	bin := t.TempDir()
	t.Setenv("PATH", bin)
	if s := strings.Join(Wrong(m.tools()), "\n"); s != "the program nft is not installed, so that functions of kind netfilter get no packets (function-gone): apt install nftables" {
		t.Errorf("says %q", s)
	}
	must(t, os.WriteFile(filepath.Join(bin, "nft"), []byte("#!/bin/sh\n"), 0o755))
	if f := m.tools(); len(f) != 1 || f[0].Verdict != Yes {
		t.Errorf("installed: %+v", f)
	}
}

func TestControllersClockIsCompared(t *testing.T) {
	const says = ", so that certificates may be refused, and times of events on several nodes cannot be compared: run an NTP client on both machines"
	for _, c := range []struct {
		off   time.Duration
		wrong bool
		want  string
	}{
		{0, false, ""}, {time.Minute, false, ""}, {-time.Minute, false, ""}, {55 * time.Second, true, ""},
		{61 * time.Second, false, "this machine's clock is more than a minute ahead of the controller's" + says},
		{58 * time.Second, true, "this machine's clock is more than a minute ahead of the controller's" + says},
		{-time.Hour, false, "this machine's clock is more than a minute behind the controller's" + says},
	} {
		if got := strings.Join(Wrong([]Finding{ControllerClock(c.off, c.wrong)}), ""); got != c.want {
			t.Errorf("%s, wrong before: %t: %q, want %q", c.off, c.wrong, got, c.want)
		}
	}
}

// The settings are the machine's, so that these are made up.
func TestCompilerOfProgramsIsLookedAt(t *testing.T) {
	for name, c := range map[string]struct {
		settings fstest.MapFS
		want     []string // check, verdict, and what it says
	}{
		"good":             {fstest.MapFS{"bpf_jit_enable": {Data: []byte("1\n")}, "bpf_jit_harden": {Data: []byte("0\n")}}, []string{"jit yes compiles", "jit-harden yes does not blind"}},
		"for others alone": {fstest.MapFS{"bpf_jit_enable": {Data: []byte("1\n")}, "bpf_jit_harden": {Data: []byte("1\n")}}, []string{"jit yes compiles", "jit-harden yes does not blind"}},
		"interprets":       {fstest.MapFS{"bpf_jit_enable": {Data: []byte("0\n")}, "bpf_jit_harden": {Data: []byte("2\n")}}, []string{"jit no interprets"}},
		"blinds":           {fstest.MapFS{"bpf_jit_enable": {Data: []byte("1\n")}, "bpf_jit_harden": {Data: []byte("2\n")}}, []string{"jit yes compiles", "jit-harden no blinds the constants of all programs"}},
		"not to be seen":   {fstest.MapFS{}, []string{"jit unknown does not exist"}},
		"without it":       {fstest.MapFS{"bpf_jit_enable": {Data: []byte("1\n")}}, []string{"jit yes compiles"}},
	} {
		found := jit(c.settings)
		if len(found) != len(c.want) {
			t.Errorf("%s: %+v, want %q", name, found, c.want)
			continue
		}
		for i, f := range found {
			check, rest, _ := strings.Cut(c.want[i], " ")
			verdict, says, _ := strings.Cut(rest, " ")
			if f.Check != check || string(f.Verdict) != verdict || !strings.Contains(f.Says, says) || f.Weight != Cost || f.Verdict == No && (f.Mend == "" || f.Effect == "") {
				t.Errorf("%s: %+v, want %s", name, f, c.want[i])
			}
		}
	}
}

// What this machine has, all must load; nothing is unknown but where a test has less than
// a machine.
func TestThisMachineIsFit(t *testing.T) {
	m := node(t)
	for _, f := range m.Look().Findings {
		if f.Weight == Fatal && f.Verdict != Yes {
			t.Errorf("%+v", f)
		}
	}
}

func TestFit(t *testing.T) {
	for name, c := range map[string]struct {
		findings []Finding
		want     Verdict
	}{
		"none":              {nil, Yes},
		"slower":            {[]Finding{{Verdict: No, Weight: Cost}, {Verdict: Unknown, Weight: Cost}}, Yes},
		"unknown":           {[]Finding{{Verdict: Yes, Weight: Fatal}, {Verdict: Unknown, Weight: Warning}}, Unknown},
		"wrong and unknown": {[]Finding{{Verdict: Unknown, Weight: Fatal}, {Verdict: No, Weight: Warning}}, No},
	} {
		if got := (Report{Findings: c.findings}).Fit(); got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
	}
}

// The names of checks and their weights are what people filter the report's JSON by.
func TestChecksHaveTheseNames(t *testing.T) {
	m := node(t)
	m.Plan.Interfaces[0].Datapath = model.DatapathXDP
	m.Plan.Proxies = []plan.Proxy{{Function: "fw", Proxy: model.Proxy{To: "core", From: "core"}}, {Function: "nat", Netfilter: &plan.Netfilter{}}}
	got := map[string]bool{}
	m.Plan.Proxies[0].Via = netip.MustParseAddr("fe80::2")
	for _, f := range slices.Concat(m.Look().Findings, queueing(m.Net, *m.Plan, false, nil), []Finding{ControllerClock(0, false)}) {
		got[f.Check] = true
	}
	delete(got, "jit-harden") // where the kernel has it, and this namespace shows it
	want := strings.Fields("address big-tcp bpf-fs chain-mtu clock controller-clock extra features forwarding function-device gro-list interface ipv6 jit kernel lro master mtu open-files other-programs program qdisc rights route run-dir seg6 state-dir tool unplanned via xdp xdp-checksums xdp-mtu xdp-redirect")
	if names := slices.Sorted(maps.Keys(got)); !slices.Equal(names, want) {
		t.Errorf("%q, want %q", names, want)
	}
}

func TestKernelsWithoutAFeatureAreToldTheOldest(t *testing.T) {
	lacks := &host.UnsupportedError{Feature: "loops in eBPF by a helper", Min: "5.17"}
	f := needs(lacks)
	if f.Verdict != No || f.Weight != Fatal || f.Mend != "install Linux 6.1 or later" || !strings.Contains(f.Says, "has no loops in eBPF by a helper") {
		t.Errorf("got %+v", f)
	}
	if f := needs(fs.ErrPermission); f.Verdict != Unknown {
		t.Errorf("without permission: got %+v", f)
	}
}
