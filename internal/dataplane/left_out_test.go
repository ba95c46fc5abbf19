package dataplane

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/tables"
)

func (b *bed) index(name string) int {
	b.Helper()
	var dev host.Device
	b.must(b.do(func() (err error) {
		dev, err = b.cfg.Net.Device(name)
		return err
	}))
	return dev.Index
}

func (b *bed) foreign(kind ebpf.ProgramType, name string, returns int32) *ebpf.Program {
	b.Helper()
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: kind, Name: name, License: "MIT", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, returns), asm.Return()}})
	b.must(err)
	b.Cleanup(func() { p.Close() })
	return p
}

// again takes interfaces away and makes them anew, so that nothing is attached.
func (b *bed) again(names ...string) {
	b.Helper()
	for _, name := range names {
		b.must(b.net.DeleteLink(name))
		b.addVeth(name)
	}
}

// Three interfaces have come back without programs, and the kernel refuses one: the
// others are guarded all the same, and the plan is whole as soon as it can be.
func TestInterfaceThatCannotBeAttachedLeavesTheOthersGuarded(t *testing.T) {
	for _, c := range []struct {
		name   string
		clsact bool
		anew   bool // also with another generation
		spoil  func(b *bed, d *Dataplane) (mend func() error)
		says   []string
		has    []string // of the places of "in"
	}{
		{"the hook is full", false, true, func(b *bed, d *Dataplane) func() error {
			index := b.index("in")
			var offs []func() error
			for full := false; !full; {
				b.must(b.do(func() error {
					off, err := attachOther(b.net, b.foreign(ebpf.SchedCLS, "other", -1), index, false, true, false)
					if full = errors.Is(err, unix.ERANGE); full {
						return nil
					}
					offs = append(offs, off)
					return err
				}))
			}
			return func() (err error) {
				for _, off := range offs {
					err = errors.Join(err, off())
				}
				return err
			}
		}, []string{"attach to interface in at TC ingress: ", "; packets that arrive on in are not checked there, and the next reconciliation tries again"}, nil},
		{"a filter is in the place of its own", true, false, func(b *bed, d *Dataplane) func() error {
			index, f := b.index("in"), filterOf("another", hookTC)
			b.must(b.net.SetFilter(index, false, f, b.foreign(ebpf.SchedCLS, "other", -1).FD(), true))
			return func() error { return b.net.RemoveFilter(index, false, f) }
		}, []string{`attach to interface in at TC ingress: a filter "waystamp another tc" is there`}, nil},
		{"another instance is there", false, false, func(b *bed, d *Dataplane) (off func() error) {
			index := b.index("in")
			b.must(b.do(func() (err error) {
				off, err = attachOther(b.net, b.foreign(ebpf.SchedCLS, "ws_core_tc", -1), index, false, true, b.cfg.clsact)
				return err
			}))
			return off
		}, []string{"(ws_core_tc) of instance NAME is at TC ingress, and only one instance can have it", "are not checked there"}, nil},
		{"native XDP is taken", false, false, func(b *bed, d *Dataplane) func() error {
			var l link.Link
			p, index := b.foreign(ebpf.XDP, "other", 2), b.index("in")
			b.must(b.do(func() (err error) {
				l, err = link.AttachXDP(link.XDPOptions{Program: p, Interface: index})
				return err
			}))
			return func() error { return l.Close() }
		}, []string{"another XDP program is there", "; TC does all the work on in"}, []string{"tc"}},
		{"the device vanishes before it is attached", false, true, func(b *bed, d *Dataplane) func() error {
			d.cfg.before = func(step, what string) error {
				if step == stepLinkAttach && what == "tc in" {
					return b.net.DeleteLink("in")
				}
				return nil
			}
			return func() error { b.addVeth("in"); return nil }
		}, []string{"attach to interface in at TC ingress: ", "are not checked there"}, nil},
	} {
		for _, anew := range []bool{false, true} {
			if anew && !c.anew { // it takes seconds
				continue
			}
			t.Run(fmt.Sprintf("%s, anew %t", c.name, anew), func(t *testing.T) {
				b := newBed(t)
				b.cfg.clsact = c.clsact
				d := b.open()
				n := bedNode()
				n.Interfaces[1].Datapath = model.DatapathXDP
				n.Interfaces = append(n.Interfaces, model.Interface{Name: "side", Role: model.RoleCore})
				b.must(b.apply(d, n))
				b.again("out", "in", "side")
				mend := c.spoil(b, d)
				if anew {
					d.gen.identity = identity{}
				}
				degraded, ok := errors.AsType[*DegradedError](b.do(d.Reconcile))
				d.cfg.before = nil
				if !ok {
					t.Fatalf("got %v; want a DegradedError", degraded)
				}
				failed, ok := errors.AsType[*AttachError](degraded)
				if !ok || failed.Interface != "in" {
					t.Errorf("got %v; want an AttachError of in", degraded)
				}
				for _, want := range c.says {
					if !strings.Contains(degraded.Error(), want) {
						t.Errorf("got %v; want %q", degraded, want)
					}
				}
				w := b.world()
				if len(w.Generations) != 1 || w.Armed[0] != 1 {
					t.Errorf("generations %v, armed %v", w.Generations, w.Armed)
				}
				states, err := d.Interfaces()
				b.must(err)
				for _, s := range states {
					switch {
					case s.Name == "in":
						if want := slices.Contains(c.has, "tc"); s.TC != want || s.XDP {
							t.Errorf("in has TC %t, XDP %t; want %t, false", s.TC, s.XDP, want)
						}
					case !s.TC || s.Out != (s.Role == model.RoleEdge):
						t.Errorf("%s is not guarded: %+v", s.Name, s)
					}
				}
				// Nothing has changed: it is tried, and told, again.
				if c.name != "the device vanishes before it is attached" {
					if again := b.do(d.Reconcile); again == nil || again.Error() != degraded.Error() {
						t.Errorf("the next one says %v; want %v", again, degraded)
					}
				}
				b.must(mend())
				b.must(b.do(d.Reconcile))
				if states, err = d.Interfaces(); err != nil || !states[1].TC || !states[1].XDP {
					t.Errorf("mended: %+v, %v", states, err)
				}
			})
		}
	}
}

// Apply is all or nothing, also of the places that another reconciliation would leave
// out.
func TestPlanWithAnInterfaceThatCannotBeAttachedIsRefused(t *testing.T) {
	b := newBed(t)
	d := b.open()
	b.must(b.apply(d, bedNode()))
	before := b.world()
	broken := errors.New("broken off by the test")
	d.cfg.before = func(step, what string) error {
		if step == stepLinkAttach && what == "tc side" {
			return broken
		}
		return nil
	}
	n := bedNode()
	n.Interfaces = append(n.Interfaces, model.Interface{Name: "side", Role: model.RoleCore})
	err := b.apply(d, n)
	if _, ok := errors.AsType[*DegradedError](err); ok || !errors.Is(err, broken) || strings.Contains(err.Error(), "tries again") {
		t.Errorf("got %v", err)
	}
	if diff := diffWorlds(before, b.world()); diff != "" {
		t.Errorf("a refused plan has changed something:\n%s", diff)
	}
}

// A device that vanishes while links move to new programs is like one that was missing.
func TestDeviceThatVanishesWhileLinksMoveIsLeftOut(t *testing.T) {
	for _, clsact := range []bool{false, true} {
		t.Run(fmt.Sprintf("clsact %t", clsact), func(t *testing.T) {
			b := newBed(t)
			b.cfg.clsact = clsact
			d := b.open()
			b.must(b.apply(d, bedNode()))
			old := b.world()
			d.gen.identity = identity{}
			d.cfg.before = func(step, what string) error {
				if step == stepLinkUpdate && what == "tc in" {
					return b.net.DeleteLink("in")
				}
				return nil
			}
			err := b.do(d.Reconcile)
			if failed, ok := errors.AsType[*AttachError](err); !ok || failed.Interface != "in" {
				t.Errorf("got %v; want an AttachError of in", err)
			}
			w := b.world()
			if len(w.Generations) != 1 || w.Links["out tc 0"] == 0 || w.Links["out tc 0"] == old.Links["out tc 0"] {
				t.Errorf("before %v, after %v: out is not at the new programs", old.Links, w.Links)
			}
			d.cfg.before = nil
			b.addVeth("in")
			b.must(b.do(d.Reconcile))
			if w := b.world(); w.Links["in tc 0"] == 0 {
				t.Errorf("links %v", w.Links)
			}
		})
	}
}

// No packet goes to a function from whose interface packets would come back unchecked,
// nor to one in the node's own kernel that could send them out where no program puts
// their headers back.
func TestFunctionWithoutItsProgramsGetsNoPackets(t *testing.T) {
	gone := func(d *Dataplane) (out []string) {
		keys, err := tables.ProxyKeys(d.node.Proxies)
		if err != nil {
			t.Fatal(err)
		}
		have, err := d.gen.read()
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range d.node.Proxies {
			if have.Proxies[keys[p.Function]].Gone != 0 {
				out = append(out, p.Function)
			}
		}
		return out
	}
	for _, c := range []struct {
		device, at string
		gone       []string
	}{
		{"from", "from from", []string{"fw"}},
		{"side", "out side", []string{"nat"}},
	} {
		for _, anew := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, anew %t", c.at, anew), func(t *testing.T) {
				b := newProxyBed(t)
				d := b.open()
				b.must(b.apply(d, withLocalNAT(proxyNode())))
				if got := gone(d); len(got) != 0 {
					t.Fatalf("%v are gone before anything is", got)
				}
				b.again("in", c.device)
				d.cfg.before = func(step, what string) error {
					if step == stepLinkAttach && what == c.at {
						return errors.New("refused by the test")
					}
					return nil
				}
				if anew {
					d.gen.identity = identity{}
				}
				if _, ok := errors.AsType[*AttachError](b.do(d.Reconcile)); !ok {
					t.Error("it is not told of")
				}
				if got := gone(d); !slices.Equal(got, c.gone) {
					t.Errorf("gone: %v; want %v", got, c.gone)
				}
				// Nor after own addresses have changed, which looks at no interfaces.
				b.must(b.do(func() error { return d.SetLocal(nil) }))
				if got := gone(d); !slices.Equal(got, c.gone) {
					t.Errorf("then gone: %v; want %v", got, c.gone)
				}
				if w := b.world(); w.Links["in tc 0"] == 0 {
					t.Errorf("the other interface is not guarded: %v", w.Links)
				}
				d.cfg.before = nil
				b.must(b.do(d.Reconcile))
				if got := gone(d); len(got) != 0 {
					t.Errorf("it can be attached, and gone are %v", got)
				}
			})
		}
	}
}

// Where the devices that segment super-packets cannot be guarded, nothing is sent there.
func TestSegmenterWithoutItsProgramGetsNoPackets(t *testing.T) {
	b := newProxyBed(t)
	d := b.open()
	b.must(b.apply(d, proxyNode()))
	to, _ := tables.CutterPairs()
	b.must(b.net.DeleteLink(to.In))
	_, err := b.net.EnsureCutter(host.Cutter{In: to.In, Out: to.Out, Owner: "waystamp test"})
	b.must(err)
	d.cfg.before = func(step, what string) error {
		if step == stepLinkAttach && what == "tc "+to.Out {
			return errors.New("refused by the test")
		}
		return nil
	}
	node := func() (v abi.Node) {
		t.Helper()
		b.must(d.gen.maps[tables.MapNode].Lookup(uint32(0), &v))
		return v
	}
	if err := b.do(d.Reconcile); err == nil || !strings.Contains(err.Error(), "super-packets are not segmented for functions") {
		t.Errorf("got %v", err)
	}
	if v := node(); v.CutIfindex != 0 || v.CutBackIfindex == 0 || v.Armed != 1 {
		t.Errorf("node %+v", v)
	}
	d.cfg.before = nil
	b.must(b.do(d.Reconcile))
	if v := node(); int(v.CutIfindex) != b.index(to.In) {
		t.Errorf("node %+v", v)
	}
}
