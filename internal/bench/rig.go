package bench

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/waystamp/waystamp/internal/bench/meter"
	"github.com/waystamp/waystamp/internal/dataplane"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/tables"
)

// Devices of the node that is measured. Behind devIn is the generator, behind
// devOut the sink.
const (
	devIn  = "in"
	devOut = "out"
	devEnd = "end" // the other end of either, in its own namespace
)

// rigMTU leaves room for 16 segments around 1500 bytes; native XDP on veth
// takes up to 3498.
const rigMTU = 2000

// rig is a generator, a node and a sink, each a namespace without a name.
type rig struct {
	cpus []int // that packets go through the node on, each with queues of its own
	gen  *host.Net
	node *host.Net
	sink *host.Net
	mac  [6]byte // of devIn

	index struct{ gen, in, out, sink int }

	dp       *dataplane.Dataplane
	cfg      dataplane.Config
	stateDir string

	generator *meter.Generator
	tap       *meter.Tap // where packets are counted
	each      float64    // nanoseconds that a packet took last; 0: no run yet
	others    []*meter.Tap
	closers   []func() error // of what a case has made besides
}

func newRig(cpus ...int) (_ *rig, err error) {
	r := &rig{cpus: cpus}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.close())
		}
	}()
	for _, n := range []**host.Net{&r.gen, &r.node, &r.sink} {
		ns, err := host.Anonymous()
		if err != nil {
			return nil, err
		}
		*n, err = host.Open(ns)
		if err = errors.Join(err, ns.Close()); err != nil {
			return nil, err
		}
		for _, kv := range [][2]string{
			{"net/ipv6/conf/all/accept_ra", "0"}, {"net/ipv6/conf/default/accept_ra", "0"},
			{"net/ipv6/conf/default/accept_dad", "0"}, {"net/ipv6/conf/default/dad_transmits", "0"},
			{"net/ipv6/conf/all/forwarding", "1"},
			{"net/ipv4/ip_forward", "1"}, {"net/ipv4/conf/all/rp_filter", "0"}, {"net/ipv4/conf/default/rp_filter", "0"},
			{"net/ipv6/conf/all/seg6_enabled", "1"}, {"net/ipv6/conf/default/seg6_enabled", "1"},
			{"net/ipv6/conf/default/addr_gen_mode", "1"},
		} {
			if err := (*n).SetSysctl(kv[0], kv[1]); err != nil {
				return nil, err
			}
		}
	}
	for _, side := range []struct {
		dev   string
		other *host.Net
		at    *int
		peer  *int
	}{{devIn, r.gen, &r.index.in, &r.index.gen}, {devOut, r.sink, &r.index.out, &r.index.sink}} {
		err := r.node.AddVeth(host.Veth{Name: side.dev, PeerName: devEnd, Peer: side.other.NetNS(), MTU: rigMTU, Queues: len(cpus)})
		if err != nil {
			return nil, err
		}
		for _, e := range []struct {
			n    *host.Net
			name string
			at   *int
		}{{r.node, side.dev, side.at}, {side.other, devEnd, side.peer}} {
			if err := e.n.SetUp(e.name); err != nil {
				return nil, err
			}
			l, err := e.n.Link(e.name)
			if err != nil {
				return nil, err
			}
			*e.at = l.Index
		}
	}
	if err := r.node.SetUp("lo"); err != nil {
		return nil, err
	}
	if r.mac, err = r.node.HardwareAddress(devIn); err != nil {
		return nil, err
	}
	// The way on, known for good: nobody's packets ever wait for a neighbour.
	next := netip.MustParseAddr("fe80::99")
	mac, err := r.sink.HardwareAddress(devEnd)
	if err != nil {
		return nil, err
	}
	if err := r.node.AddAddress(devOut, netip.MustParsePrefix("fe80::1/64")); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if err := r.node.WaitUp(ctx, devIn, devOut); err != nil {
		return nil, err
	}
	next4 := netip.MustParseAddr(nodeNext4)
	if err := r.node.AddAddress(devOut, netip.MustParsePrefix(nodeAddress4)); err != nil {
		return nil, err
	}
	for _, a := range []netip.Addr{next, next4} {
		if err := r.node.AddNeighbour(devOut, a, mac); err != nil {
			return nil, err
		}
	}
	if err := r.node.AddRoute(host.Route{Destination: netip.MustParsePrefix("0.0.0.0/0"), Via: next4, Device: devOut}); err != nil {
		return nil, err
	}
	return r, r.node.AddRoute(host.Route{Destination: netip.MustParsePrefix("::/0"), Via: next, Device: devOut})
}

// in runs f in a node's namespace.
func in(n *host.Net, f func() error) error { return n.NetNS().Do(f) }

// apply puts a plan in force on the node, as its agent would.
func (r *rig) apply(p plan.Node) (err error) {
	if err := r.node.AddAddress("lo", netip.PrefixFrom(p.Address, p.Address.BitLen())); err != nil {
		return err
	}
	if err := r.node.AnnounceLocator(p.Locator); err != nil {
		return err
	}
	for _, c := range tables.Cutters(p) {
		if _, err := r.node.EnsureCutter(host.Cutter{In: c.In, Out: c.Out, Owner: "waystamp bench"}); err != nil {
			return err
		}
	}
	if r.stateDir, err = os.MkdirTemp("", "waystamp-bench-"); err != nil {
		return fmt.Errorf("make a directory for packet numbers: %w", err)
	}
	var b [4]byte
	rand.Read(b[:])
	r.cfg = dataplane.Config{
		Instance: fmt.Sprintf("%s%x", instancePrefix(os.Getpid()), b), StateDir: r.stateDir, Net: r.node,
	}
	return in(r.node, func() error {
		if r.dp, err = dataplane.Open(r.cfg); err != nil {
			return err
		}
		if err := r.dp.SetLocal([]netip.Addr{p.Address}); err != nil {
			return err
		}
		return r.dp.Apply(p)
	})
}

func instancePrefix(pid int) string { return fmt.Sprintf("bench-%d-", pid) }

// benchOf is the process whose instance that is.
func benchOf(instance string) (pid int, ok bool) {
	f := strings.Split(instance, "-")
	if len(f) != 3 || f[0] != "bench" {
		return 0, false
	}
	pid, err := strconv.Atoi(f[1])
	return pid, err == nil
}

// Owned returns the data paths that this process has yet to take away, and those
// that are left of benches that have ended.
func Owned() (own, orphans []string, err error) { return ownedIn(dataplane.DefaultPinDir) }

func ownedIn(dir string) (own, orphans []string, err error) {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, nil, fmt.Errorf("read the pin directory: %w", err)
	}
	for _, e := range entries {
		pid, ok := benchOf(e.Name())
		if !ok {
			continue
		}
		if pid == os.Getpid() {
			own = append(own, e.Name())
		} else if !isRunning(pid) {
			orphans = append(orphans, e.Name())
		}
	}
	return own, orphans, nil
}

// isRunning: is there such a process?
func isRunning(pid int) bool {
	_, err := os.Stat(fmt.Sprintf("/proc/%d", pid))
	return err == nil
}

// listen puts a sink behind the node.
func (r *rig) listen(h meter.Hook) error {
	return in(r.sink, func() (err error) {
		r.tap, err = meter.NewSink(r.index.sink, h)
		return err
	})
}

// generate makes the generator; see meter.NewGenerator.
func (r *rig) generate(frame []byte, head int, fields ...meter.Field) error {
	return in(r.gen, func() (err error) {
		r.generator, err = meter.NewGenerator(frame, head, r.index.gen, fields...)
		return err
	})
}

// warmUp is how many packets the first run sends: it fills caches and tells how
// many a run takes.
const warmUp = 1 << 16

// run sends so many packets in one go, the same part of them on each CPU, and returns what one took, from its making
// to its counting in nanoseconds, and the part of them that was lost on the way.
// One go, because the kernel takes tens of milliseconds to end each.
func (r *rig) run(n int) (each, loss float64, err error) {
	if err := r.tap.Reset(); err != nil {
		return 0, 0, err
	}
	var g errgroup.Group
	for _, cpu := range r.cpus {
		g.Go(func() error {
			return in(r.gen, func() error {
				return pinned(cpu, func() error { return r.generator.Send(n / len(r.cpus)) })
			})
		})
	}
	if err := g.Wait(); err != nil {
		return 0, 0, err
	}
	got, each, err := r.tap.Seen()
	if err != nil {
		return 0, 0, err
	}
	if each == 0 {
		return 0, 0, fmt.Errorf("of %d packets %d came through, too few to say how long one took", n, got)
	}
	return each, max(0, 1-float64(got)/float64(n)), nil
}

// done is what the data path has stamped or verified, and refused by reason.
func (r *rig) done() (packets uint64, refused map[string]uint64, err error) {
	c, err := r.dp.Counters()
	if err != nil {
		return 0, nil, err
	}
	for _, p := range c.Paths {
		packets += p.Packets
	}
	refused = map[string]uint64{}
	for _, x := range c.Refusals {
		refused[x.Reason.String()] += x.Dropped
	}
	return packets, refused, nil
}

func (r *rig) close() error {
	var errs []error
	for _, t := range append(r.others, r.tap) {
		if t != nil {
			errs = append(errs, t.Close())
		}
	}
	if r.generator != nil {
		errs = append(errs, r.generator.Close())
	}
	if r.dp != nil {
		errs = append(errs, r.dp.Close(), in(r.node, func() error {
			_, err := dataplane.Detach(r.cfg)
			return err
		}))
	}
	for _, f := range r.closers {
		errs = append(errs, f())
	}
	if r.stateDir != "" {
		errs = append(errs, os.RemoveAll(r.stateDir))
	}
	for _, n := range []*host.Net{r.gen, r.node, r.sink} {
		if n != nil {
			errs = append(errs, n.Close())
		}
	}
	return errors.Join(errs...)
}
