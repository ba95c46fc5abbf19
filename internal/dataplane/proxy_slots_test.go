package dataplane

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/dataplane/object"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/srv6"
	"github.com/waystamp/waystamp/internal/tables"
)

// byMark is a program that makes skb->mark its tc_index, which a test run cannot
// set, and calls p.
func byMark(t *testing.T, p *ebpf.Program) *ebpf.Program {
	t.Helper()
	const mark = 8 // in struct __sk_buff
	return calling(t, p, asm.Instructions{
		asm.LoadMem(asm.R2, asm.R1, mark, asm.Word),
		asm.StoreMem(asm.R1, tcIndex, asm.R2, asm.Word),
		asm.Mov.Imm(asm.R2, 0),
		asm.StoreMem(asm.R1, mark, asm.R2, asm.Word),
	})
}

// setsIndex is a program that sets tc_index and calls p.
func setsIndex(t *testing.T, p *ebpf.Program, index uint32) *ebpf.Program {
	t.Helper()
	return calling(t, p, asm.Instructions{
		asm.Mov.Imm(asm.R2, int32(index)),
		asm.StoreMem(asm.R1, tcIndex, asm.R2, asm.Word),
	})
}

// calling is a program that does something to struct __sk_buff in R1, which stays
// there, and calls p.
func calling(t *testing.T, p *ebpf.Program, do asm.Instructions) *ebpf.Program {
	t.Helper()
	calls, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.ProgramArray, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { calls.Close() })
	before, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.SchedCLS, License: "Dual BSD/GPL",
		Instructions: append(do,
			asm.LoadMapPtr(asm.R2, calls.FD()),
			asm.Mov.Imm(asm.R3, 0),
			asm.FnTailCall.Call(),
			asm.Mov.Imm(asm.R0, 77), // the call failed
			asm.Return(),
		),
	})
	if err != nil {
		t.Fatalf("load a program that calls another: %v", err)
	}
	t.Cleanup(func() { before.Close() })
	if err := calls.Put(uint32(0), p); err != nil {
		t.Fatal(err)
	}
	return before
}

// keptSlot is a slot that a header is kept in; the header's fingerprint is the packet's index.
func (r *proxyRun) keptSlot() (slot uint32, kept abi.Cached) {
	r.Helper()
	var i uint32
	var c abi.Cached
	it := r.d.gen.maps[tables.MapSlots].Iterate()
	for it.Next(&i, &c) {
		if c.Expires > 1 {
			slot, kept = i, c
		}
	}
	r.must(it.Err())
	if slot == 0 {
		r.Fatal("no slot has a header")
	}
	return slot, kept
}

// testRun is what BPF_PROG_TEST_RUN takes (linux/bpf.h): made once and given to
// the kernel again and again, since who shall run at the same time must start at
// the same time.
type testRun struct {
	program, verdict     uint32
	size, sizeOut        uint32
	data, out            unsafe.Pointer
	repeat, duration     uint32
	contextSize, _       uint32
	context, _           unsafe.Pointer
	flags, cpu, batch, _ uint32
}

func (r *testRun) run(room uint32) error {
	const progTestRun = 10
	r.sizeOut = room
	if _, _, errno := unix.RawSyscall(unix.SYS_BPF, progTestRun, uintptr(unsafe.Pointer(r)), unsafe.Sizeof(*r)); errno != 0 {
		return fmt.Errorf("run a program: %w", errno)
	}
	return nil
}

// Two copies of a packet come back on two CPUs at the same moment: one of them
// gets the header, and the other is refused. Between a look at the slot and its
// being taken lie a few nanoseconds, so one CPU starts a little later each time.
//
// The other side, a slot that is given to the next packet while its own comes
// back, cannot be shown like this: both sides read a clock of milliseconds, and
// only a packet that read it before a tick, and takes the slot after it, would meet
// who read it after.
func TestCopiesThatComeBackAtOnceGetOneHeader(t *testing.T) {
	n := proxyNode()
	n.Proxies[0].Recognise, n.Proxies[0].Segments = model.RecogniseMetadata, model.SegmentsKeep
	n.Proxies[0].Cache, n.Proxies[0].Lifetime = 1, time.Hour
	r := newProxyRun(t, n)
	program := byMark(t, r.d.program(object.FunctionTC))
	r.in(1, udp(1))
	slots := r.d.gen.maps[tables.MapSlots]
	index, kept := r.keptSlot()

	const rounds, room = 5000, 512
	var arrived, won, refused, both atomic.Int64
	meet := func(at int64) {
		arrived.Add(1)
		for spins := 1; arrived.Load() < at; spins++ {
			if spins%1000 == 0 { // others want the CPU, or there is only one
				unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
			}
		}
	}
	var g errgroup.Group
	for cpu := range 2 {
		g.Go(func() error {
			return onCPU(r.net.NetNS(), cpu%runtime.NumCPU(), func() error {
				mac := r.macs["from"]
				frame, out := slices.Clone(ether(udp(1))), make([]byte, room)
				copy(frame, mac[:])
				context := skb{Mark: index, Ifindex: r.index["from"]}
				x := testRun{
					program: uint32(program.FD()), size: uint32(len(frame)), data: unsafe.Pointer(&frame[0]), out: unsafe.Pointer(&out[0]),
					contextSize: uint32(unsafe.Sizeof(context)), context: unsafe.Pointer(&context),
				}
				before := int64(0)
				for round := range int64(rounds) {
					if cpu == 0 {
						before = won.Load()
						if err := slots.Put(index, kept); err != nil {
							return err
						}
					}
					meet(4*round + 2)
					for wait := (round / 2) % 256 * int64(cpu^int(round&1)); wait > 0; wait-- {
						_ = arrived.Load()
					}
					if err := x.run(room); err != nil {
						return err
					}
					if x.verdict == verdictRedirect {
						won.Add(1)
					} else {
						refused.Add(1)
					}
					meet(4*round + 4)
					if cpu == 0 && won.Load() == before+2 {
						both.Add(1)
					}
				}
				return nil
			})
		})
	}
	r.must(g.Wait())
	if won.Load() != rounds || refused.Load() != rounds {
		t.Errorf("of %d pairs %d packets got the header and %d did not; %d times both did", rounds, won.Load(), refused.Load(), both.Load())
	}
	if f := r.function("fw"); f.TxSuccess != rounds || f.TxNotCached != rounds {
		t.Errorf("%+v after %d pairs", f, rounds)
	}
	if got := r.refusals()[abi.ReasonNotCached]; got != rounds {
		t.Errorf("%d packets were refused for %s, want %d", got, abi.ReasonNotCached, rounds)
	}
}

// A packet to an own address that comes back with its index gets its header: it is the
// egress that decides on it. Without a header it is the node's own matter.
func TestIndexIsReadBeforeOwnAddresses(t *testing.T) {
	n := proxyNode()
	n.Proxies[0].Recognise, n.Proxies[0].Segments = model.RecogniseMetadata, model.SegmentsKeep
	r := newProxyRun(t, n)
	own := udp(1)
	address := netip.AddrFrom16([16]byte(own[24:40]))
	r.must(r.net.AddAddress("side", netip.PrefixFrom(address, 128)))
	r.must(r.d.SetLocal([]netip.Addr{address}))
	r.in(1, own)
	_, kept := r.keptSlot()
	index := uint32(kept.Fingerprint)
	program := byMark(t, r.d.gen.programs[object.FunctionTC])
	run := func(index uint32) uint32 {
		t.Helper()
		frame, mac := ether(own), r.macs["from"]
		copy(frame, mac[:])
		opts := ebpf.RunOptions{Data: frame, DataOut: make([]byte, 512), Context: skb{Mark: index, IngressIfindex: r.index["from"], Ifindex: r.index["from"]}}
		var verdict uint32
		r.must(r.do(func() (err error) {
			verdict, err = program.Run(&opts)
			return err
		}))
		return verdict
	}
	for i, c := range []struct{ index, verdict uint32 }{{index, verdictRedirect}, {index, verdictUnspec}, {0, verdictUnspec}} {
		if v := run(c.index); v != c.verdict {
			t.Errorf("index %d, time %d: verdict %d, want %d; refusals %v", c.index, i+1, int32(v), int32(c.verdict), r.refusals())
		}
	}
	if f := r.function("fw"); f.TxSuccess != 1 || f.TxIgnored != 2 || f.TxNotCached != 0 {
		t.Errorf("%+v", f)
	}
}

func rndOf(t *testing.T, p srv6.Packet) uint64 {
	t.Helper()
	proof, ok := p.Proof()
	if !ok {
		t.Fatalf("%+v has no proof", p)
	}
	return proof.RND
}

// However many packets are in the function, and in whatever order they come back, each gets
// its own header, and a copy of one that was back before, or one that is late, gets none:
// its header's place may be another's by then.
func TestIndexFindsItsOwnHeaderOrNone(t *testing.T) {
	n := proxyNode()
	n.Proxies[0].Recognise, n.Proxies[0].Segments = model.RecogniseMetadata, model.SegmentsKeep
	n.Proxies[0].Cache, n.Proxies[0].Lifetime = 1000, time.Hour
	r := newProxyRun(t, n)
	slots := r.d.gen.maps[tables.MapSlots]
	program := byMark(t, r.d.gen.programs[object.FunctionTC])
	back := func(index uint32, payload byte) (uint32, []byte) {
		t.Helper()
		frame, mac := ether(udp(payload)), r.macs["from"]
		copy(frame, mac[:])
		opts := ebpf.RunOptions{Data: frame, DataOut: make([]byte, 512), Context: skb{Mark: index, IngressIfindex: r.index["from"], Ifindex: r.index["from"]}}
		verdict, err := program.Run(&opts)
		r.must(err)
		return verdict, opts.DataOut
	}
	// kept is where the headers are, by the packets' numbers.
	type place struct{ slot, index uint32 }
	kept := func() map[uint64]place {
		t.Helper()
		out := map[uint64]place{}
		var i uint32
		var c abi.Cached
		it := slots.Iterate()
		for it.Next(&i, &c) {
			if c.Expires > 1 {
				p, err := srv6.Decode(append(slices.Clone(c.Outer[:c.OuterLen]), udp(0)...))
				r.must(err)
				out[rndOf(t, p)] = place{i, uint32(c.Fingerprint)}
			}
		}
		r.must(it.Err())
		return out
	}
	number := uint64(0)
	send := func() uint64 {
		t.Helper()
		number++
		frame, mac := frameOf(outerOf(1, 1, model.SchemeKeyed, number, udp(1))), r.macs["in"]
		copy(frame, mac[:])
		v, err := r.d.gen.programs[object.CoreTC].Run(&ebpf.RunOptions{
			Data: frame, DataOut: make([]byte, 512), Context: skb{IngressIfindex: r.index["in"], Ifindex: r.index["in"]},
		})
		if err != nil || v != verdictRedirect {
			t.Fatalf("packet %d: verdict %d, %v, refusals %v", number, int32(v), err, r.refusals())
		}
		return number
	}
	want := func(rnd uint64, index uint32) {
		t.Helper()
		v, out := back(index, 1)
		p, err := srv6.Decode(out[srv6.EthernetLen:])
		if v != verdictRedirect || err != nil || rndOf(t, p) != rnd {
			t.Fatalf("packet %d with index %d: verdict %d, %v, got the header of %+v; refusals %v", rnd, index, int32(v), err, p, r.refusals())
		}
	}
	none := func(index uint32, what string) {
		t.Helper()
		before := r.refusals()[abi.ReasonNotCached]
		if v, _ := back(index, 1); v != verdictShot || r.refusals()[abi.ReasonNotCached] != before+1 {
			t.Fatalf("%s with index %d: verdict %d, refusals %v; want it refused", what, index, int32(v), r.refusals())
		}
	}
	// Each CPU has slots of its own.
	r.must(onCPU(r.net.NetNS(), 0, func() error {
		for range 300 {
			send()
		}
		all := kept()
		near := 0
		for rnd, p := range all {
			if p.slot != p.index {
				near++
			}
			want(rnd, p.index)
			none(p.index, "a copy")
		}
		if len(all) != 300 || near == 0 {
			t.Errorf("of %d packets %d had their headers near", len(all), near)
		}
		// One by one they go through the same few slots, and each copy comes when
		// the next packet is in the function.
		used := map[uint32]bool{}
		last := uint32(0)
		for range 3 * abi.SlotsNear {
			rnd := send()
			p := kept()[rnd]
			used[p.slot] = true
			if last != 0 {
				none(last, "a copy")
			}
			want(rnd, p.index)
			last = p.index
		}
		if len(used) > abi.SlotsNear {
			t.Errorf("%d packets, one at a time, had their headers in %d slots, want at most %d", 3*abi.SlotsNear, len(used), abi.SlotsNear)
		}
		// One is late, and its slot is given to another.
		lost := send()
		late := kept()[lost]
		var c abi.Cached
		r.must(slots.Lookup(late.slot, &c))
		c.Expires = 2
		r.must(slots.Put(late.slot, c))
		for i := 0; ; i++ {
			rnd := send()
			p := kept()[rnd]
			if p.slot == late.slot {
				none(late.index, "a late packet")
				want(rnd, p.index)
				break
			}
			want(rnd, p.index)
			if i > 2*abi.SlotsNear {
				t.Fatal("the slot of a late packet is given to nobody")
			}
		}
		return nil
	}))
}

// fragments are the three of a datagram, in a function.
type fragments struct {
	*proxyRun
	first    uint32 // its index
	fragment func(i, id int) []byte
	// back gives a packet to the program as what comes back from the function does, with the
	// index of the first.
	back func(inner []byte) (verdict uint32, out []byte)
}

func fragmentsInAFunction(t *testing.T, rewrites bool) fragments {
	t.Helper()
	n := proxyNode()
	n.Proxies[0].Recognise, n.Proxies[0].Segments, n.Proxies[0].Rewrites = model.RecogniseMetadata, model.SegmentsKeep, rewrites
	n.Proxies[0].Lifetime = time.Hour
	r := newProxyRun(t, n)
	program := byMark(t, r.d.gen.programs[object.FunctionTC])
	fragment := func(i, id int) []byte {
		flags := uint16(i * 24)
		if i < 2 {
			flags |= 1
		}
		head := binary.BigEndian.AppendUint16([]byte{17, 0}, flags)
		return innerOf(44, append(binary.BigEndian.AppendUint32(head, uint32(id)), bytes.Repeat([]byte{byte(i)}, 24)...))
	}
	index := uint32(0)
	for i := range 3 {
		v, _, err := r.run(object.CoreTC, "in", frameOf(outerOf(1, 1, model.SchemeKeyed, uint64(i+1), fragment(i, 7))), 0)
		if err != nil || v != verdictRedirect {
			t.Fatalf("verdict %d, %v, refusals %v", int32(v), err, r.refusals())
		}
		if i == 0 {
			_, kept := r.keptSlot()
			index = uint32(kept.Fingerprint)
		}
	}
	return fragments{r, index, fragment, func(inner []byte) (uint32, []byte) {
		t.Helper()
		frame, mac := ether(inner), r.macs["from"]
		copy(frame, mac[:])
		opts := ebpf.RunOptions{Data: frame, DataOut: make([]byte, 512), Context: skb{Mark: index, IngressIfindex: r.index["from"], Ifindex: r.index["from"]}}
		var verdict uint32
		r.must(r.do(func() (err error) {
			verdict, err = program.Run(&opts)
			return err
		}))
		return verdict, opts.DataOut
	}}
}

// Three fragments of a datagram come back as connection tracking makes them, all with the
// first one's index, IPv6's with another identification: each gets a header of its own, and
// a fourth is refused, as is one of other hosts.
func TestFragmentsOfADatagramShareTheirHeaders(t *testing.T) {
	r := fragmentsInAFunction(t, false)
	fragment, back := r.fragment, r.back
	numbers := map[uint64]bool{}
	for i := range 3 {
		if i == 1 {
			other := fragment(i, 99)
			other[23]++ // the source's last byte
			if v, _ := back(other); v != verdictShot {
				t.Errorf("a fragment of another host: verdict %d", int32(v))
			}
		}
		v, out := back(fragment(i, 99))
		p, err := srv6.Decode(out[srv6.EthernetLen:])
		if v != verdictRedirect || err != nil {
			t.Fatalf("fragment %d: verdict %d, %v, refusals %v", i, int32(v), err, r.refusals())
		}
		numbers[rndOf(t, p)] = true
	}
	if len(numbers) != 3 || !numbers[1] || !numbers[2] || !numbers[3] {
		t.Errorf("the fragments have the numbers %v, want those of the three that came", numbers)
	}
	if v, _ := back(fragment(2, 99)); v != verdictShot {
		t.Errorf("a fourth fragment of three: verdict %d", int32(v))
	}
	if f := r.function("fw"); f.TxSuccess != 3 || f.TxNotCached != 2 || *f.InFlight != 0 || r.refusals()[abi.ReasonNotCached] != 2 {
		t.Errorf("%+v, refusals %v", f, r.refusals())
	}
}

// A function that rewrites sends the three back with other addresses: the first has the header
// of its own index, and the others are those that have the same addresses, protocol and
// identification.
func TestFragmentsOfARewrittenDatagramShareTheirHeaders(t *testing.T) {
	r := fragmentsInAFunction(t, true)
	nat := func(i, id int) []byte {
		b := r.fragment(i, id)
		b[23] += 100 // the source's last byte
		return b
	}
	numbers := map[uint64]bool{}
	for i := range 3 {
		if i == 1 {
			otherHost, otherProtocol := nat(i, 99), nat(i, 99)
			otherHost[23]++
			otherProtocol[srv6.IPv6Len] = 6
			for name, other := range map[string][]byte{
				"as it came": r.fragment(i, 99), "of another host": otherHost, "of another protocol": otherProtocol, "of another datagram": nat(i, 98),
			} {
				if v, _ := r.back(other); v != verdictShot {
					t.Errorf("a fragment %s: verdict %d", name, int32(v))
				}
			}
		}
		v, out := r.back(nat(i, 99))
		p, err := srv6.Decode(out[srv6.EthernetLen:])
		if v != verdictRedirect || err != nil {
			t.Fatalf("fragment %d: verdict %d, %v, refusals %v", i, int32(v), err, r.refusals())
		}
		numbers[rndOf(t, p)] = true
	}
	if len(numbers) != 3 || !numbers[1] || !numbers[2] || !numbers[3] {
		t.Errorf("the fragments have the numbers %v, want those of the three that came", numbers)
	}
	if v, _ := r.back(nat(2, 99)); v != verdictShot {
		t.Errorf("a fourth fragment of three: verdict %d", int32(v))
	}
	if f := r.function("fw"); f.TxSuccess != 3 || f.TxNotCached != 5 || *f.InFlight != 0 || r.refusals()[abi.ReasonNotCached] != 5 {
		t.Errorf("%+v, refusals %v", f, r.refusals())
	}
}

// The header of the first is gone, as when it has expired: then nothing says which addresses
// the others have, and they are refused, also with their own.
func TestRewrittenFragmentsWithoutTheirFirstAreRefused(t *testing.T) {
	r := fragmentsInAFunction(t, true)
	slots := r.d.gen.maps[tables.MapSlots]
	var place, at uint32
	var c, kept abi.Cached
	for it := slots.Iterate(); it.Next(&at, &c); {
		if c.Expires > 1 && uint32(c.Fingerprint) == r.first {
			place, kept = at, c
		}
	}
	if place == 0 {
		t.Fatal("the first fragment has no header")
	}
	kept.Expires = 2
	r.must(slots.Put(place, kept))
	for i := range 3 {
		if v, _ := r.back(r.fragment(i, 99)); v != verdictShot {
			t.Errorf("fragment %d: verdict %d", i, int32(v))
		}
	}
}

// An index is given again, to another packet. Whose header it then names is no fragment's of
// the datagram that it was given to before.
func TestAFragmentDoesNotTakeTheHeaderOfAnotherPacket(t *testing.T) {
	r := fragmentsInAFunction(t, false)
	slots := r.d.gen.maps[tables.MapSlots]
	var at uint32
	var c abi.Cached
	given, changed := 0, false
	for it := slots.Iterate(); it.Next(&at, &c); {
		if c.Expires <= 1 {
			continue
		}
		given++
		// Slots go round: the first fragment's may be any of the three.
		if index := uint32(c.Fingerprint); !changed && index != r.first {
			c.Fingerprint, changed = uint64(index), true // of a packet that is no fragment
			r.must(slots.Put(at, c))
		}
	}
	if given != 3 {
		t.Fatalf("%d headers are kept", given)
	}
	passed := 0
	for i := range 3 {
		if v, _ := r.back(r.fragment(i, 99)); v == verdictRedirect {
			passed++
		}
	}
	if f := r.function("fw"); passed != 2 || f.TxSuccess != 2 || f.TxNotCached != 1 || *f.InFlight != 1 {
		t.Errorf("%d passed, %+v; want two, and the header of the other packet kept", passed, f)
	}
}
