package gateway

import (
	"crypto/x509"
	"maps"
	"net/netip"
	"slices"
	"time"
)

// SessionState is an open session as it is now.
type SessionState struct {
	ID       uint64 // as in the audit log; they begin with 1 in each process
	Service  string
	Host     string
	Identity string
	Serial   string // of the certificate, hexadecimal
	Client   netip.AddrPort
	Since    time.Time
	Until    time.Time // the certificate's end
	Resumed  bool      // by a ticket
	Requests uint64    // that were let in
	UnderWay int       // of these, those that have not ended
	Chains   []string  // that they have taken, in alphabetical order; chainsShown at most
}

// chainsShown bounds how many chains a session remembers.
const chainsShown = 32

// SessionsAfter are open sessions with higher IDs than one, the lowest first, and whether there are more than that.
func (g *Gateway) SessionsAfter(id uint64, most int) (list []SessionState, more bool) {
	g.mu.Lock()
	var open []*session
	for s := range g.sessions {
		if s.id > id {
			open = append(open, s)
		}
	}
	g.mu.Unlock()
	slices.SortFunc(open, func(a, b *session) int { return int(int64(a.id - b.id)) })
	if more = len(open) > most; more {
		open = open[:most]
	}
	for _, s := range open {
		list = append(list, s.state())
	}
	return list, more
}

func (s *session) state() SessionState {
	s.mu.Lock()
	defer s.mu.Unlock()
	return SessionState{
		ID: s.id, Service: s.service, Host: s.host, Identity: s.identity, Serial: s.serial, Client: s.client, Since: s.since, Until: s.shown[0].NotAfter,
		Resumed: s.resumed, Requests: s.last, UnderWay: len(s.requests), Chains: slices.Sorted(maps.Keys(s.chains)),
	}
}

// End ends a session, with the requests that are under way. It is false if there is none with this ID.
func (g *Gateway) End(id uint64) bool {
	g.mu.Lock()
	var found *session
	for s := range g.sessions {
		if s.id == id {
			found = s
		}
	}
	g.mu.Unlock()
	if found == nil {
		return false
	}
	g.endSession(found, refuse(SessionEnded, "an operator has ended it"))
	return true
}

// Revoke replaces the list of identities that are not let in, whatever their certificates say. Their sessions have ended when it
// returns; it says how many.
func (g *Gateway) Revoke(list []string) (ended int) {
	next := setOf(list)
	g.mu.Lock()
	before := g.revoked
	g.revoked = next
	var theirs []*session
	for s := range g.sessions {
		if next[s.identity] {
			theirs = append(theirs, s)
		}
	}
	g.mu.Unlock()
	for _, s := range theirs {
		g.endSession(s, revokedIdentity(s.identity))
	}
	// A session that is just being opened is checked behind its entry into g.sessions.
	for _, c := range []struct {
		event     Event
		has, lack map[string]bool
	}{{EventRevoked, next, before}, {EventTrusted, before, next}} {
		for _, who := range slices.Sorted(maps.Keys(c.has)) {
			if c.lack[who] {
				continue
			}
			if err := g.config.Audit.Write(Record{Event: c.event, Identity: who}); err != nil {
				g.config.Log.Error("a change of the list of revoked identities is not in the audit log", "identity", who, "err", err)
			}
		}
	}
	return len(theirs)
}

func (g *Gateway) isRevoked(identity string) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.revoked[identity] {
		return revokedIdentity(identity)
	}
	return nil
}

func revokedIdentity(identity string) error {
	return refuse(IdentityRevoked, "an operator has revoked %s", identity)
}

// verify says who holds a certificate, or refuses it.
func (g *Gateway) verify(c *Clients, shown []*x509.Certificate, now time.Time, before standing) (string, standing, error) {
	who, s, err := c.verify(shown, now, before)
	if err == nil {
		err = g.isRevoked(who)
	}
	if err != nil {
		return "", standing{}, err
	}
	return who, s, nil
}

func setOf(list []string) map[string]bool {
	set := make(map[string]bool, len(list))
	for _, s := range list {
		set[s] = true
	}
	return set
}
