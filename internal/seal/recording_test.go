package seal

import (
	"bufio"
	"bytes"
	"crypto/aes"
	"crypto/cipher"
	"crypto/ecdh"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"strings"
	"testing"
)

// recording is what somebody on the way has of a session: records of both directions (RFC 8446 section 5).
type recording struct {
	t           *testing.T
	there, back [][]byte
}

func newRecording(t *testing.T, there, back []byte) recording {
	t.Helper()
	split := func(b []byte) (list [][]byte) {
		for len(b) >= 5 {
			n := 5 + int(binary.BigEndian.Uint16(b[3:]))
			if n > len(b) {
				break
			}
			list = append(list, b[:n])
			b = b[n:]
		}
		return list
	}
	r := recording{t, split(there), split(back)}
	if len(r.there) == 0 || len(r.back) == 0 || r.there[0][5] != 1 || r.back[0][5] != 2 {
		t.Fatal("the record has no ClientHello and ServerHello")
	}
	return r
}

func (r recording) must(b []byte, err error) []byte {
	r.t.Helper()
	if err != nil {
		r.t.Fatal(err)
	}
	return b
}

// label is HKDF-Expand-Label (RFC 8446 section 7.1).
func (r recording) label(secret []byte, label string, context []byte, n int) []byte {
	info := binary.BigEndian.AppendUint16(nil, uint16(n))
	info = append(append(info, byte(len(label)+6)), "tls13 "+label...)
	info = append(append(info, byte(len(context))), context...)
	return r.must(hkdf.Expand(sha256.New, secret, string(info), n))
}

// open opens one record of TLS_AES_128_GCM_SHA256; nil: the secret is not its.
func (r recording) open(secret, record []byte, number uint64) []byte {
	block, err := aes.NewCipher(r.label(secret, "key", nil, 16))
	if err != nil {
		r.t.Fatal(err)
	}
	aead, err := cipher.NewGCM(block)
	if err != nil {
		r.t.Fatal(err)
	}
	nonce := r.label(secret, "iv", nil, 12)
	for i := range 8 {
		nonce[4+i] ^= byte(number >> (8 * (7 - i)))
	}
	text, err := aead.Open(nil, nonce, record[5:], record[:5])
	if err != nil {
		return nil
	}
	return text
}

// openApplication opens what the client has sent under its traffic secret, wherever that begins.
func (r recording) openApplication(secret []byte) (text []byte) {
	for i := range r.there {
		for j, record := range r.there[i:] {
			text = append(text, r.open(secret, record, uint64(j))...)
		}
	}
	return text
}

// openedBy tells whether a private key of X25519 on either side opens the server's first encrypted record.
func (r recording) openedBy(k *ecdh.PrivateKey) bool {
	hello, answer := r.there[0][5:], r.back[0][5:]
	if suite := binary.BigEndian.Uint16(answer[4+2+32+1+int(answer[4+2+32]):]); suite != 0x1301 {
		r.t.Fatalf("cipher suite 0x%04x; this reads 0x1301", suite)
	}
	for _, share := range [][]byte{shareOf(hello), shareOf(answer)} {
		public, err := ecdh.X25519().NewPublicKey(share)
		if err != nil {
			r.t.Fatal(err)
		}
		shared := r.must(k.ECDH(public))
		zero := make([]byte, 32)
		empty := sha256.Sum256(nil)
		early := r.must(hkdf.Extract(sha256.New, zero, zero))
		handshake := r.must(hkdf.Extract(sha256.New, shared, r.label(early, "derived", empty[:], 32)))
		transcript := sha256.Sum256(append(bytes.Clone(hello), answer...))
		secret := r.label(handshake, "s hs traffic", transcript[:], 32)
		for _, record := range r.back[1:] {
			if record[0] == 23 {
				if r.open(secret, record, 0) != nil {
					return true
				}
				break
			}
		}
	}
	return false
}

// shareOf finds the only key share of X25519 in a ClientHello or ServerHello (RFC 8446 section
// 4.2.8): group 29, 32 bytes.
func shareOf(hello []byte) []byte {
	at := bytes.Index(hello, []byte{0, 29, 0, 32})
	return hello[at+4 : at+4+32]
}

func secretOf(t *testing.T, log, name string) []byte {
	t.Helper()
	for s := bufio.NewScanner(strings.NewReader(log)); s.Scan(); {
		if f := strings.Fields(s.Text()); len(f) == 3 && f[0] == name {
			b, err := hex.DecodeString(f[2])
			if err != nil {
				t.Fatal(err)
			}
			return b
		}
	}
	t.Fatalf("the key log has no %s", name)
	return nil
}

// exchangeWithKnownKey records the beginning of a handshake whose client's ephemeral key is known.
func exchangeWithKnownKey(t *testing.T, accepts *Part) (*ecdh.PrivateKey, recording) {
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
	return k, newRecording(t, there.seen, back.seen)
}
