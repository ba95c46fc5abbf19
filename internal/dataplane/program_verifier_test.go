package dataplane

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/dataplane/object"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/tables"
	"github.com/waystamp/waystamp/internal/tables/xtest"
)

// verifierRoom is how many instructions a program may take the verifier: three quarters of
// what the kernel allows, so that a change shows here before it fails on an older kernel.
const verifierRoom = 1_000_000 * 3 / 4

// Every program in every configuration loads, and is far from the verifier's limits. The
// lines "verifier: …" are read by test/kernels, which compares them with those of before.
func TestVerifierHasRoom(t *testing.T) {
	t.Parallel()
	plain, labels := verifiedConfig(t, nil), verifiedConfig(t, &plan.MPLS{Services: 100000, Label: 16001})
	if have, err := haveDecapL3(); err != nil {
		t.Fatal(err)
	} else if have { // then no agent loads them without
		plain.DecapL3, labels.DecapL3 = 1, 1
	}
	for i, cfg := range []abi.Config{plain, labels} {
		for _, o := range slices.Concat(object.All, object.Alone) {
			alone := slices.ContainsFunc(object.Alone, func(a object.Object) bool { return a.Program == o.Program })
			if alone && i > 0 {
				continue // it has no configuration
			}
			if cfg.Services != 0 && !slices.Contains(labelPrograms, o.Program) {
				continue // nothing in it asks for labels
			}
			flags := []uint32{unix.BPF_F_XDP_HAS_FRAGS, 0}
			if !strings.HasSuffix(o.Program, "xdp") {
				flags = flags[1:]
			}
			for _, f := range flags {
				name := fmt.Sprintf("%s/decap_l3=%d", o.Program, cfg.DecapL3)
				if alone {
					name = o.Program
				}
				if cfg.Services != 0 {
					name += "/labels"
				}
				if f != 0 {
					name += "/frags"
				}
				t.Run(name, func(t *testing.T) {
					t.Parallel()
					said, err := verified(o, cfg, f)
					if err != nil {
						t.Fatal(err)
					}
					fmt.Printf("verifier: %s %d instructions, %d states, %d bytes of stack\n", name, said.instructions, said.states, said.stack)
					if said.instructions > verifierRoom {
						t.Errorf("the verifier processes %d instructions of at most %d, and of 1000000 it gives up: simplify the program, or split it", said.instructions, verifierRoom)
					}
				})
			}
		}
	}
}

// verifiedConfig is that of a node: for one without a block the verifier would leave out what
// asks for SIDs.
func verifiedConfig(t *testing.T, m *plan.MPLS) abi.Config {
	cfg, err := tables.EncodeConfig(plan.Node{
		Name: "r1", Block: xtest.Prefix("fc00::/48"), Locator: xtest.Prefix("fc00:0:0:100::/56"), Address: xtest.Addr("fc00:1::1"), MPLS: m,
	})
	if err != nil {
		t.Fatal(err)
	}
	return cfg
}

// verifierSaid is what the verifier says of a program that it takes.
type verifierSaid struct {
	instructions, states int
	// Bytes: of the function that has most, and on newer kernels of all that call each other
	// at a time, of which 512 are allowed.
	stack int
}

var (
	verifierLine  = regexp.MustCompile(`(?m)^processed (\d+) insns .* peak_states (\d+) `)
	verifierStack = regexp.MustCompile(`(?m)^stack depth ((max )?\d+.*)$`)
)

// sameTag says whether the kernel knows a program by one of the tags that waystamp version prints.
func sameTag(o object.Object, loaded *ebpf.Program) error {
	want, err := o.Tag()
	if err != nil || want == nil {
		return err
	}
	info, err := loaded.Info()
	if err != nil {
		return err
	}
	if info.Tag != want.SHA256 && info.Tag != want.SHA1 {
		return fmt.Errorf("the kernel's tag of %s is %s; waystamp version prints %s and, of older kernels, %s", o.Program, info.Tag, want.SHA256, want.SHA1)
	}
	return nil
}

func verified(o object.Object, cfg abi.Config, flags uint32) (s verifierSaid, err error) {
	spec, err := o.Load()
	if err != nil {
		return s, err
	}
	if v := spec.Variables[object.VarConfig]; v != nil {
		if err := v.Set(cfg); err != nil {
			return s, err
		}
	}
	p := spec.Programs[o.Program]
	p.Flags = p.Flags&^unix.BPF_F_XDP_HAS_FRAGS | flags
	g := &generation{limits: rigLimits, maps: map[tables.Map]*ebpf.Map{}}
	defer func() { err = errors.Join(err, g.close()) }()
	shared := map[string]*ebpf.Map{}
	if spec.Variables[object.VarConfig] != nil { // it is of a generation
		if err := new(Dataplane).makeMaps(g, spec.Maps, nil); err != nil {
			return s, err
		}
		for name := range spec.Maps {
			if !internalMap(name) {
				shared[name] = g.maps[tables.Map(name)]
			}
		}
	}
	coll, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{
		MapReplacements: shared, Programs: ebpf.ProgramOptions{LogLevel: ebpf.LogLevelStats},
	})
	if err != nil {
		return s, err
	}
	defer coll.Close()
	if err := sameTag(o, coll.Programs[o.Program]); err != nil {
		return s, err
	}
	log := coll.Programs[o.Program].VerifierLog
	m := verifierLine.FindStringSubmatch(log)
	if m == nil {
		return s, fmt.Errorf("the verifier does not say what it processed:\n%s", log)
	}
	if s.instructions, err = strconv.Atoi(m[1]); err != nil {
		return s, err
	}
	if s.states, err = strconv.Atoi(m[2]); err != nil {
		return s, err
	}
	m = verifierStack.FindStringSubmatch(log)
	if m == nil {
		return s, fmt.Errorf("the verifier does not say how much stack there is:\n%s", log)
	}
	for f := range strings.FieldsFuncSeq(m[1], func(r rune) bool { return r < '0' || r > '9' }) {
		n, err := strconv.Atoi(f)
		if err != nil {
			return s, err
		}
		s.stack = max(s.stack, n)
	}
	return s, nil
}
