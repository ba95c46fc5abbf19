package host

import (
	"errors"
	"testing"
)

func testCutter() Cutter { return Cutter{In: "wscut0", Out: "wscut1", Owner: "waystamp test"} }

func anonymousNet(t *testing.T) *Net {
	t.Helper()
	ns, err := Anonymous()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ns.Close() })
	n, err := Open(ns)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { n.Close() })
	return n
}

func checkCutter(t *testing.T, n *Net, c Cutter) (in, out Link) {
	t.Helper()
	must(t, n.WaitUp(soon(t), c.In, c.Out)) // the kernel says so up to a second later (linkwatch)
	for _, w := range []struct {
		name string
		l    *Link
	}{{c.In, &in}, {c.Out, &out}} {
		l, err := n.Link(w.name)
		if err != nil {
			t.Fatal(err)
		}
		*w.l = l
		if !l.Up || l.MTU != 65535 || l.Alias != c.Owner || l.MAC == [6]byte{} {
			t.Errorf("%+v", l)
		}
		if v, err := n.Sysctl("net/ipv6/conf/" + w.name + "/forwarding"); err != nil || v != "1" {
			t.Errorf("%s forwards: %q, %v", w.name, v, err)
		}
	}
	own, err := n.Addresses()
	if err != nil || len(own) != 0 {
		t.Errorf("addresses %v, %v; want none", own, err)
	}
	on, names, err := n.features(c.In)
	if err != nil || len(names) < 20 {
		t.Fatalf("%d features, %v", len(names), err)
	}
	if left := wholeBy(names, on); len(left) > 0 {
		t.Errorf("super-packets stay whole by %v", left)
	}
	if on, err := n.Offload(c.Out, GRO); err != nil || on {
		t.Errorf("GRO %t, %v", on, err)
	}
	return in, out
}

func TestCutterIsMadeAdoptedRepairedAndRemoved(t *testing.T) {
	n, c := anonymousNet(t), testCutter()
	if _, err := n.EnsureCutter(c); err != nil {
		t.Fatal(err)
	}
	in, out := checkCutter(t, n, c)
	// A veth does leave them whole of itself: the test above can fail.
	if on, names, err := n.features(c.Out); err != nil || len(wholeBy(names, on)) == 0 {
		t.Errorf("features of an untouched veth: %v, %v", names, err)
	}
	if err := errors.Join(n.SetOffload(c.In, TSO, true), n.SetOffload(c.Out, GRO, true), n.SetMTU(c.In, 1500), n.SetDown(c.Out), n.SetSysctl("net/ipv6/conf/wscut1/forwarding", "0")); err != nil {
		t.Fatal(err)
	}
	if made, err := n.EnsureCutter(c); err != nil || made {
		t.Fatal(made, err)
	}
	in2, out2 := checkCutter(t, n, c)
	if in2.Index != in.Index || out2.Index != out.Index {
		t.Error("it was made anew instead of taken over")
	}
	// Half of another pair under the second name.
	if err := n.RemoveCutter(c); err != nil {
		t.Fatal(err)
	}
	if err := n.RemoveCutter(c); err != nil {
		t.Errorf("removing it twice: %v", err)
	}
	other := Cutter{In: "wscut1", Out: "elsewhere", Owner: c.Owner}
	if _, err := n.EnsureCutter(other); err != nil {
		t.Fatal(err)
	}
	if _, err := n.EnsureCutter(c); err != nil {
		t.Fatal(err)
	}
	checkCutter(t, n, c)
	if _, err := n.Link("elsewhere"); !errors.Is(err, ErrNoLink) {
		t.Errorf("half a pair is left: %v", err)
	}
	if err := n.RemoveCutter(c); err != nil {
		t.Fatal(err)
	}
	links, err := n.Links()
	if err != nil || len(links) != 1 {
		t.Errorf("left: %+v, %v", links, err)
	}
}

func TestForeignDeviceIsNotTaken(t *testing.T) {
	n, c := anonymousNet(t), testCutter()
	if err := n.AddVeth(Veth{Name: "wscut1", PeerName: "theirs"}); err != nil {
		t.Fatal(err)
	}
	if _, err := n.EnsureCutter(c); !errors.Is(err, ErrForeignLink) {
		t.Errorf("got %v; want ErrForeignLink", err)
	}
	if _, err := n.Link("wscut0"); !errors.Is(err, ErrNoLink) {
		t.Errorf("the other end was made: %v", err)
	}
	if err := n.RemoveCutter(c); err != nil {
		t.Error(err)
	}
	if _, err := n.Link("theirs"); err != nil {
		t.Errorf("a foreign device was removed: %v", err)
	}
}
