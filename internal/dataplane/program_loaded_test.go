package dataplane

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/ringbuf"
	"github.com/google/go-cmp/cmp"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/dataplane/object"
	"github.com/waystamp/waystamp/internal/tables"
	"github.com/waystamp/waystamp/internal/tables/xtest"
)

// loaded are the programs that ship with one set of maps, as an agent loads them.
// A program takes the verifier a tenth of a second or three, so that each is loaded
// when a test first runs it, and a process loads no more sets than its tests have in
// hand at the same time: who gives one back empties the maps.
type loaded struct {
	cfg      abi.Config
	g        *generation
	events   *ringbuf.Reader
	traced   *ringbuf.Reader
	indexed  map[indexed]*ebpf.Program // see withIndex
	calls    []*ebpf.Map               // by these
	possible int                       // CPUs that per-CPU maps have values for
}

// labelPrograms are those that packets with labels may come to.
var labelPrograms = []string{object.CoreTC, object.EdgeTC, object.EdgeOutTC, object.MPLSTC, object.MPLSOutTC, object.CoreXDP, object.EdgeXDP, object.MPLSCoreXDP, object.MPLSEdgeXDP}

// atRest are those that no test has, by what they were loaded with: their
// programs know it as constants.
var atRest struct {
	mu  sync.Mutex
	all map[abi.Config][]*loaded
}

// takeLoaded gives programs whose maps are as new. Nobody else has them.
func takeLoaded(cfg abi.Config) (*loaded, error) {
	atRest.mu.Lock()
	if have := atRest.all[cfg]; len(have) > 0 {
		atRest.all[cfg] = have[:len(have)-1]
		atRest.mu.Unlock()
		return have[len(have)-1], nil
	}
	atRest.mu.Unlock()
	return load(cfg)
}

func load(cfg abi.Config) (_ *loaded, err error) {
	l := &loaded{cfg: cfg, g: &generation{limits: rigLimits, maps: map[tables.Map]*ebpf.Map{}, programs: map[string]*ebpf.Program{}}}
	defer func() {
		if err != nil {
			err = errors.Join(err, l.close())
		}
	}()
	if err := new(Dataplane).loadObjects(l.g, cfg, nil, nil); err != nil {
		return nil, err
	}
	if l.possible, err = ebpf.PossibleCPU(); err != nil {
		return nil, err
	}
	if l.events, err = ringbuf.NewReader(l.g.maps[tables.MapEvents]); err != nil {
		return nil, err
	}
	l.traced, err = ringbuf.NewReader(l.g.maps[tables.MapTraced])
	return l, err
}

// program is one of them, loaded with those that it hands packets to.
func (l *loaded) program(name string) *ebpf.Program {
	want := []string{name}
	switch {
	case name == object.CoreXDP && l.cfg.Services != 0:
		want = append(want, object.MPLSCoreXDP)
	case name == object.EdgeXDP && l.cfg.Services != 0:
		want = append(want, object.MPLSEdgeXDP)
	case strings.HasSuffix(name, "_xdp"):
	case l.cfg.Services != 0:
		want = append(want, object.MPLSTC, object.MPLSOutTC)
	default:
		want = append(want, object.ExtTC)
	}
	want = slices.DeleteFunc(want, func(n string) bool { return l.g.programs[n] != nil })
	if len(want) > 0 {
		if err := l.loadMore(want); err != nil {
			panic(err)
		}
	}
	return l.g.programs[name]
}

// loadMore loads programs. What a test has cut the way to stays cut off.
func (l *loaded) loadMore(programs []string) error {
	var cut []int
	for i, j := range jumps {
		var id uint32
		if l.g.programs[j.program] != nil && l.g.maps[j.table].Lookup(j.at, &id) != nil {
			cut = append(cut, i)
		}
	}
	errs := []error{new(Dataplane).loadPrograms(l.g, l.cfg, programs)}
	for _, i := range cut {
		errs = append(errs, l.g.maps[jumps[i].table].Delete(jumps[i].at))
	}
	return errors.Join(errs...)
}

func (l *loaded) close() error {
	errs := []error{l.g.close()}
	for _, m := range l.calls {
		errs = append(errs, m.Close())
	}
	for _, p := range l.indexed {
		errs = append(errs, p.Close())
	}
	for _, r := range []*ringbuf.Reader{l.events, l.traced} {
		if r != nil {
			errs = append(errs, r.Close())
		}
	}
	return errors.Join(errs...)
}

// tcIndex is the offset of tc_index in struct __sk_buff.
const tcIndex = 44

// indexed is a program that gets packets with a value of skb->tc_index.
type indexed struct {
	program string
	index   uint32
}

// withIndex is a program that sets skb->tc_index, which a test run cannot, and calls
// another.
func (l *loaded) withIndex(program string, index uint32) (p *ebpf.Program, err error) {
	k := indexed{program, index}
	if p := l.indexed[k]; p != nil {
		return p, nil
	}
	calls, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.ProgramArray, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	if err != nil {
		return nil, err
	}
	l.calls = append(l.calls, calls)
	if err := calls.Put(uint32(0), l.program(program)); err != nil {
		return nil, err
	}
	p, err = ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.SchedCLS, License: "Dual BSD/GPL",
		Instructions: asm.Instructions{
			asm.Mov.Imm(asm.R2, int32(index)),
			asm.StoreMem(asm.R1, tcIndex, asm.R2, asm.Word),
			asm.LoadMapPtr(asm.R2, calls.FD()),
			asm.Mov.Imm(asm.R3, 0),
			asm.FnTailCall.Call(),
			asm.Mov.Imm(asm.R0, 77), // the call failed
			asm.Return(),
		},
	})
	if err != nil {
		return nil, fmt.Errorf("load a program that calls another: %w", err)
	}
	if l.indexed == nil {
		l.indexed = map[indexed]*ebpf.Program{}
	}
	l.indexed[k] = p
	return p, nil
}

// giveBack empties the maps and lets other tests have them. Where that fails
// nobody gets them.
func (l *loaded) giveBack() error {
	// What was attached until now may still run.
	if err := errors.Join(waitForPrograms(), l.empty()); err != nil {
		return errors.Join(fmt.Errorf("empty the maps for the next test: %w", err), l.close())
	}
	atRest.mu.Lock()
	defer atRest.mu.Unlock()
	if atRest.all == nil {
		atRest.all = map[abi.Config][]*loaded{}
	}
	atRest.all[l.cfg] = append(atRest.all[l.cfg], l)
	return nil
}

// empty makes all maps as they were when they were made. It knows the types of
// maps and not what each is for, so that it forgets none.
func (l *loaded) empty() error {
	mem, err := openMemory("", l.possible, l.g)
	if err == nil {
		err = errors.Join(l.g.emptyMatch(), mem.windows.shrink(l.g, 0), mem.numbers.shrink(l.g, 0))
	}
	if err != nil {
		return err
	}
	for name, m := range l.g.maps {
		var err error
		switch m.Type() {
		case ebpf.Hash, ebpf.LRUHash:
			err = emptyTable(m)
		case ebpf.Array, ebpf.PerCPUArray:
			err = l.zeroArray(m)
		case ebpf.ArrayOfMaps: // above
		case ebpf.ProgramArray:
			err = l.g.connect()
		case ebpf.RingBuf:
			err = errors.Join(emptyRing(l.events), emptyRing(l.traced))
		default:
			err = fmt.Errorf("nobody knows how to empty a map of type %s", m.Type())
		}
		if err != nil {
			return fmt.Errorf("map %s: %w", name, err)
		}
	}
	return nil
}

func emptyTable(m *ebpf.Map) error {
	for {
		key, err := m.NextKeyBytes(nil)
		if err != nil || key == nil {
			return err
		}
		if err := m.Delete(key); err != nil {
			return err
		}
	}
}

func (l *loaded) zeroArray(m *ebpf.Map) error {
	size := int(m.ValueSize())
	each, zero := size, any(make([]byte, size))
	if m.Type() == ebpf.PerCPUArray {
		each = (size + 7) &^ 7 * l.possible
		zero = slices.Repeat([][]byte{make([]byte, size)}, l.possible)
	}
	all, none := make([]byte, int(m.MaxEntries())*each), make([]byte, each)
	if err := lookUpFirst(m, m.MaxEntries(), unsafe.Pointer(unsafe.SliceData(all))); err != nil {
		return err
	}
	for i := range m.MaxEntries() {
		if bytes.Equal(all[int(i)*each:][:each], none) {
			continue
		}
		if err := m.Put(i, zero); err != nil {
			return err
		}
	}
	return nil
}

func emptyRing(r *ringbuf.Reader) error {
	r.SetDeadline(time.Unix(1, 0))
	for {
		switch _, err := r.Read(); {
		case errors.Is(err, os.ErrDeadlineExceeded):
			return nil
		case err != nil:
			return err
		}
	}
}

// A test must not see what another has left: in no map, of whatever type.
func TestWhatIsGivenBackIsAsNew(t *testing.T) {
	taken := func(t *testing.T) *loaded {
		r := newRig(t, rigSpec{
			name: "given back", block: xtest.Prefix("fc00::/48"), locator: xtest.Prefix("fc00:0:0:900::/56"), address: xtest.Addr("fc00:9::1"),
		})
		return r.loaded
	}
	var used *loaded
	t.Run("used", func(t *testing.T) {
		used = taken(t)
		for name, m := range used.g.maps {
			if m.Type() == ebpf.RingBuf || m.Type() == ebpf.ArrayOfMaps || m.Type() == ebpf.ProgramArray {
				continue
			}
			key, value := bytes.Repeat([]byte{1}, int(m.KeySize())), any(bytes.Repeat([]byte{2}, int(m.ValueSize())))
			if m.Type() == ebpf.Array || m.Type() == ebpf.PerCPUArray {
				binary.NativeEndian.PutUint32(key, m.MaxEntries()-1)
			}
			if m.Type() == ebpf.PerCPUArray {
				value = slices.Repeat([][]byte{value.([]byte)}, used.possible)
			}
			if err := m.Put(key, value); err != nil {
				t.Fatalf("map %s: %v", name, err)
			}
		}
		for use := range uint32(abi.MatchUses) {
			all := tables.Prefixes{Dst: map[tables.DstKey]tables.Match{{}: {Target: 7, Action: uint8(abi.MatchActionPath)}}}
			if err := putPrefixes(used.g.maps[tables.MapMatch], used.g.limits.Lines, use, all); err != nil {
				t.Fatal(err)
			}
		}
		for _, x := range []slabKind{windowSlabs(), numberSlabs(used.possible)} {
			s := &slabs{slabKind: x}
			if err := errors.Join(s.grow(x.words+1, Config{}.step), s.placeIn(used.g, Config{}.step), s.close()); err != nil {
				t.Fatal(err)
			}
		}
		// It is in the namespace of the test and armed by nobody: an event.
		opts := ebpf.RunOptions{Data: plainPacket("fd00::1", "fc00:0:0:901::"), DataOut: make([]byte, 500)}
		if _, err := used.program(object.EdgeTC).Run(&opts); err != nil {
			t.Fatal(err)
		}
	})
	again := taken(t)
	if again != used {
		t.Fatal("what was given back is not what the next test gets")
	}
	if n := again.events.AvailableBytes(); n != 0 {
		t.Errorf("%d bytes of events are left", n)
	}
	fresh, err := load(used.cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer fresh.close()
	for name, m := range fresh.g.maps {
		if m.Type() == ebpf.RingBuf || m.Type() == ebpf.ProgramArray { // each has programs of its own
			continue
		}
		want, got := contents(t, m), contents(t, again.g.maps[name])
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("map %s is not as new:\n%s", name, diff)
		}
	}
}

func contents(t *testing.T, m *ebpf.Map) map[string]string {
	all := map[string]string{}
	var key []byte
	if m.Type() == ebpf.PerCPUArray {
		var i uint32
		var each [][]byte
		it := m.Iterate()
		for it.Next(&i, &each) {
			all[fmt.Sprint(i)] = fmt.Sprintf("%x", each)
		}
		if err := it.Err(); err != nil {
			t.Fatal(err)
		}
		return all
	}
	if m.Type() == ebpf.ArrayOfMaps {
		var i uint32
		var id ebpf.MapID
		it := m.Iterate()
		for it.Next(&i, &id) {
			inner, err := ebpf.NewMapFromID(id)
			if err != nil {
				t.Fatal(err)
			}
			for k, v := range contents(t, inner) {
				all[fmt.Sprintf("%d: %s", i, k)] = v
			}
			inner.Close()
		}
		if err := it.Err(); err != nil {
			t.Fatal(err)
		}
		return all
	}
	var value []byte
	it := m.Iterate()
	for it.Next(&key, &value) {
		all[fmt.Sprintf("%x", key)] = fmt.Sprintf("%x", value)
	}
	if err := it.Err(); err != nil {
		t.Fatal(err)
	}
	return all
}
