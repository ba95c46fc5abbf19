package e2e

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/srv6"
	"github.com/waystamp/waystamp/internal/stream/function"
)

// withParameters is examples/streams.yaml with parameters in chain web, and others in chain web4.
func withParameters(t *testing.T, run, inverse, web, web4 string) string {
	t.Helper()
	visits := func(p string) string {
		return "functions: [{name: zip, parameters: " + p + "}, {name: unzip, parameters: " + p + "}]"
	}
	s := strings.NewReplacer("run: [{gzip: {level: 1}}]", "run: ["+run+"]", "run: [gunzip], back: [{gzip: {level: 1}}]", "run: ["+inverse+"]").Replace(example(t, "streams.yaml"))
	s = strings.Replace(s, "functions: [zip, unzip]", visits(web), 1)
	return strings.Replace(s, "functions: [zip, unzip]", visits(web4), 1)
}

// Two chains through the same functions have parameters of their own: xor has another byte for each of them, captures show the parameters in SIDs, and
// workers are apart.
func TestChainsThroughOneFunctionHaveTheirOwnParameters(t *testing.T) {
	t.Parallel()
	w := build(t, withParameters(t, "xor", "xor", "0x2a", "0x111"))
	const marker = "which byte did that"
	masked := func(key byte) []byte {
		b := []byte(marker)
		for i := range b {
			b[i] ^= key
		}
		return b
	}
	type seen struct {
		key byte
		to  netip.Addr
	}
	r := &recorder[seen]{}
	r.start(w, "r3", "r3-r2", 64<<10, func(f []byte) (seen, bool) {
		p, err := srv6.DecodeFrame(f)
		for _, key := range []byte{0, 0x5a, 0x2a, 0x11} {
			if err == nil && bytes.Contains(f, masked(key)) {
				return seen{key, p.Header.Destination}, true
			}
		}
		return seen{}, false
	})
	for _, w.ipv4 = range []bool{false, true} {
		must(t, w.echoed(strings.Repeat(marker+" ", 1000)))
	}
	frames := map[string]int{}
	for _, s := range r.soFar() {
		b := s.to.As16()
		frames[fmt.Sprintf("xor %#x, parameters %x", s.key, b[8:])]++
	}
	for _, want := range []string{"xor 0x2a, parameters 000000000000002a", "xor 0x11, parameters 0000000000000111"} {
		if frames[want] == 0 {
			t.Errorf("no frame between r2 and r3 is of %s", want)
		}
		delete(frames, want)
	}
	if len(frames) > 0 {
		t.Errorf("frames between r2 and r3 have %v", frames)
	}
	for node, of := range map[string]string{"r2": "zip", "r3": "unzip"} {
		one, err := w.workerOf(node, of+":0x2a")
		must(t, err)
		other, err := w.workerOf(node, of+":0x111")
		must(t, err)
		if one == other {
			t.Errorf("%s: both instances of %s are process %d", node, of, one)
		}
		if _, err := w.workerOf(node, of); err == nil {
			t.Errorf("%s: %s, which no chain visits without parameters, has a worker", node, of)
		}
	}
}

// seal and open have the key that a visit's parameters name. A node with a wrong file for one number resets the connections of that chain alone.
func TestParametersNameTheKeyOfAChain(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	key := func(name string, first byte) string {
		file := filepath.Join(dir, name)
		must(t, os.WriteFile(file, []byte(function.Key{first, 31: 1}.Text()+"\n"), 0o600))
		return file
	}
	run := "{seal: {keys: {7: " + key("seal-7", 1) + ", 8: " + key("seal-8", 2) + "}}}"
	inverse := "{open: {keys: {7: " + key("open-7", 1) + ", 8: " + key("open-8", 3) + "}}}"
	w := build(t, withParameters(t, run, inverse, "7", "8"))
	const text = "a text that nobody may read"
	must(t, w.echoed(text))
	w.ipv4 = true
	if err := w.echoed(text); !errors.Is(err, unix.ECONNRESET) && !errors.Is(err, unix.EPIPE) {
		t.Errorf("a connection of the chain whose keys differ: %v; want a reset", err)
	}
	w.ipv4 = false
	must(t, w.echoed(text))
}

// Whoever changes the parameters in a SID on the way changes the segment list, which is then not the planned one: also to those of another chain.
func TestOtherParametersInTheSIDAreRefused(t *testing.T) {
	t.Parallel()
	w := build(t, withParameters(t, "xor", "xor", "0x2a", "0x111"))
	must(t, w.echoed("before"))
	web := w.part("web", "forward, up to zip:0x2a")
	list := web.Segments()
	planned := list[len(list)-1]
	if b := planned.As16(); len(list) != 1 || b[15] != 0x2a {
		t.Fatalf("the part's list is %v", list)
	}
	frames := &recorder[[]byte]{}
	frames.start(w, "r2", "r2-r1", 64<<10, func(f []byte) ([]byte, bool) {
		p, err := srv6.DecodeFrame(f)
		if err != nil {
			return nil, false
		}
		v, ok := p.Proof()
		return bytes.Clone(f), ok && v.Path == web.Path
	})
	must(t, w.echoed("captured"))
	all := frames.soFar()
	if len(all) < 3 {
		t.Fatalf("%d frames of the part came; want 3", len(all))
	}
	since := time.Now()
	link := openPort(t, w.ns("r1"), "r1-r2", unix.ETH_P_IPV6)
	// None, those of chain web4, and some that nobody has.
	const destination, entry = 14 + 24, 14 + 40 + 8 // in a frame with one entry
	for i, lower := range []uint16{0, 0x111, 0x2b} {
		f := bytes.Clone(all[i])
		for _, at := range []int{destination, entry} {
			if !bytes.Equal(f[at:at+16], planned.AsSlice()) {
				t.Fatalf("the frame has %x at %d; want %s", f[at:at+16], at, planned)
			}
			binary.BigEndian.PutUint16(f[at+14:], lower)
		}
		must(t, link.Send(f))
	}
	w.refused("r2", "segments", 3)
	w.explained(w.event(since, "r2", "segments"), "*its segment list says r2 as fc00:0:0:200::*")
}

// Parameters are behind other segments of a part, also where the first entry is left out of the list; compressed lists have none, and connections take the
// instance all the same.
func TestParametersAreInPlainListsAlone(t *testing.T) {
	t.Parallel()
	file := example(t, "parameters.yaml")
	for _, form := range []string{"{sids: compressed}", "{reduced: true}"} {
		file = strings.Replace(file, "    direction: both\n", "    direction: both \n    encapsulation: "+form+"\n", 1) // a blank tells it from the next
	}
	w := build(t, file)
	back := map[string]uint32{"rate:0xf4240:0x3d0900": w.part("web", "reverse, up to rate:0xf4240:0x3d0900").Path, "rate:0x7d000": w.part("web4", "reverse, up to rate:0x7d000").Path}
	c := w.capture("r2", "r2-r3")
	for _, w.ipv4 = range []bool{false, true} {
		must(t, w.echoed(strings.Repeat("a text ", 1000)))
	}
	for name, lower := range map[string]uint64{"rate:0xf4240:0x3d0900": 0, "rate:0x7d000": 512000} {
		frames := 0
		for _, p := range c.soFar() {
			if v, ok := p.Proof(); !ok || v.Path != back[name] {
				continue
			}
			b := p.Header.Destination.As16()
			if got := binary.BigEndian.Uint64(b[8:]); got != lower {
				t.Errorf("%s: a packet goes to %s; want %#x in its lower 64 bits", name, p.Header.Destination, lower)
			}
			frames++
		}
		f, err := w.function("r2", name)
		must(t, err)
		if frames == 0 || f.Stream.Opened != 1 {
			t.Errorf("%s: %d frames of the way back, %d connections; want some, and one", name, frames, f.Stream.Opened)
		}
	}
}
