package dataplane

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"

	"github.com/waystamp/waystamp/internal/dataplane/object"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/pot"
	"github.com/waystamp/waystamp/internal/tables/xtest"
)

// At all edges of the arithmetic at once. TestProgramStampsAsTheModelDoes draws
// the rest.
func TestProgramAddsAsBigNumbersDo(t *testing.T) {
	e := newTestEngine(t)
	primes := []uint64{2, 3, 53, 1<<31 - 1, 4294967311, 0xffffffbd3f0331, 1<<61 - 1, 9223372036854775783}
	words := func(p uint64) []uint64 {
		return []uint64{0, 1, p - 1, p, p + 1, 2*p - 1, 1<<63 - 1, 1 << 63, 1<<64 - 1}
	}
	n := 0
	for _, p := range primes {
		for _, x := range [][3]uint64{{0, 0, 0}, {p - 1, p - 1, p - 1}, {p - 1, 1, 1 % p}, {p / 2, p / 3, p - p/3 - 1}} {
			s := pot.Share{Position: 1, Polynomial: pot.Polynomial{Prime: p, Share: x[0], Public: x[1] % p, LPC: x[2]}}
			for _, rnd := range words(p) {
				for _, cml := range words(p) {
					h := pot.Header{Scheme: model.SchemeOPoT, Path: 1}
					in := pot.Values{RND: rnd, CML: cml}
					want, err := pot.Model{}.Stamp(s, h, pot.Flow{}, in)
					if err != nil {
						t.Fatal(err)
					}
					got, err := e.Stamp(s, h, pot.Flow{}, in)
					if err != nil || got != want {
						t.Errorf("prime %d, share %d, rest %d, LPC %d, RND 0x%x, CML 0x%x: got 0x%x, %v; want 0x%x",
							p, s.Polynomial.Share, s.Polynomial.Public, s.Polynomial.LPC, rnd, cml, got.CML, err, want.CML)
					}
					n++
				}
			}
		}
	}
	if n < 2500 {
		t.Errorf("only %d stamps", n)
	}
}

func TestProgramGivesThePublishedCumulativeValues(t *testing.T) {
	e := newTestEngine(t)
	for name, c := range map[string]struct {
		rnd  uint64
		want []uint64
	}{
		"draft-08-3.3.yaml": {45, []uint64{17, 39, 2}},
		"ciscodevnet.yaml":  {0xc9554d4442ad67, []uint64{0xf30d6d95469259, 0x60f5615b5b97c9, 0xc9554d4442ad65}},
	} {
		path := filepath.Join("..", "pot", "testdata", name)
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		p, err := pot.ParseProfile(path, text)
		if err != nil {
			t.Fatal(err)
		}
		ev, err := pot.Evaluate(e, p, c.rnd, nil)
		if err != nil {
			t.Fatal(err)
		}
		if ev.Result != pot.Verified || len(ev.Visits) != len(c.want) {
			t.Fatalf("%s: %v after %d visits", name, ev.Result, len(ev.Visits))
		}
		for i, v := range ev.Visits {
			if v.Out.CML != c.want[i] {
				t.Errorf("%s, hop %d: CML 0x%x, want 0x%x", name, v.Hop, v.Out.CML, c.want[i])
			}
		}
	}
	// Who skips a hop is refused, with these values (STANDARDS of the draft).
	p, err := pot.ParseProfile("draft", []byte(`
prime-number: 53
validator-key: 10
hops:
  - {secret-share: 28, lpc: 21, public-polynomial: 1}
  - {secret-share: 17, lpc: 48, public-polynomial: 29}
  - {secret-share: 47, lpc: 38, public-polynomial: 20}
`))
	if err != nil {
		t.Fatal(err)
	}
	for want, order := range map[uint64][]int{39: {1, 2}, 33: {1, 3}, 38: {2, 3}} {
		ev, err := pot.Evaluate(e, p, 45, order)
		if err != nil {
			t.Fatal(err)
		}
		if got := ev.Visits[1].Out.CML; got != want || ev.Result != pot.Proof {
			t.Errorf("order %v: CML %d, %v; want %d, proof", order, got, ev.Result, want)
		}
	}
}

// The reference code's own vectors (internal/pot/testdata) cannot go through the
// program: of a message's 23 bytes one is the scheme, which is 2 where the
// program tags at all, and theirs count up from 0. So it is shown by messages
// that are the protocol's: those of docs/protocol here, Scapy's packets with
// another SipHash, and random ones in TestProgramStampsAsTheModelDoes.
func TestProgramTagsAsTheProtocolsDocumentSays(t *testing.T) {
	text, err := os.ReadFile("../../docs/protocol/README.md")
	if err != nil {
		t.Fatal(err)
	}
	rows := regexp.MustCompile("(?m)^\\| (\\d+) \\| `([0-9a-f]{32})` \\| `([0-9a-f]{46})` \\| `([0-9a-f]{16})` \\|$").FindAllStringSubmatch(string(text), -1)
	if len(rows) < 3 {
		t.Fatalf("%d rows of vectors in docs/protocol/README.md, want 3", len(rows))
	}
	e := newTestEngine(t)
	var keys []pot.Key
	var last pot.Values
	h := pot.Header{Scheme: model.SchemeKeyed}
	for _, row := range rows {
		j, err := strconv.Atoi(row[1])
		if err != nil {
			t.Fatal(err)
		}
		key, m, tag := unhex(t, row[2]), unhex(t, row[3]), unhex(t, row[4])
		s := pot.Share{Position: uint8(j), Key: pot.Key(key)}
		keys = append(keys, s.Key)
		h.Epoch, h.Path = m[17], binary.BigEndian.Uint32(m[18:])
		in := pot.Values{RND: binary.BigEndian.Uint64(m), CML: binary.BigEndian.Uint64(m[8:])}
		if last, err = e.Stamp(s, h, pot.Flow{}, in); err != nil {
			t.Fatal(err)
		}
		if want := (pot.Values{RND: in.RND, CML: binary.BigEndian.Uint64(tag)}); last != want || int(m[22]) != j || m[16] != 2 {
			t.Errorf("position %d: tag %016x, want %016x", j, last.CML, want.CML)
		}
	}
	v := pot.Verifier{Keys: keys}
	if _, r, err := e.Verify(pot.Share{Position: uint8(len(keys))}, v, h, pot.Flow{}, last); err != nil || r != pot.Verified {
		t.Errorf("the last tag: %v, %v; want it verified", r, err)
	}
	for bit := range 64 {
		wrong := last
		wrong.CML ^= 1 << bit
		if _, r, err := e.Verify(pot.Share{Position: uint8(len(keys))}, v, h, pot.Flow{}, wrong); err != nil || r != pot.Proof {
			t.Errorf("the last tag with bit %d changed: %v, %v; want it refused", bit, r, err)
		}
	}
}

// The profiles of keyed and keyed-flow, whose tags are those of docs/protocol.
func TestProgramGivesTheTagsOfTheProfiles(t *testing.T) {
	e := newTestEngine(t)
	text, err := os.ReadFile("../../docs/protocol/README.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"keyed.yaml", "keyed-flow.yaml"} {
		path := filepath.Join("..", "pot", "testdata", name)
		profile, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		p, err := pot.ParseProfile(path, profile)
		if err != nil {
			t.Fatal(err)
		}
		for engine, by := range map[string]pot.Engine{"model": pot.Model{}, "program": e} {
			ev, err := pot.Evaluate(by, p, 0x0001000000000001, nil)
			if err != nil || ev.Result != pot.Verified || len(ev.Visits) != 3 {
				t.Fatalf("%s by the %s: %v, %v after %d visits", name, engine, err, ev.Result, len(ev.Visits))
			}
			for _, v := range ev.Visits {
				if tag := fmt.Sprintf("`%016x`", v.Wire.CML); !strings.Contains(string(text), tag) {
					t.Errorf("%s by the %s, hop %d: tag %s is not in docs/protocol/README.md", name, engine, v.Hop, tag)
				}
			}
			skipped, err := pot.Evaluate(by, p, 0x0001000000000001, []int{1, 3})
			if err != nil || skipped.Result != pot.Proof {
				t.Errorf("%s by the %s, a hop left out: %v, %v; want it refused", name, engine, skipped.Result, err)
			}
		}
	}
}

// All rows of flows, each with its binding and tags.
func TestTheModelBindsAsTheProtocolsDocumentSays(t *testing.T) {
	text, err := os.ReadFile("../../docs/protocol/README.md")
	if err != nil {
		t.Fatal(err)
	}
	rows := regexp.MustCompile("(?m)^\\| (TCP|UDP|protocol 58), ([0-9a-f:.]+)(?: port (\\d+))? to ([0-9a-f:.]+)(?: port (\\d+))? \\| `([0-9a-f]{16})` \\| `([0-9a-f]{16})` \\| `([0-9a-f]{16})` \\| `([0-9a-f]{16})` \\|$").FindAllStringSubmatch(string(text), -1)
	if len(rows) != 3 {
		t.Fatalf("%d rows of flows in docs/protocol/README.md, want 3", len(rows))
	}
	e := newTestEngine(t)
	for _, row := range rows {
		f := pot.Flow{Source: xtest.Addr(row[2]), Destination: xtest.Addr(row[4]), Protocol: map[string]uint8{"TCP": 6, "UDP": 17, "protocol 58": 58}[row[1]]}
		if row[3] != "" {
			sport, _ := strconv.Atoi(row[3])
			dport, _ := strconv.Atoi(row[5])
			f.SourcePort, f.DestinationPort = uint16(sport), uint16(dport)
		}
		h := pot.Header{Scheme: model.SchemeKeyedFlow, Epoch: 3, Path: 0x01020304}
		w := pot.Values{RND: 0x0001000000000001}
		for j := range 3 {
			s := pot.Share{Position: uint8(j)}
			for i := range s.Key {
				s.Key[i], s.Bind[i] = byte(16*j+i), byte(0xf0+i)
			}
			b := s.Binding(f)
			if got := hex.EncodeToString(b[:]); got != row[6] {
				t.Errorf("%s: B %s, want %s", row[0], got, row[6])
			}
			want := s.StampFlow(h, w, b).WireOut
			got, err := e.Stamp(s, h, f, w)
			if err != nil || got != want || fmt.Sprintf("%016x", got.CML) != row[7+j] {
				t.Errorf("%s: T_%d %016x by the program, %016x by the model, %v; want %s", row[0], j, got.CML, want.CML, err, row[7+j])
			}
			w = want
		}
	}
}

func unhex(t *testing.T, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(s)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// How long a verdict takes must not tell where a tag is wrong: nothing in
// SipHash branches, and the difference of two tags goes into one branch, which
// asks whether all its 64 bits are zero.
func TestNoBranchTellsWhereATagIsWrong(t *testing.T) {
	verifiers := 0
	for _, o := range object.All {
		spec, err := o.Load()
		if err != nil {
			t.Fatal(err)
		}
		for name, p := range spec.Programs {
			n, err := checkBranches(p.Instructions)
			if err != nil {
				t.Errorf("%s: %v", name, err)
			}
			verifiers += n
		}
	}
	// Both programs for core and the one for options before the SRH, and those of the
	// headend, of functions, of flows that go past them over either encapsulation, of what functions make, of functions on byte streams, which may go on as
	// an egress, and of labels on both hooks.
	if want := 11 * 3; verifiers != want {
		t.Errorf("%d comparisons of proofs found, want %d: keyed, keyed-flow and opot in eleven programs", verifiers, want)
	}
}

var (
	reDiff    = regexp.MustCompile(`\bdiff = .*\^`)
	reSipHash = regexp.MustCompile(`(^|/)siphash\.h$`)
	reVerify  = regexp.MustCompile(`(^|/)verify\.h$`)
)

// checkBranches gives the number of comparisons of proofs: a difference of
// values as bpf/lib/proof/verify.h takes it, up to the branch on it.
func checkBranches(ins asm.Instructions) (found int, err error) {
	var line *btf.Line
	for i, in := range ins {
		// An instruction without a line belongs to that of the one before.
		if l, ok := in.Source().(*btf.Line); ok && l != nil {
			line = l
		}
		if line == nil {
			continue
		}
		if reSipHash.MatchString(line.FileName()) && conditional(in) {
			return found, fmt.Errorf("instruction %d, %v, branches within SipHash: %s", i, in, line)
		}
		if !reVerify.MatchString(line.FileName()) || !reDiff.MatchString(line.Line()) || in.OpCode != asm.Xor.Op(asm.RegSource) {
			continue
		}
		// The list's difference is taken word by word and not secret.
		if regexp.MustCompile(`want->|e->segments`).MatchString(line.Line()) {
			continue
		}
		if err := oneBranchOn(in.Dst, ins[i+1:]); err != nil {
			return found, fmt.Errorf("the difference of instruction %d, %q: %w", i, line.Line(), err)
		}
		found++
	}
	return found, nil
}

func conditional(in asm.Instruction) bool {
	if !in.OpCode.Class().IsJump() {
		return false
	}
	switch in.OpCode.JumpOp() {
	case asm.Ja, asm.Call, asm.Exit:
		return false
	}
	return true
}

// oneBranchOn: the first use of r is a branch on whether all of it is zero.
func oneBranchOn(r asm.Register, ins asm.Instructions) error {
	for _, in := range ins {
		if conditional(in) && (in.Dst == r || in.OpCode.Source() == asm.RegSource && in.Src == r) {
			op := in.OpCode.JumpOp()
			if in.OpCode.Class() != asm.JumpClass || op != asm.JEq && op != asm.JNE || in.OpCode.Source() != asm.ImmSource || in.Constant != 0 {
				return fmt.Errorf("%v asks for something else than whether it is zero", in)
			}
			return nil
		}
		if in.OpCode.Class().IsJump() || in.Dst == r || in.Src == r && in.OpCode.Class().IsStore() {
			return fmt.Errorf("%v comes before its branch", in)
		}
	}
	return fmt.Errorf("nothing branches on it")
}
