package seal

import (
	"bytes"
	"context"
	"crypto/ecdh"
	"crypto/rand"
	"crypto/sha512"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/waystamp/waystamp/test/tlsrecord"
)

func TestPartCarriesBothDirections(t *testing.T) {
	dials, accepts := newPart(t)
	payload, back := bytes.Repeat([]byte("request "), 10_000), bytes.Repeat([]byte("answer "), 10_000)
	d, a, there, home := newWires()
	s := talk(t, dials, accepts, d, a, payload, back)
	if !s.whole(payload, back) {
		t.Fatalf("a session failed: %v %v %v %v", s.dialErr, s.acceptErr, s.err, s.errBack)
	}
	if want := (Hello{Chain: "deep", Path: 7, Epoch: 3, Service: "shop", Protocol: HTTP1}); s.hello != want {
		t.Errorf("the other end heard %+v; want %+v", s.hello, want)
	}
	for _, q := range []*queue{there, home} {
		for _, text := range []string{"request ", "answer ", "deep", "shop", "dpi"} {
			if bytes.Contains(q.seen, []byte(text)) {
				t.Errorf("%q is on the wire in clear", text)
			}
		}
	}
	if !bytes.Contains(there.seen, []byte(serverName(3))) {
		t.Error("the name that is in clear was not found; the search for others shows nothing")
	}
}

func TestPartRefuses(t *testing.T) {
	other, otherKey := newKey(t)
	for name, c := range map[string]struct {
		change func(d, a *Part)
		reason Reason // of who accepts; "": who dials refuses first
		said   string // by who refuses
	}{
		"a key of somebody else dials":     {func(d, _ *Part) { d.Epochs[0].Key = otherKey }, Peer, "its key is not that of spiffe://waystamp/node/r1/function/gateway"},
		"a key of somebody else accepts":   {func(_, a *Part) { a.Epochs[0].Key = otherKey }, "", "its key is not that of spiffe://waystamp/node/r3/function/dpi"},
		"a name of somebody else dials":    {func(d, _ *Part) { d.Name = Name("r9", "gateway") }, Peer, "not of spiffe://waystamp/node/r1/function/gateway"},
		"a name of somebody else accepts":  {func(_, a *Part) { a.Name = Name("r3", "ids") }, "", "not of spiffe://waystamp/node/r3/function/dpi"},
		"another chain":                    {func(d, _ *Part) { d.Chain = "light" }, PartMismatch, `chain "light"`},
		"another path":                     {func(d, _ *Part) { d.Path = 8 }, PartMismatch, "path 0x00000008"},
		"an epoch that does not live":      {func(d, _ *Part) { d.Epochs[0].Number = 4 }, Peer, "epoch-4"},
		"a key that is over":               {func(_, a *Part) { a.Epochs[0].Peer = other }, Peer, "its key is not"},
		"who accepts has no key":           {func(_, a *Part) { a.Epochs[0].Key = nil }, Key, "has no key of epoch 3"},
		"who accepts does not know anyone": {func(_, a *Part) { a.Epochs = nil }, Key, "of any epoch"},
		"who dials has no key":             {func(d, _ *Part) { d.Epochs[0].Key = nil }, "", "has no key of epoch 3"},
		"who dials does not know anyone":   {func(d, _ *Part) { d.Epochs[0].Peer = nil }, "", "is not known"},
	} {
		t.Run(name, func(t *testing.T) {
			dials, accepts := newPart(t)
			c.change(dials, accepts)
			d, a, _, _ := newWires()
			s := talk(t, dials, accepts, d, a, []byte("request"), []byte("answer"))
			if len(s.got)+len(s.gotBack) > 0 || s.dialErr == nil {
				t.Errorf("%q and %q arrived, and who dials heard %v", s.got, s.gotBack, s.dialErr)
			}
			refuses := s.acceptErr
			if c.reason == "" {
				refuses = s.dialErr
			} else if got := ReasonOf(s.acceptErr); got != c.reason {
				t.Errorf("the reason is %s (%v); want %s", got, s.acceptErr, c.reason)
			}
			if refuses == nil || !strings.Contains(refuses.Error(), c.said) {
				t.Errorf("it says %v; want %q in it", refuses, c.said)
			}
		})
	}
}

// While epochs change, who accepts knows two, and shows the key of the one that who dials is in.
func TestPartTakesEpochsThatLive(t *testing.T) {
	dials, accepts := newPart(t)
	nextDials, nextAccepts := newPart(t)
	nextDials.Epochs[0].Number, nextAccepts.Epochs[0].Number = 4, 4
	accepts.Epochs = append(accepts.Epochs, nextAccepts.Epochs...)
	for _, from := range []*Part{dials, nextDials} {
		d, a, _, _ := newWires()
		if s := talk(t, from, accepts, d, a, []byte("request"), nil); string(s.got) != "request" || s.hello.Epoch != from.Epochs[0].Number {
			t.Fatalf("epoch %d: %v %v", from.Epochs[0].Number, s.dialErr, s.acceptErr)
		}
	}
	// A key of one epoch is none of the other.
	mixed := *dials
	mixed.Epochs = []Epoch{{Number: 3, Key: nextDials.Epochs[0].Key, Peer: dials.Epochs[0].Peer}}
	d, a, _, _ := newWires()
	if s := talk(t, &mixed, accepts, d, a, []byte("request"), nil); ReasonOf(s.acceptErr) != Peer {
		t.Errorf("the key of another epoch: %v", s.acceptErr)
	}
}

func TestPlainBytesAreUnsealed(t *testing.T) {
	for _, text := range []string{"GET / HTTP/1.1\r\nHost: shop.example.org\r\n\r\n", "\x00\x00\x00\x00\x00\x00\x00\x00"} {
		_, accepts := newPart(t)
		d, a, _, _ := newWires()
		d.Write([]byte(text))
		_, _, err := accepts.Accept(t.Context(), a)
		if got := ReasonOf(err); got != Unsealed {
			t.Errorf("%q is refused as %s (%v); want %s", text, got, err, Unsealed)
		}
	}
}

func TestRefusalComesBack(t *testing.T) {
	dials, accepts := newPart(t)
	d, a, _, _ := newWires()
	go func() {
		c, _, err := accepts.Accept(t.Context(), a)
		if err == nil {
			c.Answer(t.Context(), Answer{Failure: FailureCertificate, Text: strings.Repeat("x", 10_000)})
		}
	}()
	_, err := dials.Dial(t.Context(), d, "shop", HTTP2)
	r, ok := errors.AsType[*Refusal](err)
	if !ok || r.Failure != FailureCertificate || len(r.Text) != textMax || KindOf(err) != FailureCertificate {
		t.Errorf("who dials hears %v", err)
	}
}

func TestWaitingIsBounded(t *testing.T) {
	dials, accepts := newPart(t)
	ctx, stop := context.WithCancel(t.Context())
	d, a, _, _ := newWires()
	done := make(chan error)
	go func() {
		_, err := dials.Dial(ctx, d, "shop", HTTP1)
		done <- err
	}()
	if _, _, err := accepts.Accept(t.Context(), a); err != nil { // and no answer
		t.Fatal(err)
	}
	stop()
	if err := <-done; err == nil {
		t.Error("who dials has an answer that nobody gave")
	}
}

// A handshake that lasts too long leaves the connection to its caller, who resets it.
func TestAHandshakeThatIsGivenUpEndsInAReset(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	silent, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	_, accepts := newPart(t)
	ctx, stop := context.WithCancel(t.Context())
	stop()
	if _, _, err := accepts.Accept(ctx, c); ReasonOf(err) != Gone {
		t.Errorf("who says nothing is refused as %s (%v); want %s", ReasonOf(err), err, Gone)
	}
	if err := errors.Join(c.(*net.TCPConn).SetLinger(0), c.Close()); err != nil {
		t.Fatal(err)
	}
	if _, err := silent.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("who said nothing reads %v; want a reset", err)
	}
}

// deadlines counts those for writing.
type deadlines struct {
	wire
	set atomic.Int32
}

func (d *deadlines) SetWriteDeadline(time.Time) error {
	d.set.Add(1)
	return nil
}

// The end of a stream waits for a slow reader, as its bytes do.
func TestTheEndOfAStreamHasNoDeadline(t *testing.T) {
	dials, accepts := newPart(t)
	d, a, _, _ := newWires()
	over := make(chan error)
	go func() {
		c, _, err := accepts.Accept(t.Context(), a)
		if err == nil {
			err = c.Answer(t.Context(), Answer{})
		}
		if err == nil {
			_, err = io.ReadAll(c)
		}
		over <- err
	}()
	under := &deadlines{wire: d}
	c, err := dials.Dial(t.Context(), under, "shop", HTTP1)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(c.CloseWrite(), <-over); err != nil {
		t.Error(err)
	}
	if n := under.set.Load(); n != 0 {
		t.Errorf("%d deadlines were set for writing", n)
	}
}

// What the other end says has bounds, and forges no line of a log.
func TestMessagesOfTheOtherEndAreChecked(t *testing.T) {
	for text, ok := range map[string]bool{
		`{"open":true}`: true,
		`{"open":false,"failure":"origin-tls","text":"a"}`: true,
		`{}`:                                   false,
		`null`:                                 false,
		`{"open":true,"failure":"origin-tls"}`: false,
		`{"open":false,"failure":"whatever"}`:  false,
		`{"open":false,"failure":"service","text":"a\nb"}`:              false,
		`{"open":true,"text":"` + strings.Repeat("x", textMax+1) + `"}`: false,
		`{"open":true,"more":1}`:                                        false,
	} {
		var a Answer
		b := append(binary.BigEndian.AppendUint16(nil, uint16(len(text))), text...)
		if err := receive(bytes.NewReader(b), &a); (err == nil) != ok {
			t.Errorf("%s: %v", text, err)
		}
	}
	var sent bytes.Buffer
	if err := send(&sent, Answer{Failure: FailureTLS, Text: "a\nb" + strings.Repeat("ä", textMax)}); err != nil {
		t.Fatal(err)
	}
	var a Answer
	if err := receive(&sent, &a); err != nil || !strings.HasPrefix(a.Text, "a b") {
		t.Errorf("%v: %q", err, a.Text)
	}
	var h Hello
	if err := send(&sent, Hello{Chain: "deep", Service: "shop\nforged"}); err != nil {
		t.Fatal(err)
	}
	if err := receive(&sent, &h); !errors.Is(err, ErrMismatch) {
		t.Errorf("a name of two lines: %v", err)
	}
}

func TestKeysAreNotPrinted(t *testing.T) {
	dials, _ := newPart(t)
	for _, text := range []string{fmt.Sprintf("%v %+v %#v", *dials, *dials, dials.Epochs), fmt.Sprint(dials)} {
		for _, form := range []string{"%v", "%x", "%d"} {
			if secret := fmt.Sprintf(form, []byte(dials.Epochs[0].Key)[:8]); strings.Contains(text, strings.Trim(secret, "[]")) {
				t.Errorf("a key is in %q", text)
			}
		}
	}
}

// unprotected is whether nothing speaks for a byte of a flight: in a record that is not encrypted, the version that RFC 8446 section
// 5.1 has everybody ignore.
func unprotected(flight []byte, at int) bool {
	for i := 0; i+5 <= len(flight); i += 5 + int(binary.BigEndian.Uint16(flight[i+3:])) {
		if kind := flight[i]; (at == i+1 || at == i+2) && kind != 23 {
			return true
		}
	}
	return false
}

// firstTicket keeps the first that it is given, also when a session of it failed.
type firstTicket struct {
	mu    sync.Mutex
	state *tls.ClientSessionState
}

func (k *firstTicket) Get(string) (*tls.ClientSessionState, bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.state, k.state != nil
}

func (k *firstTicket) Put(_ string, s *tls.ClientSessionState) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.state == nil {
		k.state = s
	}
}

func TestFlippedBytesAreNotDelivered(t *testing.T) {
	for _, c := range []struct {
		name    string
		resumed bool
		bytes   int // of both flights, at least
	}{{"a full handshake", false, 3000}, {"a resumed session", true, 2000}} {
		t.Run(c.name, func(t *testing.T) {
			dials, accepts := newPart(t)
			kept := &firstTicket{}
			dials.adjust = func(settings *tls.Config) {
				settings.SessionTicketsDisabled, settings.ClientSessionCache = !c.resumed, kept
			}
			payload, back := bytes.Repeat([]byte("request "), 20), bytes.Repeat([]byte("answer "), 20)
			var there, home *queue
			for range 2 { // the second is resumed, if any
				var d, a wire
				d, a, there, home = newWires()
				if s := talk(t, dials, accepts, d, a, payload, back); !s.whole(payload, back) || there == nil {
					t.Fatalf("a session that nobody changes failed: %+v", s)
				}
			}
			flights := [2][]byte{there.seen, home.seen}
			flipped, went := 0, 0
			for side, flight := range flights {
				for at := range flight {
					d, a, there, home := newWires()
					[]*queue{there, home}[side].flip = at
					s := talk(t, dials, accepts, d, a, payload, back)
					flipped++
					if s.whole(payload, back) {
						if !unprotected(flight, at) {
							t.Errorf("byte %d of flight %d was flipped, and nobody saw it", at, side)
						}
						if s.resumed != c.resumed {
							t.Errorf("with byte %d of flight %d flipped, the session is resumed: %t; want %t", at, side, s.resumed, c.resumed)
						}
						went++
						continue
					}
					switch side {
					case 0:
						// One record has the payload, so that nothing of it may arrive.
						if len(s.got) != 0 && !(bytes.Equal(s.got, payload) && s.err != nil) {
							t.Errorf("byte %d of flight %d was flipped, and %d bytes arrived (%v)", at, side, len(s.got), s.err)
						}
					default:
						if len(s.gotBack) != 0 && !(bytes.Equal(s.gotBack, back) && s.errBack != nil) {
							t.Errorf("byte %d of flight %d was flipped, and %d bytes arrived (%v)", at, side, len(s.gotBack), s.errBack)
						}
					}
				}
			}
			if flipped < c.bytes || went == 0 || went > 20 {
				t.Errorf("%d bytes were flipped, %d of them unprotected", flipped, went)
			}
		})
	}
}

func TestTruncationNeverLooksComplete(t *testing.T) {
	dials, accepts := newPart(t)
	dials.adjust = func(c *tls.Config) { c.SessionTicketsDisabled = true } // each session is as long as the first
	payload := bytes.Repeat([]byte("x"), 300)
	d, a, there, _ := newWires()
	if s := talk(t, dials, accepts, d, a, payload, nil); !s.whole(payload, nil) {
		t.Fatalf("a session that nobody cuts failed: %+v", s)
	}
	delivered := false
	for at := range there.seen {
		d, a, there, _ := newWires()
		there.cut = at
		s := talk(t, dials, accepts, d, a, payload, nil)
		if s.acceptErr == nil && s.err == nil {
			t.Errorf("cut at byte %d, the end looks complete with %d bytes", at, len(s.got))
		}
		// Between the payload's record and that of its end, TLS alone would see an end.
		if bytes.Equal(s.got, payload) {
			delivered = true
			if !errors.Is(s.err, ErrTruncated) {
				t.Errorf("cut at byte %d: %v", at, s.err)
			}
		}
	}
	if !delivered {
		t.Error("no cut was behind the payload")
	}
}

// Who has recorded a session and gets all keys of the plan afterwards cannot open it. With what the
// ends had in memory it opens, so that the record is whole.
func TestKeysOfThePlanOpenNothing(t *testing.T) {
	dials, accepts := newPart(t)
	var log bytes.Buffer
	dials.adjust = func(c *tls.Config) {
		c.KeyLogWriter = &log
		c.CurvePreferences = []tls.CurveID{tls.X25519} // without ML-KEM, which is ephemeral by its nature
	}
	payload := []byte("marker-in-a-request")
	d, a, there, home := newWires()
	if s := talk(t, dials, accepts, d, a, payload, nil); !s.whole(payload, nil) {
		t.Fatalf("the session failed: %+v", s)
	}
	recorded := tlsrecord.New(t, there.seen, home.seen)
	secret := tlsrecord.SecretOf(t, log.String(), "CLIENT_TRAFFIC_SECRET_0")
	if text := recorded.OpenApplication(secret); !bytes.Contains(text, payload) {
		t.Fatalf("the session's own secret does not open the record; the test could not find anything: %q", text)
	}
	// An Ed25519 key is good for X25519, too (RFC 8032 section 5.1.5): the secrets that a session
	// without ephemeral keys would have are those between these and the keys in the record.
	opened := func(parts ...*Part) bool {
		for _, p := range parts {
			h := sha512.Sum512(p.Epochs[0].Key.Seed())
			for _, scalar := range [][]byte{h[:32], p.Epochs[0].Key.Seed()} {
				k, err := ecdh.X25519().NewPrivateKey(scalar)
				if err != nil {
					t.Fatal(err)
				}
				if recorded.OpenedBy(k, nil) {
					return true
				}
			}
		}
		return false
	}
	if opened(dials, accepts) {
		t.Error("a key of the plan opens a recorded session")
	}
	// The same search finds the key of an exchange when it is given one.
	k, known := exchangeWithKnownKey(t, accepts)
	if !known.OpenedBy(k, nil) {
		t.Error("the search does not find a session whose exchange is known; that it finds no other shows nothing")
	}
}

// exchangeWithKnownKey records the beginning of a handshake whose client's ephemeral key is known.
func exchangeWithKnownKey(t *testing.T, accepts *Part) (*ecdh.PrivateKey, tlsrecord.Recording) {
	t.Helper()
	k, err := ecdh.X25519().GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	sized := func(n int, b []byte) []byte { // behind its length
		head := binary.BigEndian.AppendUint32(nil, uint32(len(b)))
		return append(head[4-n:], b...)
	}
	extension := func(kind uint16, b []byte) []byte {
		return append(binary.BigEndian.AppendUint16(nil, kind), sized(2, b)...)
	}
	var extensions []byte
	for _, e := range [][]byte{
		extension(0, sized(2, append([]byte{0}, sized(2, []byte(serverName(3)))...))),
		extension(10, []byte{0, 2, 0, 29}),      // X25519
		extension(13, []byte{0, 2, 0x08, 0x07}), // Ed25519
		extension(16, sized(2, sized(1, []byte(Protocol)))),
		extension(43, []byte{2, 3, 4}), // TLS 1.3
		extension(51, sized(2, append([]byte{0, 29}, sized(2, k.PublicKey().Bytes())...))),
	} {
		extensions = append(extensions, e...)
	}
	body := append([]byte{3, 3}, make([]byte, 32)...)
	body = append(body, 0)                      // no session
	body = append(body, 0, 2, 0x13, 0x01, 1, 0) // one suite, no compression
	body = append(body, sized(2, extensions)...)
	hello := append([]byte{1}, sized(3, body)...)

	d, a, there, back := newWires()
	done := make(chan error)
	go func() {
		_, _, err := accepts.Accept(t.Context(), a)
		a.Close()
		done <- err
	}()
	d.Write(append([]byte{22, 3, 1}, sized(2, hello)...))
	// The server goes on until it wants the client's certificate.
	var got []byte
	for buf := make([]byte, 4096); len(got) < 600; {
		n, err := d.Read(buf)
		if err != nil {
			t.Fatalf("the server ended after %d bytes: %v", len(got), err)
		}
		got = append(got, buf[:n]...)
	}
	d.Close()
	<-done
	return k, tlsrecord.New(t, there.seen, back.seen)
}
