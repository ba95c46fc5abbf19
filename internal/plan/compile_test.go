package plan

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/pot"
)

func compile(t testing.TB, d model.Domain, keys *Keyring) *Domain {
	t.Helper()
	p, err := Compile(d, keys)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func addresses(list ...string) []netip.Addr {
	var out []netip.Addr
	for _, s := range list {
		out = append(out, netip.MustParseAddr(s))
	}
	return out
}

func TestPaperDomainCompilesToItsPaths(t *testing.T) {
	d := compile(t, paper(model.SchemeKeyed), NewKeyring(random(1), nil))
	if len(d.Paths) != 2 {
		t.Fatalf("%d paths; want 2", len(d.Paths))
	}
	// FNV-1a-32 of "web/forward" and "web/reverse", by another implementation.
	for i, want := range []uint32{fnv1a("web/forward"), fnv1a("web/reverse")} {
		if got := d.Paths[i].Path; got != want {
			t.Errorf("paths[%d] is 0x%08x; want 0x%08x", i, got, want)
		}
	}
	forward, reverse := d.Paths[0], d.Paths[1]
	if diff := cmp.Diff(addresses("fc00:0:0:200::", "fc00:0:0:300::", "fc00:0:0:600::"), forward.Segments(), equal); diff != "" {
		t.Errorf("forward segments (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(addresses("fc00:0:0:301::", "fc00:0:0:201::", "fc00:0:0:100::"), reverse.Segments(), equal); diff != "" {
		t.Errorf("reverse segments (-want +got):\n%s", diff)
	}
	if want := 1700 - 72 - 3*16; forward.MTU != want || reverse.MTU != want {
		t.Errorf("MTUs %d and %d; want %d", forward.MTU, reverse.MTU, want)
	}
	if want := (model.Match{Source: netip.MustParsePrefix("fc00:8::/64")}); reverse.Match != want {
		t.Errorf("reverse matches %v; want %v", reverse.Match, want)
	}
	var got []string
	for _, n := range d.Nodes {
		got = append(got, fmt.Sprintf("%s %d %d %d", n.Name, len(n.Headends), len(n.Endpoints), len(n.Egresses)))
	}
	if diff := cmp.Diff([]string{"r1 1 0 1", "r2 0 2 0", "r3 0 2 0", "r6 1 0 1"}, got); diff != "" {
		t.Errorf("parts of nodes (-want +got):\n%s", diff)
	}
}

// fnv1a is the hash as its definition says, to have a second opinion.
func fnv1a(s string) uint32 {
	h := uint64(2166136261)
	for _, c := range []byte(s) {
		h = (h ^ uint64(c)) * 16777619 % (1 << 32)
	}
	return uint32(h)
}

var equal = cmp.Options{
	cmp.Comparer(func(a, b netip.Addr) bool { return a == b }),
	cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }),
	cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b }),
}

func TestEveryCompiledPathIsSoundAndVerifies(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		d := domains().Draw(t, "domain")
		p, err := Compile(d, NewKeyring(random(rapid.Uint64().Draw(t, "seed")), nil))
		if err != nil {
			t.Fatal(err)
		}
		taken := map[netip.Addr]bool{}
		ids := map[uint32]bool{0: true}
		for _, path := range p.Paths {
			if ids[path.Path] {
				t.Fatalf("%s %s: path id 0x%x is 0 or taken", path.Chain, path.Direction, path.Path)
			}
			ids[path.Path] = true
			soundPath(t, d, path, taken)
			verifies(t, path, rapid.Uint64Range(0, 1<<60-1).Draw(t, "rnd"))
		}
		for _, n := range p.Nodes {
			if err := n.check(); err != nil {
				t.Fatalf("node %s does not hold: %v", n.Name, err)
			}
			soundProxies(t, d, n, p.Paths)
		}
	})
}

// soundProxies holds that a node has all its functions without segment routing, in the order of
// the domain, and of each local one what must pass it.
func soundProxies(t *rapid.T, d model.Domain, n Node, paths []Path) {
	var want []Proxy
	for _, f := range d.Functions {
		if f.Node != n.Name || f.Kind == model.KindForward {
			continue
		}
		x := Proxy{Function: f.Name, Proxy: f.Proxy}
		if f.Kind == model.KindNetfilter {
			x.Netfilter = &Netfilter{Netfilter: f.Netfilter, Groups: zoneGroups(f, paths)} // tested by itself
		}
		for _, path := range paths {
			for _, h := range path.Hops {
				if f.Proxy.Local && h.Function == f.Name {
					x.Matches = append(x.Matches, path.Match)
					break // however often it is visited
				}
			}
		}
		want = append(want, x)
	}
	if diff := cmp.Diff(want, n.Proxies, equal); diff != "" {
		t.Fatalf("proxies of node %s (-want +got):\n%s", n.Name, diff)
	}
	rules := 0
	for _, r := range n.LocalRules() {
		if !slices.Contains(n.Proxies[r.Target].Matches, r.Match) {
			t.Fatalf("node %s: the local rule for %s names function %s, which has no such match", n.Name, r.Match, n.Proxies[r.Target].Function)
		}
		rules++
	}
	for _, x := range n.Proxies {
		rules -= len(x.Matches)
	}
	if rules != 0 {
		t.Fatalf("node %s has %d local rules more than matches", n.Name, rules)
	}
}

func TestUnawareFunctionsStayEndpointsAndGetAProxy(t *testing.T) {
	d := compile(t, functions(), NewKeyring(random(1), nil))
	var got []string
	for _, n := range d.Nodes {
		for _, e := range n.Endpoints {
			got = append(got, fmt.Sprintf("%s %s %d %s", n.Name, e.Direction, e.Share.Position, e.Function))
		}
		for _, x := range n.Proxies {
			got = append(got, fmt.Sprintf("%s %s, %d matches", n.Name, x.Function, len(x.Matches)))
		}
	}
	want := []string{
		"r2 forward 1 fw", "r2 reverse 3 fw", "r2 fw, 0 matches",
		"r3 forward 2 dpi", "r3 forward 3 nat", "r3 reverse 1 nat", "r3 reverse 2 dpi", "r3 dpi, 0 matches", "r3 nat, 2 matches",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	r3 := d.Nodes[2]
	prefix := netip.MustParsePrefix("fc00:8::/64")
	rules := []Rule{{Match: model.Match{Destination: prefix}, Target: 1}, {Match: model.Match{Source: prefix}, Target: 1}}
	if diff := cmp.Diff(rules, r3.LocalRules(), equal); diff != "" {
		t.Errorf("local rules (-want +got):\n%s", diff)
	}
	if got := r3.CacheEntries(); got != 40000 {
		t.Errorf("r3 needs %d entries; want 40000, twice those of dpi", got)
	}
}

// A packet that has lost its header is dropped if one of the functions that it
// may have been in says so.
func TestLocalRuleOfAFunctionThatDropsComesFirst(t *testing.T) {
	d := functions()
	d.Functions[2].Proxy.OnUnknown = model.OnUnknownPlain
	strict := d.Functions[2]
	strict.Name, strict.Proxy.OnUnknown = "strict", model.OnUnknownDrop
	d.Functions = append(d.Functions, strict)
	d.Chains[0].Functions = []string{"fw", "nat", "strict"}
	r3 := compile(t, d, nil).Nodes[2]
	dst, _ := Classify(r3.LocalRules())
	for _, e := range dst {
		if !e.Source && r3.Proxies[e.Target].Function != "strict" {
			t.Errorf("%s leads to %s; want strict", e.Prefix, r3.Proxies[e.Target].Function)
		}
	}
	if len(dst) == 0 {
		t.Error("no rules")
	}
}

func TestLocalFunctionHasTheMatchOfEachPath(t *testing.T) {
	d := functions()
	other := d.Chains[0]
	other.Name, other.Both = "other", false
	other.Match.Source = netip.MustParsePrefix("fc00:7::/64")
	d.Chains = append(d.Chains, other)
	r3 := compile(t, d, nil).Nodes[2]
	if got := r3.Proxies[1].Matches; len(got) != 3 {
		t.Errorf("matches %v; want one for each path", got)
	}
	if err := r3.check(); err != nil {
		t.Error(err)
	}
}

func TestChangedProxyKeepsSecrets(t *testing.T) {
	first := compile(t, functions(), NewKeyring(random(1), nil))
	d := functions()
	d.Functions[0].Proxy.Cache = 5
	second := compile(t, d, NewKeyring(broken{}, first.Paths))
	if diff := cmp.Diff(first.Paths, second.Paths, equal, secrets); diff != "" {
		t.Errorf("-first +second:\n%s", diff)
	}
}

func TestFunctionsThatCannotBeAreRefused(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*model.Domain)
		want   string
	}{
		"node of an idle function": {func(d *model.Domain) {
			d.Functions = append(d.Functions, model.Function{Name: "idle", Node: "r9", Kind: model.KindUnaware, Proxy: d.Functions[2].Proxy})
		}, `function idle: node "r9" does not exist`},
		"rule of a proxy": {func(d *model.Domain) { d.Functions[0].Proxy.Rewrites = true }, "function fw: rewrites: true cannot be combined with"},
		"content caches":  {func(d *model.Domain) { d.Functions[0].Node = "r3"; d.Functions[0].Proxy.Cache = model.CacheMax }, "node r3: keeps 1068576 headers for functions that are recognised by content"},
		"metadata caches": {func(d *model.Domain) {
			f := d.Functions[2]
			f.Name, f.Proxy.Cache = "more", 60000
			d.Functions = append(d.Functions, f)
		}, "node r3: keeps 70000 headers for functions that are recognised by metadata; a node can keep 65535"},
		"too many": {func(d *model.Domain) {
			for i := range ProxiesMax {
				f := d.Functions[2]
				f.Name, f.Proxy.Cache = fmt.Sprintf("f%d", i), 1
				d.Functions = append(d.Functions, f)
			}
		}, "node r3: has 1025 functions that get packets without outer headers; a node can have 1023"},
	} {
		t.Run(name, func(t *testing.T) {
			d := functions()
			c.change(&d)
			if _, err := Compile(d, NewKeyring(random(1), nil)); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v; want %q in it", err, c.want)
			}
		})
	}
}

func soundPath(t *rapid.T, d model.Domain, path Path, taken map[netip.Addr]bool) {
	i := slices.IndexFunc(d.Chains, func(c model.Chain) bool { return c.Name == path.Chain })
	ch := d.Chains[i].Directed(path.Direction)
	if got := len(path.Hops); got != len(ch.Functions)+2 || len(path.Shares) != got {
		t.Fatalf("%s: %d hops and %d shares for %d functions", path.Chain, got, len(path.Shares), len(ch.Functions))
	}
	for j, h := range path.Hops[1:] {
		n, _ := d.Node(h.Node)
		if !n.Locator.Contains(h.SID) || h.SID == d.Block.Addr() || taken[h.SID] {
			t.Fatalf("%s: SID %s of hop %d is outside %s, the block's first, or taken", path.Chain, h.SID, j+1, n.Locator)
		}
		taken[h.SID] = true
		if j < len(ch.Functions) {
			f, _ := d.Function(ch.Functions[j])
			if h.Function != f.Name || h.Node != f.Node {
				t.Fatalf("%s: hop %d is %s on %s; want %s on %s", path.Chain, j+1, h.Function, h.Node, f.Name, f.Node)
			}
		} else if h.Node != ch.Egress || h.Function != "" {
			t.Fatalf("%s: the last hop is %q on %s; want the egress on %s", path.Chain, h.Function, h.Node, ch.Egress)
		}
	}
	lane := 0
	for j, in := range path.Ingress {
		n, _ := d.Node(ch.Ingress[j])
		if in.Node != n.Name || in.Address != n.Address || int(in.Lane) != lane || int(in.Lanes) != n.CPUs {
			t.Fatalf("%s: ingress %d is %+v; want %s with lanes from %d", path.Chain, j, in, n.Name, lane)
		}
		lane += n.CPUs
	}
}

// verifies walks a packet by the arithmetic of package pot: through all hops,
// and with one hop left out.
func verifies(t *rapid.T, path Path, rnd uint64) {
	last := len(path.Shares) - 1
	result := func(visits []pot.Share) pot.Result {
		wire := pot.Values{RND: rnd}
		for _, s := range visits {
			wire = s.Stamp(path.Header(), wire).WireOut
		}
		_, r := path.Verifier.Verify(path.Shares[last], path.Header(), wire)
		return r
	}
	if r := result(path.Shares[:last]); r != pot.Verified {
		t.Fatalf("%s: all hops in order give %s", path.Chain, r)
	}
	for skip := range last {
		visits := slices.Delete(slices.Clone(path.Shares[:last]), skip, skip+1)
		if r := result(visits); r != pot.Proof {
			t.Fatalf("%s: without position %d the verdict is %s", path.Chain, skip, r)
		}
	}
}

func TestNodePlanHoldsNoOtherNodesSecrets(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		d := domains().Draw(t, "domain")
		p, err := Compile(d, NewKeyring(random(rapid.Uint64().Draw(t, "seed")), nil))
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range p.Nodes {
			b, err := EncodeNode(n)
			if err != nil {
				t.Fatal(err)
			}
			for _, path := range p.Paths {
				noneOf(t, b, n.Name, path)
			}
		}
	})
}

// noneOf holds that the file of a node has a secret of a path if and only if
// the node's place in it calls for that.
func noneOf(t *rapid.T, file []byte, node string, path Path) {
	last := len(path.Hops) - 1
	egress := path.Hops[last].Node == node
	at := func(j int) bool {
		if j == 0 {
			return slices.ContainsFunc(path.Ingress, func(in Ingress) bool { return in.Node == node })
		}
		return path.Hops[j].Node == node
	}
	expect := func(what string, j int, secret []byte, want bool) {
		if got := bytes.Contains(file, hex.AppendEncode(nil, secret)); got != want {
			t.Fatalf("node %s and %s of position %d of %s, %s: in its file %v; want %v", node, what, j, path.Chain, path.Direction, got, want)
		}
	}
	for j, s := range path.Shares {
		switch path.Scheme {
		case model.SchemeKeyed:
			if j < last {
				expect("the key", j, s.Key[:], at(j) || egress)
			}
		case model.SchemeOPoT:
			if j < last { // the mask of the link from j to j+1: both ends have it
				m := s.Polynomial.Down
				expect("the mask", j, append(be64(m.RND), be64(m.CML)...), at(j) || at(j+1))
			}
			fallthrough
		case model.SchemePoT:
			expect("the share", j, be64(s.Polynomial.Share), at(j))
		}
	}
	if path.Scheme != model.SchemeKeyed {
		expect("the secret", last, be64(path.Verifier.Secret), egress)
	}
}

func be64(n uint64) []byte {
	b := make([]byte, 8)
	for i := range b {
		b[i] = byte(n >> (56 - 8*i))
	}
	return b
}

func TestUnchangedDomainKeepsEverything(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		d := domains().Draw(t, "domain")
		first, err := Compile(d, NewKeyring(random(1), nil))
		if err != nil {
			t.Fatal(err)
		}
		second, err := Compile(d, NewKeyring(broken{}, first.Paths))
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(first, second, equal, secrets); diff != "" {
			t.Fatalf("the second plan differs (-first +second):\n%s", diff)
		}
	})
}

// broken is a source that nothing may be read from.
type broken struct{}

func (broken) Read([]byte) (int, error) { return 0, errors.New("read of random bytes") }

var _ io.Reader = broken{}

// secrets lets cmp look at what prints as [redacted].
var secrets = cmp.Options{
	cmp.Comparer(func(a, b pot.Share) bool { return a == b }),
	cmp.Comparer(func(a, b pot.Verifier) bool { return a.Secret == b.Secret && slices.Equal(a.Keys, b.Keys) }),
}

func TestChangeElsewhereLeavesAPathAlone(t *testing.T) {
	d := paper(model.SchemeOPoT)
	first := compile(t, d, NewKeyring(random(1), nil))
	d.Chains = append([]model.Chain{{
		Name:      "first",
		Ingress:   []string{"r1"},
		Functions: []string{"dpi", "fw", "dpi"},
		Egress:    "r6",
		Match:     model.Match{Destination: netip.MustParsePrefix("fc00:9::/64")},
	}}, d.Chains...)
	second := compile(t, d, NewKeyring(random(2), first.Paths))
	if diff := cmp.Diff(first.Paths, second.Paths[1:], equal, secrets); diff != "" {
		t.Errorf("the paths that were there (-before +after):\n%s", diff)
	}
	sids := map[netip.Addr]bool{}
	for _, p := range second.Paths {
		for _, s := range p.Segments() {
			if sids[s] {
				t.Errorf("SID %s is given twice", s)
			}
			sids[s] = true
		}
	}
	if got := second.Paths[0].Epoch; got != epochFirst {
		t.Errorf("the new path starts with epoch %d; want %d", got, epochFirst)
	}
}

func TestChangedPathGetsTheNextEpochAndFreshSecrets(t *testing.T) {
	base := paper(model.SchemeKeyed)
	first := compile(t, base, NewKeyring(random(1), nil))
	for name, change := range map[string]func(*model.Domain){
		"scheme":             func(d *model.Domain) { d.Chains[0].Proof.Scheme = model.SchemeOPoT },
		"order of functions": func(d *model.Domain) { d.Chains[0].Functions = []string{"dpi", "fw"} },
		"node of a function": func(d *model.Domain) { d.Functions[0].Node = "r3" },
		"lanes of an ingress": func(d *model.Domain) {
			d.Nodes[0].CPUs, d.Nodes[3].CPUs = 8, 8
		},
		"locator": func(d *model.Domain) { d.Nodes[1].Locator = netip.MustParsePrefix("fc00:0:0:f00::/56") },
		"waypoint": func(d *model.Domain) {
			d.Chains[0].Waypoints = []model.Waypoint{{Before: 1, SID: netip.MustParseAddr("fc00:0:0:9900::")}}
		},
	} {
		t.Run(name, func(t *testing.T) {
			d := paper(model.SchemeKeyed)
			change(&d)
			second := compile(t, d, NewKeyring(random(2), first.Paths))
			for i, p := range second.Paths {
				if p.Epoch != epochFirst+1 {
					t.Errorf("%s: epoch %d; want %d", p.Direction, p.Epoch, epochFirst+1)
				}
				if p.Shares[0] == first.Paths[i].Shares[0] {
					t.Errorf("%s: the headend's share is the old one", p.Direction)
				}
			}
		})
	}
	t.Run("match and violation do not count", func(t *testing.T) {
		d := paper(model.SchemeKeyed)
		d.Chains[0].Match.Source = netip.MustParsePrefix("fc00:7::/64")
		d.Chains[0].Proof.OnViolation = model.OnViolationReport
		second := compile(t, d, NewKeyring(broken{}, first.Paths))
		if second.Paths[0].Epoch != epochFirst || second.Paths[0].OnViolation != model.OnViolationReport {
			t.Errorf("got epoch %d, %s", second.Paths[0].Epoch, second.Paths[0].OnViolation)
		}
	})
}

func TestWithoutAKeyringSecretsAreFresh(t *testing.T) {
	first, second := compile(t, paper(model.SchemeKeyed), nil), compile(t, paper(model.SchemeKeyed), nil)
	if first.Paths[0].Shares[0] == second.Paths[0].Shares[0] {
		t.Error("two compilations gave the same key")
	}
}

func TestEpochAfter255Is0(t *testing.T) {
	first := compile(t, paper(model.SchemeKeyed), NewKeyring(random(1), nil))
	for i := range first.Paths {
		first.Paths[i].Epoch = 255
	}
	second := compile(t, paper(model.SchemeOPoT), NewKeyring(random(2), first.Paths))
	if got := second.Paths[0].Epoch; got != 0 {
		t.Errorf("epoch %d; want 0", got)
	}
}

func TestCollidingPathIDsAreToldApart(t *testing.T) {
	// Two names whose FNV-1a-32 hashes are equal, found by search.
	a, b := collision(t)
	paths := []Path{{PathID: PathID{Chain: a}}, {PathID: PathID{Chain: b}}}
	assignPathIDs(paths)
	if paths[0].Path == paths[1].Path {
		t.Fatalf("%s and %s both have 0x%08x", a, b, paths[0].Path)
	}
	swapped := []Path{paths[1], paths[0]}
	assignPathIDs(swapped)
	if swapped[0].Path != paths[1].Path || swapped[1].Path != paths[0].Path {
		t.Error("ids depend on the order in the file")
	}
}

func collision(t *testing.T) (string, string) {
	seen := map[uint32]string{}
	for i := range 2_000_000 {
		name := fmt.Sprintf("c%d", i)
		h := fnv1a(name + "/forward")
		if other, ok := seen[h]; ok {
			return other, name
		}
		seen[h] = name
	}
	t.Fatal("no two names collide")
	return "", ""
}

// What SYNs may say is what the chain's MTU leaves, or less where that is said;
// both directions have it.
func TestClampIsWhatFits(t *testing.T) {
	four := netip.MustParsePrefix("198.51.100.0/24")
	for name, c := range map[string]struct {
		clamp  model.Clamp
		change func(*model.Domain)
		want   int
	}{
		"none":                 {model.Clamp{}, nil, 0},
		"what fits":            {model.Clamp{On: true}, nil, 1700 - 72 - 48 - 60},
		"what fits, IPv4":      {model.Clamp{On: true}, func(d *model.Domain) { d.Chains[0].Match.Destination = four }, 1700 - 72 - 48 - 40},
		"a number":             {model.Clamp{On: true, Most: 1300}, nil, 1300},
		"as much as fits":      {model.Clamp{On: true, Most: 1520}, nil, 1520},
		"a number, no MTU":     {model.Clamp{On: true, Most: 9000}, unsized, 9000},
		"a narrower interface": {model.Clamp{On: true}, func(d *model.Domain) { d.Nodes[2].Interfaces[1].MTU = 1500 }, 1320},
	} {
		d := paper(model.SchemeKeyed)
		d.Chains[0].Clamp = c.clamp
		if c.change != nil {
			c.change(&d)
		}
		p := compile(t, d, NewKeyring(random(1), nil))
		for _, node := range []string{"r1", "r6"} {
			i := slices.IndexFunc(p.Nodes, func(n Node) bool { return n.Name == node })
			if got := p.Nodes[i].Headends[0].MSS; got != c.want {
				t.Errorf("%s: at %s SYNs may say %d, want %d", name, node, got, c.want)
			}
		}
		if p.Paths[0].MSS != c.want || p.Paths[1].MSS != c.want {
			t.Errorf("%s: the paths have %d and %d, want %d", name, p.Paths[0].MSS, p.Paths[1].MSS, c.want)
		}
	}
}

// unsized is a domain that declares no MTU.
func unsized(d *model.Domain) {
	for i := range d.Nodes {
		for j := range d.Nodes[i].Interfaces {
			d.Nodes[i].Interfaces[j].MTU = 0
		}
	}
}

func TestCompileRefusesWhatCannotBeBuilt(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*model.Domain)
		want   string
	}{
		"unknown ingress":  {func(d *model.Domain) { d.Chains[0].Ingress = []string{"r9"} }, `node "r9" does not exist`},
		"unknown function": {func(d *model.Domain) { d.Chains[0].Functions = []string{"x"} }, `function "x" does not exist`},
		"function nowhere": {func(d *model.Domain) { d.Functions[0].Node = "r9" }, `node "r9" of function fw does not exist`},
		"no ingress":       {func(d *model.Domain) { d.Chains[0].Ingress = nil }, "no ingress"},
		"no functions":     {func(d *model.Domain) { d.Chains[0].Functions = nil }, "no functions"},
		"too long":         {func(d *model.Domain) { d.Chains[0].Functions = slices.Repeat([]string{"fw"}, 16) }, "16 functions"},
		"there and back":   {func(d *model.Domain) { d.Chains[0].Egress = "r1" }, "is ingress and egress"},
		"reverse of many":  {func(d *model.Domain) { d.Chains[0].Ingress = []string{"r1", "r2"} }, "has no reverse"},
		"keyed-flow":       {func(d *model.Domain) { d.Chains[0].Proof.Scheme = 4 }, "proof scheme Scheme(4) is not known"},
		"keyed-flow through a rewriter": {func(d *model.Domain) {
			d.Chains[0].Proof.Scheme = model.SchemeKeyedFlow
			d.Functions[0].Kind = model.KindUnaware
			d.Functions[0].Proxy = model.Proxy{Local: true, Recognise: model.RecogniseMetadata, Segments: model.SegmentsKeep, Rewrites: true, Cache: 16, Lifetime: time.Second}
		}, "function fw: rewrites addresses or ports, which the proofs of keyed-flow are bound to"},
		"waypoint of a node": {func(d *model.Domain) { d.Chains[0].Waypoints = waypoints(0, "fc00:0:0:2ff::") },
			"waypoint fc00:0:0:2ff:: is within the locator fc00:0:0:200::/56 of node r2"},
		"waypoint elsewhere": {func(d *model.Domain) { d.Chains[0].Waypoints = waypoints(0, "fc00:9::") }, "waypoint fc00:9:: is not within the SID block"},
		"waypoint 0":         {func(d *model.Domain) { d.Chains[0].Waypoints = waypoints(0, "fc00::") }, "is the first /64 of the block"},
		"waypoint nowhere":   {func(d *model.Domain) { d.Chains[0].Waypoints = waypoints(3, "fc00:0:0:f00::") }, "stands before function 4 of 2"},
		"too many waypoints": {func(d *model.Domain) {
			d.Chains[0].Waypoints = slices.Repeat(waypoints(1, "fc00:0:0:f00::"), 14)
		}, "16 functions and waypoints"},
		"lanes": {func(d *model.Domain) {
			d.Chains[0].Both, d.Chains[0].Ingress = false, []string{"r1", "r2"}
			d.Nodes[0].CPUs, d.Nodes[1].CPUs = 4000, 97
		}, "4097 CPUs"},
		"mtu":                   {func(d *model.Domain) { d.Nodes[1].Interfaces[0].MTU = 1280 + 72 + 48 - 1 }, "raise the MTU to 1400"},
		"clamp above what fits": {func(d *model.Domain) { d.Chains[0].Clamp = model.Clamp{On: true, Most: 1521} }, "mss-clamp: 1521 is more than fits: packets of 1580 bytes leave 1520 to TCP"},
		"clamp to what is not known": {func(d *model.Domain) {
			unsized(d)
			d.Chains[0].Clamp.On = true
		}, "mss-clamp: the MTU is not known"},
		"room": {func(d *model.Domain) { d.Nodes[1].Locator = netip.MustParsePrefix("fc00:0:0:200::/64") }, "node r2: its locator fc00:0:0:200::/64 has no SID left for chain web"},
	} {
		t.Run(name, func(t *testing.T) {
			d := paper(model.SchemeKeyed)
			c.change(&d)
			_, err := Compile(d, NewKeyring(random(1), nil))
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v; want %q in it", err, c.want)
			}
		})
	}
	t.Run("just enough MTU", func(t *testing.T) {
		d := paper(model.SchemeKeyed)
		d.Nodes[1].Interfaces[0].MTU = 1280 + 72 + 48
		if p := compile(t, d, NewKeyring(random(1), nil)); p.Paths[0].MTU != 1280 {
			t.Errorf("MTU %d; want 1280", p.Paths[0].MTU)
		}
	})
}

func waypoints(before int, sid string) []model.Waypoint {
	return []model.Waypoint{{Before: before, SID: netip.MustParseAddr(sid)}}
}

// A waypoint is in the segment lists of both directions, and takes no position of
// the proof: the egress has as many shares before it as there are functions.
func TestWaypointsAreVisitedAndNotProven(t *testing.T) {
	d := paper(model.SchemeKeyed)
	d.Chains[0].Waypoints = append(waypoints(1, "fc00:0:0:f00::"), waypoints(2, "fc00:0:0:f01::")...)
	first := compile(t, d, NewKeyring(random(1), nil))
	forward, reverse := first.Paths[0], first.Paths[1]
	if diff := cmp.Diff(addresses("fc00:0:0:200::", "fc00:0:0:f00::", "fc00:0:0:300::", "fc00:0:0:f01::", "fc00:0:0:600::"), forward.Segments(), equal); diff != "" {
		t.Errorf("forward (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(addresses("fc00:0:0:f01::", "fc00:0:0:301::", "fc00:0:0:f00::", "fc00:0:0:201::", "fc00:0:0:100::"), reverse.Segments(), equal); diff != "" {
		t.Errorf("reverse (-want +got):\n%s", diff)
	}
	if want := 1700 - 72 - 5*16; forward.MTU != want {
		t.Errorf("MTU %d; want %d", forward.MTU, want)
	}
	for _, n := range first.Nodes {
		for _, e := range n.Egresses {
			if e.Share.Position != 3 || len(e.Verifier.Keys) != 3 || len(e.Segments) != 5 {
				t.Errorf("%s: egress at position %d with %d keys and %d segments; want 3, 3 and 5", n.Name, e.Share.Position, len(e.Verifier.Keys), len(e.Segments))
			}
		}
	}
	b, err := EncodePaths(first.Paths)
	if err != nil {
		t.Fatal(err)
	}
	again, err := DecodePaths(b)
	if err != nil {
		t.Fatal(err)
	}
	// Read from a file again, it is the same path: nothing is new.
	second := compile(t, d, NewKeyring(broken{}, again))
	if diff := cmp.Diff(first.Paths, second.Paths, equal); diff != "" {
		t.Errorf("compiled again (-first +second):\n%s", diff)
	}
	// An egress takes one segment list in each epoch, so another waypoint makes a new one.
	d.Chains[0].Waypoints[0].SID = netip.MustParseAddr("fc00:0:0:f02::")
	for i, p := range compile(t, d, NewKeyring(random(2), again)).Paths {
		if want := first.Paths[i].Epoch + 1; p.Epoch != want || cmp.Equal(p.Shares, first.Paths[i].Shares) {
			t.Errorf("%s with another waypoint has epoch %d; want %d, and other shares", p.Direction, p.Epoch, want)
		}
	}
	forward.Hops[2].Waypoints = addresses("fc00:0:0:200::")
	if _, err := EncodePaths([]Path{forward}); err == nil || !strings.Contains(err.Error(), "fc00:0:0:200:: is the SID of a hop") {
		t.Errorf("a waypoint that is a hop: %v", err)
	}
}

func TestInstance0OfTheBlockIsNoSID(t *testing.T) {
	d := paper(model.SchemeKeyed)
	d.Nodes[1].Locator = netip.MustParsePrefix("fc00::/63")
	if _, err := Compile(d, NewKeyring(random(1), nil)); err == nil {
		t.Error("two visits fit into instances 0 and 1; want an error")
	}
	d.Chains[0].Both = false
	p := compile(t, d, NewKeyring(random(1), nil))
	if want := netip.MustParseAddr("fc00:0:0:1::"); p.Paths[0].Hops[1].SID != want {
		t.Errorf("SID %s; want %s", p.Paths[0].Hops[1].SID, want)
	}
}

// The four forms of the same chain: what its headend sends, what that leaves to
// packets, and that another form is another epoch.
func TestEncapsulationOfAChain(t *testing.T) {
	d := paper(model.SchemeKeyed)
	d.Chains[0].Functions = []string{"fw", "dpi", "fw", "dpi", "fw", "dpi"}
	last := compile(t, d, NewKeyring(random(1), nil)).Paths
	sids := addresses("fc00:0:0:200::", "fc00:0:0:300::", "fc00:0:0:201::", "fc00:0:0:301::", "fc00:0:0:202::", "fc00:0:0:302::", "fc00:0:0:600::")
	containers := addresses("fc00:0:0:200:300:201:301:202", "fc00:0:0:302:600::")
	for i, c := range []struct {
		is             model.Encapsulation
		whole, carried []netip.Addr
	}{
		{model.Encapsulation{Reduced: true}, sids, sids[1:]},
		{model.Encapsulation{SIDs: model.SIDsCompressed}, containers, containers},
		{model.Encapsulation{SIDs: model.SIDsCompressed, Reduced: true}, containers, containers[1:]},
		{model.Encapsulation{}, sids, sids},
	} {
		d.Chains[0].Encapsulation = c.is
		out := compile(t, d, NewKeyring(random(uint64(i)+2), last))
		p := out.Paths[0]
		if diff := cmp.Diff([][]netip.Addr{sids, c.whole, c.carried}, [][]netip.Addr{p.SIDs(), p.Segments(), p.Carried()}, equal); diff != "" {
			t.Errorf("%s: SIDs, segments, carried (-want +got):\n%s", c.is, diff)
		}
		if want := 1700 - 72 - 16*len(c.carried); p.MTU != want {
			t.Errorf("%s: MTU %d; want %d", c.is, p.MTU, want)
		}
		if want := last[0].Epoch + 1; p.Epoch != want || slices.Equal(p.Verifier.Keys, last[0].Verifier.Keys) {
			t.Errorf("%s: epoch %d; want %d, with fresh keys", c.is, p.Epoch, want)
		}
		for _, n := range out.Nodes {
			for _, id := range partsOf(n) {
				if id.Encapsulation != c.is {
					t.Errorf("%s: %s has %s", c.is, n.Name, id.Encapsulation)
				}
			}
			b, err := EncodeNode(n)
			if err != nil {
				t.Fatal(err)
			}
			read, err := DecodeNode(b)
			if diff := cmp.Diff(partsOf(n), partsOf(read)); err != nil || diff != "" {
				t.Errorf("%s: the plan of %s is read otherwise: %v\n%s", c.is, n.Name, err, diff)
			}
		}
		last = out.Paths
	}
}

func partsOf(n Node) []PathID {
	var ids []PathID
	for _, h := range n.Headends {
		ids = append(ids, h.PathID)
	}
	for _, e := range n.Endpoints {
		ids = append(ids, e.PathID)
	}
	for _, e := range n.Egresses {
		ids = append(ids, e.PathID)
	}
	return ids
}
