package object

import (
	"bytes"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// What loads all programs (the agent's own trial, waystamp doctor, make check-kernels) goes by
// All and Alone: no compiled object is missing there, and each has the one program that its entry names.
func TestEveryObjectIsListed(t *testing.T) {
	files, err := filepath.Glob("*_bpfel.o")
	if err != nil {
		t.Fatal(err)
	}
	sources, err := filepath.Glob("../../../bpf/*.bpf.c")
	if err != nil {
		t.Fatal(err)
	}
	listed := slices.Concat(All, Alone)
	if len(files) != len(listed) || len(files) != len(sources) || len(files) == 0 {
		t.Errorf("%d objects, %d sources, and %d in the lists", len(files), len(sources), len(listed))
	}
	for _, f := range files {
		compiled, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		i := slices.IndexFunc(listed, func(o Object) bool { return bytes.Equal(*o.ELF, compiled) })
		if i < 0 {
			t.Errorf("%s is neither in All nor in Alone, so nothing tries it on other kernels", f)
			continue
		}
		spec, err := listed[i].Load()
		if err != nil {
			t.Fatal(err)
		}
		if len(spec.Programs) != 1 || spec.Programs[listed[i].Program] == nil {
			t.Errorf("%s is listed as %s, and has %d programs", f, listed[i].Program, len(spec.Programs))
		}
	}
}

// LoadMaps reads one of the objects for the maps of all.
func TestEachObjectHasTheMapsOfAll(t *testing.T) {
	want, err := LoadMaps()
	if err != nil {
		t.Fatal(err)
	}
	constants := func(name string, _ *ebpf.MapSpec) bool { return strings.HasPrefix(name, ".") }
	maps.DeleteFunc(want, constants)
	if len(want) < 40 {
		t.Errorf("there are %d maps only", len(want))
	}
	for _, o := range All {
		spec, err := o.Load()
		if err != nil {
			t.Fatal(err)
		}
		maps.DeleteFunc(spec.Maps, constants)
		if diff := cmp.Diff(want, spec.Maps, cmpopts.IgnoreFields(ebpf.MapSpec{}, "Key", "Value")); diff != "" {
			t.Errorf("the maps of %s are others:\n%s", o.Program, diff)
		}
	}
}

// Only what reads structures of netfilter's is relocated. Whether tags are the kernel's own,
// TestVerifierHasRoom asks the kernel.
func TestProgramsHaveTags(t *testing.T) {
	var relocated []string
	for _, o := range slices.Concat(All, Alone) {
		tag, err := o.Tag()
		if err != nil {
			t.Fatal(err)
		}
		if tag == nil {
			relocated = append(relocated, o.Program)
		}
	}
	if diff := cmp.Diff([]string{BypassTC, MPLSBypassTC}, relocated); diff != "" {
		t.Errorf("programs without a tag (-want +have):\n%s", diff)
	}
}
