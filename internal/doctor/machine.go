package doctor

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/dataplane"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
)

// Machine is what an agent would run on, and with what.
type Machine struct {
	Plan     *plan.Node // nil: no plan is compared, and there need be no network
	Net      *host.Net
	NoNet    error // why there is none
	Instance string
	RunDir   string
	StateDir string
	PinDir   string
}

// What the agent needs of the state directory at the least: the records of windows and
// numbers, twice while they are written.
const stateRoom = 64 << 20

// filesLeast are as many as an agent has open that holds a domain of middle size.
const filesLeast = 1024

// Look runs all checks. Only loading the programs takes more than a moment: about a second.
func (m Machine) Look() Report {
	needed := needs(dataplane.Check())
	r := Report{Version: ReportVersion, Findings: slices.Concat([]Finding{kernelVersion()}, capabilities(), []Finding{needed})}
	// Without what all programs need, each of them would say the same in the words of the verifier.
	if needed.Verdict != No {
		r.Findings = append(r.Findings, programs()...)
	}
	r.Findings = slices.Concat(r.Findings, extras(), jit(os.DirFS("/proc/sys/net/core")), m.place())
	switch {
	case m.NoNet != nil:
		r.Findings = append(r.Findings, check{"network", "", Fatal}.unknown(m.NoNet))
	case m.Plan != nil:
		r.Findings = append(r.Findings, m.node()...)
	}
	return r
}

// place is what an agent finds outside of the network.
func (m Machine) place() []Finding {
	return []Finding{pins(m.PinDir, m.Instance), directory("state-dir", m.StateDir, true), directory("run-dir", m.RunDir, false), openFiles(), clock()}
}

// node compares the network with the plan.
func (m Machine) node() []Finding {
	tcx, err := dataplane.HasTCX()
	return slices.Concat([]Finding{m.address()}, planCapabilities(*m.Plan), Interfaces(m.Net, *m.Plan), m.tools(), m.settings(), routes(m.Net, *m.Plan),
		vias(m.Net, *m.Plan), queueing(m.Net, *m.Plan, tcx, err), m.costs(), m.others(), m.unplanned(), tagsUnderXDP(m.Net, *m.Plan))
}

// Start asks what an agent that starts here needs outside of its plan: the error is why it cannot, and warnings are
// what it can do without. What the agent mends by itself, such as a bpf file system that is not mounted, is neither.
func (m Machine) Start() (warnings []string, err error) {
	if err := Needs(); err != nil {
		return nil, err
	}
	for _, f := range []Finding{kernelVersion(), pins(m.PinDir, m.Instance), directory("state-dir", m.StateDir, true), directory("run-dir", m.RunDir, false), openFiles()} {
		switch {
		case f.Verdict == Yes || f.Verdict == No && f.fix != nil:
		case f.Verdict == No && f.Weight == Fatal:
			return nil, errors.New(f.String())
		default:
			warnings = append(warnings, f.String())
		}
	}
	return warnings, nil
}

func kernelVersion() Finding {
	c := check{"kernel", "", Warning}
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return c.unknown(err)
	}
	release := unix.ByteSliceToString(u.Release[:])
	var have [2]int
	if _, err := fmt.Sscanf(release, "%d.%d", &have[0], &have[1]); err != nil {
		return c.unknown(fmt.Errorf("read the kernel's version %q: %w", release, err))
	}
	if oldest := dataplane.OldestKernel; have[0] < oldest[0] || have[0] == oldest[0] && have[1] < oldest[1] {
		return c.no("the programs are not tested on this kernel", installNewer(),
			"this is Linux %s, older than %d.%d", release, oldest[0], oldest[1])
	}
	return c.yes("this is Linux %s", release)
}

func installNewer() string {
	return fmt.Sprintf("install Linux %d.%d or later", dataplane.OldestKernel[0], dataplane.OldestKernel[1])
}

// capability is one that an agent needs, and what it cannot do without.
type capability struct {
	name   string
	number uint
	effect string
}

// capabilities are those of this process, which every agent needs.
func capabilities() []Finding {
	return held(Fatal, "run as root, or give the agent's unit AmbientCapabilities=%s", []capability{
		{"CAP_NET_ADMIN", unix.CAP_NET_ADMIN, "programs cannot be attached, nor routes set"},
		{"CAP_BPF", unix.CAP_BPF, "programs cannot be loaded"},
		{"CAP_PERFMON", unix.CAP_PERFMON, "programs cannot be loaded"},
	})
}

// planCapabilities are those that only the functions of a plan need, whose places are namespaces.
func planCapabilities(n plan.Node) []Finding {
	const effect = "functions of kinds netfilter and stream, and gateways, get no packets (function-gone)"
	var want []capability
	worker := func(p plan.Proxy) bool { return p.Stream != nil || p.Gateway != nil }
	if slices.ContainsFunc(n.Proxies, func(p plan.Proxy) bool { return p.Netfilter != nil || worker(p) }) {
		want = append(want, capability{"CAP_SYS_ADMIN", unix.CAP_SYS_ADMIN, effect})
	}
	if slices.ContainsFunc(n.Proxies, worker) { // which give up all of them
		for name, number := range map[string]uint{
			"CAP_NET_RAW": unix.CAP_NET_RAW, "CAP_SYS_CHROOT": unix.CAP_SYS_CHROOT, "CAP_SETPCAP": unix.CAP_SETPCAP,
			"CAP_SETUID": unix.CAP_SETUID, "CAP_SETGID": unix.CAP_SETGID, "CAP_KILL": unix.CAP_KILL,
		} {
			want = append(want, capability{name, number, "workers of functions of kind stream, and gateways, do not start"})
		}
		slices.SortFunc(want[1:], func(a, b capability) int { return strings.Compare(a.name, b.name) })
	}
	return held(Warning, "run as root, which has %s, and without the package's unprivileged.conf", want)
}

// held tells which capabilities this process has.
func held(w Weight, mend string, want []capability) (out []Finding) {
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	err := unix.Capget(&hdr, &data[0])
	has := func(n uint) bool { return data[n/32].Effective&(1<<(n%32)) != 0 }
	for _, want := range want {
		c := check{"rights", want.name, w}
		inAdmin := want.number == unix.CAP_BPF || want.number == unix.CAP_PERFMON // of old, CAP_SYS_ADMIN has these
		switch {
		case err != nil:
			out = append(out, c.unknown(fmt.Errorf("read the capabilities of the process: %w", err)))
		case has(want.number) || inAdmin && has(unix.CAP_SYS_ADMIN):
			out = append(out, c.yes("this process has %s", want.name))
		default:
			out = append(out, c.no(want.effect, fmt.Sprintf(mend, want.name), "this process lacks %s", want.name))
		}
	}
	return out
}

// Needs is why this kernel or process cannot run the data path, in the words of the check "features"; nil if it can.
func Needs() error {
	err := dataplane.Check()
	if f := needs(err); f.Verdict == No {
		return fmt.Errorf("%w%s", err, strings.TrimPrefix(f.String(), f.Says))
	}
	return err
}

// needs tells what the programs cannot do without, from what dataplane.Check said.
func needs(err error) Finding {
	c := check{"features", "", Fatal}
	switch {
	case err == nil:
		return c.yes("the kernel has all features that the programs need")
	case errors.Is(err, errors.ErrUnsupported):
		return c.no("programs cannot be loaded", installNewer(), "%s", err)
	}
	return c.unknown(err)
}

func programs() (out []Finding) {
	tried, err := dataplane.TryPrograms()
	if err != nil {
		return []Finding{check{"program", "", Fatal}.unknown(fmt.Errorf("load the programs: %w", err))}
	}
	for _, t := range tried {
		c := check{"program", t.Program, Fatal}
		switch {
		case t.Err == nil:
			out = append(out, c.yes("%s loads", t.Program))
		case errors.Is(t.Err, fs.ErrPermission):
			out = append(out, c.unknown(fmt.Errorf("load %s: %w", t.Program, t.Err)))
		case t.Alone:
			c.weight = Warning
			out = append(out, c.no("functions of kind stream and gateways get no connections", "please report this, with the kernel's version", "%s does not load: %s", t.Program, t.Err))
		default:
			out = append(out, c.no("no agent can start", "please report this, with the kernel's version", "%s does not load: %s", t.Program, t.Err))
		}
	}
	return out
}

func extras() (out []Finding) {
	for _, e := range dataplane.Extras() {
		c := check{"extra", e.Name, Cost}
		switch {
		case e.Err != nil:
			out = append(out, c.unknown(fmt.Errorf("find out whether the kernel has %s: %w", e.Name, e.Err)))
		case e.Have:
			out = append(out, c.yes("the kernel has %s", e.Name))
		default:
			out = append(out, c.no(e.Without, fmt.Sprintf("Linux %s is the first that has it", e.Since), "the kernel lacks %s", e.Name))
		}
	}
	return out
}

// jit reads whether programs are compiled, and whether with constants that nobody can guess, which no namespace but
// the first is told. settings is /proc/sys/net/core.
func jit(settings fs.FS) []Finding {
	c := check{"jit", "", Cost}
	b, err := fs.ReadFile(settings, "bpf_jit_enable")
	switch now := strings.TrimSpace(string(b)); {
	case errors.Is(err, fs.ErrNotExist):
		return []Finding{c.unknown(errors.New("/proc/sys/net/core/bpf_jit_enable does not exist: the kernel always or never compiles programs, or this network namespace does not show the setting"))}
	case err != nil:
		return []Finding{c.unknown(err)}
	case now == "0":
		return []Finding{c.no("programs run many times slower", "sysctl -w net.core.bpf_jit_enable=1", "the kernel interprets programs")}
	}
	out := []Finding{c.yes("the kernel compiles programs")}
	c = check{"jit-harden", "", Cost}
	b, err = fs.ReadFile(settings, "bpf_jit_harden")
	switch now := strings.TrimSpace(string(b)); {
	case errors.Is(err, fs.ErrNotExist): // a kernel without it
	case err != nil:
		out = append(out, c.unknown(err))
	case now == "2":
		out = append(out, c.no("programs are longer and slower",
			"sysctl -w net.core.bpf_jit_harden=1, which is for programs of users without rights alone", "the kernel blinds the constants of all programs (bpf_jit_harden is 2)"))
	default:
		out = append(out, c.yes("the kernel does not blind the constants of programs that root loads"))
	}
	return out
}

// bpfRoot is where the bpf file system is.
const bpfRoot = "/sys/fs/bpf"

// pins looks at the directory of all instances, or where it would be made; an instance's own in it may be another user's.
func pins(dir, instance string) Finding {
	c := check{"bpf-fs", dir, Fatal}
	var st unix.Statfs_t
	if rel, err := filepath.Rel(bpfRoot, dir); err == nil && filepath.IsLocal(rel) {
		switch _, err := os.Stat(bpfRoot); {
		case errors.Is(err, fs.ErrNotExist):
			return c.no("no data path can be pinned", "mount -t sysfs sysfs /sys; in a container, share the host's /sys/fs/bpf with it, or choose a bpf file system with --pin-dir",
				"%s does not exist: /sys is not the kernel's here, or the kernel has no eBPF", bpfRoot)
		case err != nil:
			return c.unknown(err)
		}
	}
	at := dir
	for {
		err := unix.Statfs(at, &st)
		if err == nil {
			break
		}
		if !errors.Is(err, unix.ENOENT) || at == filepath.Dir(at) {
			return c.unknown(fmt.Errorf("%s: %w", at, err))
		}
		at = filepath.Dir(at)
	}
	if st.Type != unix.BPF_FS_MAGIC {
		f := c.no("the data path would end with the agent", "choose a directory below "+bpfRoot+" with --pin-dir, or mount one there (mount -t bpf bpf DIRECTORY)", "%s is not on a bpf file system", dir)
		if rel, err := filepath.Rel(bpfRoot, dir); err == nil && filepath.IsLocal(rel) {
			f.Mend, f.fix = "mount -t bpf bpf "+bpfRoot, dataplane.MountBPF
		}
		return f
	}
	own := filepath.Join(dir, instance)
	if _, err := os.Stat(own); instance != "" && err == nil {
		at = own
	}
	if err := writable(at); err != nil {
		return c.no("nothing can be pinned", "run as root, or choose a bpf file system of that user with --pin-dir", "user %d cannot write to %s", os.Geteuid(), at)
	}
	return c.yes("%s is on a bpf file system, and can be written", dir)
}

// writable: this process, as who it acts now, can make files in a directory.
func writable(dir string) error {
	return unix.Faccessat(unix.AT_FDCWD, dir, unix.W_OK|unix.X_OK, unix.AT_EACCESS)
}

// directory tries a directory, or where it would be made. An agent needs one that lasts for its headends, for what its egresses have
// seen, and to keep what it has of a controller.
func directory(name, dir string, lasts bool) Finding {
	c := check{name, dir, Fatal}
	effect := "the agent cannot start"
	if lasts {
		c.weight, effect = Warning, "packet numbers and replay windows cannot be saved, headends refuse packets, and no controller can be followed"
	}
	at := dir
	for {
		st, err := os.Stat(at)
		if err == nil && !st.IsDir() {
			return c.no(effect, "choose another one with --"+name, "%s is not a directory", at)
		}
		if err == nil {
			break
		}
		if !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENOTDIR) || at == filepath.Dir(at) {
			return c.unknown(err)
		}
		at = filepath.Dir(at)
	}
	if err := writable(at); err != nil {
		return c.no(effect, "run as root, or choose another one with --"+name, "user %d cannot write to %s", os.Geteuid(), at)
	}
	var st unix.Statfs_t
	if err := unix.Statfs(at, &st); err != nil {
		return c.unknown(fmt.Errorf("%s: %w", at, err))
	}
	c.weight = Warning
	if lasts && st.Type == unix.TMPFS_MAGIC {
		return c.no("headends may reuse packet numbers after a reboot", "choose another one with --"+name+", or give its chains new secrets after each reboot", "%s does not survive a reboot", dir)
	}
	if room := st.Bavail * uint64(st.Bsize); lasts && room < stateRoom {
		return c.no("packet numbers and replay windows may not be saved", "make room", "%s has %d MiB left, of %d that may be needed", at, room>>20, stateRoom>>20)
	}
	if lasts {
		if err := syncs(at); err != nil {
			return c.no("saved state may be lost on a power failure", "choose another one with --"+name, "%s cannot be written to disk: %s", at, err)
		}
	}
	if at != dir {
		f := c.yes("%s does not exist, and the agent can make it", dir)
		mode := os.FileMode(0o750) // as agents make them
		if lasts {
			mode = 0o700
		}
		f.Mend = fmt.Sprintf("mkdir -p -m %#o %s", mode, dir)
		f.fix = func() error { return os.MkdirAll(dir, mode) }
		return f
	}
	return c.yes("%s can be written", dir)
}

// syncs writes a file and waits for the disk.
func syncs(dir string) error {
	f, err := os.CreateTemp(dir, ".waystamp-doctor-*")
	if err != nil {
		return err
	}
	_, err = f.WriteString("x")
	return errors.Join(err, f.Sync(), f.Close(), os.Remove(f.Name()))
}

func openFiles() Finding {
	c := check{"open-files", "", Warning}
	var r unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &r); err != nil {
		return c.unknown(fmt.Errorf("read the limit of open files: %w", err))
	}
	if r.Max < filesLeast {
		return c.no("an agent with many interfaces runs out of file descriptors", fmt.Sprintf("ulimit -n %d, or LimitNOFILE= of the unit", filesLeast), "a process may have %d files open", r.Max)
	}
	return c.yes("a process may have %d files open", r.Max)
}

// clock asks the kernel whether somebody keeps its time.
func clock() Finding {
	c := check{"clock", "", Cost}
	var t unix.Timex
	state, err := unix.Adjtimex(&t)
	switch {
	case err != nil:
		return c.unknown(fmt.Errorf("ask whether the clock is synchronised: %w", err))
	case state == unix.TIME_ERROR || t.Status&unix.STA_UNSYNC != 0:
		return c.no("times of events on several nodes cannot be compared", "run an NTP client", "the clock is not synchronised")
	}
	return c.yes("the clock is synchronised")
}

// clockOffMost is how far this machine's clock may be from its controller's: certificates are valid from a time on, and
// times of events are compared. One that is wrong is right again when it is nearer by clockOffBack.
const (
	clockOffMost = time.Minute
	clockOffBack = 5 * time.Second
)

// ControllerClock judges how much this machine's clock is ahead of its controller's; wrong: as the last time. It has no figure,
// which would be another one each time.
func ControllerClock(off time.Duration, wrong bool) Finding {
	c := check{"controller-clock", "", Warning}
	most := clockOffMost
	if wrong {
		most -= clockOffBack
	}
	if off.Abs() <= most {
		return c.yes("the clock is no minute off the controller's")
	}
	where := "ahead of"
	if off < 0 {
		where = "behind"
	}
	return c.no("certificates may be refused, and times of events on several nodes cannot be compared", "run an NTP client on both machines",
		"this machine's clock is more than a minute %s the controller's", where)
}

// address: a plan for another node does harm here.
func (m Machine) address() Finding {
	c := check{"address", m.Plan.Address.String(), Fatal}
	all, err := m.Net.Addresses()
	if err != nil {
		return c.unknown(err)
	}
	for _, a := range all {
		if a == m.Plan.Address {
			return c.yes("this machine has the address %s of node %s", a, m.Plan.Name)
		}
	}
	return c.no("the agent does not start", fmt.Sprintf("ip address add %s/128 dev lo, or take the plan of this node", m.Plan.Address),
		"no interface has the address %s of node %s", m.Plan.Address, m.Plan.Name)
}

// tools are programs that functions need.
func (m Machine) tools() (out []Finding) {
	for _, p := range m.Plan.Proxies {
		if p.Netfilter == nil {
			continue
		}
		c := check{"tool", "nft", Warning}
		if at, err := exec.LookPath("nft"); err != nil {
			return append(out, c.no("functions of kind netfilter get no packets (function-gone)", "apt install nftables", "the program nft is not installed"))
		} else {
			return append(out, c.yes("nft is %s", at))
		}
	}
	return out
}

// settings are those that agents ask for, with what mends them.
func (m Machine) settings() []Finding {
	all := Settings(m.Net, *m.Plan)
	for i, f := range all {
		if f.Check == "lro" && f.Verdict == No {
			all[i].fix = func() error { return m.Net.Switch(f.About, "rx-lro", false) }
		}
	}
	return all
}

// unplanned looks at interfaces that are in no plan.
func (m Machine) unplanned() []Finding {
	return unplanned(m.Net, *m.Plan, func(l host.Link) (guarded bool, err error) {
		err = m.Net.NetNS().Do(func() (err error) {
			guarded, err = dataplane.Guarded(m.Net, l)
			return err
		})
		return guarded, err
	})
}

// costs are what takes time alone.
func (m Machine) costs() []Finding {
	out := functionDevices(m.Net, *m.Plan)
	for _, i := range m.Plan.Interfaces {
		if _, err := m.Net.Link(i.Name); errors.Is(err, host.ErrNoLink) {
			continue // Interfaces speaks of it
		}
		out = append(out, lists(m.Net, i.Name))
		if i.Datapath == model.DatapathXDP {
			out = append(out, nativeXDP(m.Net, i.Name)...)
			out = append(out, checksums(m.Net, i.Name)...)
		}
		out = append(out, nic(os.DirFS("/sys"), os.DirFS("/proc"), i.Name)...)
	}
	return out
}

// others are programs at the plan's interfaces that are not ours and meet packets first.
func (m Machine) others() (out []Finding) {
	xdp := map[string]bool{}
	for _, i := range m.Plan.Interfaces {
		xdp[i.Name] = i.Datapath == model.DatapathXDP
	}
	for _, u := range usedBy(*m.Plan) {
		l, err := m.Net.Link(u.name)
		if errors.Is(err, host.ErrNoLink) {
			continue
		}
		c := check{"other-programs", u.name, Warning}
		var found []dataplane.Other
		if err == nil {
			err = m.Net.NetNS().Do(func() (err error) {
				found, err = dataplane.Others(m.Net, l)
				return err
			})
		}
		if err != nil {
			out = append(out, c.unknown(fmt.Errorf("interface %s: %w", u.name, err)))
			continue
		}
		for _, o := range found {
			effect, mend := "packets that it accepts, sends on or drops are not checked", fmt.Sprintf("detach it, or attach it behind waystamp's (tc filter show dev %s %s; bpftool net)", u.name, strings.TrimPrefix(o.At, "TC "))
			if o.XDP {
				mend = fmt.Sprintf("ip link set %s xdp off, or end what has attached it", u.name)
				if xdp[u.name] {
					effect += ", and waystamp's cannot be attached at XDP, as the plan says"
				}
			}
			out = append(out, c.no(effect, mend, "%s is at %s of interface %s and meets packets before waystamp", o.What, o.At, u.name))
		}
		if len(found) == 0 {
			out = append(out, c.yes("no program of others meets packets of interface %s before waystamp", u.name))
		}
	}
	return out
}

// drivers tells what a device's driver can do at XDP; *host.Net does.
type drivers interface {
	Link(name string) (host.Link, error)
	XDPFeatures(name string) (host.XDPFeatures, error)
}

// nativeXDP: whether an interface's driver runs programs, and whether its MTU is in the way: a driver that gives
// frames in one buffer refuses programs above what fits it.
func nativeXDP(net drivers, name string) []Finding {
	c, m := check{"xdp", name, Cost}, check{"xdp-mtu", name, Cost}
	l, err := net.Link(name)
	if err != nil {
		return []Finding{c.unknown(err)}
	}
	tooLong := l.MTU > pageFrame && l.Kind != "veth"
	refused := m.no("its driver may refuse XDP, and TC then handles all packets", fmt.Sprintf("ip link set %s mtu %d, if XDP is wanted", name, pageFrame),
		"interface %s has an MTU of %d, and %d is the longest that is sure to fit one buffer", name, l.MTU, pageFrame)
	fits := m.yes("interface %s has an MTU of %d", name, l.MTU)
	f, err := net.XDPFeatures(name)
	switch {
	case err != nil && tooLong:
		return []Finding{c.unknown(err), refused}
	case err != nil:
		return []Finding{c.unknown(err), fits}
	case !f.Native:
		return []Finding{c.no("TC handles all packets", "leave out datapath: xdp, or choose a NIC whose driver has it", "the driver of interface %s has no XDP", name)}
	case tooLong && !f.Buffers:
		fits = refused
	}
	return []Finding{c.yes("the driver of interface %s has XDP", name), fits, redirects(name, l.Kind, f)}
}

// redirects: whether a device accepts frames that XDP programs redirect to it. A veth does as long as its peer has a program at
// XDP or GRO.
func redirects(name, kind string, f host.XDPFeatures) Finding {
	c := check{"xdp-redirect", name, Cost}
	if f.Redirects {
		return c.yes("interface %s accepts frames that XDP redirects to it", name)
	}
	mend := "choose a NIC whose driver does, if speed matters"
	if kind == "veth" {
		mend = "ethtool -K DEVICE gro on, at the other end of the pair"
	}
	return c.no("TC handles packets that leave by it", mend, "interface %s does not accept frames that XDP redirects to it", name)
}

// checksums: a redirect at XDP loses the mark of a checksum that is still to be computed, and a veth carries frames with such marks if
// their sender leaves checksums to its device. That device is in another namespace, or shows here.
func checksums(net *host.Net, name string) []Finding {
	l, err := net.Link(name)
	if err == nil && l.Kind != "veth" {
		return nil
	}
	c := check{"xdp-checksums", name, Warning}
	mend := func(device string) string { return fmt.Sprintf("ethtool -K %s tx off, or datapath: tc", device) }
	if err != nil {
		return []Finding{c.unknown(err)}
	}
	if l.PeerNamespace != 0 || l.Peer == 0 {
		return []Finding{c.unknown(fmt.Errorf("the other end of interface %s is in another namespace, and whether senders there leave checksums to it, which XDP loses, cannot be told; at that end: %s", name, mend("DEVICE")))}
	}
	peer, err := net.LinkAt(l.Peer)
	if err != nil {
		return []Finding{c.unknown(err)}
	}
	switch on, err := net.Offload(peer.Name, host.TransmitSum); {
	case err != nil:
		return []Finding{c.unknown(err)}
	case on:
		return []Finding{c.no("packets of senders there arrive with wrong checksums", mend(peer.Name),
			"interface %s has datapath xdp, and its other end, %s, leaves checksums to it", name, peer.Name)}
	}
	return []Finding{c.yes("the other end of interface %s, %s, computes checksums", name, peer.Name)}
}

// pageFrame is the longest frame that is sure to fit a driver's single buffer at XDP.
const pageFrame = 3498
