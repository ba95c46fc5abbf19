package e2e

import (
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/netfilter"
	"github.com/waystamp/waystamp/internal/plan"
)

// The gateway's network with a DPI that reads payload: the chain deep is sealed from the gateway to it, and from
// there to the origin.
func sealedDomain(t *testing.T) string { return sealedDomainAt(t, "[fc00:8::2]:443") }

func sealedDomainAt(t *testing.T, address string) string {
	t.Helper()
	text := gatewayDomain(t, address)
	for _, c := range [][2]string{
		{"{name: dpi, node: r3, kind: forward}", "{name: dpi, node: r3, kind: stream, intrusive: true, run: [" +
			"{match: {literals: [seal-marker], then: mark}}, {match: {literals: [seal-evil], then: reset}}]}"},
		{"functions: [fw, dpi], egress: r6, direction: both,", "functions: [fw, dpi], egress: r6, direction: both, seal: true,"},
	} {
		if !strings.Contains(text, c[0]) {
			t.Fatalf("the domain has no %q", c[0])
		}
		text = strings.Replace(text, c[0], c[1], 1)
	}
	return text
}

const sealMarker = "seal-marker-in-a-request"

// Who reads payload on a sealed chain is the function that has to, and nobody else.
func TestASealedChainIsReadByItsFunctionAlone(t *testing.T) {
	t.Parallel()
	bothTexts(t, func(t *testing.T, carried func(string) string) { sealedChainIsRead(t, carried(sealedDomain(t))) })
}

func sealedChainIsRead(t *testing.T, domain string) {
	s := newShopOf(t, domain, "[fc00:8::2]:443")
	dpi := func() *api.Stream {
		t.Helper()
		f, err := s.function("r3", "dpi")
		must(t, err)
		return f.Stream
	}
	// All that comes in by any interface of any machine.
	type at struct{ place, link string }
	readers := map[at]*recorder[int]{}
	for _, place := range []string{"r1", "r2", "r3", "r4", "r5", "r6", "h1", "h2"} {
		links, err := s.net(place).Links()
		must(t, err)
		for _, l := range links {
			if l.Name == "lo" {
				continue
			}
			r := &recorder[int]{}
			r.start(s.world, place, l.Name, 64<<10, func(frame []byte) (int, bool) { return len(frame), bytes.Contains(frame, []byte("seal-marker")) })
			readers[at{place, l.Name}] = r
		}
	}
	frames := s.counting(s.part("deep", "forward, from gateway to dpi"))
	for _, version := range []string{"1.1", "2"} {
		if got, want := s.curl("alice.pem", version, "/files/"+sealMarker), "hello|5 200 1\n"; got != want {
			t.Errorf("curl prints %q; want %q", got, want)
		}
		if got, want := s.post("alice.pem", version, "/files/form", sealMarker), "hello|200\n"; got != want {
			t.Errorf("curl prints %q for what it posts; want %q", got, want)
		}
	}
	if frames().frames() == 0 {
		t.Error("nothing went by the sealed part")
	}
	n := dpi()
	if n.Ended+n.Now == 0 || n.PartMismatch+n.Unsealed+n.Peer+n.NoKey != 0 || n.ToServer.In == 0 {
		t.Errorf("dpi has counted %+v", n)
	}
	// What dpi refuses ends there.
	s.mu.Lock()
	before := len(s.seen)
	s.mu.Unlock()
	if got := s.curl("alice.pem", "1.1", "/files/seal-evil"); !strings.Contains(got, " 502 ") {
		t.Errorf("curl prints %q for what dpi refuses; want 502", got)
	}
	s.mu.Lock()
	if after := len(s.seen); after != before {
		t.Errorf("the origin has got %q", s.seen[before:])
	}
	s.mu.Unlock()
	if n := dpi(); n.ResetByFunction == 0 {
		t.Errorf("dpi has counted %+v; want a connection that it has reset", n)
	}
	if got, want := s.curl("alice.pem", "1.1", "/files/large"), "|20000000 200 1\n"; got != want {
		t.Errorf("curl prints %q for 20 MB; want %q", got, want)
	}
	if got, want := s.curl("alice.pem", "1.1", "/status"), "hello|5 200 1\n"; got != want {
		t.Errorf("curl prints %q by the other chain; want %q", got, want)
	}
	for where, r := range readers {
		if found := r.soFar(); len(found) > 0 {
			t.Errorf("%d frames that came in by %s of %s have the marker in clear", len(found), where.link, where.place)
		}
	}
	// The same search finds what is in clear.
	must(t, s.Do("h1", func() error {
		c, err := net.Dial("udp", "[fc00:8::2]:9")
		if err != nil {
			return err
		}
		_, err = c.Write([]byte(sealMarker))
		return errors.Join(err, c.Close())
	}))
	eventually(t, func() error {
		if len(readers[at{"r1", "r1-h1"}].soFar()) == 0 {
			return errors.New("a datagram in clear was not found at r1-h1; that nothing else was shows nothing")
		}
		return nil
	})
}

// An origin that is not who the service names is not spoken with: the client sees 502, and the gateway's log says why.
func TestTheLastEndHoldsTheOriginToItsName(t *testing.T) {
	t.Parallel()
	s := newShopOf(t, strings.Replace(sealedDomain(t), "name: shop.internal", "name: other.internal", 1), "[fc00:8::2]:443")
	if got := s.curl("alice.pem", "1.1", "/files/a"); !strings.Contains(got, " 502 ") {
		t.Errorf("curl prints %q; want 502", got)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.seen) != 0 {
		t.Errorf("the origin has got %q", s.seen)
	}
	m, err := s.Member("r1")
	must(t, err)
	text, err := os.ReadFile(filepath.Join(m.Agent.RunDir, "gateway-audit.log"))
	must(t, err)
	if !bytes.Contains(text, []byte("origin-certificate")) {
		t.Errorf("the gateway's audit log does not say why:\n%s", text)
	}
}

// An end of another key than the plan names is refused.
func TestAnEndOfAnotherKeyIsRefused(t *testing.T) {
	t.Parallel()
	s := newShopOf(t, sealedDomain(t), "[fc00:8::2]:443")
	i := slices.IndexFunc(s.plan.Nodes, func(n plan.Node) bool { return n.Name == "r1" })
	n := s.plan.Nodes[i]
	n.Headends = slices.Clone(n.Headends)
	j := slices.IndexFunc(n.Headends, func(h plan.Headend) bool { return h.Seal != nil })
	other := *n.Headends[j].Seal
	other.Key[0] ^= 1
	n.Headends[j].Seal = &other
	s.follow(n)
	eventually(t, func() error {
		got := s.curl("alice.pem", "1.1", "/files/a")
		f, err := s.function("r3", "dpi")
		if err == nil && (!strings.Contains(got, " 502 ") || f.Stream.Peer == 0) {
			err = fmt.Errorf("curl prints %q, and dpi has refused %d", got, f.Stream.Peer)
		}
		return err
	})
	if got, want := s.curl("alice.pem", "1.1", "/status"), "hello|5 200 1\n"; got != want {
		t.Errorf("curl prints %q by the other chain; want %q", got, want)
	}
}

// plainDomain is sealedDomain with functions that know nothing of seals.
func plainDomain(t *testing.T, address string, functions map[string]string, made string) string {
	t.Helper()
	text := sealedDomainAt(t, address)
	lines := strings.Split(text, "\n")
	for name, to := range functions {
		i := slices.IndexFunc(lines, func(l string) bool { return strings.HasPrefix(l, "  - {name: "+name+", ") })
		if i < 0 {
			t.Fatalf("the domain has no function %s", name)
		}
		lines[i] = "  - {name: " + name + ", " + to + "}"
	}
	return strings.Join(lines, "\n") + "\n  functions:\n" + made
}

// attachedTo are the node's interfaces to a function of kind netfilter, and from it.
func (s *shop) attachedTo(function string) (to, from string) {
	a := model.FilterAttached(function)
	return a.To, a.From
}

// record keeps the frames that come in anywhere, by any interface of any machine, and have the marker in clear.
func (s *shop) record(places ...string) map[string]*recorder[int] {
	s.t.Helper()
	readers := map[string]*recorder[int]{}
	for _, place := range places {
		links, err := s.net(place).Links()
		must(s.t, err)
		for _, l := range links {
			if l.Name == "lo" {
				continue
			}
			r := &recorder[int]{}
			r.start(s.world, place, l.Name, 64<<10, func(frame []byte) (int, bool) { return len(frame), bytes.Contains(frame, []byte("seal-marker")) })
			readers[place+" "+l.Name] = r
		}
	}
	return readers
}

// A firewall of nftables that routes, and knows nothing of all this, reads requests, and stops one. The
// marker is on its own links and nowhere else.
func TestAFunctionThatKnowsNothingOfSealsReadsItsConnections(t *testing.T) {
	t.Parallel()
	text := plainDomain(t, "[fc00:8::2]:443", map[string]string{"dpi": `node: r3, kind: unaware, intrusive: true, attach: {to: dpi-to, from: dpi-from, via: "fe80::2"}`}, `
    - name: dpi
      kind: nftables
      ruleset: |
        table ip6 dpi {
          chain forward {
            type filter hook forward priority filter; policy accept;
            tcp dport 80 @ih,88,72 0x7365616c2d6576696c counter reject with tcp reset
          }
        }
`)
	s := newShopOf(t, text, "[fc00:8::2]:443")
	readers := s.record("r1", "r2", "r3", "r4", "r5", "r6", "h1", "h2", "dpi")
	for _, version := range []string{"1.1", "2"} {
		if got, want := s.curl("alice.pem", version, "/files/"+sealMarker), "hello|5 200 1\n"; got != want {
			t.Errorf("curl prints %q; want %q", got, want)
		}
		if got, want := s.post("alice.pem", version, "/files/form", sealMarker), "hello|200\n"; got != want {
			t.Errorf("curl prints %q for what it posts; want %q", got, want)
		}
	}
	if got, want := s.curl("alice.pem", "1.1", "/files/large"), "|20000000 200 1\n"; got != want {
		t.Errorf("curl prints %q for 20 MB; want %q", got, want)
	}
	// What the function stops has that effect.
	s.mu.Lock()
	before := len(s.seen)
	s.mu.Unlock()
	if got := s.curl("alice.pem", "1.1", "/files/seal-evil"); !strings.Contains(got, " 502 ") {
		t.Errorf("curl prints %q for what dpi stops; want 502", got)
	}
	s.mu.Lock()
	if after := len(s.seen); after != before {
		t.Errorf("the origin has got %q", s.seen[before:])
	}
	s.mu.Unlock()
	if out, err := s.Run(soon(t), "dpi", "nft", "list", "ruleset"); err != nil || !regexp.MustCompile("counter packets [1-9]").Match(out) {
		t.Errorf("dpi has counted nothing: %v\n%s", err, out)
	}
	// The function opens no connection to the node's side.
	must(t, s.Do("dpi", func() error {
		c, err := net.DialTimeout("tcp", "[fe80::1%dpi-to]:8443", settleTime)
		if err == nil {
			c.Close()
		}
		if !errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("the function connects to the worker's place: %v; want %v", err, unix.ECONNREFUSED)
		}
		return nil
	}))
	f, err := s.function("r3", "dpi")
	must(t, err)
	if n := f.Stream; n.ResetByFunction == 0 || n.PartMismatch+n.Unsealed+n.Peer+n.NoKey != 0 || n.ToServer.Out == 0 || n.ToClient.Out < 20_000_000 {
		t.Errorf("dpi has counted %+v", n)
	}
	for where, r := range readers {
		found, own := len(r.soFar()) > 0, where == "dpi dpi-to" || where == "r3 dpi-from"
		if found != own {
			t.Errorf("the marker in clear was found at %s: %t; want %t", where, found, own)
		}
	}
}

// A function of kind netfilter reads requests by its own rules: one that they reject is refused to the client, one that they drop gets
// no answer, and none of either reaches the origin. The marker is on the links of its namespace and nowhere else.
func TestRulesOfNetfilterReadPayload(t *testing.T) {
	t.Parallel()
	rules := func(verdict string) string {
		return `
      chain forward {
        type filter hook forward priority filter; policy accept;
        tcp dport 80 @ih,88,72 0x7365616c2d6576696c counter name evil ` + verdict + `
        tcp sport 80 counter name answers
      }
      counter evil {
      }
      counter answers {
      }
`
	}
	with := func(rules string) string {
		text := sealedDomainAt(t, "[fc00:8::2]:443")
		lines := strings.Split(text, "\n")
		i := slices.IndexFunc(lines, func(l string) bool { return strings.HasPrefix(l, "  - {name: dpi, ") })
		if i < 0 {
			t.Fatal("the domain has no function dpi")
		}
		lines[i] = "  - name: dpi\n    node: r3\n    kind: netfilter\n    intrusive: true\n    rules: |" + rules
		return strings.Join(lines, "\n")
	}
	s := newShopOf(t, with(rules("reject with tcp reset")), "[fc00:8::2]:443")
	ns, err := host.OpenNamed("waystamp-" + s.Instance("r3") + "-dpi")
	must(t, err)
	t.Cleanup(func() { ns.Close() })
	readers := s.record("r1", "r2", "r3", "r4", "r5", "r6", "h1", "h2")
	inside := map[string]*recorder[int]{}
	for _, name := range []string{netfilter.InsideIn, netfilter.InsideOut} {
		inside[name] = &recorder[int]{}
		inside[name].startIn(s.world, ns, name, 64<<10, func(frame []byte) (int, bool) { return len(frame), bytes.Contains(frame, []byte("seal-marker")) })
	}
	for _, version := range []string{"1.1", "2"} {
		if got, want := s.curl("alice.pem", version, "/files/"+sealMarker), "hello|5 200 1\n"; got != want {
			t.Errorf("curl prints %q; want %q", got, want)
		}
		if got, want := s.post("alice.pem", version, "/files/form", sealMarker), "hello|200\n"; got != want {
			t.Errorf("curl prints %q for what it posts; want %q", got, want)
		}
	}
	if got, want := s.curl("alice.pem", "1.1", "/files/large"), "|20000000 200 1\n"; got != want {
		t.Errorf("curl prints %q for 20 MB; want %q", got, want)
	}
	counted := func(name string) uint64 {
		t.Helper()
		f, err := s.function("r3", "dpi")
		must(t, err)
		if f.Rules == nil || f.Rules.Error != "" {
			t.Fatalf("the node says %+v of dpi's rules", f.Rules)
		}
		for _, c := range f.Rules.Counters {
			if c.Name == name {
				return c.Packets
			}
		}
		t.Fatalf("the rules of dpi have no counter %s: %+v", name, f.Rules)
		return 0
	}
	if counted("answers") == 0 {
		t.Error("no answer has met the rules")
	}
	requests := func() int {
		s.mu.Lock()
		defer s.mu.Unlock()
		return len(s.seen)
	}
	before := requests()
	if got := s.curl("alice.pem", "1.1", "/files/seal-evil"); !strings.Contains(got, " 502 ") {
		t.Errorf("curl prints %q for what the rules reject; want 502", got)
	}
	if now := requests(); now != before {
		t.Errorf("the origin has got %d requests that the rules reject", now-before)
	}
	if counted("evil") == 0 {
		t.Error("the rules have rejected nothing")
	}
	f, err := s.function("r3", "dpi")
	must(t, err)
	if n := f.Stream; n.ResetByFunction == 0 || n.PartMismatch+n.Unsealed+n.Peer+n.NoKey != 0 || n.ToServer.Out == 0 || n.ToClient.Out < 20_000_000 {
		t.Errorf("dpi has counted %+v", n)
	}
	a, b := s.attachedTo("dpi")
	for where, r := range readers {
		found, own := len(r.soFar()) > 0, where == "r3 "+b
		if found != own {
			t.Errorf("the marker in clear was found at %s: %t; want %t", where, found, own)
		}
	}
	for name, r := range inside {
		if found, want := len(r.soFar()) > 0, name == netfilter.InsideIn; found != want {
			t.Errorf("the marker in clear came in by %s of the function's namespace: %t; want %t", name, found, want)
		}
	}
	// The node's kernel takes nothing that comes from the function.
	for _, name := range []string{a, b} {
		for key, want := range map[string]string{"ipv6/conf/" + name + "/disable_ipv6": "1", "ipv4/conf/" + name + "/forwarding": "0"} {
			if v, err := s.net("r3").Sysctl("net/" + key); err != nil || v != want {
				t.Errorf("%s is %q on the node: %v; want %s", key, v, err, want)
			}
		}
	}
	// Dropped: nobody says anything, and the connection is not let go on.
	m := parse(t, with(rules("drop")))
	next, err := plan.Compile(m.Domain, nil)
	must(t, err)
	i := slices.IndexFunc(next.Nodes, func(n plan.Node) bool { return n.Name == "r3" })
	now := s.plan.Nodes[slices.IndexFunc(s.plan.Nodes, func(n plan.Node) bool { return n.Name == "r3" })]
	now.Proxies = next.Nodes[i].Proxies
	worker, err := s.workerOf("r3", "dpi")
	must(t, err)
	s.follow(now)
	rejected := counted("evil")
	before = requests()
	if got := s.curlFor("2", "alice.pem", "1.1", "/files/seal-evil"); !strings.Contains(got, " 000 ") {
		t.Errorf("curl prints %q for what the rules drop; want no answer", got)
	}
	if counted("evil") == rejected {
		t.Error("the rules have dropped nothing")
	}
	if now := requests(); now != before {
		t.Errorf("the origin has got %d requests that the rules drop", now-before)
	}
	if got, want := s.curl("alice.pem", "1.1", "/files/a"), "hello|5 200 1\n"; got != want {
		t.Errorf("curl prints %q beside a request that was dropped; want %q", got, want)
	}
	if now, err := s.workerOf("r3", "dpi"); err != nil || now != worker {
		t.Errorf("with other rules dpi has worker %d: %v; want %d", now, err, worker)
	}
	// Rules that the kernel does not take leave those before in force.
	now.Proxies = slices.Clone(now.Proxies)
	j := slices.IndexFunc(now.Proxies, func(x plan.Proxy) bool { return x.Function == "dpi" })
	wrong := *now.Proxies[j].Netfilter
	wrong.Rules = "chain forward {\n\ttype filter hook forward priority filter; policy accept;\n\tjump nowhere\n}\n"
	now.Proxies[j].Netfilter = &wrong
	must(t, s.WriteNodePlan("r3", now))
	eventually(t, func() error {
		if p := s.status("r3").Problems; !slices.ContainsFunc(p, func(p string) bool { return strings.Contains(p, "the previous rules stay in force") }) {
			return fmt.Errorf("r3 says %q of rules that the kernel refuses", p)
		}
		return nil
	})
	if got := s.curlFor("2", "alice.pem", "1.1", "/files/seal-evil"); !strings.Contains(got, " 000 ") {
		t.Errorf("curl prints %q with rules that the kernel refuses; want those before in force, and no answer", got)
	}
}

// Two functions that read payload, one after the other: a part from one to the other, and the second, which
// takes any frame, knows nothing of it.
func TestTwoFunctionsReadOneAfterTheOther(t *testing.T) {
	t.Parallel()
	text := plainDomain(t, "[fc00:8::2]:443", map[string]string{
		"fw":  "node: r2, kind: stream, intrusive: true, run: [{match: {literals: [seal-bad], then: reset}}]",
		"dpi": "node: r3, kind: unaware, intrusive: true, attach: {to: dpi-to, from: dpi-from}",
	}, "    - {name: dpi, kind: raw}\n")
	text = strings.Replace(text, "name: light, ingress: [r1], functions: [fw], egress: r6, direction: both,", "name: light, ingress: [r1], functions: [fw], egress: r6, direction: both, seal: true,", 1)
	s := newShopOf(t, text, "[fc00:8::2]:443")
	readers := s.record("r1", "r2", "r3", "r4", "r5", "r6", "h1", "h2", "dpi")
	frames := s.counting(s.part("deep", "forward, from fw to dpi"))
	for _, version := range []string{"1.1", "2"} {
		if got, want := s.post("alice.pem", version, "/files/form", sealMarker), "hello|200\n"; got != want {
			t.Errorf("curl prints %q for what it posts; want %q", got, want)
		}
	}
	if frames().frames() == 0 {
		t.Error("nothing went by the part between the two functions")
	}
	if got, want := s.curl("alice.pem", "1.1", "/files/large"), "|20000000 200 1\n"; got != want {
		t.Errorf("curl prints %q for 20 MB; want %q", got, want)
	}
	if got, want := s.curl("alice.pem", "1.1", "/status"), "hello|5 200 1\n"; got != want {
		t.Errorf("curl prints %q by the chain of one function; want %q", got, want)
	}
	if got := s.curl("alice.pem", "1.1", "/files/seal-bad"); !strings.Contains(got, " 502 ") {
		t.Errorf("curl prints %q for what fw refuses; want 502", got)
	}
	for where, r := range readers {
		found, own := len(r.soFar()) > 0, where == "dpi dpi-to" || where == "r3 dpi-from"
		if found != own {
			t.Errorf("the marker in clear was found at %s: %t; want %t", where, found, own)
		}
	}
	// Without what it goes through nothing goes.
	must(t, s.net("dpi").DeleteLink("dpi-from"))
	if got := s.curl("alice.pem", "1.1", "/files/a"); !strings.Contains(got, " 502 ") {
		t.Errorf("curl prints %q without a link of dpi; want 502", got)
	}
	s.mayRefuse("r3", "stream-down") // it has no worker then
	s.mayRefuse("r3", "stream-unknown")
}

// A function's interface is made anew: its connections are reset, the function is said to lack it, and
// is attached again once it is there.
func TestAFunctionThatKnowsNothingOfSealsIsAttachedAgain(t *testing.T) {
	t.Parallel()
	text := plainDomain(t, "[fc00:8::2]:443", map[string]string{
		"dpi": `node: r3, kind: unaware, intrusive: true, attach: {to: dpi-to, from: dpi-from, via: "fe80::2"}`,
	}, "    - {name: dpi, kind: forward}\n")
	s := newShopOf(t, text, "[fc00:8::2]:443")
	if got, want := s.curl("alice.pem", "1.1", "/files/a"), "hello|5 200 1\n"; got != want {
		t.Fatalf("curl prints %q; want %q", got, want)
	}
	node, function := s.net("r3"), s.net("dpi")
	for _, name := range []string{"dpi-from", "dpi-to"} {
		was, err := node.Link(name)
		must(t, err)
		must(t, node.DeleteLink(name))
		eventually(t, func() error {
			f, err := s.function("r3", "dpi")
			if err == nil && !strings.Contains(f.Stream.Error, name) {
				err = fmt.Errorf("r3 says %q of dpi without %s", f.Stream.Error, name)
			}
			return err
		})
		must(t, node.AddVeth(host.Veth{Name: name, PeerName: name, Peer: s.ns("dpi"), MTU: was.MTU}))
		must(t, function.AddAddress(name, netip.MustParsePrefix("fe80::2/64")))
		must(t, function.SetUp(name))
		table := map[string]int{"dpi-from": 1, "dpi-to": 2}[name]
		for _, any := range []string{"::/0", "0.0.0.0/0"} {
			must(t, function.AddRoute(host.Route{Destination: netip.MustParsePrefix(any), Via: netip.MustParseAddr("fe80::1"), Device: name, Table: table}))
		}
		eventually(t, func() error {
			if got, want := s.curl("alice.pem", "1.1", "/files/a"), "hello|5 200 1\n"; got != want {
				return fmt.Errorf("curl prints %q with a new %s; want %q", got, name, want)
			}
			return nil
		})
		if v, err := node.Sysctl("net/ipv6/conf/" + name + "/disable_ipv6"); err != nil || v != "1" {
			t.Errorf("the new %s has disable_ipv6 %q (%v): the node's kernel takes packets of the function", name, v, err)
		}
	}
	// The next agent takes the worker over, with both places.
	worker, err := s.workerOf("r3", "dpi")
	must(t, err)
	s.kill("r3")
	must(t, s.StartAgent(soon(t), "r3"))
	if got, want := s.curl("alice.pem", "1.1", "/files/a"), "hello|5 200 1\n"; got != want {
		t.Errorf("curl prints %q with another agent; want %q", got, want)
	}
	if now, err := s.workerOf("r3", "dpi"); err != nil || now != worker {
		t.Errorf("the next agent has worker %d of dpi: %v; want %d", now, err, worker)
	}
	for _, reason := range []string{"function-gone", "stream-down", "stream-unknown"} {
		s.mayRefuse("r3", reason)
	}
}

// Hosts that speak IPv4: the part is sealed, and the plain connection is IPv4's.
func TestAFunctionThatKnowsNothingOfSealsReadsIPv4(t *testing.T) {
	t.Parallel()
	const address = "198.51.100.2:443"
	text := plainDomain(t, address, map[string]string{"dpi": `node: r3, kind: unaware, intrusive: true, attach: {to: dpi-to, from: dpi-from, via: "fe80::2"}`}, `
    - name: dpi
      kind: nftables
      ruleset: |
        table ip dpi {
          chain forward {
            type filter hook forward priority filter; policy accept;
            tcp dport 80 @ih,88,72 0x7365616c2d6576696c counter reject with tcp reset
          }
        }
`)
	for host, prefix := range map[string]string{"h1": "192.0.2.0/24", "h2": "198.51.100.0/24"} {
		line := regexp.MustCompile(`(\{name: ` + host + `,[^}]*)\}`)
		if !line.MatchString(text) {
			t.Fatalf("the lab has no host %s", host)
		}
		text = line.ReplaceAllString(text, "${1}, prefix4: "+prefix+"}")
	}
	s := newShopOf(t, text, address)
	readers := s.record("r1", "r2", "r3", "r4", "r5", "r6", "h1", "h2", "dpi")
	if got, want := s.post("alice.pem", "1.1", "/files/form", sealMarker), "hello|200\n"; got != want {
		t.Errorf("curl prints %q for what it posts; want %q", got, want)
	}
	if got, want := s.curl("alice.pem", "2", "/files/large"), "|20000000 200 1\n"; got != want {
		t.Errorf("curl prints %q for 20 MB; want %q", got, want)
	}
	if got := s.curl("alice.pem", "1.1", "/files/seal-evil"); !strings.Contains(got, " 502 ") {
		t.Errorf("curl prints %q for what dpi stops; want 502", got)
	}
	for where, r := range readers {
		found, own := len(r.soFar()) > 0, where == "dpi dpi-to" || where == "r3 dpi-from"
		if found != own {
			t.Errorf("the marker in clear was found at %s: %t; want %t", where, found, own)
		}
	}
}

// The same by rules of netfilter: the agent's routes in the function's namespace are those of IPv4, too.
func TestRulesOfNetfilterReadPayloadOfIPv4(t *testing.T) {
	t.Parallel()
	const address = "198.51.100.2:443"
	lines := strings.Split(sealedDomainAt(t, address), "\n")
	i := slices.IndexFunc(lines, func(l string) bool { return strings.HasPrefix(l, "  - {name: dpi, ") })
	if i < 0 {
		t.Fatal("the domain has no function dpi")
	}
	lines[i] = `  - name: dpi
    node: r3
    kind: netfilter
    intrusive: true
    rules: |
      chain forward {
        type filter hook forward priority filter; policy accept;
        meta nfproto ipv4 tcp dport 80 @ih,88,72 0x7365616c2d6576696c reject with tcp reset
      }`
	text := strings.Join(lines, "\n")
	for host, prefix := range map[string]string{"h1": "192.0.2.0/24", "h2": "198.51.100.0/24"} {
		line := regexp.MustCompile(`(\{name: ` + host + `,[^}]*)\}`)
		if !line.MatchString(text) {
			t.Fatalf("the lab has no host %s", host)
		}
		text = line.ReplaceAllString(text, "${1}, prefix4: "+prefix+"}")
	}
	s := newShopOf(t, text, address)
	if got, want := s.post("alice.pem", "1.1", "/files/form", sealMarker), "hello|200\n"; got != want {
		t.Errorf("curl prints %q for what it posts; want %q", got, want)
	}
	if got, want := s.curl("alice.pem", "2", "/files/large"), "|20000000 200 1\n"; got != want {
		t.Errorf("curl prints %q for 20 MB; want %q", got, want)
	}
	s.mu.Lock()
	before := len(s.seen)
	s.mu.Unlock()
	if got := s.curl("alice.pem", "1.1", "/files/seal-evil"); !strings.Contains(got, " 502 ") {
		t.Errorf("curl prints %q for what the rules reject; want 502", got)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if now := len(s.seen); now != before {
		t.Errorf("the origin has got %d requests that the rules reject", now-before)
	}
}

// A chain gets fresh secrets and keys of its ends by steps, while clients ask by new connections and one large
// answer is on its way: each gets all of it.
func TestKeysOfEndsChangeUnderLoad(t *testing.T) {
	t.Parallel()
	bothTexts(t, func(t *testing.T, carried func(string) string) { keysOfEndsChange(t, carried(sealedDomain(t))) })
}

func keysOfEndsChange(t *testing.T, domain string) {
	s := newShopOf(t, domain, "[fc00:8::2]:443")
	var asked atomic.Int64
	done, wrong := make(chan struct{}), make(chan string, 3)
	ask := func(paths []string, want string) {
		for {
			if got := s.curl("alice.pem", "1.1", paths...); got != want {
				wrong <- fmt.Sprintf("curl prints %q for %q; want %q", got, paths, want)
				return
			}
			asked.Add(1)
			select {
			case <-done:
				wrong <- ""
				return
			default:
			}
		}
	}
	go ask([]string{"/files/a"}, "hello|5 200 1\n")
	go ask([]string{"/files/b", "/files/c"}, "hello|5 200 1\nhello|5 200 0\n")
	go ask([]string{"/files/large"}, "|20000000 200 1\n")
	last := s.plan
	shown := map[plan.SealPublic]bool{}
	for range 2 {
		keys := plan.NewKeyring(rand.Reader, last.Paths)
		keys.KeepSIDs()
		keys.Rotate(func(name string) bool { return name == "deep" })
		next, err := plan.Compile(s.manifest.Domain, keys)
		must(t, err)
		steps, err := plan.MakeSteps(last.Paths, last.Nodes, next)
		must(t, err)
		if len(steps.Lossy) != 0 || len(steps.Turns) == 0 {
			t.Fatalf("%d paths turn, %d are lossy; want some, and none", len(steps.Turns), len(steps.Lossy))
		}
		for _, p := range next.Paths {
			if p.Seal != nil {
				shown[p.Seal.From.Public()] = true
			}
		}
		for _, step := range [][]plan.Node{steps.Both, steps.Turn, next.Nodes} {
			for _, n := range step {
				s.follow(n)
			}
			// Some by each of them.
			before := asked.Load()
			eventually(t, func() error {
				if n := asked.Load() - before; n < 6 && len(wrong) == 0 {
					return fmt.Errorf("clients have got %d answers in this step", n)
				}
				return nil
			})
		}
		last = next
	}
	close(done)
	for range 3 {
		if problem := <-wrong; problem != "" {
			t.Error(problem)
		}
	}
	if len(shown) != 2 {
		t.Errorf("the gateway's end had %d keys; want a fresh one each time", len(shown))
	}
	f, err := s.function("r3", "dpi")
	must(t, err)
	if n := f.Stream; n.PartMismatch+n.Unsealed+n.Peer+n.NoKey != 0 {
		t.Errorf("dpi has counted %+v", n)
	}
}

// post sends a body, and prints the answer and status.
func (s *shop) post(cert, version, path, body string) string {
	s.t.Helper()
	var out []byte
	must(s.t, s.Do("h1", func() error {
		out, _ = exec.CommandContext(soon(s.t), "curl", "-sS", "-m", "40", "--noproxy", "*", "--cacert", filepath.Join(s.folder, "web.pem"), "--http"+version,
			"--resolve", s.resolve(), "-w", "|%{http_code}\n", "--cert", filepath.Join(s.folder, cert),
			"--data-binary", body, fmt.Sprintf("https://shop.example.org:%d%s", s.at.Port(), path)).CombinedOutput()
		return nil
	}))
	return string(out)
}
