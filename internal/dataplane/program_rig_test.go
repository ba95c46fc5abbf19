package dataplane

import (
	"cmp"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"math"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/dataplane/object"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/srv6"
	"github.com/waystamp/waystamp/internal/tables"
	"github.com/waystamp/waystamp/internal/tables/xtest"
	"github.com/waystamp/waystamp/test/oracle"
)

// Where a rig's packets come in, and go out.
const (
	portCore     = "core"
	portEdge     = "edge"
	portEdgeDrop = "edge-drop" // unmatched: drop
	portOut      = "out"
)

// The rig's interfaces, and the one neighbour behind portOut. The packets of
// test/packets are addressed to the first.
var (
	rigMAC       = [6]byte{2, 0, 0, 0, 0, 2}
	neighbourMAC = [6]byte{2, 0, 0, 0, 0, 0x99}
)

const neighbour, neighbourIPv4 = "fe80::99", "192.0.2.99"

// rigMTU is that of portOut.
const rigMTU = 65535

// Verdicts of the programs.
const (
	tcPass      = ^uint32(0) // TC_ACT_UNSPEC
	tcDrop      = 2
	tcRedirect  = 7
	xdpDrop     = 1
	xdpPass     = 2
	xdpRedirect = 4
)

// rigRoute is a route of the rig's namespace beside the default route, which
// leads to the neighbour.
type rigRoute struct {
	to   netip.Prefix
	kind int // RTN_UNREACHABLE …; 0: to the neighbour
	mtu  int // of a way, locked; 0: the device's
}

type rigSpec struct {
	name           string
	block, locator netip.Prefix
	address        netip.Addr
	own            []netip.Addr // beside the address, of both versions
	errors         [2]uint64    // interval and burst of ICMP errors, in nanoseconds; 0: as many as there are
	moved          []netip.Addr // told to be the node's own, as they were before nobody was there to see
	routes         []rigRoute
	oldKernel      bool // as if it lacked what is younger than Linux 6.1
	cpu            int  // that the programs run on
	mpls           *plan.MPLS
}

// rig is one node: a network namespace with interfaces, routes and a neighbour,
// and the programs that ship with one set of maps, attached to nothing. Packets
// are given to them with BPF_PROG_TEST_RUN. The namespace is the test's own;
// programs and maps are taken from those that are loaded, and given back.
type rig struct {
	*testing.T
	*loaded
	spec     rigSpec
	d        *Dataplane        // for its functions that fill maps
	have     tables.Contents   // what the maps hold
	ports    map[string]uint32 // their indexes
	jobs     chan func()
	ns       *host.NetNS
	node     oracle.Node            // as the maps are
	guards   map[string]model.Guard // of edge ports
	number   uint64                 // the next that every headend gives out; 0: there is none
	last     tally                  // as it was after the last run
	refusals []abi.Refusal          // where count reads to
	entries  int                    // of ws_stats that count reads; 0: all
	mem      *memory                // windows and numbers of the plan
	windows  map[tables.CounterKey]tables.WindowSlot
	seen     map[tables.CounterKey][]oracle.Train // what they have accepted before each packet
	each     []abi.Stats
}

// rigNexthopTTL is in jiffies: what TC learned must still count when XDP's turn
// comes.
const rigNexthopTTL = 1 << 40

// rigLimits are small: all of ws_stats is read after every packet.
var rigLimits = tables.Limits{Lines: 1 << 12, Headends: 128, Stats: 128, Hops: 256, Egresses: 128, Places: 512, Buckets: 8, Slots: 1 << 12}

func newRig(t *testing.T, spec rigSpec) *rig {
	t.Helper()
	ns, err := host.Anonymous()
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{
		T: t, spec: spec, d: &Dataplane{}, have: tables.New(), ports: map[string]uint32{}, jobs: make(chan func()), ns: ns,
	}
	ended := make(chan error)
	go func() { ended <- ns.Do(r.work) }()
	t.Cleanup(func() {
		close(r.jobs)
		errs := []error{<-ended, ns.Close()}
		errs = append(errs, r.mem.close())
		if r.loaded != nil {
			errs = append(errs, r.loaded.giveBack())
		}
		if err := errors.Join(errs...); err != nil {
			t.Errorf("clean up the rig: %v", err)
		}
	})
	r.must(r.in(r.network))
	r.must(r.load())
	return r
}

// work runs the rig's jobs on one thread and CPU in its namespace: a headend
// counts by CPU.
func (r *rig) work() error {
	return host.OnCPU(r.spec.cpu, func() error {
		for f := range r.jobs {
			f()
		}
		return nil
	})
}

func (r *rig) in(f func() error) error {
	done := make(chan error, 1)
	r.jobs <- func() { done <- f() }
	return <-done
}

func (r *rig) must(err error) {
	r.Helper()
	if err != nil {
		r.Fatal(err)
	}
}

func netOf(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// network makes the namespace's interfaces, addresses, routes and neighbour.
func (r *rig) network() error {
	for _, key := range []string{"ipv6/conf/all/forwarding", "ipv4/ip_forward"} {
		if err := os.WriteFile("/proc/sys/net/"+key, []byte("1"), 0); err != nil {
			return err
		}
	}
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer h.Close()
	lo, err := h.LinkByName("lo")
	if err != nil {
		return err
	}
	if err := h.LinkSetUp(lo); err != nil {
		return err
	}
	for _, name := range []string{portCore, portEdge, portEdgeDrop, portOut} {
		a := netlink.NewLinkAttrs()
		a.Name, a.MTU, a.HardwareAddr = name, rigMTU, rigMAC[:]
		v := netlink.NewVeth(a)
		v.PeerName = name + "-peer"
		if err := h.LinkAdd(v); err != nil {
			return fmt.Errorf("make %s: %w", name, err)
		}
		for _, end := range []string{name, v.PeerName} {
			l, err := h.LinkByName(end)
			if err != nil {
				return err
			}
			if err := h.LinkSetUp(l); err != nil {
				return err
			}
			if end == name {
				r.ports[name] = uint32(l.Attrs().Index)
			}
		}
	}
	for _, a := range append([]netip.Addr{r.spec.address}, r.spec.own...) {
		na := &netlink.Addr{IPNet: netOf(netip.PrefixFrom(a, a.BitLen()))}
		if a.Is6() {
			na.Flags = unix.IFA_F_NODAD
		}
		if err := h.AddrAdd(lo, na); err != nil {
			return fmt.Errorf("add address %s: %w", a, err)
		}
	}
	out := int(r.ports[portOut])
	for family, ip := range map[int]string{unix.AF_INET6: neighbour, unix.AF_INET: neighbourIPv4} {
		if err := h.NeighAdd(&netlink.Neigh{
			LinkIndex: out, Family: family, State: netlink.NUD_PERMANENT,
			IP: net.ParseIP(ip), HardwareAddr: neighbourMAC[:],
		}); err != nil {
			return fmt.Errorf("add the neighbour: %w", err)
		}
	}
	routes := append([]rigRoute{
		{to: netip.MustParsePrefix("::/0")}, {to: netip.MustParsePrefix("0.0.0.0/0")}, {to: r.spec.locator, kind: unix.RTN_PROHIBIT},
	}, r.spec.routes...)
	for _, x := range routes {
		n := &netlink.Route{Dst: netOf(x.to), Type: unix.RTN_UNICAST}
		if x.kind != 0 {
			n.Type = x.kind
		} else {
			n.LinkIndex, n.Gw = out, net.ParseIP(neighbour)
			if x.to.Addr().Is4() {
				n.Gw, n.Flags = net.ParseIP(neighbourIPv4), int(netlink.FLAG_ONLINK)
			}
			n.MTU, n.MTULock = x.mtu, x.mtu != 0
		}
		if err := h.RouteAdd(n); err != nil {
			return fmt.Errorf("add route to %s: %w", x.to, err)
		}
	}
	return nil
}

// load takes programs and maps for the rig.
func (r *rig) load() error {
	cfg, err := tables.EncodeConfig(plan.Node{Name: r.spec.name, Block: r.spec.block, Locator: r.spec.locator, Address: r.spec.address, MPLS: r.spec.mpls})
	if err != nil {
		return err
	}
	have, err := haveDecapL3()
	if err != nil {
		return err
	}
	if have && !r.spec.oldKernel {
		cfg.DecapL3 = 1
	}
	cfg.IcmpIntervalNs, cfg.IcmpBurstNs = r.spec.errors[0], r.spec.errors[1]
	cfg.NexthopTtl = rigNexthopTTL
	if r.loaded, err = takeLoaded(cfg); err != nil {
		return err
	}
	r.last, err = r.count()
	return err
}

// route is what oracle.Node.Route is for this rig.
func (r *rig) route(to netip.Addr) oracle.Way {
	best := rigRoute{to: netip.MustParsePrefix("::/0")}
	if to.Is4() {
		best.to = netip.MustParsePrefix("0.0.0.0/0")
	}
	for _, x := range append([]rigRoute{{to: r.spec.locator, kind: unix.RTN_PROHIBIT}}, r.spec.routes...) {
		if x.to.Contains(to) && x.to.Bits() > best.to.Bits() {
			best = x
		}
	}
	switch best.kind {
	case unix.RTN_UNREACHABLE:
		return oracle.Way{None: oracle.Unreachable}
	case unix.RTN_PROHIBIT:
		return oracle.Way{None: oracle.Prohibited}
	case unix.RTN_BLACKHOLE:
		return oracle.Way{None: oracle.BlackHole}
	}
	return oracle.Way{MTU: cmp.Or(best.mtu, rigMTU)}
}

// apply makes n the plan of the maps; nil: none, as before the first.
// Own addresses are the agent's matter, and set with a plan.
func (r *rig) apply(n *plan.Node) error {
	r.node = oracle.Node{Own: r.spec.own, Route: r.route, Armed: n != nil}
	ports := map[uint32]abi.Port{}
	var local []netip.Addr
	if n != nil {
		r.node.Node = *n
		ports = map[uint32]abi.Port{
			r.ports[portCore]: {}, r.ports[portEdge]: {Guard: uint32(r.guards[portEdge])},
			r.ports[portEdgeDrop]: {UnmatchedDrop: 1, Guard: uint32(r.guards[portEdgeDrop])},
			r.ports[portOut]:      {XdpTarget: 1},
		}
		local = slices.Concat([]netip.Addr{r.spec.address}, r.spec.own, r.spec.moved)
	}
	r.node.Name, r.node.Block, r.node.Locator, r.node.Address = r.spec.name, r.spec.block, r.spec.locator, r.spec.address
	reach := map[string]tables.Reach{}
	for _, p := range r.node.Proxies {
		reach[p.Function] = tables.Reach{} // in the node's own kernel
	}
	w, err := tables.Desire(r.node.Node, tables.Wiring{Ports: ports, Reach: reach, Cpus: r.spec.cpu + 1}, local, r.have, tables.RecoverIndexes(r.have, rigLimits, tables.Placed{}))
	if err != nil {
		return err
	}
	if err := r.newMemory(w); err != nil {
		return err
	}
	ops := append(tables.Changes(r.have, w.Contents), tables.Deletes(nil, tables.MapPorts, r.have.Ports, w.Ports)...)
	for i := range ops {
		if ops[i].Table == tables.MapHeadends && ops[i].Remove() {
			ops[i].Value = &abi.Headend{} // without the wait for programs: none runs
		}
	}
	if err := r.d.run(r.g, ops); err != nil {
		return err
	}
	r.have = w.Contents
	node := abi.Node{Xdp: 1}
	if n != nil {
		node.Armed = 1
	}
	if len(w.Rules) > 0 {
		node.Rules = uint32(abi.RulesStateThere)
	}
	if n != nil && tables.HasOwn(*n) {
		node.Own = 1
	}
	if err := r.g.setNode(node); err != nil {
		return err
	}
	return r.setNumbers(1)
}

// newMemory gives the plan's egresses windows that have seen nothing, and its
// headends slots to count in. No program runs meanwhile.
func (r *rig) newMemory(w tables.Wanted) (err error) {
	if r.mem == nil {
		if r.d.cpus, err = ebpf.PossibleCPU(); err != nil {
			return err
		}
		if r.mem, err = r.d.memory(r.g); err != nil {
			return err
		}
	}
	// What no window and no slot is in was never written to.
	r.mem.free(slices.Collect(maps.Keys(r.mem.Placed.Windows)), slices.Collect(maps.Keys(r.mem.Placed.Numbers)))
	r.windows, r.seen = map[tables.CounterKey]tables.WindowSlot{}, map[tables.CounterKey][]oracle.Train{}
	if err := r.d.prepareMemory(r.g, r.mem, w); err != nil {
		return err
	}
	for k, slot := range r.mem.Placed.Windows {
		r.windows[k.CounterKey] = slot
	}
	return nil
}

// forget makes all windows ones that have seen nothing.
func (r *rig) forget() error {
	for _, w := range r.windows {
		r.mem.windows.clear(w.At, w.End())
	}
	r.seen = map[tables.CounterKey][]oracle.Train{}
	return nil
}

// wordOf is where a train is counted.
func wordOf(w tables.Window, t oracle.Train) uint32 {
	each := uint64(w.Size / 4)
	return uint32(uint64(t.Lane)*each + t.Counter/4%each)
}

// holds are what a window holds that has accepted these trains, where that is
// not zero.
func holds(w tables.Window, trains []oracle.Train) map[uint32]uint64 {
	fours := map[uint32]uint64{} // the newest in each word
	for _, t := range trains {
		i := wordOf(w, t)
		fours[i] = max(fours[i], t.Counter/4)
	}
	out := map[uint32]uint64{}
	for i, four := range fours {
		out[i] = four / uint64(w.Size/4) << 24
	}
	for _, t := range trains {
		if i := wordOf(w, t); t.Counter/4 == fours[i] {
			out[i] += uint64(t.Frames) << (6 * (t.Counter % 4))
		}
	}
	return out
}

// word is one of those that a window counts in.
func (r *rig) word(k tables.CounterKey, i uint32) *atomic.Uint64 {
	return r.mem.windows.word(r.windows[k].At + int(i))
}

// see makes a window one that has accepted these trains.
func (r *rig) see(k tables.CounterKey, trains []oracle.Train) error {
	r.seen[k] = trains
	for i, v := range holds(r.windows[k].Window, trains) {
		r.word(k, i).Store(v)
	}
	return nil
}

// checkWindows: has the packet spent exactly what it should? It is given back.
func (r *rig) checkWindows(spent *oracle.Spent) error {
	for k, w := range r.windows {
		before := r.seen[k]
		after := before
		if spent != nil && k == (tables.CounterKey{Path: abi.BE32(spent.Path), Epoch: spent.Epoch}) {
			after = append(slices.Clone(before), spent.Train)
		}
		for i, want := range holds(w.Window, after) {
			if got := r.word(k, i).Load(); got != want {
				return fmt.Errorf("word %d of the %s is %#x, want %#x", i, w, got, want)
			}
		}
		if len(after) == len(before) {
			continue
		}
		at := wordOf(w.Window, spent.Train)
		r.word(k, at).Store(holds(w.Window, before)[at])
	}
	return nil
}

func (r *rig) put(t tables.Map, key, value any) error {
	if err := r.g.maps[t].Put(key, value); err != nil {
		return fmt.Errorf("write to map %s: %w", t, err)
	}
	return nil
}

// setNumbers makes n the next number of every headend; 0: none is left.
func (r *rig) setNumbers(n uint64) error {
	r.number = n
	for _, h := range r.have.Headends {
		ceiling := uint64(abi.RNDCounterMax)
		if n == 0 {
			ceiling = 7
		}
		r.resetNumber(h)
		r.mem.numbers.putCeiling(h.Counter, ceiling)
	}
	return nil
}

// tell says to the headends what their paths take; of those that are not in the
// map, and for 0, nothing was told.
func (r *rig) tell(told map[uint32]int) error {
	r.node.PathMTU = told
	var errs []error
	for _, h := range r.have.Headends {
		m := abi.PathMTU{Path: h.Path, Mtu: uint32(told[abi.BE32(h.Path)]), Expires: math.MaxUint64}
		errs = append(errs, r.put(tables.MapPathMTUs, h.Stats, m))
	}
	return errors.Join(errs...)
}

func (r *rig) resetNumber(h abi.Headend) {
	last := r.number - 1
	if r.number == 0 {
		last = 7 // as the ceiling is then
	}
	r.mem.numbers.putLast(h.Counter, last)
}

// checkNumber: has this headend given out exactly used numbers?
func (r *rig) checkNumber(h abi.Headend, used uint64) error {
	if got, want := r.mem.numbers.readNumbers(h.Counter).start, r.number-1+used; r.number != 0 && got != want {
		return fmt.Errorf("the last number of path 0x%08x is %d, want %d", abi.BE32(h.Path), got, want)
	}
	return nil
}

// tally is what the programs have counted, over all CPUs.
type tally struct {
	dropped, reported [abi.ReasonCount]uint64
	stats             [128]abi.Stats
}

func (r *rig) count() (tally, error) {
	var c tally
	if r.refusals == nil {
		r.refusals = make([]abi.Refusal, int(r.g.maps[tables.MapRefusals].MaxEntries())*r.possible)
		r.each = make([]abi.Stats, len(c.stats)*r.possible)
	}
	n := len(c.stats)
	if r.entries > 0 {
		n = r.entries
		copy(c.stats[n:], r.last.stats[n:])
	}
	err := errors.Join(
		lookUpFirst(r.g.maps[tables.MapRefusals], r.g.maps[tables.MapRefusals].MaxEntries(), unsafe.Pointer(unsafe.SliceData(r.refusals))),
		lookUpFirst(r.g.maps[tables.MapStats], uint32(n), unsafe.Pointer(unsafe.SliceData(r.each))))
	for i, x := range r.refusals {
		c.dropped[i/r.possible] += x.Dropped
		c.reported[i/r.possible] += x.Reported
	}
	for i, x := range r.each[:n*r.possible] {
		s := &c.stats[i/r.possible]
		s.Packets += x.Packets
		s.Frames += x.Frames
		s.Bytes += x.Bytes
	}
	return c, err
}

// lookUpFirst reads the first n values of an array, per CPU if it is such a one, by
// one system call and ten times as fast as the library would.
func lookUpFirst(m *ebpf.Map, n uint32, values unsafe.Pointer) error {
	const lookUpBatch = 24 // BPF_MAP_LOOKUP_BATCH
	var cursor uint32
	keys := make([]uint32, n)
	attr := struct {
		in, out, keys, values unsafe.Pointer
		count, fd             uint32
		elemFlags, flags      uint64
	}{
		out: unsafe.Pointer(&cursor), keys: unsafe.Pointer(unsafe.SliceData(keys)), values: values,
		count: n, fd: uint32(m.FD()),
	}
	_, _, errno := unix.Syscall(unix.SYS_BPF, lookUpBatch, uintptr(unsafe.Pointer(&attr)), unsafe.Sizeof(attr))
	if errno != 0 && errno != unix.ENOENT || attr.count != n || keys[n-1] != n-1 {
		return fmt.Errorf("read the first %d entries of %s: %d read, %w", n, m, attr.count, errno)
	}
	return nil
}

// moved is what a program counted for one packet.
type moved struct {
	dropped, reported []string // reasons, as often as they were counted
	stats             map[uint32]abi.Stats
}

func (before tally) moved(now tally) moved {
	m := moved{stats: map[uint32]abi.Stats{}}
	for i := range now.dropped {
		for range now.dropped[i] - before.dropped[i] {
			m.dropped = append(m.dropped, reasonName(abi.Reason(i)))
		}
		for range now.reported[i] - before.reported[i] {
			m.reported = append(m.reported, reasonName(abi.Reason(i)))
		}
	}
	for i := range now.stats {
		a, b := before.stats[i], now.stats[i]
		if a != b {
			m.stats[uint32(i)] = abi.Stats{Packets: b.Packets - a.Packets, Frames: b.Frames - a.Frames, Bytes: b.Bytes - a.Bytes}
		}
	}
	return m
}

// reasonName is the name of a reason as reasons.h has it, and the oracle.
func reasonName(r abi.Reason) string {
	return strings.ToUpper(strings.ReplaceAll(r.String(), "-", "_"))
}

// skb is struct __sk_buff (linux/bpf.h): what a test run sets of it.
type skb struct {
	_              [8]byte
	Mark           uint32
	_              [24]byte
	IngressIfindex uint32
	Ifindex        uint32
	_              [116]byte
	WireLen        uint32
	GSOSegs        uint32
	_              [8]byte
	GSOSize        uint32
	_              [12]byte
}

const _ = uint(unsafe.Offsetof(skb{}.GSOSegs) - 164)

// frame is what comes to an interface.
type frame struct {
	port             string
	b                []byte // from the Ethernet header
	gsoSize, gsoSegs uint32 // as in the kernel; 0: not a super-packet
}

// outcome is what a program did with a frame.
type outcome struct {
	verdict uint32
	b       []byte // the frame afterwards
	mark    uint32 // of the packet afterwards; TC only
}

// runTC gives the frame to the TC program of its interface. Like all that runs
// programs it belongs into a job.
func (r *rig) runTC(f frame) (outcome, error) {
	prog := r.program(object.EdgeTC)
	if f.port == portCore {
		prog = r.program(object.CoreTC)
	}
	at := r.ports[f.port]
	ctx := skb{Ifindex: at, IngressIfindex: at, GSOSegs: f.gsoSegs, GSOSize: f.gsoSize}
	var after skb
	o, err := r.run(prog, ebpf.RunOptions{Data: f.b, Context: ctx, ContextOut: &after})
	o.mark = after.Mark
	return o, err
}

// runXDP gives the frame to the XDP program of its interface. The kernel says
// that it came by the loopback device.
func (r *rig) runXDP(f frame) (outcome, error) {
	prog := r.program(object.EdgeXDP)
	if f.port == portCore {
		prog = r.program(object.CoreXDP)
	}
	return r.run(prog, ebpf.RunOptions{Data: f.b})
}

func (r *rig) run(p *ebpf.Program, opts ebpf.RunOptions) (o outcome, _ error) {
	opts.DataOut = make([]byte, len(opts.Data)+512)
	var err error
	if o.verdict, err = p.Run(&opts); err != nil {
		return o, fmt.Errorf("run %s: %w", p, err)
	}
	o.b = opts.DataOut
	return o, nil
}

// counted is what has been counted since it was last called.
func (r *rig) counted() (moved, error) {
	now, err := r.count()
	if err != nil {
		return moved{}, err
	}
	m := r.last.moved(now)
	r.last = now
	return m, nil
}

// drain are the events since the last call.
func (r *rig) drain() ([]abi.Event, error) {
	var all []abi.Event
	r.events.SetDeadline(time.Unix(1, 0))
	for {
		raw, err := r.events.Read()
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return all, nil
		}
		if err != nil {
			return nil, fmt.Errorf("read map %s: %w", tables.MapEvents, err)
		}
		var e abi.Event
		if len(raw.RawSample) != len(xtest.BytesOf(&e)) {
			return nil, fmt.Errorf("an event of %d bytes, want %d", len(raw.RawSample), len(xtest.BytesOf(&e)))
		}
		copy(xtest.BytesOf(&e), raw.RawSample)
		if err := checkPlace(e); err != nil {
			return nil, err
		}
		all = append(all, e)
	}
}

// checkPlace: the line that the event names decides for its reason.
func checkPlace(e abi.Event) error {
	reason := abi.Reason(e.Reason)
	name := filepath.Join("lib", abi.File(e.File).String())
	if strings.HasSuffix(name, ".bpf.c") {
		name = abi.File(e.File).String()
	}
	text, err := os.ReadFile(filepath.Join(sources, name))
	if err != nil {
		return fmt.Errorf("an event for %s names file %d: %w", reason, e.File, err)
	}
	lines := strings.Split(string(text), "\n")
	want := "REASON(" + strings.ToUpper(strings.ReplaceAll(reason.String(), "-", "_")) + ")"
	if n := int(e.Line); n < 1 || n > len(lines) || !strings.Contains(lines[n-1], want) {
		return fmt.Errorf("an event for %s names %s:%d, which does not say %s", reason, name, n, want)
	}
	return nil
}

// sources is where the programs' sources are, from this package.
const sources = "../../bpf"

// freshEvents gives every reason its whole share of events of a second again.
func (r *rig) freshEvents() error {
	for i := range r.g.maps[tables.MapRefusals].MaxEntries() {
		if err := r.put(tables.MapRefusals, i, make([]abi.Refusal, r.possible)); err != nil {
			return err
		}
	}
	var err error
	r.last, err = r.count()
	return errors.Join(err)
}

// expect is what the oracle says of a frame, with what it does not model: a
// test run's super-packets have no type, so that the kernel does not let headers
// be put before them, or taken away.
func (r *rig) expect(f frame) (want oracle.Result, passes bool) {
	if len(f.b) >= srv6.EthernetLen && [6]byte(f.b[:6]) != rigMAC {
		return oracle.Result{}, true // the kernel's matter
	}
	a := oracle.Arrival{Frame: f.b, Number: r.number, CPU: r.spec.cpu, Interface: model.Interface{Name: f.port, Role: model.RoleEdge, Guard: r.guards[f.port]}}
	switch f.port {
	case portCore:
		a.Interface.Role = model.RoleCore
	case portEdgeDrop:
		a.Interface.Unmatched = model.UnmatchedDrop
	}
	a.Seen = func(path uint32, epoch uint8) []oracle.Train {
		return r.seen[tables.CounterKey{Path: abi.BE32(path), Epoch: epoch}]
	}
	n := r.node
	if f.gsoSize != 0 {
		a.Frames = max(2, f.frames(srv6.EthernetLen)) // with 1 Longest would not count
		a.Longest = f.longest()
		a.Counted = f.counted
	}
	want = n.Process(a)
	if want.ToFunction && f.gsoSize != 0 {
		want = oracle.Result{Verdict: oracle.Drop, Reason: oracle.Reason(reasonName(abi.ReasonStripFailed)), Visits: want.Visits, Reported: want.Reported}
	}
	if want.Reason == oracle.Unproven && r.neverForwarded(f.b) {
		return oracle.Result{}, false
	}
	if r.neverForwarded(f.b) {
		want.Reported = slices.DeleteFunc(want.Reported, func(x oracle.Reason) bool { return x == oracle.Unproven })
	}
	if f.gsoSize == 0 {
		return want, false
	}
	for i, v := range want.Visits {
		egress := slices.ContainsFunc(n.Egresses, func(e plan.Egress) bool {
			return e.Path == v.Path && e.Epoch == v.Epoch && v.Position == e.Share.Position
		})
		if v.Position != 0 && !egress {
			continue
		}
		reason, spent, reported := abi.ReasonStripFailed, want.Spent, want.Reported
		if v.Position == 0 {
			reason, spent, reported = abi.ReasonPushFailed, nil, nil
		}
		want = oracle.Result{Verdict: oracle.Drop, Reason: oracle.Reason(reasonName(reason)), Visits: want.Visits[:i], Reported: reported, Spent: spent}
		break
	}
	// To answer a sender of IPv4 the outer header must go, which a test run's
	// super-packets do not let happen.
	if (want.Reason == oracle.TooBig || want.Reason == oracle.NoRoute) && len(want.Visits) > 0 && want.Error != nil && want.Error[0]>>4 == 4 {
		want.Error = nil
	}
	return want, false
}

// neverForwarded: to an address that has moved away, from one that the kernel
// forwards nothing from. Asked whether the packet is for this node it says that
// it will keep it.
func (r *rig) neverForwarded(b []byte) bool {
	p, _ := srv6.DecodeFrame(b) // behind the IPv6 header it may be damaged
	from := p.Header.Source
	return from.IsValid() && (from.IsLinkLocalUnicast() || from.IsMulticast() || from.IsLoopback()) && slices.Contains(r.spec.moved, p.Header.Destination)
}

// frames are those that a super-packet is on a wire: what the kernel says, or
// what follows from the payload of the inner packet at that offset.
func (f frame) frames(inner int) int {
	if f.gsoSize == 0 {
		return 1
	}
	if f.gsoSegs != 0 {
		return int(f.gsoSegs)
	}
	payload := len(f.b) - inner - innerHeaders(f.b[inner:])
	return max(1, int(math.Ceil(float64(payload)/float64(f.gsoSize))))
}

// counted are the frames that it counts for at its egress.
func (f frame) counted(inner []byte) int {
	const udp, tcp, tcpLen, ipv4Len = 17, 6, 20, 20
	header, protocol := srv6.IPv6Len, 6
	if len(inner) >= ipv4Len && inner[0]>>4 == 4 {
		header, protocol = max(ipv4Len, 4*int(inner[0]&15)), 9
	}
	whole := protocol == 9 || len(inner) >= header
	known := whole && (inner[protocol] == udp || inner[protocol] == tcp && len(inner) >= header+tcpLen)
	if f.gsoSegs == 0 && !known {
		return 1
	}
	return f.frames(len(f.b) - len(inner))
}

// innerHeaders is the length of the headers that each frame has of its own.
func innerHeaders(b []byte) int {
	const ipv4Len, tcp, tcpLen = 20, 6, 20
	header, protocol := srv6.IPv6Len, 6
	if len(b) > 0 && b[0]>>4 == 4 {
		header, protocol = ipv4Len, 9
	}
	if len(b) < header {
		return 0
	}
	if header == ipv4Len {
		header = max(ipv4Len, 4*int(b[0]&15))
	}
	l4 := 8
	if b[protocol] == tcp {
		l4 = tcpLen
		if len(b) >= header+tcpLen {
			l4 = int(b[header+12]>>4) * 4
		}
	}
	return header + l4
}

// longest is the length of the longest of them, without headers of ours.
func (f frame) longest() int {
	b := f.b[min(len(f.b), srv6.EthernetLen):]
	outer := 0
	if f.port == portCore && len(b) >= srv6.IPv6Len+srv6.SRHLen && b[0]>>4 == 6 {
		at, next := srv6.IPv6Len, b[6]
		for (next == srv6.NextHeaderHopByHop || next == srv6.NextHeaderDestination) && at+2 <= len(b) {
			next, at = b[at], at+8+8*int(b[at+1])
		}
		if next == srv6.NextHeaderRoute && at+2 <= len(b) {
			outer = at + 8 + 8*int(b[at+1])
		}
	}
	return min(outer+innerHeaders(b[min(outer, len(b)):])+int(f.gsoSize), len(b))
}

// wantMoved is what must be counted, and nothing else.
func (r *rig) wantMoved(f frame, want oracle.Result) (moved, error) {
	m := moved{stats: map[uint32]abi.Stats{}}
	if want.Verdict == oracle.Drop {
		m.dropped = []string{string(want.Reason)}
	}
	for _, x := range want.Reported {
		m.reported = append(m.reported, string(x))
	}
	for _, v := range want.Visits {
		i, err := r.statsOf(v)
		if err != nil {
			return m, err
		}
		s := m.stats[i]
		s.Packets++
		s.Bytes += uint64(v.Bytes)
		s.Frames += uint64(f.frames(len(f.b) - v.Bytes))
		m.stats[i] = s
	}
	return m, nil
}

// statsOf is the entry of ws_stats that a visit is counted in.
func (r *rig) statsOf(v oracle.Visit) (index uint32, err error) {
	if v.Position == 0 {
		h, err := r.headendOf(v)
		return h.Stats, err
	}
	for k, h := range r.have.Hops {
		if k.Path == abi.BE32(v.Path) && k.Epoch == v.Epoch && h.Position == v.Position {
			return h.Stats, nil
		}
	}
	return 0, fmt.Errorf("the oracle has the packet visit position %d of path 0x%08x, epoch %d, which the maps do not have", v.Position, v.Path, v.Epoch)
}

func (r *rig) headendOf(v oracle.Visit) (abi.Headend, error) {
	for _, h := range r.have.Headends {
		if h.Path == abi.BE32(v.Path) && h.Epoch == v.Epoch {
			return h, nil
		}
	}
	return abi.Headend{}, fmt.Errorf("the oracle has the packet enter path 0x%08x, epoch %d, which the maps do not have", v.Path, v.Epoch)
}

// seen is what check found out about a frame.
type seen struct {
	want oracle.Result // with what the oracle does not model
	tc   outcome
	xdp  uint32 // verdict, if it had a say
	took bool   // XDP did the whole job

	moved moved // what both together must have counted
}

// check gives the frame to TC and, if it is no super-packet, to XDP with what TC
// has learned, and compares what they do with what the oracle says: verdict,
// bytes, counters. XDP may also pass it on, as if nothing had happened. Where
// each is false, the caller looks at the counters.
func (r *rig) check(f frame, labels *oracle.Labels, each bool) (s seen, err error) {
	want, foreign := r.expect(f)
	s.want = want
	defer func() {
		err = r.describe(err, f, want)
	}()
	wantMoved, err := r.wantMoved(f, want)
	if err != nil {
		return s, err
	}
	if f.truncated() {
		return s, r.checkTruncated(f)
	}
	if err := r.checkSpending(want.Spent, wantMoved); err != nil {
		return s, err
	}
	if s.tc, err = r.runTC(f); err != nil {
		return s, err
	}
	if err := checkTC(f, want, s.tc, labels); err != nil {
		got, err2 := r.counted()
		return s, fmt.Errorf("TC: %w (counted %+v)", errors.Join(err, err2), got)
	}
	if each {
		if err := r.checkMoved("TC", wantMoved); err != nil {
			return s, err
		}
	}
	if err := errors.Join(r.takeNumberBack(want), r.checkWindows(want.Spent)); err != nil {
		return s, fmt.Errorf("TC: %w", err)
	}

	// XDP does not know the interface's address; the device filters by it.
	if f.gsoSize == 0 && (!foreign || f.b[0]&1 != 0) {
		if s.xdp, s.took, err = r.checkXDP(f, s.tc); err != nil {
			return s, fmt.Errorf("XDP: %w", err)
		}
		if s.took || len(want.Visits) > 0 && want.Visits[0].Position == 0 { // it may have taken a number in vain
			if err := r.takeNumberBack(want); err != nil && s.took {
				return s, fmt.Errorf("XDP: %w", err)
			}
		}
		spent := want.Spent
		if !s.took {
			spent = nil
		}
		if err := r.checkWindows(spent); err != nil {
			return s, fmt.Errorf("XDP: %w", err)
		}
		switch {
		case each && s.took:
			return s, r.checkMoved("XDP", wantMoved)
		case each:
			return s, r.checkMoved("XDP", moved{})
		case s.took:
			wantMoved = wantMoved.twice()
		}
	}
	s.moved = wantMoved
	return s, nil
}

// checkSpending: what spends a number is counted for its path, or as one of the refusals
// that are read for it. An agent goes by that.
func (r *rig) checkSpending(spent *oracle.Spent, m moved) error {
	if spent == nil {
		return nil
	}
	for _, i := range newSaved(r.have.Hops).egresses[tables.CounterKey{Path: abi.BE32(spent.Path), Epoch: spent.Epoch}] {
		if m.stats[i].Packets > 0 {
			return nil
		}
	}
	for _, reason := range abi.SpentReasons {
		if slices.Contains(m.dropped, reasonName(reason)) {
			return nil
		}
	}
	return fmt.Errorf("a number of path %#x is spent, yet what is counted is %+v: an agent would not save it", spent.Path, m)
}

// describe tells of what frame an error is; nil: of none.
func (r *rig) describe(err error, f frame, want oracle.Result) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%w\non %s of %s, CPU %d, GSO size %d, segments %d, number %d, came:\n%s\nthe oracle says %s %s, reported %v, visits %+v",
		err, f.port, r.spec.name, r.spec.cpu, f.gsoSize, f.gsoSegs, r.number, layers(f.b), want.Verdict, want.Reason, want.Reported, want.Visits)
}

// truncated: without a whole IP header. The kernel takes no such frame for a test
// run of TC; see TestTruncatedHeaders.
func (f frame) truncated() bool {
	n := len(f.b) - srv6.EthernetLen
	if n < 0 {
		return true
	}
	t := binary.BigEndian.Uint16(f.b[12:])
	return t == srv6.EtherTypeIPv6 && n < srv6.IPv6Len || t == 0x0800 && n < 20
}

func (r *rig) checkTruncated(f frame) error {
	if len(f.b) < srv6.EthernetLen || f.gsoSize != 0 {
		return nil
	}
	got, err := r.runXDP(f)
	if err != nil {
		return err
	}
	if got.verdict != xdpPass || !slices.Equal(got.b, f.b) {
		return fmt.Errorf("XDP did not leave a truncated frame alone: verdict %d\n%s", got.verdict, layers(got.b))
	}
	return r.checkMoved("XDP", moved{})
}

// checkTC compares what TC did. That only the counters moved that should is
// checked apart.
func checkTC(f frame, want oracle.Result, got outcome, labels *oracle.Labels) error {
	verdict := map[oracle.Verdict]uint32{
		oracle.Pass: tcPass, oracle.Deliver: tcPass, oracle.Drop: tcDrop, oracle.Forward: tcRedirect,
	}[want.Verdict]
	if want.Error != nil {
		verdict = tcRedirect
	}
	if got.verdict != verdict {
		return fmt.Errorf("verdict %d, want %d", int32(got.verdict), int32(verdict))
	}
	if got.mark != want.Mark {
		return fmt.Errorf("the packet has mark %#x afterwards, want %#x", got.mark, want.Mark)
	}
	wantBytes := f.b
	switch {
	case want.Error != nil:
		wantBytes = slices.Concat(f.b[:12], etherType(want.Error[0]>>4 == 4), want.Error)
	case want.Packet != nil:
		wantBytes = slices.Concat(f.b[:12], etherType(want.IPv4), want.Packet)
	case len(want.Visits) > 0 || want.Reason == "PUSH_FAILED" || want.Reason == "STRIP_FAILED":
		return nil // a packet that is dropped on its way through
	}
	gotBytes := got.b
	// By a way that TC remembers it leaves with addresses that are there already.
	if ready := slices.Concat(neighbourMAC[:], rigMAC[:]); want.Verdict == oracle.Forward && len(gotBytes) >= len(ready) && slices.Equal(gotBytes[:len(ready)], ready) {
		gotBytes = slices.Concat(wantBytes[:len(ready)], gotBytes[len(ready):])
	}
	if want.Encapsulated && len(gotBytes) > srv6.EthernetLen {
		if err := labels.Check(gotBytes[srv6.EthernetLen:]); err != nil {
			return err
		}
		gotBytes = slices.Concat(gotBytes[:srv6.EthernetLen], oracle.WithoutLabel(gotBytes[srv6.EthernetLen:]))
	}
	if !slices.Equal(wantBytes, gotBytes) {
		return fmt.Errorf("the packet afterwards differs:\nwant\n%s\ngot\n%s", layers(wantBytes), layers(gotBytes))
	}
	return nil
}

func etherType(ipv4 bool) []byte {
	if ipv4 {
		return []byte{0x08, 0}
	}
	return []byte{0x86, 0xdd}
}

// checkXDP: unchanged, or finished as TC finished it.
func (r *rig) checkXDP(f frame, tc outcome) (verdict uint32, took bool, err error) {
	got, err := r.runXDP(f)
	if err != nil {
		return 0, false, err
	}
	switch {
	case got.verdict == xdpPass:
		if !slices.Equal(got.b, f.b) {
			return got.verdict, false, fmt.Errorf("passed on, but changed to\n%s", layers(got.b))
		}
		return got.verdict, false, nil
	case got.verdict == xdpDrop && tc.verdict == tcDrop:
		if !slices.Equal(got.b, tc.b) {
			return got.verdict, true, fmt.Errorf("dropped as\n%s\nwhile TC dropped\n%s", layers(got.b), layers(tc.b))
		}
		return got.verdict, true, nil
	case got.verdict == xdpRedirect && tc.verdict == tcRedirect:
		want := slices.Concat(neighbourMAC[:], rigMAC[:], tc.b[12:])
		if !slices.Equal(got.b, want) {
			return got.verdict, true, fmt.Errorf("sent\n%s\nwhile TC sent\n%s", layers(got.b), layers(want))
		}
		return got.verdict, true, nil
	}
	return got.verdict, false, fmt.Errorf("verdict %d while TC's is %d", got.verdict, int32(tc.verdict))
}

// takeNumberBack checks that a headend has used a number, and gives it back.
func (r *rig) takeNumberBack(want oracle.Result) error {
	visits := want.Visits
	if want.Reason == "PUSH_FAILED" {
		return r.setNumbers(r.number)
	}
	if len(visits) == 0 || visits[0].Position != 0 {
		return nil
	}
	h, err := r.headendOf(visits[0])
	if err != nil {
		return err
	}
	defer r.resetNumber(h)
	return r.checkNumber(h, 1)
}

func (r *rig) checkMoved(who string, want moved) error {
	got, err := r.counted()
	if err != nil {
		return err
	}
	for _, reasons := range [][]string{got.dropped, got.reported, want.dropped, want.reported} {
		slices.Sort(reasons)
	}
	if !slices.Equal(got.dropped, want.dropped) || !slices.Equal(got.reported, want.reported) || !maps.Equal(got.stats, want.stats) {
		return fmt.Errorf("%s counted %+v, want %+v", who, got, want)
	}
	return nil
}

// twice is what two programs count that do the same.
func (m moved) twice() moved {
	t := moved{stats: map[uint32]abi.Stats{}}
	for i, s := range m.stats {
		t.stats[i] = abi.Stats{Packets: 2 * s.Packets, Frames: 2 * s.Frames, Bytes: 2 * s.Bytes}
	}
	for _, x := range m.dropped {
		t.dropped = append(t.dropped, x, x)
	}
	for _, x := range m.reported {
		t.reported = append(t.reported, x, x)
	}
	return t
}

// layers shows a frame for people.
func layers(b []byte) string {
	var s strings.Builder
	p, err := srv6.DecodeFrame(b)
	if p.Ethernet != nil {
		fmt.Fprintf(&s, "  ethernet %x > %x type %04x\n", p.Ethernet.Source, p.Ethernet.Destination, p.Ethernet.Type)
	}
	if p.Header.Source.IsValid() {
		h := p.Header
		fmt.Fprintf(&s, "  ipv6 %s > %s next %d hop limit %d tc %02x label %05x payload %d\n",
			h.Source, h.Destination, h.NextHeader, h.HopLimit, h.TrafficClass, h.FlowLabel, h.PayloadLength)
	}
	if p.SRH != nil {
		fmt.Fprintf(&s, "  srh next %d left %d flags %02x tag %04x segments (last first) %s\n",
			p.SRH.NextHeader, p.SRH.SegmentsLeft, p.SRH.Flags, p.SRH.Tag, p.SRH.Segments)
		for _, x := range p.SRH.TLVs {
			fmt.Fprintf(&s, "  tlv %d: %x\n", x.Type, x.Value)
		}
	}
	if err != nil {
		fmt.Fprintf(&s, "  (%v)\n", err)
	}
	h, rest, err := p.Inner()
	if err != nil {
		h, rest, err = srv6.DecodeInner(b)
	}
	if err == nil {
		fmt.Fprintf(&s, "  inner ipv%d %s > %s next %d hop limit %d length %d, %d bytes there\n",
			h.Version, h.Source, h.Destination, h.NextHeader, h.HopLimit, h.Length, len(rest))
	}
	fmt.Fprintf(&s, "  %d bytes: %s", len(b), hex.EncodeToString(b[:min(len(b), 700)]))
	if len(b) > 700 {
		s.WriteString(" …")
	}
	return s.String()
}
