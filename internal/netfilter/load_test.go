package netfilter

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"testing"

	"github.com/waystamp/waystamp/internal/host"
)

func fw(text string) Ruleset {
	return Ruleset{Function: "fw", Text: text, Arguments: map[string]uint32{"guest": 1, "staff": 2}}
}

// generation is a ruleset of which each rule says which it is of.
func generation(n int) string {
	var b strings.Builder
	fmt.Fprintf(&b, "counter kept {\n}\nset seen {\n\ttype ipv4_addr; flags dynamic;\n}\nmap way {\n\ttype mark : verdict; elements = { $guest : jump inner }\n}\n")
	fmt.Fprintf(&b, "chain inner {\n\tlog prefix \"generation %d\"\n}\n", n)
	b.WriteString("chain forward {\n\ttype filter hook forward priority filter; policy drop;\n\tmeta mark vmap @way\n")
	for i := range 40 {
		fmt.Fprintf(&b, "\tmeta mark %d log prefix \"generation %d\" counter name kept accept\n", 100+i, n)
	}
	b.WriteString("}\n")
	return b.String()
}

var reGeneration = regexp.MustCompile(`generation (\d+)`)

func TestWhoeverListsWhileRulesAreReplacedSeesAWholeSet(t *testing.T) {
	ctx := soon(t)
	ns := scratch(t)
	must(t, Load(ctx, ns, fw(generation(0))))

	stop, cancel := context.WithCancel(ctx)
	lists, seen := 0, map[string]bool{}
	done := make(chan error)
	go func() {
		done <- func() error {
			for stop.Err() == nil {
				out, err := host.Command(ctx, ns, "nft", "list", "table", "inet", "waystamp-fw").CombinedOutput()
				if err != nil {
					return fmt.Errorf("%w: %s", err, out)
				}
				all := reGeneration.FindAllString(string(out), -1)
				for _, g := range all {
					if g != all[0] {
						return fmt.Errorf("%s beside %s in one list", g, all[0])
					}
				}
				// Each once or more: where nft meets a reload it lists again, and
				// version 1.0.6 then may print a rule twice.
				rules := map[string]bool{}
				for line := range strings.Lines(string(out)) {
					if strings.Contains(line, "generation ") {
						rules[line] = true
					}
				}
				if len(rules) != 41 {
					return fmt.Errorf("%d rules of %s, want 41:\n%s", len(rules), all[:min(1, len(all))], out)
				}
				lists++
				seen[all[0]] = true
			}
			return nil
		}()
	}()
	for n := range 100 {
		if err := Load(ctx, ns, fw(generation(n+1))); err != nil {
			t.Fatal(err)
		}
	}
	cancel()
	must(t, <-done)
	if len(seen) < 10 {
		t.Errorf("%d lists saw %d generations: too few to show anything", lists, len(seen))
	}
	t.Logf("%d lists saw %d of 101 generations, each whole", lists, len(seen))
	if got := reGeneration.FindString(nftIn(t, ns, "list", "table", "inet", "waystamp-fw")); got != "generation 100" {
		t.Errorf("in the end there is %s", got)
	}
}

const countingRules = `counter c {
}
counter other {
}
quota q {
	over 1000 bytes
}
set seen {
	type ipv4_addr; flags dynamic; timeout 1h;
}
set fixed {
	type ipv4_addr; elements = { 192.0.2.1 }
}
chain output {
	type filter hook output priority 0;
	meta mark set $guest
	counter name c
	quota name q
	ip daddr 127.0.0.0/8 add @seen { ip daddr }
}
`

// ping sends n echo requests of 84 bytes over the loopback interface.
func ping(t *testing.T, ns *host.NetNS, n int) {
	t.Helper()
	out, err := host.Command(t.Context(), ns, "ping", "-c", fmt.Sprint(n), "-i", "0.01", "127.0.0.1").CombinedOutput()
	if err != nil {
		t.Fatalf("ping: %v: %s", err, out)
	}
}

func withLoopback(t *testing.T) *host.NetNS {
	t.Helper()
	ns := scratch(t)
	n, err := host.Open(ns)
	must(t, err)
	defer n.Close()
	must(t, n.SetUp("lo"))
	return ns
}

func TestCountersQuotasAndDynamicSetsSurviveAReload(t *testing.T) {
	ctx := soon(t)
	ns := withLoopback(t)
	must(t, Load(ctx, ns, fw(countingRules)))
	ping(t, ns, 3) // and as many replies
	want := Counter{Packets: 6, Bytes: 6 * 84}
	check := func(when string, names ...string) {
		t.Helper()
		got, err := ReadCounters(ctx, ns, "fw")
		must(t, err)
		if got.Named["c"] != want {
			t.Errorf("%s: counter c is %+v, want %+v", when, got.Named["c"], want)
		}
		if len(got.Named) != len(names) {
			t.Errorf("%s: got counters %v, want %v", when, got.Named, names)
		}
		if got := got.Arguments[1].Packets; got != want.Packets {
			t.Errorf("%s: argument 1 has %d packets, want %d", when, got, want.Packets)
		}
	}
	check("before", "c", "other")
	changed := strings.Replace(countingRules, "counter other {\n}\n", "", 1)
	changed = strings.Replace(changed, "over 1000 bytes", "over 2000 bytes", 1)
	changed = strings.Replace(changed, "192.0.2.1", "192.0.2.2", 1)
	must(t, Load(ctx, ns, fw(changed)))
	check("after a reload", "c")
	text := nftIn(t, ns, "list", "table", "inet", "waystamp-fw")
	for _, want := range []string{"over 2000 bytes used 504 bytes", "elements = { 127.0.0.1 ", "elements = { 192.0.2.2 }"} {
		if !strings.Contains(text, want) {
			t.Errorf("the table has no %q:\n%s", want, text)
		}
	}
	ping(t, ns, 1)
	want = Counter{Packets: 8, Bytes: 8 * 84}
	check("after more packets", "c")
	// Gone and come back, it begins anew; so does a set of another type.
	must(t, Load(ctx, ns, fw("")))
	must(t, Load(ctx, ns, fw(strings.Replace(countingRules, "ip daddr 127.0.0.0/8 add @seen { ip daddr }", "", 1))))
	got, err := ReadCounters(ctx, ns, "fw")
	must(t, err)
	if got.Named["c"] != (Counter{}) {
		t.Errorf("a counter that was gone still has %+v", got.Named["c"])
	}
	other := strings.Replace(countingRules, "type ipv4_addr; flags dynamic", "type ipv6_addr; flags dynamic", 1)
	other = strings.Replace(other, "ip daddr 127.0.0.0/8 add @seen { ip daddr }", "", 1)
	must(t, Load(ctx, ns, fw(other)))
}

func TestRefusedRulesLeaveTheOldOnesInForce(t *testing.T) {
	ctx := soon(t)
	ns := scratch(t)
	must(t, Load(ctx, ns, fw(generation(1))))
	before := nftIn(t, ns, "list", "ruleset")
	var e *Error
	if err := Load(ctx, ns, fw(generation(2)+"chain c {\n\tjump nowhere\n}\n")); !errors.As(err, &e) {
		t.Errorf("got %v, want an *Error", err)
	}
	if now := nftIn(t, ns, "list", "ruleset"); now != before {
		t.Errorf("before:\n%s\nafter:\n%s", before, now)
	}
	// What only the namespace itself refuses: here an interface that it lacks.
	s := fw("\n" + generation(2) + "chain c {\n\tiif eth0 drop\n}\n")
	s.Interfaces = []string{"eth0"}
	must(t, Check(ctx, s))
	e = nil
	if err := Load(ctx, ns, s); !errors.As(err, &e) || e.Problems[0].Line != strings.Count(s.Text, "\n")-1 {
		t.Errorf("got %v, want an *Error at the line of eth0", err)
	}
	if now := nftIn(t, ns, "list", "ruleset"); now != before {
		t.Errorf("before:\n%s\nafter:\n%s", before, now)
	}
}

func TestOneFunctionsRefusalHoldsUpNoOther(t *testing.T) {
	ctx := soon(t)
	ns := scratch(t)
	good, bad := fw(generation(1)), Ruleset{Function: "dpi", Text: "nonsense\n"}
	var e *Error
	if err := Load(ctx, ns, bad, good); !errors.As(err, &e) || e.Function != "dpi" {
		t.Errorf("got %v, want an *Error of dpi", err)
	}
	if got := nftIn(t, ns, "list", "tables"); got != "table inet waystamp\ntable inet waystamp-fw\n" {
		t.Errorf("got %q", got)
	}
	if _, err := ReadCounters(ctx, ns, "dpi"); !errors.Is(err, ErrNotLoaded) {
		t.Errorf("got %v, want %v", err, ErrNotLoaded)
	}
}

func TestOtherTablesAreLeftAlone(t *testing.T) {
	ctx := soon(t)
	ns := scratch(t)
	nftIn(t, ns, "add", "table", "ip", "waystamp-fw")
	nftIn(t, ns, "add", "table", "inet", "waystamps")
	nftIn(t, ns, "add", "chain", "inet", "waystamps", "fw")
	before := nftIn(t, ns, "list", "ruleset")
	s := fw(generation(1))
	s.Zones = [][]uint32{{1}, {2}}
	must(t, Load(ctx, ns, s, Ruleset{Function: "dpi"}))
	must(t, Unload(ctx, ns, "dpi", "nobody"))
	if got, want := nftIn(t, ns, "list", "tables", "inet"), "table inet waystamps\ntable inet waystamp\ntable inet waystamp-fw\n"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	must(t, Unload(ctx, ns))
	must(t, Unload(ctx, ns))
	if now := nftIn(t, ns, "list", "ruleset"); now != before {
		t.Errorf("before:\n%s\nafter:\n%s", before, now)
	}
}

// Marks of one group share a zone, of two groups none, and those of none stay in 0.
func TestArgumentsHaveTheirZones(t *testing.T) {
	ctx := soon(t)
	far, ns := joined(t)
	s := Ruleset{
		Function:  "fw",
		Arguments: map[string]uint32{"a": 1, "b": 2, "c": 70000, "d": 80000},
		Zones:     [][]uint32{{2, 1}, {70000}},
	}
	s.Text = "chain marking {\n\ttype filter hook prerouting priority -350;\n\tmeta mark set udp dport\n}\n"
	for _, z := range []struct{ mark, zone int }{{1, 1}, {2, 1}, {70000, 65535}, {80000, 0}} {
		s.Text += fmt.Sprintf("counter of%d {\n}\n", z.mark)
		s.Text += fmt.Sprintf("chain c%d {\n\ttype filter hook prerouting priority 0;\n\tmeta mark %d ct zone %d counter name of%d\n}\n", z.mark, z.mark, z.zone, z.mark)
	}
	s.Text = strings.Replace(s.Text, "meta mark set udp dport", "meta mark set udp dport map { 1001 : 1, 1002 : 2, 1003 : 70000, 1004 : 80000 }", 1)
	must(t, Load(ctx, ns, s))
	send(t, far, "192.0.2.2", 1001, 1002, 1003, 1004)
	var got Counters
	until(t, func() bool {
		var err error
		got, err = ReadCounters(ctx, ns, "fw")
		must(t, err)
		return got.Named["of80000"].Packets > 0
	})
	for name, c := range got.Named {
		if c.Packets != 1 {
			t.Errorf("counter %s: %d packets in the zone of the mark, want 1", name, c.Packets)
		}
	}
	if len(got.Named) != 4 || len(got.Arguments) != 4 || got.Arguments[70000].Packets != 1 {
		t.Errorf("got %+v", got)
	}
}

// A packet that no rule accepts is dropped by the chain's policy, also in the moment
// of a reload; one that a rule accepts gets through.
func TestNoPacketMeetsHalfARuleset(t *testing.T) {
	ctx := soon(t)
	far, ns := joined(t)
	rules := func(n int) Ruleset {
		s := fw("chain input {\n\ttype filter hook prerouting priority 0; policy drop;\n")
		for i := range 40 {
			s.Text += fmt.Sprintf("\tmeta mark %d counter\n", 100+n+i)
		}
		s.Text += "\tudp dport 1001 accept\n}\n"
		return s
	}
	must(t, Load(ctx, ns, rules(0)))
	// Judged by a table that is not ours.
	nftIn(t, ns, "table inet judge { counter good { }; counter bad { }; chain input { type filter hook input priority 0; "+
		"udp dport 1001 counter name good; udp dport 1002 counter name bad; }; }")
	stop, cancel := context.WithCancel(ctx)
	done := make(chan error)
	sent := 0
	go func() {
		done <- far.Do(func() error {
			for stop.Err() == nil {
				for _, port := range []uint16{1001, 1002} {
					if err := datagram("192.0.2.2", port); err != nil {
						return err
					}
				}
				sent++
			}
			return nil
		})
	}()
	for n := range 50 {
		if err := Load(ctx, ns, rules(n)); err != nil {
			t.Fatal(err)
		}
	}
	cancel()
	must(t, <-done)
	count := func(name string) string { return nftIn(t, ns, "list", "counter", "inet", "judge", name) }
	until(t, func() bool { return strings.Contains(count("good"), fmt.Sprintf("packets %d ", sent)) })
	if got := count("bad"); !strings.Contains(got, "packets 0 ") {
		t.Errorf("of %d packets that are to be dropped some got through:\n%s", sent, got)
	}
	if sent < 1000 {
		t.Errorf("%d packets are too few to show anything", sent)
	}
}
