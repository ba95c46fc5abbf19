package stream

import (
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/waystamp/waystamp/internal/await"
)

// A worker tells of connections above its limit, and of those that a function has reset, with both ends; of no others.
func TestAWorkerTellsOfRefusals(t *testing.T) {
	w := once(t)
	text, err := Text("dpi", port, 1, []string{`{"match": {"literals": ["poison"]}}`}, nil, nil, false, Limits{Connections: 1, Buffer: BufferMin, Idle: time.Hour, HalfClosed: time.Hour})
	must(t, err)
	text, err = Placed(text, port, MemoryMin)
	must(t, err)
	p, _ := w.stayingAs(t, text)
	w.releases(t, p)
	told := make(chan Refusal, 10)
	p.Refused = func(r Refusal) { told <- r }
	next := func() (r Refusal) {
		t.Helper()
		select {
		case r = <-told:
		case <-time.After(await.Limit(30 * time.Second)):
			t.Error("the worker tells of no refusal")
		}
		return r
	}
	p.Answer(nil)
	for _, version := range []string{"IPv4", "IPv6"} {
		to := towards[version]
		l := w.listen(t, to)
		c, s := w.pair(t, l, to)
		echoes(t, c, s)
		if err := w.firstError(to); !isReset(err) {
			t.Errorf("%s: one connection too many: %v; want a reset", version, err)
		}
		r := next()
		if r.Why != "worker-limit" || r.Client.Addr() != c.LocalAddr().(*net.TCPAddr).AddrPort().Addr() || r.Server != to || r.Untold != 0 {
			t.Errorf("%s: the worker tells of %+v; want one connection too many, to %s", version, r, to)
		}
		if _, err := c.Write([]byte("poison")); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Read(make([]byte, 1)); !isReset(err) {
			t.Errorf("%s: the client: %v; want a reset", version, err)
		}
		want := Refusal{Client: c.LocalAddr().(*net.TCPAddr).AddrPort(), Server: to, Why: "worker-function"}
		if r := next(); r != want {
			t.Errorf("%s: the worker tells of %+v; want %+v", version, r, want)
		}
		// Neither end in order, nor a reset by the client, is a refusal.
		c, s = w.pair(t, l, to)
		must(t, s.Close())
		must(t, c.Close())
		eventually(t, "the connection has ended", func() bool { return p.Statistics().Now == 0 })
		c, _ = w.pair(t, l, to)
		must(t, c.SetLinger(0))
		must(t, c.Close())
		eventually(t, "the connection is reset", func() bool { return p.Statistics().Now == 0 })
	}
	must(t, p.Close())
	select {
	case r := <-told:
		t.Errorf("the worker tells of %+v", r)
	default:
	}
}

// Nobody waits for a reader of refusals, and none is left out without being counted.
func TestRefusalsAreBounded(t *testing.T) {
	r := newRefusalQueue()
	for range refusalsKept + 5 {
		r.tell(ends{}, "worker-limit")
	}
	if len(r.list) != refusalsKept || r.untold.Load() != 5 {
		t.Errorf("%d wait, %d are left out; want %d and 5", len(r.list), r.untold.Load(), refusalsKept)
	}
	(*refusalQueue)(nil).tell(ends{}, "worker-limit")

	var g refusalGate
	now := time.Now()
	went := 0
	for range 100 {
		if g.take(&Refusal{Why: "worker-limit", Untold: 1}, now) {
			went++
		}
	}
	if went != 2*refusalsPerSecond {
		t.Errorf("%d went on in a second; want %d", went, 2*refusalsPerSecond)
	}
	if g.take(&Refusal{Why: "\x1b[31m"}, now.Add(time.Minute)) {
		t.Error("a reason that there is not goes on")
	}
	x := Refusal{Why: "worker-limit", Client: netip.MustParseAddrPort("[fe80::1%\x1b]:5"), Untold: 7}
	if !g.take(&x, now.Add(time.Minute)) || x.Untold != uint32(7+2*(100-went)) || x.Client.Addr().Zone() != "" {
		t.Errorf("a second later it is %+v; want that it says what was left out, and no zone", x)
	}
	if !g.take(&x, now.Add(time.Minute)) || addUpTo(^uint32(0), 5) != ^uint32(0) {
		t.Error("a count wraps")
	}
}
