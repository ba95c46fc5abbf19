package seal

import (
	"bytes"
	"crypto/tls"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/waystamp/waystamp/test/tlsrecord"
)

// once talks over new wires.
func once(t *testing.T, dials, accepts *Part) session {
	t.Helper()
	d, a, _, _ := newWires()
	return talk(t, dials, accepts, d, a, []byte("request"), []byte("answer"))
}

// resumes talks twice, and holds that the second session is resumed: what a test then changes has that effect.
func resumes(t *testing.T, dials, accepts *Part) {
	t.Helper()
	for i := range 2 {
		s := once(t, dials, accepts)
		if !s.whole([]byte("request"), []byte("answer")) || s.resumed != (i > 0) {
			t.Fatalf("session %d: resumed %t, %v %v", i+1, s.resumed, s.dialErr, s.acceptErr)
		}
	}
}

// fresh holds that the next session is whole, and none that is resumed.
func fresh(t *testing.T, what string, dials, accepts *Part) {
	t.Helper()
	if s := once(t, dials, accepts); !s.whole([]byte("request"), []byte("answer")) || s.resumed {
		t.Errorf("%s: resumed %t, %v %v; want a full handshake", what, s.resumed, s.dialErr, s.acceptErr)
	}
}

// Parts come anew with each connection: what binds a ticket is what is in them.
func TestASessionBetweenTheSameEndsIsResumed(t *testing.T) {
	dials, accepts := newPart(t)
	resumes(t, dials, accepts)
	d, a := *dials, *accepts
	d.Epochs, a.Epochs = []Epoch{dials.Epochs[0]}, []Epoch{accepts.Epochs[0]}
	if s := once(t, &d, &a); !s.resumed {
		t.Errorf("a session of the same part is not resumed: %v %v", s.dialErr, s.acceptErr)
	}
}

func TestATicketIsOfOnePartAndEpoch(t *testing.T) {
	for what, change := range map[string]func(d, a *Part){
		"another epoch": func(d, a *Part) { d.Epochs[0].Number, a.Epochs[0].Number = 4, 4 },
		"another path":  func(d, a *Part) { d.Path, a.Path = 8, 8 },
		"another name of who dials": func(d, a *Part) {
			d.Name = Name("r2", "gateway")
			a.Other = d.Name
		},
		"another key of who dials": func(d, a *Part) {
			public, key := newKey(t)
			d.Epochs[0].Key, a.Epochs[0].Peer = key, public
		},
		"another key of who accepts": func(d, a *Part) {
			public, key := newKey(t)
			a.Epochs[0].Key, d.Epochs[0].Peer = key, public
		},
	} {
		t.Run(what, func(t *testing.T) {
			dials, accepts := newPart(t)
			var kept tls.ClientSessionCache
			dials.adjust = func(c *tls.Config) {
				if kept == nil {
					kept = c.ClientSessionCache
				}
				c.ClientSessionCache = kept // offers the ticket whatever has changed
				c.ServerName = serverName(3)
			}
			resumes(t, dials, accepts)
			dials.adjust = func(c *tls.Config) {
				c.ClientSessionCache = renamed{kept, serverName(3)}
			}
			change(dials, accepts)
			fresh(t, what, dials, accepts)
		})
	}
}

// renamed gives one name's session for each name.
type renamed struct {
	tls.ClientSessionCache
	name string
}

func (r renamed) Get(string) (*tls.ClientSessionState, bool) { return r.ClientSessionCache.Get(r.name) }

// Where a ticket does open, the other end is held to its key as in a full handshake.
func TestAResumedEndIsHeldToItsKey(t *testing.T) {
	other, _ := newKey(t)
	for name, c := range map[string]struct {
		change func(d, a *Part)
		by     func(s session) error
	}{
		"who accepts wants another key":  {func(_, a *Part) { a.Epochs[0].Peer = other }, func(s session) error { return s.acceptErr }},
		"who accepts wants another name": {func(_, a *Part) { a.Other = Name("r2", "gateway") }, func(s session) error { return s.acceptErr }},
		"who dials wants another key":    {func(d, _ *Part) { d.Epochs[0].Peer = other }, func(s session) error { return s.dialErr }},
	} {
		t.Run(name, func(t *testing.T) {
			dials, accepts := newPart(t)
			kept := tls.NewLRUClientSessionCache(1)
			var mu sync.Mutex
			resumed := 0
			note := func(c *tls.Config) {
				verify := c.VerifyConnection
				c.VerifyConnection = func(s tls.ConnectionState) error {
					mu.Lock()
					defer mu.Unlock()
					if s.DidResume {
						resumed++
					}
					return verify(s)
				}
			}
			dials.adjust = func(c *tls.Config) { c.ClientSessionCache = kept; note(c) }
			accepts.adjust = func(c *tls.Config) { c.SetSessionTicketKeys([][32]byte{{1}}); note(c) } // whatever has changed
			resumes(t, dials, accepts)
			mu.Lock()
			before := resumed
			mu.Unlock()
			c.change(dials, accepts)
			s := once(t, dials, accepts)
			if err := c.by(s); err == nil || ReasonOf(err) != Peer || len(s.got)+len(s.gotBack) > 0 {
				t.Errorf("it is taken: %q %q, %v", s.got, s.gotBack, err)
			}
			mu.Lock()
			defer mu.Unlock()
			if resumed == before {
				t.Error("nobody was about to resume; the refusal shows nothing")
			}
		})
	}
}

func TestATicketIsOfItsHour(t *testing.T) {
	at := time.Now()
	resume.mu.Lock()
	clock := resume.now
	resume.now = func() time.Time { return at }
	resume.mu.Unlock()
	defer func() {
		resume.mu.Lock()
		defer resume.mu.Unlock()
		resume.now = clock
	}()
	dials, accepts := newPart(t)
	resumes(t, dials, accepts)
	at = at.Add(ticketTime - time.Second)
	if s := once(t, dials, accepts); !s.resumed {
		t.Errorf("not resumed before the hour is over: %v %v", s.dialErr, s.acceptErr)
	}
	at = at.Add(time.Second)
	fresh(t, "an hour later", dials, accepts)
	at = at.Add(-24 * time.Hour)
	fresh(t, "with a clock that went back", dials, accepts)
}

// Each session has an exchange of keys of its own: who has recorded it, and gets the key of its ticket later, opens
// nothing.
func TestAResumedSessionHasAnExchangeOfItsOwn(t *testing.T) {
	dials, accepts := newPart(t)
	dials.adjust = func(c *tls.Config) { c.CurvePreferences = []tls.CurveID{tls.X25519} }
	var shares [][]byte
	for i := range 3 {
		d, a, there, back := newWires()
		if s := talk(t, dials, accepts, d, a, []byte("request"), nil); s.resumed != (i > 0) {
			t.Fatalf("session %d: resumed %t, %v %v", i+1, s.resumed, s.dialErr, s.acceptErr)
		}
		r := tlsrecord.New(t, there.seen, back.seen)
		for _, hello := range [][]byte{r.There[0][5:], r.Back[0][5:]} {
			if !bytes.Contains(hello, []byte{0, 29, 0, 32}) {
				t.Fatalf("session %d: a hello has no key share of X25519", i+1)
			}
			for _, before := range shares {
				if bytes.Equal(before, tlsrecord.ShareOf(hello)) {
					t.Errorf("session %d has a key share of one before", i+1)
				}
			}
			shares = append(shares, tlsrecord.ShareOf(hello))
		}
	}
	if len(shares) != 6 {
		t.Errorf("%d key shares; want 6", len(shares))
	}
}

// cpuTime is what this process has taken of CPUs' time.
func cpuTime(b *testing.B) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func BenchmarkNewSession(b *testing.B) {
	for _, certified := range []bool{false, true} {
		for _, resumed := range []bool{false, true} {
			name := "full"
			if resumed {
				name = "resumed"
			}
			if certified {
				name += "-certified"
			}
			b.Run(name, func(b *testing.B) {
				dials, accepts := newPart(b)
				if certified {
					dials, accepts = certifiedPart(newSigner(b, time.Now().Add(time.Hour)))
				}
				dials.adjust = func(c *tls.Config) { c.SessionTicketsDisabled = !resumed }
				before := cpuTime(b)
				for b.Loop() {
					d, a, _, _ := newWires()
					if s := talk(b, dials, accepts, d, a, []byte("request"), []byte("answer")); s.dialErr != nil || s.acceptErr != nil {
						b.Fatal(s.dialErr, s.acceptErr)
					}
				}
				b.ReportMetric(float64(cpuTime(b)-before)/float64(b.N), "cpu-ns/op") // of both ends
			})
		}
	}
}
