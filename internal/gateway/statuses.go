package gateway

import (
	"cmp"
	"context"
	"crypto/x509"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// statusAgain is after how long a responder is asked again about a certificate that is shown, or that a session has shown.
	statusAgain = 5 * time.Minute
	// statusPause is how long it is not asked again after it has not answered.
	statusPause = 10 * time.Second
	// statusTime bounds how long a handshake waits for it.
	statusTime = 5 * time.Second
	// statusInUse is how long a certificate counts as shown after a session has rested on it: each one says so four times a second.
	statusInUse = 4 * tick
	// statusesMax is of how many certificates answers are kept.
	statusesMax = 20_000
	// refreshesMax bounds the questions at once about certificates of open sessions.
	refreshesMax = 16
)

// StatusQuestion is what a responder of OCSP (RFC 6960) is asked.
type StatusQuestion struct {
	Clients string // whose certificate it is
	// Certificates are the one that it is about and those up to its root, in DER. They say where the responder is, if the
	// clients' setting does not.
	Certificates [][]byte
	Request      []byte // in DER
}

// Statuses are what responders have answered about clients' certificates, while that is good. They ask nobody themselves.
type Statuses struct {
	clients   string
	olderThan time.Duration

	mu sync.Mutex
	by map[string]*status // by statusKey
}

func newStatuses(clients string, olderThan time.Duration) *Statuses {
	return &Statuses{clients: clients, olderThan: olderThan, by: map[string]*status{}}
}

// status is what is known of one certificate.
type status struct {
	chain []*x509.Certificate // it, and those up to its root
	used  atomic.Int64        // when a session rested on it last, in nanoseconds since 1970

	answer atomic.Pointer[answer] // the last that was good; nil: none yet

	mu      sync.Mutex
	failure error         // why there is no newer one; nil: the last question was answered
	again   time.Time     // when to ask again
	asking  chan struct{} // closed once the question that is under way is over; nil: none is
}

// rest is an answer that a verification rests on.
type rest struct {
	of     *status
	answer *answer
}

// holds reports whether the answer is the last one still, and notes that a session rests on it.
func (r rest) holds(now time.Time) bool {
	r.of.used.Store(now.UnixNano())
	return r.of.answer.Load() == r.answer
}

func statusKey(cert, issuer *x509.Certificate) string {
	return string(cert.SerialNumber.Bytes()) + "\x00" + authorityOf(issuer)
}

func (s *Statuses) find(chain []*x509.Certificate) *status {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.by[statusKey(chain[0], chain[1])]
}

// check refuses the first certificate of a chain, if it is revoked or nothing good is known of it. until is when what is known gets too old.
func (s *Statuses) check(chain []*x509.Certificate, now time.Time) (on rest, until time.Time, err error) {
	of := s.find(chain)
	if of == nil {
		return on, until, refuse(OCSPUnreachable, "no responder has answered about certificate %x yet", chain[0].SerialNumber)
	}
	of.used.Store(now.UnixNano())
	of.mu.Lock()
	defer of.mu.Unlock()
	switch a := of.answer.Load(); {
	case a == nil && of.failure != nil:
		return on, until, of.failure
	case a == nil:
		return on, until, refuse(OCSPUnreachable, "no responder has answered about certificate %x yet", chain[0].SerialNumber)
	case a.revoked:
		return on, until, refuse(CertRevoked, "certificate %x is revoked since %s, its responder says", chain[0].SerialNumber, a.since.UTC().Format(time.RFC3339))
	default:
		if err := a.check(now, s.olderThan); err != nil {
			if of.failure != nil {
				err = of.failure // says why no newer one has come
			}
			return on, until, err
		}
		return rest{of, a}, a.until(s.olderThan), nil
	}
}

// due are the certificates of chains, roots aside, about which a responder is to be asked now. It makes room for those that are new.
func (s *Statuses) due(chains [][]*x509.Certificate, now time.Time) (list []*status, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, chain := range chains {
		for i := range chain[:len(chain)-1] {
			key := statusKey(chain[i], chain[i+1])
			of := s.by[key]
			if of == nil {
				if len(s.by) >= statusesMax && !s.makeRoomLocked(now) {
					return nil, refuse(Limit, "answers of responders about %d certificates are kept, all of open sessions", len(s.by))
				}
				of = &status{chain: chain[i:]}
				of.used.Store(now.UnixNano())
				s.by[key] = of
			}
			of.mu.Lock()
			is := !now.Before(of.again) && !slices.Contains(list, of)
			of.mu.Unlock()
			if is {
				list = append(list, of)
			}
		}
	}
	return list, nil
}

// makeRoomLocked forgets a quarter of what no session rests on, the longest unused first.
func (s *Statuses) makeRoomLocked(now time.Time) bool {
	type idle struct {
		key  string
		used int64
	}
	var list []idle
	for key, of := range s.by {
		if used := of.used.Load(); now.Sub(time.Unix(0, used)) > statusInUse {
			list = append(list, idle{key, used})
		}
	}
	slices.SortFunc(list, func(a, b idle) int { return cmp.Compare(a.used, b.used) })
	for _, x := range list[:min(len(list), max(1, statusesMax/4))] {
		delete(s.by, x.key)
	}
	return len(list) > 0
}

// inUse are the certificates that sessions rest on and about which a responder is to be asked again.
func (s *Statuses) inUse(now time.Time) (list []*status) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, of := range s.by {
		if now.Sub(time.Unix(0, of.used.Load())) > statusInUse {
			continue
		}
		of.mu.Lock()
		if of.asking == nil && !now.Before(of.again) {
			list = append(list, of)
		}
		of.mu.Unlock()
	}
	return list
}

// carry takes over what another one knows, when the rest of a configuration changes.
func (s *Statuses) carry(from *Statuses) {
	from.mu.Lock()
	before := make(map[string]*status, len(from.by))
	for k, of := range from.by {
		before[k] = of
	}
	from.mu.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	for k, of := range before {
		if s.by[k] == nil {
			s.by[k] = of
		}
	}
}

// ask asks a responder about a certificate, once at a time, and gives the channel that is closed when that is over. It returns at once.
// began: run has been called, and no question was under way.
func (s *Statuses) ask(ctx context.Context, of *status, responder func(context.Context, StatusQuestion) ([]byte, error), clock func() time.Time, run func(func())) (over <-chan struct{}, began bool) {
	of.mu.Lock()
	defer of.mu.Unlock()
	if of.asking != nil {
		return of.asking, false
	}
	done := make(chan struct{})
	of.asking = done
	run(func() {
		a, err := s.question(ctx, of, responder, clock)
		of.take(a, err, clock(), s.olderThan)
		close(done)
	})
	return done, true
}

func (s *Statuses) question(ctx context.Context, of *status, responder func(context.Context, StatusQuestion) ([]byte, error), clock func() time.Time) (*answer, error) {
	cert, issuer := of.chain[0], of.chain[1]
	r, err := newStatusRequest(cert, issuer)
	if err != nil {
		return nil, refuse(OCSPInvalid, "make a question about certificate %x: %w", cert.SerialNumber, err)
	}
	q := StatusQuestion{Clients: s.clients, Request: r.der}
	for _, c := range of.chain {
		q.Certificates = append(q.Certificates, c.Raw)
	}
	ctx, stop := context.WithTimeout(ctx, statusTime)
	defer stop()
	der, err := responder(ctx, q)
	if err != nil {
		return nil, refuse(OCSPUnreachable, "no responder answers about certificate %x: %w", cert.SerialNumber, err)
	}
	a, err := readAnswer(der, cert, issuer, r, clock())
	if err != nil {
		return nil, err
	}
	return a, a.check(clock(), s.olderThan)
}

// take notes what came of a question. An answer that is older than the one before could be repeated by somebody on the way.
func (of *status) take(a *answer, err error, now time.Time, olderThan time.Duration) {
	of.mu.Lock()
	defer of.mu.Unlock()
	of.asking = nil
	before := of.answer.Load()
	if err == nil && before != nil && a.of.Before(before.of) {
		err = refuse(OCSPStale, "the responder's answer is of %s, and the one before of %s", a.of.UTC().Format(time.RFC3339), before.of.UTC().Format(time.RFC3339))
	}
	if of.failure = err; err != nil {
		of.again = now.Add(statusPause)
		if before != nil { // what is known may come to its end soon
			of.again = earlier(of.again, now.Add(max(time.Second, before.until(olderThan).Sub(now)/4)))
		}
		return
	}
	of.answer.Store(a)
	of.again = earlier(now.Add(statusAgain), now.Add(a.until(olderThan).Sub(now)/2))
}

// askedFor reports whether an error is one that a responder's answer could change.
func askedFor(err error) bool {
	switch reasonOf(err, "") {
	case OCSPUnreachable, OCSPInvalid, OCSPStale, CertRevoked:
		return true
	}
	return err == nil
}

// verifyShown is verify for a client that shakes hands: responders are asked about its certificates, if that is due, and waited for.
func (g *Gateway) verifyShown(ctx context.Context, c *Clients, shown []*x509.Certificate) (string, standing, error) {
	who, s, err := c.verify(shown, g.config.Now(), standing{})
	if c.statuses != nil && s.chains.list != nil && askedFor(err) {
		due, full := c.statuses.due(s.chains.list, g.config.Now())
		if full != nil {
			return "", standing{}, full
		}
		var over []<-chan struct{}
		for _, of := range due {
			done, _ := c.statuses.ask(g.life, of, g.config.Status, g.config.Now, g.asks.Go)
			over = append(over, done)
		}
		for i, done := range over {
			select {
			case <-done:
			case <-ctx.Done():
				return "", standing{}, refuse(OCSPUnreachable, "no responder has answered about certificate %x in time", due[i].chain[0].SerialNumber)
			}
		}
		if len(due) > 0 {
			who, s, err = c.verify(shown, g.config.Now(), standing{chains: s.chains})
		}
	}
	if err == nil {
		err = g.isRevoked(who)
	}
	if err != nil {
		return "", standing{}, err
	}
	return who, s, nil
}

// refresh asks responders again about certificates of open sessions, and waits for none. What they answer counts when sessions are
// looked at the next time.
func (g *Gateway) refresh() {
	now := g.config.Now()
	g.mu.Lock()
	var all []*Statuses
	for _, s := range g.services {
		if st := s.Clients.statuses; st != nil && !slices.Contains(all, st) {
			all = append(all, st)
		}
	}
	g.mu.Unlock()
	for _, s := range all {
		for _, of := range s.inUse(now) {
			select {
			case g.refreshes <- struct{}{}:
			default:
				return // the next time
			}
			_, began := s.ask(g.life, of, g.config.Status, g.config.Now, func(f func()) {
				g.asks.Go(func() {
					defer func() { <-g.refreshes }()
					f()
				})
			})
			if !began {
				<-g.refreshes
			}
		}
	}
}

// errNoResponder is that a gateway was given clients of OCSP and nobody to ask for it.
var errNoResponder = errors.New("nobody asks responders of OCSP for this gateway")
