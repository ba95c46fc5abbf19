package dataplane

import (
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/dataplane/object"
	"github.com/waystamp/waystamp/internal/model"
)

// A node without functions has no programs for them. They join the generation at
// work, with the constants of those that are there, also in a process that has not
// loaded these.
func TestProgramsAreLoadedWhenAPlanNeedsThem(t *testing.T) {
	b := newProxyBed(t)
	d := b.open()
	plain := proxyNode()
	plain.Proxies, plain.Endpoints = nil, slices.Clone(plain.Endpoints[:1])
	plain.Endpoints[0].Behaviour = model.BehaviourEnd
	b.must(b.apply(d, plain))
	has := func(want ...string) {
		t.Helper()
		if diff := cmp.Diff(slices.Sorted(slices.Values(want)), slices.Sorted(maps.Keys(d.gen.programs))); diff != "" {
			t.Errorf("programs (-want +got):\n%s", diff)
		}
		for _, o := range object.All {
			_, err := os.Stat(filepath.Join(d.gen.dir, o.Program))
			if err != nil && !errors.Is(err, fs.ErrNotExist) {
				t.Fatal(err)
			}
			if is := err == nil; is != slices.Contains(want, o.Program) {
				t.Errorf("%s: pinned %t", o.Program, is)
			}
		}
	}
	has(object.CoreTC, object.ExtTC)
	at := d.gen.dir

	b.must(d.Close())
	broken := errors.New("broken off by the test")
	for _, kind := range []string{stepLoad, stepPin} {
		b.cfg.before = func(step, what string) error {
			if step == kind && what == object.FunctionTC {
				return broken
			}
			return nil
		}
		d = b.open()
		if err := b.apply(d, proxyNode()); !errors.Is(err, broken) {
			t.Errorf("%s: %v", kind, err)
		}
		has(object.CoreTC, object.ExtTC)
		b.must(d.Close())
	}
	b.cfg.before = nil
	d = b.open()
	b.must(b.apply(d, proxyNode()))
	has(object.CoreTC, object.ExtTC, object.FunctionTC)
	if d.gen.dir != at {
		t.Errorf("the generation at work is another: %s, was %s", d.gen.dir, at)
	}
	var first abi.Config
	for name := range d.gen.programs {
		cfg, err := configOf(name, d.gen.constants[name])
		b.must(err)
		if first == (abi.Config{}) {
			first = cfg
		}
		if cfg != first || cfg.FingerprintKey == [2]uint64{} || cfg.Block == 0 {
			t.Errorf("%s is configured by %+v, another by %+v", name, cfg, first)
		}
	}
}
