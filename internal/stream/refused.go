package stream

import (
	"encoding/json"
	"net/netip"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// Refusal is a connection that a worker has refused, or that a function has reset. It is the worker's word.
type Refusal struct {
	Client netip.AddrPort `json:"client"`
	Server netip.AddrPort `json:"server"`
	Why    string         `json:"why"` // a name of RefusalReasons
	// Untold counts refusals before this one that the worker, or its parent, has left out: there were too many.
	Untold uint32 `json:"untold,omitempty"`
}

// RefusalReasons are why a worker refuses or resets connections by itself, as sentences.
var RefusalReasons = map[string]string{
	"worker-limit":         "the function has as many connections as its limits allow",
	"worker-descriptors":   "the function's worker has no descriptor left for another connection",
	"worker-function":      "an operation of the function has reset the connection",
	"worker-part-mismatch": "the connection was sealed for another part than it came by, or for another service",
	"worker-unsealed":      "the connection was not sealed",
	"worker-peer":          "the connection's other end was not the one that the plan names, or its bytes were changed on the way",
	"worker-untrusted":     "the certificate of the connection's other end was not one that the controller has signed for an end",
	"worker-expired":       "the certificate of the connection's other end was not valid at that time",
	"worker-revoked":       "the certificate of the connection's other end was issued before its node was revoked",
	"worker-no-key":        "there was no key for the connection's part",
}

// refusalWhy is the reason that goes with how a connection was counted.
var refusalWhy = map[int]string{
	wordByFunction: "worker-function", wordMismatch: "worker-part-mismatch", wordUnsealed: "worker-unsealed", wordPeer: "worker-peer", wordUntrusted: "worker-untrusted", wordExpired: "worker-expired", wordRevoked: "worker-revoked", wordNoKey: "worker-no-key",
}

// Both sides hold a bound: a worker may be taken over, and a parent has readers.
const (
	refusalsKept      = 64 // that wait to be told
	refusalsPerSecond = 16
)

// refusalQueue has those that a worker tells its parent. nil: nobody is told.
type refusalQueue struct {
	list   chan Refusal
	untold atomic.Uint32
}

func newRefusalQueue() *refusalQueue { return &refusalQueue{list: make(chan Refusal, refusalsKept)} }

// tell never waits.
func (r *refusalQueue) tell(e ends, why string) {
	if r == nil {
		return
	}
	select {
	case r.list <- Refusal{Client: e.client, Server: e.server, Why: why}:
	default:
		r.untold.Add(1)
	}
}

// tellReset tells of a connection that is about to be given up, if it is a refusal.
func (l *loop) tellReset(c *conn, word int) {
	why, ok := refusalWhy[word]
	if !ok || l.w.refused == nil {
		return
	}
	switch {
	case c.ends != nil:
		l.w.refused.tell(*c.ends, why)
	case c.fd[0] >= 0 && c.fd[1] >= 0:
		l.w.refused.tell(ends{client: endOf(int(c.fd[1])), server: endOf(int(c.fd[0]))}, why)
	}
}

// endOf is the address that a socket has here: on the client's side the server's, and the other way round.
func endOf(fd int) netip.AddrPort {
	sa, err := unix.Getsockname(fd)
	if err != nil {
		return netip.AddrPort{}
	}
	return addrPort(sa)
}

// tellRefusals tells parents of refusals, as long as the process lives.
func (s *speaking) tellRefusals(r *refusalQueue) {
	for x := range r.list {
		x.Untold = r.untold.Swap(0)
		text, err := json.Marshal(jsonAsk{Refused: &x})
		s.mu.Lock()
		if err != nil || s.fd < 0 || say(s.fd, text) != nil { // the next one says that it is missing
			r.untold.Add(x.Untold + 1)
		}
		s.mu.Unlock()
		time.Sleep(time.Second / refusalsPerSecond)
	}
}

// refusalGate is a parent's bound on what a worker tells.
type refusalGate struct {
	since  time.Time
	n      int
	untold uint32
}

// take is whether a refusal goes on, with those that did not.
func (g *refusalGate) take(x *Refusal, now time.Time) bool {
	if now.Sub(g.since) >= time.Second {
		g.since, g.n = now, 0
	}
	if _, ok := RefusalReasons[x.Why]; !ok {
		return false // no worker of this program tells that
	}
	if g.n++; g.n > 2*refusalsPerSecond { // messages may come late
		g.untold = addUpTo(g.untold, x.Untold, 1)
		return false
	}
	x.Untold, g.untold = addUpTo(x.Untold, g.untold), 0
	// An address has no zone here, whose name could be any text.
	x.Client = netip.AddrPortFrom(x.Client.Addr().WithZone(""), x.Client.Port())
	x.Server = netip.AddrPortFrom(x.Server.Addr().WithZone(""), x.Server.Port())
	return true
}

func addUpTo(list ...uint32) (sum uint32) {
	for _, n := range list {
		sum += min(n, ^uint32(0)-sum)
	}
	return sum
}
