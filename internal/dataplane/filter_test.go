package dataplane

import (
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/dataplane/object"
	"github.com/waystamp/waystamp/internal/host"
)

// filterBed is a bed on a kernel without tcx, with programs of somebody else's at
// the ingress of in: one that was there first, and one of a later preference.
func filterBed(t *testing.T) (b *bed, in int, others []uint32) {
	t.Helper()
	b = newBed(t)
	b.cfg.clsact = true
	b.must(b.do(func() error {
		dev, err := b.cfg.Net.Device("in")
		in = dev.Index
		return err
	}))
	for i, first := range []bool{true, false} {
		p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, Name: "other", License: "MIT", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, -1), asm.Return()}})
		b.must(err)
		t.Cleanup(func() { p.Close() })
		info, err := p.Info()
		b.must(err)
		id, _ := info.ID()
		others = append(others, uint32(id))
		_, err = attachOther(b.net, p, in, false, first, true)
		b.must(err)
		if at := b.programsAt(in, false); len(at) != i+1 {
			t.Fatalf("programs %v after %d others", at, i+1)
		}
	}
	return b, in, others
}

// told gives the kinds of what rtnetlink has told of filters.
func told(t *testing.T, fd int) (kinds []uint16) {
	t.Helper()
	buf := make([]byte, 1<<16)
	for {
		n, _, err := unix.Recvfrom(fd, buf, unix.MSG_DONTWAIT)
		if errors.Is(err, unix.EAGAIN) {
			return kinds
		}
		if err != nil {
			t.Fatal(err)
		}
		for b := buf[:n]; len(b) >= unix.NLMSG_HDRLEN; {
			length := int(binary.NativeEndian.Uint32(b))
			kinds = append(kinds, binary.NativeEndian.Uint16(b[4:]))
			b = b[min(len(b), (length+3)&^3):]
		}
	}
}

func TestFiltersHoldPrograms(t *testing.T) {
	b, in, others := filterBed(t)
	d := b.open()
	b.must(b.apply(d, bedNode()))
	first := b.world()
	if at := b.programsAt(in, false); len(at) != 3 || at[0] != first.Links[filepath.Base(pinOf(t, b, hookTC, in))] || at[1] != others[0] || at[2] != others[1] {
		t.Errorf("programs %v at the ingress of in; want ours before %v", at, others)
	}
	if _, err := os.Stat(linksDir(b.dir())); err == nil {
		t.Error("there are links")
	}

	// They outlive the process.
	b.must(d.Close())
	d = b.open()
	b.must(b.apply(d, bedNode()))
	if diff := diffWorlds(first, b.world()); diff != "" {
		t.Errorf("taking it over has changed something:\n%s", diff)
	}

	// New programs come in one step: the kernel tells of no filter that goes.
	var fd int
	b.must(b.do(func() (err error) {
		if fd, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE); err != nil {
			return err
		}
		return unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: 1 << (unix.RTNLGRP_TC - 1)})
	}))
	defer unix.Close(fd)
	b.must(b.apply(d, elsewhere(bedNode())))
	kinds := told(t, fd)
	if len(kinds) != 3 {
		t.Errorf("%d messages of filters (%v); want one for each of three", len(kinds), kinds)
	}
	for _, k := range kinds {
		if k != unix.RTM_NEWTFILTER {
			t.Errorf("message %d; want RTM_NEWTFILTER alone", k)
		}
	}
	now := b.world()
	for name, id := range first.Links {
		if strings.HasPrefix(name, "tc-") && now.Links[name] == id {
			t.Errorf("%s still has the old program", name)
		}
	}

	// What somebody takes away comes back, and is told meanwhile.
	b.must(b.net.RemoveFilter(in, false, host.Filter(filterOf(b.cfg.Instance, hookTC))))
	states, err := d.Interfaces()
	b.must(err)
	if !states[0].TC || states[1].TC || !states[0].Clsact {
		t.Errorf("interfaces %+v; want no program at TC of in, and clsact", states)
	}
	b.must(b.do(d.Reconcile))
	if diff := diffWorlds(now, b.world()); diff != "" {
		t.Errorf("reconciling has not brought it back:\n%s", diff)
	}

	// The pins of a filter are lost, and it is the instance's all the same.
	b.must(d.Close())
	b.must(os.RemoveAll(filtersDir(b.dir())))
	d = b.open()
	b.must(b.apply(d, elsewhere(bedNode())))
	if diff := diffWorlds(now, b.world()); diff != "" {
		t.Errorf("without pins the filters were not taken over:\n%s", diff)
	}

	b.must(d.Close())
	if r, err := b.detach(b.cfg); err != nil || r.Links != 3 {
		t.Errorf("detached %+v, %v; want three programs", r, err)
	}
	if at := b.programsAt(in, false); len(at) != 2 || at[0] != others[0] || at[1] != others[1] {
		t.Errorf("programs %v after detaching; want those of others, %v", at, others)
	}
}

func pinOf(t *testing.T, b *bed, h hook, index int) string {
	t.Helper()
	pins, err := heldPins(b.dir())
	b.must(err)
	for _, p := range pins {
		if p.key == (linkKey{h, index}) {
			return p.path
		}
	}
	t.Fatalf("no pin of %s at interface %d among %v", h, index, pins)
	return ""
}

func TestFilterBeforeOursIsReported(t *testing.T) {
	b, in, _ := filterBed(t)
	d := b.open()
	b.must(b.apply(d, bedNode()))
	for _, clsact := range []bool{true, false} { // tcx comes before all of clsact
		p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, Name: "late", License: "MIT", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, -1), asm.Return()}})
		b.must(err)
		defer p.Close()
		var off func() error
		b.must(b.do(func() (err error) {
			off, err = attachOther(b.net, p, in, false, true, clsact)
			return err
		}))
		degraded, ok := errors.AsType[*DegradedError](b.do(d.Reconcile))
		if !ok || len(degraded.Problems) != 1 || !strings.Contains(degraded.Error(), "(late) stands before waystamp's at TC ingress") {
			t.Errorf("clsact %v: %v; want one problem, late", clsact, degraded)
		}
		b.must(off())
		if err := b.do(d.Reconcile); err != nil {
			t.Errorf("clsact %v, when it has gone: %v", clsact, err)
		}
	}
}

// A filter that is not the instance's is left alone, and so is the plan before.
func TestForeignFilterInOursPlaceIsLeft(t *testing.T) {
	b, in, _ := filterBed(t)
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, Name: "other", License: "MIT", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, -1), asm.Return()}})
	b.must(err)
	defer p.Close()
	theirs := filterOf("another", hookTC)
	b.must(b.cfg.Net.SetFilter(in, false, theirs, p.FD(), true))
	before := b.programsAt(in, false)
	d := b.open()
	if err := b.apply(d, bedNode()); err == nil || !strings.Contains(err.Error(), `interface in at TC ingress: a filter "waystamp another tc" is there`) {
		t.Errorf("got %v", err)
	}
	// A program of the other's is refused before, by the instance's name.
	if p, err = ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, Name: object.CoreTC, License: "MIT", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, -1), asm.Return()}}); err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	b.must(b.cfg.Net.SetFilter(in, false, theirs, p.FD(), false))
	before = b.programsAt(in, false)
	if err := b.apply(d, bedNode()); err == nil || !strings.Contains(err.Error(), "(ws_core_tc) of instance another is at TC ingress") {
		t.Errorf("got %v", err)
	}
	if pins, err := heldPins(b.dir()); err != nil || len(pins) != 0 {
		t.Errorf("pins %v, %v", pins, err)
	}
	if now := b.programsAt(in, false); len(now) != len(before) || now[0] != before[0] {
		t.Errorf("programs %v; want those of before, %v", now, before)
	}
}

func TestFailureAtAnyStepOfAFilterLeavesWhatWasThere(t *testing.T) {
	b := newBed(t)
	b.cfg.clsact = true
	d := b.open()
	b.must(b.apply(d, bedNode()))
	before := b.world()
	for _, step := range []string{stepLinkAttach, stepLinkUpdate} {
		d.cfg.before = func(s, what string) error {
			if s == step && strings.Contains(what, "in") {
				return errors.New("broken on purpose")
			}
			return nil
		}
		n := otherNode()
		if step == stepLinkUpdate {
			n = elsewhere(bedNode())
		}
		if err := b.apply(d, n); err == nil {
			t.Errorf("%s: no error", step)
		}
		d.cfg.before = nil
		if diff := diffWorlds(before, b.world()); diff != "" {
			t.Errorf("%s:\n%s", step, diff)
		}
	}
}

// The pin of a filter does not hold it: where it is broken, the filter goes all the
// same before the directory does.
func TestDetachTakesFiltersWithBrokenPinsOff(t *testing.T) {
	b, in, others := filterBed(t)
	d := b.open()
	b.must(b.apply(d, bedNode()))
	b.must(d.Close())
	pin := pinOf(t, b, hookTC, in)
	b.must(os.Remove(pin))
	b.must(os.Mkdir(pin, 0o700))
	if r, err := b.detach(b.cfg); err != nil || r.Links != 3 {
		t.Errorf("detached %+v, %v; want three programs", r, err)
	}
	if at := b.programsAt(in, false); len(at) != 2 || at[0] != others[0] || at[1] != others[1] {
		t.Errorf("programs %v after detaching; want those of others, %v", at, others)
	}
}
