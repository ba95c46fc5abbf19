package plan

import (
	"bytes"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/pot"
)

func TestPlansSurviveTheirFiles(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p, err := Compile(domains().Draw(t, "domain"), NewKeyring(random(rapid.Uint64().Draw(t, "seed")), nil))
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range p.Nodes {
			b, err := EncodeNode(n)
			if err != nil {
				t.Fatal(err)
			}
			got, err := DecodeNode(b)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(n, got, equal, secrets); diff != "" {
				t.Fatalf("node %s (-before +after):\n%s", n.Name, diff)
			}
		}
		b, err := EncodePaths(p.Paths)
		if err != nil {
			t.Fatal(err)
		}
		got, err := DecodePaths(b)
		if err != nil {
			t.Fatal(err)
		}
		if len(p.Paths) > 0 { // else nil and empty differ
			if diff := cmp.Diff(p.Paths, got, equal, secrets); diff != "" {
				t.Fatalf("paths (-before +after):\n%s", diff)
			}
		}
	})
}

// node compiles the paper's domain and returns a node's plan.
func node(t testing.TB, scheme model.Scheme, name string) Node {
	t.Helper()
	d := compile(t, paper(scheme), NewKeyring(random(1), nil))
	return d.Nodes[slices.IndexFunc(d.Nodes, func(n Node) bool { return n.Name == name })]
}

// unchecked encodes what EncodeNode would refuse.
func unchecked(t testing.TB, n Node) []byte {
	t.Helper()
	b, err := encode(nodeToFile(n))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestHeadendMaySendAnySIDsOfTheBlock(t *testing.T) {
	n := node(t, model.SchemeKeyed, "r1")
	n.Headends[0].Segments = addresses("fc00:0:0:400::", "fc00:0:0:500::", "fc00:0:0:600::")
	b, err := EncodeNode(n)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := DecodeNode(b); err != nil {
		t.Errorf("a headend whose list is wrong does not load: %v", err)
	}
}

func TestNodeRefusesAPlanThatDoesNotHold(t *testing.T) {
	const notPrime = 1<<62 + 1 // divisible by 5
	long := slices.Repeat(addresses("fc00:0:0:200::"), model.SegmentsMax+1)
	for _, c := range []struct {
		name   string
		scheme model.Scheme
		node   string
		change func(*Node)
		want   string
	}{
		{"name", model.SchemeKeyed, "r1", func(n *Node) { n.Name = "../r1" }, `name "../r1" has the character '.'`},
		{"block", model.SchemeKeyed, "r1", func(n *Node) { n.Block = netip.MustParsePrefix("fc00::/40") }, "is a /40; the SID block is a /48"},
		{"locator", model.SchemeKeyed, "r1", func(n *Node) { n.Locator = netip.MustParsePrefix("fc00:1::/56") }, "is not within the SID block"},
		{"routes of SIDs", model.SchemeKeyed, "r1", func(n *Node) {
			n.Locator, n.Advertise = netip.MustParsePrefix("fc00:0:0:100::/64"), model.AdvertiseSIDs
		}, "advertise sids needs a locator of /63 or shorter"},
		{"address in block", model.SchemeKeyed, "r1", func(n *Node) { n.Address = netip.MustParseAddr("fc00::1") }, "a node's address is outside"},
		{"IPv4 address", model.SchemeKeyed, "r1", func(n *Node) { n.Address = netip.MustParseAddr("192.0.2.1") }, "is an IPv4 address"},
		{"interface name", model.SchemeKeyed, "r1", func(n *Node) { n.Interfaces[0].Name = "a/b" }, "interfaces[0]: name"},
		{"interface twice", model.SchemeKeyed, "r1", func(n *Node) { n.Interfaces[1].Name = n.Interfaces[0].Name }, "names are unique"},
		{"core interface's guard", model.SchemeKeyed, "r1", func(n *Node) { n.Interfaces[0].Role, n.Interfaces[0].Guard = model.RoleCore, model.GuardAudit }, "guard audit: only an edge interface has one"},
		{"interface mtu", model.SchemeKeyed, "r1", func(n *Node) { n.Interfaces[0].MTU = 1279 }, "mtu 1279 is not from 1280"},
		{"path 0", model.SchemeKeyed, "r1", func(n *Node) { n.Headends[0].Path = 0 }, "path is 0"},
		{"keyed-flow", model.SchemeKeyed, "r1", func(n *Node) { n.Headends[0].Scheme = model.SchemeKeyedFlow }, "has no key of the binding"},
		{"keyed with a binding", model.SchemeKeyedFlow, "r1", func(n *Node) { n.Headends[0].Scheme = model.SchemeKeyed }, "has more than a key"},

		{"one id, two chains", model.SchemeKeyed, "r1", func(n *Node) { n.Egresses[0].Path = n.Headends[0].Path }, "is that of chain web, forward, too"},
		{"headend twice", model.SchemeKeyed, "r1", func(n *Node) { n.Headends = append(n.Headends, n.Headends[0]) }, "a headend has one epoch"},
		{"match in block", model.SchemeKeyed, "r1", func(n *Node) { n.Headends[0].Match.Source = netip.MustParsePrefix("fc00::/64") }, "overlaps the SID block"},
		{"match host bits", model.SchemeKeyed, "r1", func(n *Node) { n.Headends[0].Match.Source = netip.MustParsePrefix("fc00:7::1/64") }, "has bits set"},
		{"same match", model.SchemeKeyed, "r1", func(n *Node) {
			h := n.Headends[0]
			h.Path, h.Chain = 99, "other"
			n.Headends = append(n.Headends, h)
		}, "has the same"},
		{"no segments", model.SchemeKeyed, "r1", func(n *Node) { n.Headends[0].Segments = nil }, "has 0 entries"},
		{"17 segments", model.SchemeKeyed, "r1", func(n *Node) { n.Headends[0].Segments = long }, "has 17 entries"},
		{"segment outside", model.SchemeKeyed, "r1", func(n *Node) { n.Headends[0].Segments = addresses("fc00:2::") }, "segments[0]: fc00:2:: is not within"},
		{"segment with argument", model.SchemeKeyed, "r1", func(n *Node) { n.Headends[0].Segments = addresses("fc00:0:0:200:0:1::") }, "is not a SID with an argument of 32 bits or none"},
		{"container where a SID should be", model.SchemeKeyed, "r1", func(n *Node) { n.Headends[0].Segments = addresses("fc00:0:0:200:300:600::") }, "is not a SID with an argument of 32 bits or none"},
		{"container with a gap", model.SchemeKeyed, "r1", func(n *Node) {
			n.Headends[0].Encapsulation.SIDs = model.SIDsCompressed
			n.Headends[0].Segments = addresses("fc00:0:0:200:0:600::")
		}, "zero ends a container"},
		{"container without a C-SID", model.SchemeKeyed, "r1", func(n *Node) {
			n.Headends[0].Encapsulation.SIDs = model.SIDsCompressed
			n.Headends[0].Segments = addresses("fc00::")
		}, "zero ends a container"},
		{"egress not last in its container", model.SchemeKeyed, "r6", func(n *Node) {
			n.Egresses[0].Encapsulation.SIDs = model.SIDsCompressed
			n.Egresses[0].Segments = addresses("fc00:0:0:200:600:300::")
		}, "end with fc00:0:0:300::; the last one is the egress's own"},
		{"egress behind fewer C-SIDs", model.SchemeKeyed, "r6", func(n *Node) {
			n.Egresses[0].Encapsulation.SIDs = model.SIDsCompressed
			n.Egresses[0].Segments = addresses("fc00:0:0:300:600::")
		}, "behind 2 segments it is from 1 to 2"},
		{"no lanes", model.SchemeKeyed, "r1", func(n *Node) { n.Headends[0].Lanes = 0 }, "lanes: 0"},
		{"lanes beyond", model.SchemeKeyed, "r1", func(n *Node) { n.Headends[0].Lane = 4096 - 63 }, "lanes: 64 from 4033"},
		{"headend mtu", model.SchemeKeyed, "r1", func(n *Node) { n.Headends[0].MTU = 70000 }, "mtu 70000"},
		{"headend mss", model.SchemeKeyed, "r1", func(n *Node) { n.Headends[0].MSS = 1521 }, "mss-clamp 1521 is not from 1220 to 1520"},
		{"headend small mss", model.SchemeKeyed, "r1", func(n *Node) { n.Headends[0].MSS = 1219 }, "mss-clamp 1219 is not from"},
		{"headend mss without mtu", model.SchemeKeyed, "r1", func(n *Node) { n.Headends[0].MTU, n.Headends[0].MSS = 0, 65496 }, "is not from 1220 to 65495"},
		{"headend position", model.SchemeKeyed, "r1", func(n *Node) { n.Headends[0].Share.Position = 1 }, "a headend's is 0"},
		{"headend without key", model.SchemeKeyed, "r1", func(n *Node) { n.Headends[0].Share.Key = pot.Key{} }, "share: has no key"},
		{"key and polynomial", model.SchemeKeyed, "r1", func(n *Node) { n.Headends[0].Share.Polynomial.Prime = 7 }, "has more than a key"},
		{"endpoint SID elsewhere", model.SchemeKeyed, "r2", func(n *Node) { n.Endpoints[0].SID = netip.MustParseAddr("fc00:0:0:300::") }, "is not within the node's locator"},
		{"endpoint SID with argument", model.SchemeKeyed, "r2", func(n *Node) { n.Endpoints[0].SID = netip.MustParseAddr("fc00:0:0:200::1") }, "has an argument"},
		{"endpoint twice", model.SchemeKeyed, "r2", func(n *Node) { n.Endpoints = append(n.Endpoints, n.Endpoints[0]) }, "is given twice"},
		{"endpoint at 0", model.SchemeKeyed, "r2", func(n *Node) { n.Endpoints[0].Share.Position = 0 }, "a function's is from 1 to 15"},
		{"endpoint at 16", model.SchemeKeyed, "r2", func(n *Node) { n.Endpoints[0].Share.Position = 16 }, "a function's is from 1 to 15"},
		{"endpoint's function", model.SchemeKeyed, "r2", func(n *Node) { n.Endpoints[0].Function = "" }, `function "" is empty`},
		{"endpoint and egress", model.SchemeKeyed, "r6", func(n *Node) {
			e := n.Egresses[0]
			n.Endpoints = append(n.Endpoints, Endpoint{PathID: e.PathID, SID: e.SID, Function: "x", Sources: e.Sources, Share: pot.Share{Position: 1, Key: pot.Key{1}}})
		}, "of a function and of an egress"},
		{"egress not last", model.SchemeKeyed, "r6", func(n *Node) { slices.Reverse(n.Egresses[0].Segments) }, "the last one is the egress's own"},
		{"egress position", model.SchemeKeyed, "r6", func(n *Node) { n.Egresses[0].Segments = n.Egresses[0].Segments[1:] }, "has position 3; behind 2 segments it is from 1 to 2"},
		{"egress key", model.SchemeKeyed, "r6", func(n *Node) { n.Egresses[0].Share.Key = pot.Key{1} }, "an egress does not stamp"},
		{"too few keys", model.SchemeKeyed, "r6", func(n *Node) { n.Egresses[0].Verifier.Keys = n.Egresses[0].Verifier.Keys[1:] }, "the verifier has 2 keys"},
		{"zero key", model.SchemeKeyed, "r6", func(n *Node) { n.Egresses[0].Verifier.Keys[1] = pot.Key{} }, "a key that is zero"},
		{"secret beside keys", model.SchemeKeyed, "r6", func(n *Node) { n.Egresses[0].Verifier.Secret = 1 }, "has a secret of polynomials"},
		{"prime too big", model.SchemeOPoT, "r2", func(n *Node) { n.Endpoints[0].Share.Polynomial.Prime = 1<<63 + 29 }, "not below 2^63"},
		{"not prime", model.SchemeOPoT, "r2", func(n *Node) { n.Endpoints[0].Share.Polynomial.Prime = notPrime }, "not a prime"},
		{"prime too small", model.SchemeOPoT, "r2", func(n *Node) {
			n.Endpoints[0].Share.Polynomial = pot.Polynomial{Prime: 53, Share: 17, LPC: 48, Public: 1}
		}, "below 2^60"},
		{"share not below", model.SchemeOPoT, "r2", func(n *Node) { n.Endpoints[0].Share.Polynomial.Share = n.Endpoints[0].Share.Polynomial.Prime }, "secret share is not below"},
		{"public not below", model.SchemeOPoT, "r2", func(n *Node) { n.Endpoints[0].Share.Polynomial.Public = 1<<64 - 1 }, "public polynomial is not below"},
		{"LPC not below", model.SchemeOPoT, "r2", func(n *Node) { n.Endpoints[0].Share.Polynomial.LPC = 1<<64 - 1 }, "LPC is not below"},
		{"LPC 0", model.SchemeOPoT, "r2", func(n *Node) { n.Endpoints[0].Share.Polynomial.LPC = 0 }, "would add nothing"},
		{"polynomial and key", model.SchemeOPoT, "r2", func(n *Node) { n.Endpoints[0].Share.Key = pot.Key{1} }, "scheme opot needs none"},
		{"mask under pot", model.SchemePoT, "r2", func(n *Node) { n.Endpoints[0].Share.Polynomial.Up.CML = 1 }, "scheme pot has none"},
		{"mask before the headend", model.SchemeOPoT, "r1", func(n *Node) { n.Headends[0].Share.Polynomial.Up.RND = 1 }, "before the headend"},
		{"mask behind the egress", model.SchemeOPoT, "r6", func(n *Node) { n.Egresses[0].Share.Polynomial.Down.RND = 1 }, "behind the egress"},
		{"secret not below", model.SchemeOPoT, "r6", func(n *Node) { n.Egresses[0].Verifier.Secret = 1<<64 - 1 }, "validator key is not below"},
		{"keys beside secret", model.SchemeOPoT, "r6", func(n *Node) { n.Egresses[0].Verifier.Keys = []pot.Key{{1}} }, "verifier: has keys"},
	} {
		t.Run(c.name, func(t *testing.T) {
			n := node(t, c.scheme, c.node)
			if err := n.check(); err != nil {
				t.Fatalf("refused before the change: %v", err)
			}
			c.change(&n)
			_, err := DecodeNode(unchecked(t, n))
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("read with error %v; want %q in it", err, c.want)
			}
			if _, err := EncodeNode(n); err == nil {
				t.Error("written without error")
			}
		})
	}
}

func TestNodeRefusesFunctionsThatDoNotHold(t *testing.T) {
	r3 := func() Node { return compile(t, functions(), NewKeyring(random(1), nil)).Nodes[2] }
	again := func(n *Node, i int, change func(*Proxy)) {
		x := n.Proxies[i]
		x.Function = "other"
		change(&x)
		n.Proxies = append(n.Proxies, x)
	}
	for name, c := range map[string]struct {
		change func(*Node)
		want   string
	}{
		"name":             {func(n *Node) { n.Proxies[0].Function = "X" }, `function "X" has the character`},
		"twice":            {func(n *Node) { again(n, 1, func(x *Proxy) { x.Function = "nat" }) }, "a function has one proxy"},
		"attachment":       {func(n *Node) { n.Proxies[0].To = "" }, `proxies[0] (function dpi): attach: to "" is empty`},
		"local content":    {func(n *Node) { n.Proxies[1].Recognise = model.RecogniseContent }, "cannot be combined with attach: local"},
		"local cut":        {func(n *Node) { n.Proxies[1].Segments = model.SegmentsCut }, "cannot be combined with recognition by metadata"},
		"content rewrites": {func(n *Node) { n.Proxies[0].Rewrites = true }, "cannot be combined with recognise: content"},
		"no cache":         {func(n *Node) { n.Proxies[0].Cache = 0 }, "keeps no header"},
		"no lifetime":      {func(n *Node) { n.Proxies[0].Lifetime = 0 }, "lifetime: 0s is not from"},
		"node's interface": {func(n *Node) { n.Proxies[0].To = "r3-r2" }, `interface "r3-r2" is that of the node already`},
		"to of another":    {func(n *Node) { again(n, 0, func(x *Proxy) { x.From = "free" }) }, `interface "dpi-to" is that of dpi already`},
		"from of another":  {func(n *Node) { again(n, 0, func(x *Proxy) { x.To = "free" }) }, `interface "dpi-from" is that of dpi already`},
		"needless match":   {func(n *Node) { n.Proxies[0].Matches = n.Proxies[1].Matches }, "only a local function's"},
		"bad match": {func(n *Node) {
			n.Proxies[1].Matches[0].Destination = netip.MustParsePrefix("fc00::/64")
		}, "overlaps the SID block"},
		"match twice": {func(n *Node) { m := n.Proxies[1].Matches; m[0] = m[1] }, "is given twice"},
		"match of an egress": {func(n *Node) {
			e := compile(t, functions(), NewKeyring(random(1), nil)).Nodes[3].Egresses[0]
			e.SID = netip.MustParseAddr("fc00:0:0:3ff::")
			e.Segments[len(e.Segments)-1] = e.SID
			n.Egresses = append(n.Egresses, e)
		}, "is taken by chain web, forward, too, which ends here"},
		"End with a proxy": {func(n *Node) { n.Endpoints[0].Behaviour = model.BehaviourEnd }, "a function has a proxy if and only if"},
		"End.AD without":   {func(n *Node) { n.Proxies = n.Proxies[1:] }, "a function has a proxy if and only if"},
		"caches":           {func(n *Node) { again(n, 1, func(x *Proxy) { x.Cache = model.SlotsMax }) }, "keeps 75535 headers"},
	} {
		t.Run(name, func(t *testing.T) {
			n := r3()
			if err := n.check(); err != nil {
				t.Fatalf("refused before the change: %v", err)
			}
			c.change(&n)
			_, err := DecodeNode(unchecked(t, n))
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("read with error %v; want %q in it", err, c.want)
			}
			if _, err := EncodeNode(n); err == nil {
				t.Error("written without error")
			}
		})
	}
}

func TestControllerRefusesPathsThatDoNotHold(t *testing.T) {
	for _, c := range []struct {
		name   string
		scheme model.Scheme
		change func([]Path)
		want   string
	}{
		{"twice", model.SchemeKeyed, func(p []Path) { p[1] = p[0] }, "is given already"},
		{"hop missing", model.SchemeKeyed, func(p []Path) { p[0].Hops = p[0].Hops[:1]; p[0].Shares = p[0].Shares[:1] }, "has 1 hops"},
		{"foreign headend", model.SchemeKeyed, func(p []Path) { p[0].Ingress[0].Node = "r9" }, "does not start with r1"},
		{"lane shared", model.SchemeKeyed, func(p []Path) { p[0].Ingress = slices.Repeat(p[0].Ingress, 2) }, "of another headend too"},
		{"headend's SID", model.SchemeKeyed, func(p []Path) { p[0].Hops[0].SID = p[0].Hops[1].SID }, "the headend has none"},
		{"SID twice", model.SchemeKeyed, func(p []Path) { p[0].Hops[2].SID = p[0].Hops[1].SID }, "of another hop too"},
		{"SID with argument", model.SchemeKeyed, func(p []Path) { p[0].Hops[1].SID = p[0].Hops[1].SID.Next() }, "lower 64 bits zero"},
		{"waypoint with argument", model.SchemeKeyed, func(p []Path) { p[0].Hops[1].Waypoints = []netip.Addr{netip.MustParseAddr("fc00:0:0:f00::1")} }, "lower 64 bits"},
		{"function of the egress", model.SchemeKeyed, func(p []Path) { p[0].Hops[3].Function = "x" }, "have none"},
		{"positions swapped", model.SchemeKeyed, func(p []Path) { s := p[0].Shares; s[1], s[2] = s[2], s[1] }, "has position 2; expect 1"},
		{"foreign key", model.SchemeKeyed, func(p []Path) { p[0].Shares[1].Key = p[1].Shares[1].Key }, "not of one path"},
		{"foreign share", model.SchemeOPoT, func(p []Path) { p[0].Shares[1].Polynomial.Share ^= 1 }, "not of one path"},
		{"foreign mask", model.SchemeOPoT, func(p []Path) { p[0].Shares[1].Polynomial.Up.CML ^= 1 }, "not of one path"},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := compile(t, paper(c.scheme), NewKeyring(random(1), nil))
			c.change(d.Paths)
			_, err := EncodePaths(d.Paths)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("written with error %v; want %q in it", err, c.want)
			}
		})
	}
}

func TestFilesOfAnotherKindOrShapeAreRefused(t *testing.T) {
	good := string(unchecked(t, node(t, model.SchemeOPoT, "r1")))
	function := string(unchecked(t, compile(t, functions(), NewKeyring(random(1), nil)).Nodes[1]))
	paths, err := EncodePaths(compile(t, paper(model.SchemeKeyed), NewKeyring(random(1), nil)).Paths)
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct{ text, want string }{
		"empty":         {"", "unexpected end"},
		"paths":         {string(paths), `its kind is "paths"`},
		"version":       {strings.Replace(good, `"version": 1`, `"version": 2`, 1), "its version is 2"},
		"unknown field": {strings.Replace(good, `"name"`, `"nickname": "x", "name"`, 1), `unknown field "nickname"`},
		"nested field":  {strings.Replace(good, `"lane"`, `"lune": 1, "lane"`, 1), `unknown field "lune"`},
		"two values":    {good + "{}", "after top-level value"},
		"decimal prime": {strings.Replace(good, `"prime": "0x`, `"prime": "`, 1), "not 0x and 16"},
		"short mask":    {strings.Replace(good, `"down": "`, `"down": "0`, 1), "not 32 hexadecimal digits"},
		"recognise":     {strings.Replace(function, `"recognise": "content"`, `"recognise": "mark"`, 1), `"mark" is not a setting of recognise`},
		"lifetime":      {strings.Replace(function, `"lifetime": "1s"`, `"lifetime": "1"`, 1), `"1" is not a time with its unit`},
		"proxy's field": {strings.Replace(function, `"lifetime"`, `"life": 1, "lifetime"`, 1), `unknown field "life"`},
		"scheme":        {strings.Replace(good, `"scheme": "opot"`, `"scheme": "rot13"`, 1), `"rot13" is not a scheme`},
	} {
		t.Run(name, func(t *testing.T) {
			if c.text == good || c.text == function {
				t.Fatal("the change changed nothing")
			}
			if _, err := DecodeNode([]byte(c.text)); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v; want %q in it", err, c.want)
			}
		})
	}
	if _, err := DecodePaths([]byte(good)); err == nil {
		t.Error("a node's plan was read as paths")
	}
}

func TestErrorsAndPrintsShowNoKey(t *testing.T) {
	n := node(t, model.SchemeKeyed, "r6")
	key := fmt.Sprintf("%x", n.Egresses[0].Verifier.Keys[0][:])
	text := string(unchecked(t, n))
	if !strings.Contains(text, key) {
		t.Fatal("the file does not hold the key that is looked for")
	}
	_, err := DecodeNode([]byte(strings.Replace(text, key, key[:31]+"x", 1)))
	if err == nil || strings.Contains(err.Error(), key[:16]) {
		t.Errorf("error %v; want one without the key", err)
	}
	for _, print := range []string{fmt.Sprintf("%v", n), fmt.Sprintf("%+v", n), fmt.Sprintf("%x", n.Egresses[0].Verifier), fmt.Sprintf("%#v", keyFile(n.Egresses[0].Verifier.Keys[0]))} {
		if strings.Contains(print, key) || strings.Contains(print, fmt.Sprint(n.Egresses[0].Verifier.Keys[0][:])) {
			t.Errorf("prints the key: %s", print)
		}
	}
}

func FuzzDecodeNode(f *testing.F) {
	for _, s := range []model.Scheme{model.SchemePoT, model.SchemeOPoT, model.SchemeKeyed} {
		for _, n := range compile(f, paper(s), NewKeyring(random(1), nil)).Nodes {
			f.Add(unchecked(f, n))
		}
	}
	for _, n := range compile(f, functions(), NewKeyring(random(1), nil)).Nodes {
		f.Add(unchecked(f, n))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		n, err := DecodeNode(b)
		if err != nil {
			return
		}
		first, err := EncodeNode(n)
		if err != nil {
			t.Fatalf("what was read is not written: %v", err)
		}
		again, err := DecodeNode(first)
		if err != nil {
			t.Fatalf("what was written is not read: %v", err)
		}
		if second := unchecked(t, again); !bytes.Equal(first, second) {
			t.Fatalf("written twice, it differs:\n%s\n%s", first, second)
		}
	})
}

func FuzzDecodePaths(f *testing.F) {
	for _, s := range []model.Scheme{model.SchemePoT, model.SchemeOPoT, model.SchemeKeyed} {
		b, err := EncodePaths(compile(f, paper(s), NewKeyring(random(1), nil)).Paths)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if paths, err := DecodePaths(b); err == nil {
			if _, err := EncodePaths(paths); err != nil {
				t.Fatalf("what was read is not written: %v", err)
			}
		}
	})
}
