// Package meter has the small eBPF programs that measure a node from outside: a
// generator of packets on XDP, sinks that count and drop them, and a bare XDP
// redirect. They are assembled here for one packet each, so that building needs
// no compiler, and are pinned nowhere. They know nothing of chains: the caller
// gives them finished frames. internal/bench calls them; nothing that ships to a
// node does.
package meter

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"

	"github.com/waystamp/waystamp/internal/host"
)

// Verdicts and flags of <linux/bpf.h> and <linux/pkt_cls.h>.
const (
	xdpDrop    = 1
	tcShot     = 2
	liveFrames = 1 << 1 // BPF_F_TEST_XDP_LIVE_FRAMES
)

// Offsets in struct xdp_md.
const (
	xdpData    = 0
	xdpDataEnd = 4
)

// Field is a part of the frame that differs from packet to packet: Values[i] is
// written to the i-th, and then from the start again. All values have the same
// length, 8 bytes or less.
type Field struct {
	Offset int // bytes from the start of the frame
	Values [][]byte
}

// valueLen is the length of an entry of the map that holds a field's values.
const valueLen = 8

// Generator sends a frame again and again out of one device, as fast as one CPU
// can. Each frame's head is written anew, since the kernel uses the pages of
// earlier ones again, as whoever had them last left them.
type Generator struct {
	frame   []byte
	prog    *ebpf.Program
	maps    []*ebpf.Map
	ifindex uint32
}

// NewGenerator loads a generator that redirects to the device with that index.
// Of each frame the first head bytes are written anew: all that a node may have
// changed. A fields' map is looked up per packet.
func NewGenerator(frame []byte, head int, ifindex int, fields ...Field) (_ *Generator, err error) {
	g := &Generator{frame: frame, ifindex: uint32(ifindex)}
	defer func() {
		if err != nil {
			err = errors.Join(err, g.Close())
		}
	}()
	head = min((head+7)&^7, len(frame)&^7)
	ins := asm.Instructions{
		asm.Mov.Reg(asm.R6, asm.R1),
		asm.LoadMem(asm.R7, asm.R6, xdpData, asm.Word),
		asm.LoadMem(asm.R2, asm.R6, xdpDataEnd, asm.Word),
		asm.Mov.Reg(asm.R3, asm.R7),
		asm.Add.Imm(asm.R3, int32(head)),
		asm.JGT.Reg(asm.R3, asm.R2, "drop"),
	}
	for i := 0; i < head; i += 8 {
		ins = append(ins,
			asm.LoadImm(asm.R4, int64(binary.NativeEndian.Uint64(frame[i:])), asm.DWord),
			asm.StoreMem(asm.R7, int16(i), asm.R4, asm.DWord))
	}
	if len(fields) > 0 {
		more, err := g.fields(fields, head)
		if err != nil {
			return nil, err
		}
		ins = append(ins, more...)
	}
	ins = append(ins,
		asm.Mov.Imm(asm.R1, int32(ifindex)),
		asm.Mov.Imm(asm.R2, 0),
		asm.FnRedirect.Call(),
		asm.Return(),
		asm.Mov.Imm(asm.R0, xdpDrop).WithSymbol("drop"),
		asm.Return())
	g.prog, err = ebpf.NewProgram(&ebpf.ProgramSpec{Name: "generate", Type: ebpf.XDP, Instructions: ins, License: "GPL"})
	if err != nil {
		return nil, fmt.Errorf("load the generator: %w", err)
	}
	return g, nil
}

// fields are instructions that write the fields of the packet whose number is
// in a map of one entry.
func (g *Generator) fields(fields []Field, head int) (asm.Instructions, error) {
	n := len(fields[0].Values)
	counter, err := ebpf.NewMap(&ebpf.MapSpec{Name: "number", Type: ebpf.PerCPUArray, KeySize: 4, ValueSize: 8, MaxEntries: 1})
	if err != nil {
		return nil, fmt.Errorf("make a map of the generator: %w", err)
	}
	g.maps = append(g.maps, counter)
	lookup := func(m *ebpf.Map) asm.Instructions {
		return asm.Instructions{
			asm.LoadMapPtr(asm.R1, m.FD()),
			asm.Mov.Reg(asm.R2, asm.RFP),
			asm.Add.Imm(asm.R2, -4),
			asm.FnMapLookupElem.Call(),
			asm.JEq.Imm(asm.R0, 0, "drop"),
		}
	}
	ins := append(asm.Instructions{asm.StoreImm(asm.RFP, -4, 0, asm.Word)}, lookup(counter)...)
	ins = append(ins,
		asm.LoadMem(asm.R8, asm.R0, 0, asm.DWord),
		asm.Mov.Reg(asm.R4, asm.R8),
		asm.Add.Imm(asm.R4, 1),
		asm.StoreMem(asm.R0, 0, asm.R4, asm.DWord),
		asm.Mod.Imm(asm.R8, int32(n)),
		asm.StoreMem(asm.RFP, -4, asm.R8, asm.Word))
	for _, f := range fields {
		if len(f.Values) != n {
			return nil, fmt.Errorf("the generator's fields have %d and %d values", n, len(f.Values))
		}
		width := len(f.Values[0])
		size, ok := map[int]asm.Size{1: asm.Byte, 2: asm.Half, 4: asm.Word, 8: asm.DWord}[width]
		if !ok || f.Offset < 0 || f.Offset+width > head {
			return nil, fmt.Errorf("a field of %d bytes at offset %d does not fit a head of %d bytes", width, f.Offset, head)
		}
		m, err := ebpf.NewMap(&ebpf.MapSpec{Name: "field", Type: ebpf.Array, KeySize: 4, ValueSize: valueLen, MaxEntries: uint32(n)})
		if err != nil {
			return nil, fmt.Errorf("make a map of the generator: %w", err)
		}
		g.maps = append(g.maps, m)
		keys, values := make([]uint32, n), make([][valueLen]byte, n)
		for i, v := range f.Values {
			keys[i] = uint32(i)
			if copy(values[i][:], v) != width {
				return nil, fmt.Errorf("the values of a generator's field are not all of %d bytes", width)
			}
		}
		if _, err := m.BatchUpdate(keys, values, nil); err != nil {
			return nil, fmt.Errorf("fill a map of the generator: %w", err)
		}
		ins = append(ins, lookup(m)...)
		ins = append(ins,
			asm.LoadMem(asm.R4, asm.R0, 0, size),
			asm.StoreMem(asm.R7, int16(f.Offset), asm.R4, size))
	}
	return ins, nil
}

// Send sends n frames from the CPU of the calling thread and returns when all
// have been sent. It must run in the network namespace of the device.
func (g *Generator) Send(n int) error {
	ctx := struct{ Data, DataEnd, DataMeta, IngressIfindex, RxQueue, EgressIfindex uint32 }{
		DataEnd: uint32(len(g.frame)), IngressIfindex: g.ifindex,
	}
	if _, err := g.prog.Run(&ebpf.RunOptions{Data: g.frame, Context: ctx, Repeat: uint32(n), Flags: liveFrames}); err != nil {
		return fmt.Errorf("run the generator: %w", err)
	}
	return nil
}

// Close unloads the generator.
func (g *Generator) Close() error {
	var errs []error
	if g.prog != nil {
		errs = append(errs, g.prog.Close())
	}
	for _, m := range g.maps {
		errs = append(errs, m.Close())
	}
	return errors.Join(errs...)
}

// Tap is a program on a device that belongs to a measurement.
type Tap struct {
	link io.Closer
	prog *ebpf.Program
	seen *ebpf.Map // nil: it does not count
}

// Hook is where a Tap is attached.
type Hook uint8

const (
	XDP Hook = iota // native
	TC              // ingress
)

// clockEvery: a sink looks at the clock once in so many packets, a power of two,
// since a look costs as much as the rest.
const clockEvery = 64

// Least is how many packets each CPU must send for a sink to tell how long one took.
const Least = 16 * clockEvery

// seen is what a sink keeps per CPU; all but Packets as of the packets that it
// looked at the clock for.
type seen struct {
	Packets        uint64
	FirstNs, First uint64
	LastNs, Last   uint64
}

// NewSink attaches a program that counts every packet and drops it.
func NewSink(ifindex int, h Hook) (*Tap, error) {
	m, err := ebpf.NewMap(&ebpf.MapSpec{Name: "seen", Type: ebpf.PerCPUArray, KeySize: 4, ValueSize: 40, MaxEntries: 1})
	if err != nil {
		return nil, fmt.Errorf("make the sink's counter: %w", err)
	}
	verdict := int32(xdpDrop)
	if h == TC {
		verdict = tcShot
	}
	t := &Tap{seen: m}
	return t, t.attach(ifindex, h, asm.Instructions{
		asm.StoreImm(asm.RFP, -4, 0, asm.Word),
		asm.LoadMapPtr(asm.R1, m.FD()),
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, -4),
		asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, "end"),
		asm.Mov.Reg(asm.R6, asm.R0),
		asm.LoadMem(asm.R7, asm.R6, 0, asm.DWord),
		asm.Add.Imm(asm.R7, 1),
		asm.StoreMem(asm.R6, 0, asm.R7, asm.DWord),
		asm.Mov.Reg(asm.R1, asm.R7),
		asm.And.Imm(asm.R1, clockEvery-1),
		asm.JNE.Imm(asm.R1, 0, "end"),
		asm.FnKtimeGetNs.Call(),
		asm.StoreMem(asm.R6, 24, asm.R0, asm.DWord),
		asm.StoreMem(asm.R6, 32, asm.R7, asm.DWord),
		asm.LoadMem(asm.R1, asm.R6, 8, asm.DWord),
		asm.JNE.Imm(asm.R1, 0, "end"),
		asm.StoreMem(asm.R6, 8, asm.R0, asm.DWord),
		asm.StoreMem(asm.R6, 16, asm.R7, asm.DWord),
		asm.Mov.Imm(asm.R0, verdict).WithSymbol("end"),
		asm.Return(),
	})
}

// arrival is what a sink of NewArrivals keeps.
type arrival struct {
	Packets uint64
	Ns      uint64 // when the last came, by CLOCK_MONOTONIC
}

// NewArrivals attaches a program at TC that notes when the last packet came, and drops it.
// Packets must come one at a time.
func NewArrivals(ifindex int) (*Tap, error) {
	m, err := ebpf.NewMap(&ebpf.MapSpec{Name: "arrival", Type: ebpf.Array, KeySize: 4, ValueSize: 16, MaxEntries: 1})
	if err != nil {
		return nil, fmt.Errorf("make the sink's counter: %w", err)
	}
	t := &Tap{seen: m}
	return t, t.attach(ifindex, TC, asm.Instructions{
		asm.FnKtimeGetNs.Call(),
		asm.Mov.Reg(asm.R6, asm.R0),
		asm.StoreImm(asm.RFP, -4, 0, asm.Word),
		asm.LoadMapPtr(asm.R1, m.FD()),
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, -4),
		asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, "end"),
		asm.StoreMem(asm.R0, 8, asm.R6, asm.DWord),
		asm.LoadMem(asm.R1, asm.R0, 0, asm.DWord),
		asm.Add.Imm(asm.R1, 1),
		asm.StoreMem(asm.R0, 0, asm.R1, asm.DWord),
		asm.Mov.Imm(asm.R0, tcShot).WithSymbol("end"),
		asm.Return(),
	})
}

// Arrived is what a sink of NewArrivals has counted, and when the last packet came by
// CLOCK_MONOTONIC, in nanoseconds.
func (t *Tap) Arrived() (packets, ns uint64, err error) {
	var a arrival
	if err := t.seen.Lookup(uint32(0), &a); err != nil {
		return 0, 0, fmt.Errorf("read the sink's counter: %w", err)
	}
	return a.Packets, a.Ns, nil
}

// NewRedirect attaches an XDP program that sends every packet out of another
// device, as it is.
func NewRedirect(from, to int) (*Tap, error) {
	t := &Tap{}
	return t, t.attach(from, XDP, asm.Instructions{
		asm.Mov.Imm(asm.R1, int32(to)),
		asm.Mov.Imm(asm.R2, 0),
		asm.FnRedirect.Call(),
		asm.Return(),
	})
}

// NewIdle attaches an XDP program that lets everything pass, for the veth at
// whose peer it is: only then can that take redirects.
func NewIdle(ifindex int) (*Tap, error) {
	t := &Tap{}
	return t, t.attach(ifindex, XDP, asm.Instructions{asm.Mov.Imm(asm.R0, 2), asm.Return()})
}

func (t *Tap) attach(ifindex int, h Hook, ins asm.Instructions) (err error) {
	defer func() {
		if err != nil {
			err = errors.Join(err, t.Close())
		}
	}()
	kind := ebpf.XDP
	if h == TC {
		kind = ebpf.SchedCLS
	}
	if t.prog, err = ebpf.NewProgram(&ebpf.ProgramSpec{Name: "tap", Type: kind, Instructions: ins, License: "GPL"}); err != nil {
		return fmt.Errorf("load a program that measures: %w", err)
	}
	if h == TC {
		t.link, err = attachTC(ifindex, t.prog)
	} else {
		t.link, err = link.AttachXDP(link.XDPOptions{Program: t.prog, Interface: ifindex, Flags: link.XDPDriverMode})
	}
	if err != nil {
		return fmt.Errorf("attach a program that measures to interface %d: %w", ifindex, err)
	}
	return nil
}

// withoutTCX: as if the kernel had no tcx; tests set it.
var withoutTCX bool

// attachTC puts a program before all others at TC's ingress of an interface in the namespace of this thread.
func attachTC(ifindex int, p *ebpf.Program) (io.Closer, error) {
	if !withoutTCX {
		l, err := link.AttachTCX(link.TCXOptions{Program: p, Attach: ebpf.AttachTCXIngress, Interface: ifindex, Anchor: link.Head()})
		if !errors.Is(err, ebpf.ErrNotSupported) {
			return l, err
		}
	}
	here, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		return nil, fmt.Errorf("open this thread's network namespace: %w", err)
	}
	ns, err := host.FromFile(here)
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	f := &filter{ifindex: ifindex, own: host.Filter{Preference: 1, Handle: 1, Name: "tap"}}
	if f.net, err = host.Open(ns); err != nil {
		return nil, err
	}
	if err := f.net.SetFilter(ifindex, false, f.own, p.FD(), true); err != nil {
		return nil, errors.Join(err, f.net.Close())
	}
	return f, nil
}

// filter holds a program at TC of kernels without tcx (before Linux 6.6).
type filter struct {
	net     *host.Net
	ifindex int
	own     host.Filter
}

// Close takes the program off.
func (f *filter) Close() error {
	return errors.Join(f.net.RemoveFilter(f.ifindex, false, f.own), f.net.Close())
}

// Reset lets a sink begin anew. No packets may come meanwhile.
func (t *Tap) Reset() error {
	cpus, err := ebpf.PossibleCPU()
	if err == nil {
		err = t.seen.Put(uint32(0), make([]seen, cpus))
	}
	if err != nil {
		return fmt.Errorf("reset the sink's counter: %w", err)
	}
	return nil
}

// Seen is what a sink has seen since Reset: how many packets, and how long one
// took in nanoseconds, of all CPUs together. What goes on before the first and
// after the last packet does not count. 0: too few packets to say.
func (t *Tap) Seen() (packets uint64, each float64, err error) {
	var cpus []seen
	if err := t.seen.Lookup(uint32(0), &cpus); err != nil {
		return 0, 0, fmt.Errorf("read the sink's counter: %w", err)
	}
	packets, each = together(cpus)
	return packets, each, nil
}

// together is from the first packet on any CPU to the last on any.
func together(cpus []seen) (packets uint64, each float64) {
	var timed, first, last uint64
	for _, c := range cpus {
		packets += c.Packets
		if c.Last == c.First {
			continue
		}
		timed += c.Last - c.First
		last = max(last, c.LastNs)
		if first == 0 || c.FirstNs < first {
			first = c.FirstNs
		}
	}
	if timed == 0 {
		return packets, 0
	}
	return packets, float64(last-first) / float64(timed)
}

// Close takes the program off its device.
func (t *Tap) Close() error {
	var errs []error
	if t.link != nil {
		errs = append(errs, t.link.Close())
	}
	if t.prog != nil {
		errs = append(errs, t.prog.Close())
	}
	if t.seen != nil {
		errs = append(errs, t.seen.Close())
	}
	return errors.Join(errs...)
}
