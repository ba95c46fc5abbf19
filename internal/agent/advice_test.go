package agent

import (
	"strings"
	"testing"
	"time"

	"github.com/waystamp/waystamp/internal/dataplane"
)

func TestLossOfAFunctionIsToldOnceAMinute(t *testing.T) {
	var w lossWatch
	now := time.Unix(1000, 0)
	at := func(after time.Duration, full, missed uint64) []loss {
		return w.look(now.Add(after), []dataplane.FunctionCount{{Function: "fw", Cache: 10, RxSuccess: 100, RxIgnored: full, TxNotCached: missed}})
	}
	if l := at(0, 7, 7); len(l) != 0 {
		t.Errorf("what was lost before the agent came is told: %+v", l)
	}
	if l := at(10*time.Second, 8, 7); len(l) != 1 || l[0].full != 1 || l[0].missed != 0 {
		t.Errorf("first loss: %+v", l)
	}
	if l := at(20*time.Second, 20, 9); len(l) != 0 {
		t.Errorf("a second line within a minute: %+v", l)
	}
	if l := at(75*time.Second, 21, 10); len(l) != 1 || l[0].full != 13 || l[0].missed != 3 {
		t.Errorf("after a minute: %+v; want all since the first line", l)
	}
	if l := at(200*time.Second, 21, 10); len(l) != 0 {
		t.Errorf("nothing was lost: %+v", l)
	}
	evicted := w.look(now.Add(250*time.Second), []dataplane.FunctionCount{{Function: "fw", Cache: 10, RxSuccess: 5100, RxIgnored: 21, TxNotCached: 10, Evicted: 3}})
	if len(evicted) != 1 || evicted[0].evicted != 3 || evicted[0].rate != 100 || evicted[0].full+evicted[0].missed != 0 {
		t.Errorf("headers were evicted: %+v", evicted)
	}
	if l := at(300*time.Second, 0, 0); len(l) != 0 {
		t.Errorf("counters that start again: %+v", l)
	}
}

func TestAdviceFitsTheLoss(t *testing.T) {
	for _, c := range []struct {
		l    loss
		want string
	}{
		{loss{full: 1, FunctionCount: dataplane.FunctionCount{Cache: 10}}, "a cache of 20,"},
		{loss{missed: 1, evicted: 1, FunctionCount: dataplane.FunctionCount{Cache: 1000}}, "evicted before their packets returned: set a cache of 2000"},
		// 5 ms at a million packets per second, and as much again.
		{loss{evicted: 1, rate: 1e6, FunctionCount: dataplane.FunctionCount{Cache: 1000, TxSuccess: 10, WaitedNs: 50e6}}, "set a cache of 10000,"},
		{loss{missed: 1, FunctionCount: dataplane.FunctionCount{Cache: 1000, Expired: 3}}, "longer lifetime"},
		{loss{missed: 1, FunctionCount: dataplane.FunctionCount{Cache: 1000}}, "originates packets"},
	} {
		if got := c.l.advice(); !strings.Contains(got, c.want) {
			t.Errorf("%+v: %q; want %q in it", c.l, got, c.want)
		}
	}
}
