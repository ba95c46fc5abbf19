package controller

import (
	"maps"
	"net/netip"
	"sync"
	"time"
)

// bucket lets through so many at once, and then so many a second.
type bucket struct {
	left float64
	at   time.Time
}

// take is how many of n come through.
func (b *bucket) take(now time.Time, n int, rate float64, most int) int {
	if b.at.IsZero() {
		b.left = float64(most)
	} else if d := now.Sub(b.at).Seconds(); d > 0 { // a clock that was put back gives nothing
		b.left = min(b.left+d*rate, float64(most))
	}
	b.at = now
	n = min(n, int(b.left))
	b.left -= float64(n)
	return n
}

// budget is time for explanations, which comes back at explainShare.
type budget struct {
	left time.Duration
	at   time.Time
}

// mayBegin tells whether there is time left.
func (b *budget) mayBegin(now time.Time) bool {
	if b.at.IsZero() {
		b.left = explainAhead
	} else if d := now.Sub(b.at); d > 0 {
		b.left = min(b.left+time.Duration(float64(d)*explainShare), explainAhead)
	}
	b.at = now
	return b.left > 0
}

// took notes what an explanation has cost, also more than was left.
func (b *budget) took(d time.Duration) { b.left -= d }

// What one node, or somebody without a certificate, may ask for.
const (
	renewEvery = 10 * time.Second // a certificate for one node
	renewRate  = float64(time.Second) / float64(renewEvery)
	renewMost  = 10
	joinRate   = 0.2 // tokens a second that are not valid, of one source
	joinMost   = 20
	joinFrom   = 4096 // sources that are told apart; all others count as one
	tellRate   = 64.0 // refusals a second, of one node
	tellMost   = 512

	numbersRate = 8.0 // calls a second about numbers of draining epochs, of one node
	numbersMost = 32
	ackRate     = 16.0 // acknowledgements a second that say something new, of one node
	ackMost     = 256
)

// limits are buckets, by node; those of joins by source.
type limits struct {
	mu    sync.Mutex
	renew map[string]*bucket
	ends  map[string]*bucket // calls for certificates of ends
	tell  map[string]*bucket
	count map[string]*bucket // calls about numbers
	ack   map[string]*bucket
	join  map[netip.Prefix]*bucket
}

// bucketOf finds a bucket, or makes it.
func bucketOf[K comparable](m *map[K]*bucket, of K) *bucket {
	if *m == nil {
		*m = map[K]*bucket{}
	}
	b, ok := (*m)[of]
	if !ok {
		b = &bucket{}
		(*m)[of] = b
	}
	return b
}

func (l *limits) mayRenew(now time.Time, node string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return bucketOf(&l.renew, node).take(now, 1, renewRate, renewMost) == 1
}

func (l *limits) mayCertify(now time.Time, node string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return bucketOf(&l.ends, node).take(now, 1, renewRate, renewMost) == 1
}

func (l *limits) mayTell(now time.Time, node string, n int) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return bucketOf(&l.tell, node).take(now, n, tellRate, tellMost)
}

func (l *limits) mayNumber(now time.Time, node string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return bucketOf(&l.count, node).take(now, 1, numbersRate, numbersMost) == 1
}

func (l *limits) mayAcknowledge(now time.Time, node string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return bucketOf(&l.ack, node).take(now, 1, ackRate, ackMost) == 1
}

// source is whose tokens are counted together: an IPv4 address, or a /64, the least that one host can have.
func (l *limits) source(remote string) netip.Prefix {
	at, err := netip.ParseAddrPort(remote)
	if err != nil { // a unix socket
		return netip.Prefix{}
	}
	a := at.Addr().Unmap().WithZone("")
	p, _ := a.Prefix(min(a.BitLen(), 64))
	if _, ok := l.join[p]; !ok && len(l.join) >= joinFrom {
		return netip.Prefix{}
	}
	return p
}

// mayJoin tells whether a source may show a token. Only those that are not valid count (failedJoin).
func (l *limits) mayJoin(now time.Time, remote string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	maps.DeleteFunc(l.join, func(_ netip.Prefix, b *bucket) bool { return now.Sub(b.at).Seconds() > joinMost/joinRate }) // full again
	source := l.source(remote)
	b, ok := l.join[source]
	// Who has no place of its own is counted with strangers, and is not to answer for them: looking a token
	// up is one read.
	if !ok || source == (netip.Prefix{}) {
		return true
	}
	b.take(now, 0, joinRate, joinMost)
	return b.left >= 1
}

func (l *limits) failedJoin(now time.Time, remote string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	bucketOf(&l.join, l.source(remote)).take(now, 1, joinRate, joinMost)
}
