package gateway

import (
	"bytes"
	"crypto/ecdh"
	"crypto/ecdsa"
	"crypto/tls"
	"encoding/binary"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/waystamp/waystamp/internal/await"
	"github.com/waystamp/waystamp/test/tlsrecord"
)

// tapped is a connection that somebody on the way records.
type tapped struct {
	net.Conn
	mu          sync.Mutex
	there, back []byte
}

func (c *tapped) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.back = append(c.back, p[:n]...)
	return n, err
}

func (c *tapped) Write(p []byte) (int, error) {
	c.mu.Lock()
	c.there = append(c.there, p...)
	c.mu.Unlock()
	return c.Conn.Write(p)
}

// recorded asks for a path with a marker in it, and gives what was on the way, and the session's own secret.
func (w *world) recorded(t *testing.T, c tls.Certificate, kept tls.ClientSessionCache, resumed bool) (tlsrecord.Recording, []byte) {
	t.Helper()
	raw, err := net.Dial("tcp", w.address)
	if err != nil {
		t.Fatal(err)
	}
	tap := &tapped{Conn: raw}
	var log bytes.Buffer
	settings := w.tls(&c, "shop.example.org")
	settings.ClientSessionCache, settings.KeyLogWriter = kept, &log
	settings.CurvePreferences = []tls.CurveID{tls.X25519} // without ML-KEM, which is ephemeral by its nature
	conn := tls.Client(tap, settings)
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(await.Limit(20 * time.Second)))
	r, err := ask(conn, "GET", "/"+secrecyMarker, "shop.example.org")
	if err == nil {
		_, err = io.Copy(io.Discard, r.Body)
	}
	if err != nil || r.StatusCode != 200 || conn.ConnectionState().DidResume != resumed {
		t.Fatalf("resumed %t, %v, %v; want resumed %t and 200", conn.ConnectionState().DidResume, r, err, resumed)
	}
	tap.mu.Lock()
	defer tap.mu.Unlock()
	return tlsrecord.New(t, bytes.Clone(tap.there), bytes.Clone(tap.back)), tlsrecord.SecretOf(t, log.String(), "CLIENT_TRAFFIC_SECRET_0")
}

const secrecyMarker = "marker-in-a-request"

// Who has recorded clients' sessions and gets all keys afterwards, those of certificates and of tickets, opens none of them,
// neither the first nor one that was resumed. The sessions' own secrets open them, so that the recordings are whole.
func TestKeysOfTheGatewayOpenNothing(t *testing.T) {
	w := newWorld(t, nil)
	alice := w.staff.client(t, "/eng/alice")
	kept := tls.NewLRUClientSessionCache(1)
	first, secret := w.recorded(t, alice, kept, false)
	if text := first.OpenApplication(secret); !bytes.Contains(text, []byte(secrecyMarker)) {
		t.Fatalf("the session's own secret does not open the recording; the test could not find anything: %q", text)
	}
	second, secret := w.recorded(t, alice, kept, true)
	if text := second.OpenApplication(secret); !bytes.Contains(text, []byte(secrecyMarker)) {
		t.Fatalf("the resumed session's own secret does not open the recording: %q", text)
	}

	// All keys that there are then.
	w.gateway.mu.Lock()
	tickets := append([][32]byte{}, w.gateway.services["shop"].tickets...)
	w.gateway.mu.Unlock()
	var keys [][]byte
	for _, k := range tickets {
		keys = append(keys, k[:])
	}
	for _, k := range []any{w.staff.key, w.web.key, alice.PrivateKey, w.services[0].Certificate.PrivateKey, w.services[1].Certificate.PrivateKey} {
		b, err := k.(*ecdsa.PrivateKey).Bytes()
		if err != nil {
			t.Fatal(err)
		}
		keys = append(keys, b)
	}
	// The ticket that the client has offered opens with the key for tickets, and gives the secret of the session before.
	settings := &tls.Config{}
	settings.SetSessionTicketKeys(tickets)
	state, err := settings.DecryptTicket(second.Ticket(), tls.ConnectionState{})
	if err != nil || state == nil {
		t.Fatalf("the ticket does not open with its key (%v); that nothing else does shows nothing", err)
	}
	encoded, err := state.Bytes()
	if err != nil {
		t.Fatal(err)
	}
	// crypto/tls writes version, side, suite and time of creation before the secret, behind its length.
	at := 2 + 1 + 2 + 8
	psk := encoded[at+1 : at+1+int(encoded[at])]
	if binary.BigEndian.Uint16(encoded) != tls.VersionTLS13 || len(psk) != 32 {
		t.Fatalf("a session's state is written in another way: % x", encoded[:32])
	}
	opened := func(r tlsrecord.Recording, psk []byte) bool {
		for _, k := range keys {
			private, err := ecdh.X25519().NewPrivateKey(k)
			if err != nil {
				t.Fatal(err)
			}
			if r.OpenedBy(private, psk) || r.OpenedWith(k, psk) {
				return true
			}
		}
		return r.OpenedWith(make([]byte, 32), psk) // as if there were no exchange (psk_ke)
	}
	if opened(first, nil) {
		t.Error("a key that was there afterwards opens a recorded session")
	}
	if opened(second, nil) || opened(second, psk) {
		t.Error("a key that was there afterwards, or the ticket's secret, opens a resumed session")
	}
}
