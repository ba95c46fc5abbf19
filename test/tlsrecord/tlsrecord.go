// Package tlsrecord opens recorded sessions of TLS 1.3, as far as somebody can who was on the way and gets keys later. Tests
// of internal/seal and internal/gateway use it.
package tlsrecord

import (
	"bufio"
	"bytes"
	"crypto/aes"
	"crypto/cipher"
	"crypto/ecdh"
	"crypto/hkdf"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"strings"
	"testing"
)

// Recording is what somebody on the way has of a session: records of both directions (RFC 8446 section 5).
type Recording struct {
	t           testing.TB
	There, Back [][]byte
}

// New splits what a client and a server have sent.
func New(t testing.TB, there, back []byte) Recording {
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
	r := Recording{t, split(there), split(back)}
	if len(r.There) == 0 || len(r.Back) == 0 || r.There[0][5] != 1 || r.Back[0][5] != 2 {
		t.Fatal("the record has no ClientHello and ServerHello")
	}
	return r
}

func (r Recording) must(b []byte, err error) []byte {
	r.t.Helper()
	if err != nil {
		r.t.Fatal(err)
	}
	return b
}

// label is HKDF-Expand-Label (RFC 8446 section 7.1).
func (r Recording) label(secret []byte, label string, context []byte, n int) []byte {
	info := binary.BigEndian.AppendUint16(nil, uint16(n))
	info = append(append(info, byte(len(label)+6)), "tls13 "+label...)
	info = append(append(info, byte(len(context))), context...)
	return r.must(hkdf.Expand(sha256.New, secret, string(info), n))
}

// open opens one record of TLS_AES_128_GCM_SHA256; nil: the secret is not its.
func (r Recording) open(secret, record []byte, number uint64) []byte {
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

// OpenApplication opens what the client has sent under its traffic secret, wherever that begins.
func (r Recording) OpenApplication(secret []byte) (text []byte) {
	for i := range r.There {
		for j, record := range r.There[i:] {
			text = append(text, r.open(secret, record, uint64(j))...)
		}
	}
	return text
}

// OpenedBy tells whether a private key of X25519 on either side opens the server's first encrypted record; psk is that of a
// session that is resumed, else nil.
func (r Recording) OpenedBy(k *ecdh.PrivateKey, psk []byte) bool {
	for _, share := range [][]byte{ShareOf(r.There[0][5:]), ShareOf(r.Back[0][5:])} {
		public, err := ecdh.X25519().NewPublicKey(share)
		if err != nil {
			r.t.Fatal(err)
		}
		if r.OpenedWith(r.must(k.ECDH(public)), psk) {
			return true
		}
	}
	return false
}

// OpenedWith tells whether the server's first encrypted record opens with a shared secret of the exchange (RFC 8446 section
// 7.1), and the psk of a session that is resumed.
func (r Recording) OpenedWith(shared, psk []byte) bool {
	hello, answer := r.There[0][5:], r.Back[0][5:]
	if suite := binary.BigEndian.Uint16(answer[4+2+32+1+int(answer[4+2+32]):]); suite != 0x1301 {
		r.t.Fatalf("cipher suite 0x%04x; this reads 0x1301", suite)
	}
	zero := make([]byte, 32)
	if psk == nil {
		psk = zero
	}
	empty := sha256.Sum256(nil)
	early := r.must(hkdf.Extract(sha256.New, psk, zero))
	handshake := r.must(hkdf.Extract(sha256.New, shared, r.label(early, "derived", empty[:], 32)))
	transcript := sha256.Sum256(append(bytes.Clone(hello), answer...))
	secret := r.label(handshake, "s hs traffic", transcript[:], 32)
	for _, record := range r.Back[1:] {
		if record[0] == 23 {
			return r.open(secret, record, 0) != nil
		}
	}
	return false
}

// ShareOf finds the only key share of X25519 in a ClientHello or ServerHello (RFC 8446 section
// 4.2.8): group 29, 32 bytes.
func ShareOf(hello []byte) []byte {
	at := bytes.Index(hello, []byte{0, 29, 0, 32})
	return hello[at+4 : at+4+32]
}

// SecretOf finds a secret in what tls.Config.KeyLogWriter was told.
func SecretOf(t testing.TB, log, name string) []byte {
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

// Ticket finds the first ticket that a client offers (RFC 8446 section 4.2.11); the extension is the last.
func (r Recording) Ticket() []byte {
	hello := r.There[0][5:]
	at := 4 + 2 + 32
	at += 1 + int(hello[at])                           // session
	at += 2 + int(binary.BigEndian.Uint16(hello[at:])) // suites
	at += 1 + int(hello[at])                           // compression
	for at += 2; at+4 <= len(hello); {
		kind, n := binary.BigEndian.Uint16(hello[at:]), int(binary.BigEndian.Uint16(hello[at+2:]))
		at += 4
		if kind == 41 {
			return hello[at+4 : at+4+int(binary.BigEndian.Uint16(hello[at+2:]))]
		}
		at += n
	}
	r.t.Fatal("the client offers no ticket")
	panic("unreachable")
}

// Seal makes a record of TLS_AES_128_GCM_SHA256 with a traffic secret; kind is its content type (RFC 8446 section 5.2).
func Seal(t testing.TB, secret []byte, number uint64, kind byte, text []byte) []byte {
	t.Helper()
	r := Recording{t: t}
	block, err := aes.NewCipher(r.label(secret, "key", nil, 16))
	if err != nil {
		t.Fatal(err)
	}
	aead, err := cipher.NewGCM(block)
	if err != nil {
		t.Fatal(err)
	}
	nonce := r.label(secret, "iv", nil, 12)
	for i := range 8 {
		nonce[4+i] ^= byte(number >> (8 * (7 - i)))
	}
	head := binary.BigEndian.AppendUint16([]byte{23, 3, 3}, uint16(len(text)+1+aead.Overhead()))
	return aead.Seal(head, nonce, append(bytes.Clone(text), kind), head)
}

// Next is the traffic secret behind a KeyUpdate (RFC 8446 section 7.2).
func Next(t testing.TB, secret []byte) []byte {
	t.Helper()
	return Recording{t: t}.label(secret, "traffic upd", nil, 32)
}
