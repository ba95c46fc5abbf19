package e2e

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/netfilter"
	"github.com/waystamp/waystamp/internal/plan"
)

// Rules of functions while they change, and namespaces that go away, under load. The
// world is that of TestWhatNetfilterDoesToAPacketAndItsProof; beside it chains by DSCP, so
// that flows of two chains can have the same addresses and ports.

// portZones is the port of those flows.
const portZones = 1100

// The DSCP of the chains with argument guest, and staff.
var zoneDSCP = []int{10, 20}

// generation is a whole set of rules that is told from others by its number. A packet that
// meets a part of it is dropped.
func generation(n int) string {
	var b strings.Builder
	fmt.Fprintf(&b, `counter seen {
}
counter started {
}
chain prerouting {
  type filter hook prerouting priority filter; policy accept;
  meta mark $guest counter name seen
}
chain forward {
  type filter hook forward priority filter; policy drop;
  udp dport %d ct state new counter name started
  meta mark set 0
`, portZones)
	for i := range generationSteps {
		fmt.Fprintf(&b, "  meta mark %d meta mark set %d\n", i*n, (i+1)*n)
	}
	fmt.Fprintf(&b, "  meta mark %d accept\n}\n", generationSteps*n)
	return b.String()
}

const generationSteps = 10

// withZones gives own a conntrack zone for each argument, and adds the chains by DSCP to
// own and named.
func withZones(text string) string {
	var chains strings.Builder
	for i, kind := range []string{"own", "named"} {
		for j, argument := range []string{"guest", "staff"} {
			fmt.Fprintf(&chains, "  - {name: %s-%s-zone, ingress: [r1], functions: [{name: %s, argument: %s}], egress: r6, match: {source: \"fc00:10::/64\", destination: \"fc00:2%d::/64\", protocol: udp, dscp: %d, priority: %d}, direction: both}\n",
				argument, kind, kind, argument, i, zoneDSCP[j], 10+2*i+j)
		}
	}
	return strings.NewReplacer("namespace: own\n", "namespace: own\n    zones: argument\n", "lab:\n", chains.String()+"lab:\n").Replace(text)
}

// reload gives functions rules, by their names, and waits until they are in force.
func (w *filterWorld) reload(rules map[string]string) {
	w.t.Helper()
	n, err := w.NodePlan("r2")
	must(w.t, err)
	for i, p := range n.Proxies {
		if text, ok := rules[p.Function]; ok {
			f := *p.Netfilter
			f.Rules = text
			n.Proxies[i].Netfilter = &f
		}
	}
	w.follow(n)
}

// arrived is finish for a stream of which nothing may be missing.
func (d *ticking) arrived() uint64 {
	d.t.Helper()
	missing, double := d.finish()
	if len(missing) > 0 || len(double) > 0 {
		d.t.Errorf("%s: missing %d, more than once %d", d.name, missing[:min(10, len(missing))], double[:min(10, len(double))])
	}
	return d.next.Load()
}

func TestRulesAndNamespacesChangeUnderLoad(t *testing.T) {
	t.Parallel()
	all := buildFilters(t, func(string) string { return generation(1) }, withZones)
	for _, step := range []struct {
		name string
		do   func(*filterWorld)
	}{
		{"zones", (*filterWorld).zonesKeepFlowsApart},
		{"reload", (*filterWorld).reloadsLoseNothing},
		{"whole sets", (*filterWorld).everyListIsWhole},
		{"a namespace goes away", (*filterWorld).namespaceGoesAway},
		{"mistakes about one function", (*filterWorld).mistakesStopNoOther},
	} {
		t.Run(step.name, func(t *testing.T) { step.do(all.in(t, false)) })
	}
}

// Two chains whose flows have the same addresses and ports are two flows to a function
// with zones, and one to another.
func (w *filterWorld) zonesKeepFlowsApart() {
	for kind, flows := range map[string]uint64{"own": 2, "named": 1} {
		at := netip.AddrPortFrom(w.addr(kind), portZones)
		server := socketAt(w.t, w.ns(kind), at)
		client := socketAt(w.t, w.ns("guest"), netip.AddrPortFrom(w.addr("guest"), portZones))
		before := w.named(kind, "started")
		for i, dscp := range append(zoneDSCP, zoneDSCP...) {
			for _, c := range []*net.UDPConn{client, server} {
				must(w.t, onSocket(c, func(fd int) error { return unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_TCLASS, dscp<<2) }))
			}
			for _, way := range [][2]*net.UDPConn{{client, server}, {server, client}} {
				_, err := way[0].WriteToUDPAddrPort(datagram(i), way[1].LocalAddr().(*net.UDPAddr).AddrPort())
				must(w.t, err)
				b := make([]byte, 64)
				must(w.t, way[1].SetReadDeadline(time.Now().Add(settleTime)))
				n, err := way[1].Read(b)
				must(w.t, err)
				if !slices.Equal(b[:n], datagram(i)) {
					w.t.Errorf("%s: %x came, want %x", kind, b[:n], datagram(i))
				}
			}
		}
		if n := w.named(kind, "started") - before; n != flows {
			w.t.Errorf("%s: %d flows have begun, want %d", kind, n, flows)
		}
		must(w.t, errors.Join(server.Close(), client.Close()))
	}
}

// New plans with new rules for all three functions, while datagrams pass them: each is
// delivered once, has its stamps, and is counted, by the rules too.
func (w *filterWorld) reloadsLoseNothing() {
	seen, counts := map[string]uint64{}, map[string]tally{}
	streams := map[string]*ticking{}
	for _, kind := range filterKinds {
		seen[kind], counts[kind] = w.named(kind, "seen"), w.tally(kind)
	}
	for _, kind := range filterKinds {
		streams[kind] = w.ticking("guest", kind)
	}
	const reloads = 6
	for i := range reloads {
		rules := map[string]string{}
		for _, kind := range filterKinds {
			streams[kind].more(100)
			rules[kind] = generation(i + 2)
		}
		w.reload(rules)
	}
	for _, kind := range filterKinds {
		streams[kind].more(100)
		n := streams[kind].arrived()
		counts[kind].waits(api.Function{RxSuccess: n, TxSuccess: n})
		if got := w.named(kind, "seen") - seen[kind]; got != n {
			w.t.Errorf("%s: the rules have counted %d packets, %d were sent", kind, got, n)
		}
		eventually(w.t, func() error {
			f, err := w.function("r2", kind)
			if err == nil && *f.InFlight != 0 {
				err = fmt.Errorf("%s: %d headers are kept", kind, *f.InFlight)
			}
			return err
		})
	}
}

// A hundred loads, as the agent makes them: whoever lists the rules of the namespace sees
// one whole set of them, and each packet meets one.
func (w *filterWorld) everyListIsWhole() {
	const swaps = 100
	ns := w.inside("own")
	n, err := w.NodePlan("r2")
	must(w.t, err)
	i := slices.IndexFunc(n.Proxies, func(p plan.Proxy) bool { return p.Function == "own" })
	filter := n.Proxies[i].Netfilter
	set := netfilter.Ruleset{Function: "own", Arguments: filter.Arguments, Zones: filter.Groups}
	load := func(n int) error {
		set.Text = generation(n)
		return netfilter.Load(w.t.Context(), ns, set)
	}
	must(w.t, load(1))

	stream := w.ticking("guest", "own")
	ctx, enough := context.WithCancel(soon(w.t))
	loaded := make(chan error, 1)
	go func() {
		defer enough()
		for i := range swaps {
			if err := load(1 + i%2); err != nil {
				loaded <- err
				return
			}
		}
		loaded <- nil
	}()
	lists := map[int]int{}
	for ctx.Err() == nil {
		text, err := host.Command(w.t.Context(), ns, "nft", "list", "ruleset").Output()
		must(w.t, err)
		n, err := wholeGeneration(string(text))
		if err != nil {
			enough()
			<-loaded
			w.t.Fatalf("%v:\n%s", err, text)
		}
		lists[n]++
	}
	must(w.t, <-loaded)
	w.t.Logf("lists by generation: %v", lists)
	if len(lists) != 2 || slices.Max(slices.Collect(maps.Keys(lists))) != 2 {
		w.t.Errorf("generations 1 and 2 were to be seen: %v", lists)
	}
	stream.more(1)
	stream.arrived()
}

// wholeGeneration tells which generation a list of rules is of. nft that was interrupted by
// a load lists again, and at times keeps a rule that it had (1.0.6).
func wholeGeneration(list string) (n int, err error) {
	if _, rest, ok := strings.Cut(list, "meta mark 0x00000000 meta mark set "); !ok {
		return 0, errors.New("a list has no first rule")
	} else if _, err := fmt.Sscanf(rest, "0x%x", &n); err != nil {
		return 0, err
	}
	want := map[string]bool{}
	for i := range generationSteps {
		want[fmt.Sprintf("meta mark 0x%08x meta mark set 0x%08x", i*n, (i+1)*n)] = true
	}
	want[fmt.Sprintf("meta mark 0x%08x accept", generationSteps*n)] = true
	got := map[string]bool{}
	for line := range strings.Lines(list) {
		if line = strings.TrimSpace(line); strings.HasPrefix(line, "meta mark 0x") && !strings.Contains(line, "counter") {
			got[line] = true
		}
	}
	if !maps.Equal(want, got) {
		return 0, fmt.Errorf("a list has rules of generation %d and others, or a part of them", n)
	}
	return n, nil
}

// The namespace of somebody else is deleted: packets for its function are refused, nothing
// becomes of others, and when it is there again, so is the function.
func (w *filterWorld) namespaceGoesAway() {
	streams := map[string]*ticking{}
	for _, kind := range filterKinds {
		streams[kind] = w.ticking("guest", kind)
	}
	for _, s := range streams {
		s.more(100)
	}
	must(w.t, w.theirs.Delete())
	w.refusedSome("r2", "function-gone")
	w.told("function named gets no packets: ", "namespace "+w.there.name+" ", "ip netns add "+w.there.name)
	for _, kind := range []string{"own", "local"} {
		streams[kind].more(300)
	}
	// What is sent to where nothing is left does not come.
	streams["named"].enough()
	must(w.t, <-streams["named"].sent)
	w.makeThere()
	w.reload(map[string]string{"named": generation(3)})
	w.routeThere()
	w.ticking("guest", "named").more(300)
	for _, kind := range []string{"own", "local"} {
		streams[kind].arrived()
	}
	if sent, came := streams["named"].next.Load(), streams["named"].came.Load(); came >= sent {
		w.t.Errorf("all of %d datagrams came, also those to a namespace that was not there", sent)
	}
	w.mayRefuse("r2", "function-gone")
	w.mayRefuse("r2", "not-cached")
}

// told waits until r2's agent reports one problem with all these words.
func (w *filterWorld) told(words ...string) {
	w.t.Helper()
	eventually(w.t, func() error {
		problems := w.status("r2").Problems
		if !slices.ContainsFunc(problems, func(p string) bool {
			return !slices.ContainsFunc(words, func(word string) bool { return !strings.Contains(p, word) })
		}) {
			return fmt.Errorf("the agent of r2 reports %q, want one with %q", problems, words)
		}
		return nil
	})
}

// atFault runs f while datagrams pass the other functions, and loses none of them.
func (w *filterWorld) atFault(others []string, f func()) {
	w.t.Helper()
	var streams []*ticking
	for _, kind := range others {
		streams = append(streams, w.ticking("guest", kind))
	}
	f()
	for _, s := range streams {
		s.more(100)
		s.arrived()
	}
}

// getsNothing sends to the host of a function that is not there.
func (w *filterWorld) getsNothing(kind string) {
	w.t.Helper()
	w.mayRefuse("r2", "function-gone")
	lost := w.ticking("guest", kind)
	eventually(w.t, func() error {
		all, err := w.refusals()
		w.mu.Lock()
		defer w.mu.Unlock()
		if r := (refusal{Node: "r2", Reason: "function-gone"}); err == nil && all[r] <= w.expected[r] {
			err = fmt.Errorf("nothing is refused for %s", r.Reason)
		}
		return err
	})
	lost.enough()
	must(w.t, <-lost.sent)
	if n := lost.came.Load(); n != 0 {
		w.t.Errorf("%d datagrams have passed function %s, which is not there", n, kind)
	}
	w.refusedSome("r2", "function-gone")
}

// Rules that the kernel refuses leave the old ones in force. A function whose namespace is
// missing, or whose interface's name is taken, gets no packets until that is mended. The agent
// says what is wrong, and the other functions notice nothing.
func (w *filterWorld) mistakesStopNoOther() {
	n, err := w.NodePlan("r2")
	must(w.t, err)
	at := slices.IndexFunc(n.Proxies, func(p plan.Proxy) bool { return p.Function == "named" })
	right := *n.Proxies[at].Netfilter
	set := func(change func(f *plan.Netfilter)) {
		f := right
		change(&f)
		n.Proxies[at].Netfilter = &f
		w.follow(n)
	}

	w.atFault(filterKinds, func() {
		set(func(f *plan.Netfilter) {
			f.Rules = "chain forward {\n\ttype filter hook forward priority filter; policy drop;\n\tjump nowhere\n}\n"
		})
		w.told("the previous rules stay in force: ", "rules of function named, line 3, column ", "jump nowhere", "is what this names, such as a chain, set or counter, defined")
	})

	nowhere := "nowhere-" + w.Instance("r2")
	w.atFault([]string{"own", "local"}, func() {
		set(func(f *plan.Netfilter) { f.Namespace = nowhere })
		w.told("function named gets no packets: ", "namespace "+nowhere+" ", "it does not exist; create it (ip netns add "+nowhere+")")
		w.getsNothing("named")
	})

	r2 := w.net("r2")
	w.atFault([]string{"own", "local"}, func() {
		if _, err := r2.Link("wsi-named"); err == nil {
			must(w.t, r2.DeleteLink("wsi-named"))
		}
		must(w.t, r2.AddVeth(host.Veth{Name: "wsi-named", PeerName: "strange"}))
		set(func(*plan.Netfilter) {})
		w.told("function named gets no packets: ", "an interface wsi-named is there in ", "remove or rename it")
		w.getsNothing("named")
		must(w.t, r2.DeleteLink("strange"))
		eventually(w.t, func() error {
			for _, p := range w.status("r2").Problems {
				if strings.Contains(p, "gets no packets") {
					return errors.New(p)
				}
			}
			return nil
		})
	})
	w.routeThere()
	s := w.ticking("guest", "named")
	s.more(100)
	s.arrived()
	w.mayRefuse("r2", "function-gone")
	w.mayRefuse("r2", "not-cached")
}
