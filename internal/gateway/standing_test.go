package gateway

import (
	"crypto/x509"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"testing"
	"time"

	"github.com/waystamp/waystamp/internal/model"
)

// A session that is not verified again is one that would be let in again, whatever has changed and whatever has come to its end, and
// one whose signatures are not verified again is decided about as if they were.
func TestWhatIsNotVerifiedAgainWouldBeLetIn(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	random := rand.New(rand.NewPCG(seed, 0))
	t.Logf("seed %d", seed)
	start := time.Now()
	hours := func(most int) time.Duration { return time.Duration(1+random.IntN(60*most)) * time.Minute }
	root := newIssuer(t, "root", nil, func(c *x509.Certificate) { c.NotAfter = start.Add(48 * time.Hour) })
	stranger := newIssuer(t, "stranger", nil, nil)
	held, reused, ended := 0, 0, map[Reason]int{}
	for range 60 {
		between := newIssuer(t, "between", root, func(c *x509.Certificate) { c.NotAfter = start.Add(hours(40)) })
		key := newKey(t)
		leaf := sign(t, between, key, func(c *x509.Certificate) {
			c.URIs, c.NotAfter = append(c.URIs, spiffe(t, "/eng/alice")), start.Add(hours(40))
		})
		authorities := []*x509.Certificate{root.cert, between.cert}
		lists := NewRevocations(authorities, hours(40))
		number := int64(0)
		take := func(revoked ...*x509.Certificate) {
			number++
			for _, i := range []*issuer{root, between} {
				of := slices.DeleteFunc(slices.Clone(revoked), func(c *x509.Certificate) bool { return c.Issuer.String() != i.cert.Subject.String() })
				next := start.Add(hours(40))
				if err := lists.Take(i.list(t, number, func(l *x509.RevocationList) { l.NextUpdate = next }, of...), start); err != nil {
					t.Fatal(err)
				}
			}
		}
		take()
		// In half of the rounds responders tell of them, too.
		asked, answersOld := random.IntN(2) == 0, hours(40)
		statuses := newStatuses("staff", answersOld)
		clients := func(authorities ...*x509.Certificate) *Clients {
			c, err := NewClients(model.Clients{Name: "staff", Kind: model.IdentitySPIFFE, Within: "staff.example", OCSP: asked, OlderThan: answersOld}, authorities, lists)
			if err != nil {
				t.Fatal(err)
			}
			if asked {
				c.statuses.carry(statuses)
			}
			return c
		}
		now := start
		tell := func(chain []*x509.Certificate, revoked bool) {
			if _, err := statuses.due([][]*x509.Certificate{chain}, now); err != nil {
				t.Fatal(err)
			}
			statuses.find(chain).take(&answer{revoked: revoked, of: now.Add(-hours(3)), next: now.Add(hours(40)), signer: now.Add(hours(40))}, nil, now, answersOld)
		}
		tell([]*x509.Certificate{leaf, between.cert, root.cert}, false)
		tell([]*x509.Certificate{between.cert, root.cert}, false)
		c := clients(authorities...)
		shown := []*x509.Certificate{leaf}
		who, stands, err := c.verify(shown, now, standing{})
		if err != nil {
			ended[reasonOf(err, "")]++
			continue
		}
		for range 40 {
			now = now.Add(hours(2))
			switch random.IntN(30) {
			case 0:
				take()
			case 1:
				take(leaf)
			case 2:
				take(between.cert)
			case 3, 4, 5:
				c = clients(authorities...)
			case 6:
				c = clients(stranger.cert)
			case 7:
				now = start.Add(-hours(3))
			case 8, 9, 10:
				tell([]*x509.Certificate{leaf, between.cert, root.cert}, false)
			case 11:
				tell([]*x509.Certificate{between.cert, root.cert}, random.IntN(3) == 0)
			case 12:
				tell([]*x509.Certificate{leaf, between.cert, root.cert}, true)
			}
			want, wantErr := c.Verify(shown, now)
			if stands.holds(c, now) {
				held++
				if wantErr != nil || want != who {
					t.Fatalf("%s after the start it is not verified again, and would be %q, %v; want %q", now.Sub(start), want, wantErr, who)
				}
				continue
			}
			got, next, err := c.verify(shown, now, stands)
			if got != want || fmt.Sprint(err) != fmt.Sprint(wantErr) {
				t.Fatalf("%s after the start it is %q, %v; from the beginning %q, %v", now.Sub(start), got, err, want, wantErr)
			}
			if err != nil {
				ended[reasonOf(err, "")]++
				break
			}
			if &next.chains.list[0] == &stands.chains.list[0] {
				reused++
			}
			stands = next
		}
	}
	t.Logf("not verified again %d times, signatures not %d times, ended %v", held, reused, ended)
	if held == 0 || reused == 0 || ended[CertExpired] == 0 || ended[CertRevoked] == 0 || ended[RevocationStale] == 0 || ended[CertUntrusted] == 0 || ended[OCSPStale] == 0 {
		t.Error("not all has happened that can")
	}
}

// manySessions are open without connections, of as many identities.
func manySessions(t testing.TB, w *world, count int) {
	t.Helper()
	key := newKey(t) // one for all: they differ by name and number
	now := w.now()
	for i := range count {
		cert := sign(t, w.staff, key, func(c *x509.Certificate) { c.URIs = append(c.URIs, spiffe(t, fmt.Sprintf("/eng/c%d", i))) })
		ours, its := net.Pipe()
		t.Cleanup(func() { its.Close() })
		s := &session{id: uint64(i + 1), service: "shop", host: "shop.example.org", shown: []*x509.Certificate{cert}, conn: ours, since: now,
			requests: map[uint64]inFlight{}, chains: map[string]bool{}}
		var err error
		if s.identity, err = w.services[0].Clients.Verify(s.shown, now); err != nil {
			t.Fatal(err)
		}
		w.gateway.mu.Lock()
		w.gateway.sessions[s] = true
		w.gateway.identities[s.service+"\x00"+s.identity]++
		w.gateway.mu.Unlock()
	}
}

// Where nothing has changed a pass over the sessions verifies none of them: it makes no more memory for many than for few. With a list,
// those that it revokes end in the same pass.
func TestAPassVerifiesWhatHasChanged(t *testing.T) {
	w := newWorld(t, nil)
	const count = 200
	manySessions(t, w, count)
	w.gateway.Recheck()
	if n := testing.AllocsPerRun(3, w.gateway.Recheck); n > count/2 {
		t.Errorf("a pass over %d sessions allocates %.0f times; verifying one takes dozens", count, n)
	}
	var gone *session
	w.gateway.mu.Lock()
	for s := range w.gateway.sessions {
		gone = s
	}
	w.gateway.mu.Unlock()
	if err := w.lists.Take(w.staff.list(t, 2, nil, gone.shown[0]), time.Now()); err != nil {
		t.Fatal(err)
	}
	w.gateway.Recheck()
	gone.mu.Lock()
	why := gone.why
	gone.mu.Unlock()
	if n := w.gateway.Refused()[CertRevoked]; why != CertRevoked || n != 1 {
		t.Errorf("the session of a revoked certificate ended for %q, and %d others", why, n)
	}
}

func BenchmarkRecheck(b *testing.B) {
	w := newWorld(b, nil)
	const count = 5000
	manySessions(b, w, count)
	w.gateway.Recheck()
	each := func(name string, change func(number int64)) {
		number := int64(1)
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				b.StopTimer()
				number++
				change(number)
				b.StartTimer()
				w.gateway.Recheck()
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/count, "ns/session")
		})
	}
	each("nothing", func(int64) {})
	each("list", func(number int64) {
		if err := w.lists.Take(w.staff.list(b, number, nil), time.Now()); err != nil {
			b.Fatal(err)
		}
	})
	each("signatures", func(int64) {
		w.gateway.mu.Lock()
		defer w.gateway.mu.Unlock()
		for s := range w.gateway.sessions {
			s.stood = standing{}
		}
	})
}
