package agent

import (
	"fmt"
	"time"

	"github.com/waystamp/waystamp/internal/dataplane"
)

const (
	// silentAfter is how long a function may take packets and give none back.
	silentAfter = 20 * time.Second
	// silentPackets is the number of packets that it must have got by then.
	silentPackets = 5
)

// silenceWatch finds functions that get packets and return none: a firewall that drops
// everything, or a function that does not forward at all, shows no other sign.
type silenceWatch struct {
	seen map[string]silence
}

// silence is the time since which a function has returned nothing.
type silence struct {
	tx    uint64 // packets that have come back, with or without a header
	rx    uint64 // that it had taken when the last one came back
	since time.Time
}

// look returns the functions that are silent, by a sentence for each.
func (w *silenceWatch) look(now time.Time, counts []dataplane.FunctionCount) (warnings []string) {
	next := map[string]silence{}
	for _, c := range counts {
		tx := c.TxSuccess + c.TxNotCached
		s, known := w.seen[c.Function]
		if !known || tx != s.tx || c.RxSuccess < s.rx || c.RxSuccess == s.rx {
			s = silence{tx, c.RxSuccess, now}
		}
		next[c.Function] = s
		if took := c.RxSuccess - s.rx; took >= silentPackets && now.Sub(s.since) >= silentAfter {
			warnings = append(warnings, silentText(c))
		}
	}
	w.seen = next
	return warnings
}

// silentText has no numbers: a changing text would be logged each time.
func silentText(c dataplane.FunctionCount) string {
	check := "check that it forwards (net.ipv6.conf.all.forwarding=1, for IPv4 net.ipv4.ip_forward=1), that it has a route to the destinations by the interface back to the node (for IPv4: ip route add default via inet6 ADDRESS dev INTERFACE), and which packets its rules drop"
	if c.Local {
		check = "check which packets the rules of this node drop"
	}
	return fmt.Sprintf("function %s receives packets and returns none: %s; waystamp get functions counts them", c.Function, check)
}

// adviseSilence shows the functions that are silent.
func (a *agent) adviseSilence(counts []dataplane.FunctionCount) {
	a.warn(warnSilence, a.silence.look(time.Now(), counts))
}
