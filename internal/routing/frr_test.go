package routing_test

import (
	"crypto/rand"
	"errors"
	"flag"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/waystamp/waystamp/internal/manifest"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/routing"
)

var update = flag.Bool("update", false, "write the golden files")

// compiled is an example whose nodes all advertise their SIDs, or what it says.
func compiled(t *testing.T, example string, all bool) (model.Domain, []plan.Path) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("../../examples", example))
	if err != nil {
		t.Fatal(err)
	}
	m, err := manifest.Parse(example, b)
	if err != nil {
		t.Fatal(err)
	}
	for i := range m.Domain.Nodes {
		if all {
			m.Domain.Nodes[i].Advertise = model.AdvertiseSIDs
		}
	}
	d, err := plan.Compile(m.Domain, plan.NewKeyring(rand.Reader, nil))
	if err != nil {
		t.Fatal(err)
	}
	return m.Domain, d.Paths
}

// What the files say is also taken by FRR itself: TestFRRTakesItsConfiguration in
// test/e2e.
func TestConfigurationOfFRR(t *testing.T) {
	for golden, of := range map[string]struct {
		example, node string
		all           bool
	}{
		"functions-r2.conf":  {"functions.yaml", "r2", true},
		"functions-r3.conf":  {"functions.yaml", "r3", true},
		"functions-r6.conf":  {"functions.yaml", "r6", true},
		"compressed-r2.conf": {"compressed.yaml", "r2", true},
		"compressed-r6.conf": {"compressed.yaml", "r6", true},
		"routing-r2.conf":    {"routing.yaml", "r2", false},
		"netfilter-r2.conf":  {"netfilter.yaml", "r2", true},
		"paper-r1.conf":      {"paper.yaml", "r1", false},
	} {
		t.Run(golden, func(t *testing.T) {
			d, paths := compiled(t, of.example, of.all)
			s, err := routing.New(d, paths, of.node)
			if err != nil {
				t.Fatal(err)
			}
			same(t, golden, s)
		})
	}
}

// A plain router's kernel has its SIDs always.
func TestConfigurationOfARouter(t *testing.T) {
	sid := func(s string) routing.SID {
		return routing.SID{Prefix: netip.MustParsePrefix(s), Behaviour: routing.End}
	}
	same(t, "router.conf", routing.Speaker{
		Name: "r4", AS: 4200000005, Number: 5, Source: netip.MustParseAddr("fc00:4::1"),
		Own:  []netip.Prefix{netip.MustParsePrefix("fc00:4::1/128")},
		SIDs: []routing.SID{sid("fc00:0:0:400::/64"), sid("fc00:0:0:401::/64")}, Neighbours: []string{"r4-r1"},
	})
}

func same(t *testing.T, golden string, s routing.Speaker) {
	t.Helper()
	file := filepath.Join("testdata", golden)
	if *update {
		if err := os.WriteFile(file, []byte(s.FRR()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(string(want), s.FRR()); d != "" {
		t.Errorf("the golden file (-), and what is written (+); -update writes it:\n%s", d)
	}
}

// A file that advertises locators alone has no SIDs in BGP.
func TestSIDsAreAnnouncedWhereTheFileSaysSo(t *testing.T) {
	d, paths := compiled(t, "functions.yaml", true)
	d.Nodes[1].Advertise = model.AdvertiseLocator
	for i, n := range d.Nodes {
		s, err := routing.New(d, paths, n.Name)
		if err != nil {
			t.Fatal(err)
		}
		conf := s.FRR()
		if got, want := strings.Contains(conf, "redistribute"), i != 1; got != want {
			t.Errorf("%s redistributes: %t; want %t:\n%s", n.Name, got, want, conf)
		}
		if i == 1 && strings.Contains(conf, "/64") {
			t.Errorf("%s announces SIDs all the same:\n%s", n.Name, conf)
		}
	}
}

// A function's SIDs say by their number what packets for them meet.
func TestEveryBehaviourHasItsCodepoint(t *testing.T) {
	d, paths := compiled(t, "functions.yaml", true)
	for k := model.Kind(0); ; k++ {
		if _, err := k.MarshalText(); err != nil {
			break
		}
		for i := range d.Functions {
			d.Functions[i].Kind = k
		}
		s, err := routing.New(d, paths, "r3")
		if err != nil {
			t.Fatal(err)
		}
		for _, sid := range s.SIDs {
			if got, want := sid.Behaviour.String(), k.Behaviour().String(); got != want {
				t.Errorf("of kind %s, whose behaviour is %s, the SIDs are %q; give it its codepoint", k, want, got)
			}
		}
	}
}

func TestEachSIDIsAnnouncedOnceByItsNodeWithItsBehaviour(t *testing.T) {
	for example, want := range map[string]map[string]string{
		"functions.yaml": {"fw": "End.AD", "dpi": "End.AD", "nat": "End.AD", "": "End.DT46"},
		"paper.yaml":     {"fw": "End", "dpi": "End", "": "End.DT46"},
	} {
		d, paths := compiled(t, example, true)
		sids := map[string]string{}
		for _, n := range d.Nodes {
			s, err := routing.New(d, paths, n.Name)
			if err != nil {
				t.Fatal(err)
			}
			for _, sid := range s.SIDs {
				if !n.Locator.Contains(sid.Prefix.Addr()) {
					t.Errorf("%s: %s announces %s, which is not in its locator", example, n.Name, sid.Prefix)
				}
				if other, ok := sids[sid.Prefix.String()]; ok {
					t.Errorf("%s: %s is announced by %s and %s", example, sid.Prefix, other, n.Name)
				}
				sids[sid.Prefix.String()] = n.Name
				if got := sid.Behaviour.String(); got != want[sid.Function] {
					t.Errorf("%s: %s of function %q is %s; want %s", example, sid.Prefix, sid.Function, got, want[sid.Function])
				}
			}
		}
		for _, p := range paths {
			for _, h := range p.Hops[1:] {
				if sid := h.SID.String() + "/64"; sids[sid] != h.Node {
					t.Errorf("%s: %s of %s is announced by %q", example, sid, h.Node, sids[sid])
				}
			}
		}
	}
}

func TestFunctionNumbersComeFromNames(t *testing.T) {
	// printf fw | sha256sum
	if got := routing.FunctionNumber("fw"); got != 133671751 {
		t.Errorf("fw has number %d", got)
	}
	if got := routing.FunctionNumber(""); got != 0 {
		t.Errorf("none has number %d; want 0", got)
	}
}

func TestUnknownNode(t *testing.T) {
	d, paths := compiled(t, "paper.yaml", false)
	_, err := routing.New(d, paths, "r9")
	if err == nil || !strings.Contains(err.Error(), `no node "r9"; it has r1, `) {
		t.Errorf("error is %v", err)
	}
}

func TestPathsOfAnotherFileAreRefused(t *testing.T) {
	d, _ := compiled(t, "routing.yaml", false)
	for name, c := range map[string]struct {
		change func(*model.Domain)
		want   string
	}{
		"another function":   {func(d *model.Domain) { d.Chains[0].Functions = []string{"fw"} }, "chain web, forward, leads by fw on r2, r6 in the paths"},
		"another node of it": {func(d *model.Domain) { d.Functions[0].Node = "r3" }, "chain web, forward, leads by fw on r3, dpi on r3, r6 in the paths"},
		"no chain":           {func(d *model.Domain) { d.Chains = nil }, "chain web, forward, is not in the paths"},
		"no reverse":         {func(d *model.Domain) { d.Chains[0].Both = false }, "chain web, reverse, is not in the paths"},
		"another chain": {func(d *model.Domain) {
			other := d.Chains[0]
			other.Name, other.Both, other.Match.Destination = "other", false, netip.MustParsePrefix("2001:db8::/64")
			d.Chains = append(d.Chains, other)
		}, "chain other, forward, leads by fw on r2, dpi on r3, r6 in the paths"},
	} {
		earlier := d
		earlier.Chains, earlier.Functions = slices.Clone(d.Chains), slices.Clone(d.Functions)
		c.change(&earlier)
		p, err := plan.Compile(earlier, plan.NewKeyring(rand.Reader, nil))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := routing.New(d, p.Paths, "r2"); !errors.Is(err, routing.ErrPaths) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: error is %v; want %q", name, err, c.want)
		}
	}
}
