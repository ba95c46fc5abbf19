package function

import (
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync/atomic"

	"golang.org/x/crypto/chacha20poly1305"
)

// seal encrypts a direction with ChaCha20-Poly1305 (RFC 8439), and open decrypts it. On the
// wire there is a header, and then records:
//
//	header   "WSS1", number of the key (32 bits), salt (32 bytes, random)
//	record   final (1 bit), length of the plaintext (15 bits), ciphertext, tag (16 bytes)
//
// Numbers are in network byte order. The record's first 16 bits are its additional data;
// its nonce is the number of records before it. The key of a direction is derived from the
// one with the number, with the salt and the side (HKDF with SHA-256, RFC 5869), so that
// records of one direction are none of another one or of another connection. The last
// record is final: a stream that ends without it was cut off.
const (
	sealMagic  = "WSS1"
	sealSalt   = 32
	sealHeader = len(sealMagic) + 4 + sealSalt
	recordMax  = 16 << 10 // bytes of plaintext
	recordMore = 2 + chacha20poly1305.Overhead
	finalBit   = 1 << 15
)

type sealSettings struct {
	Key  *uint32         `json:"key"`
	File string          `json:"file"`
	Keys json.RawMessage `json:"keys"`
}

func parseSeal(raw json.RawMessage) (Entry, error) { return parseKeyed("seal", sealEntry, raw) }
func parseOpen(raw json.RawMessage) (Entry, error) { return parseKeyed("open", openEntry, raw) }

// parseKeyed reads an operation that has a key, or several, of which a visit's parameters name one.
func parseKeyed(name string, entry func(KeyFile) Entry, raw json.RawMessage) (Entry, error) {
	var set sealSettings
	if err := settingsOf(raw, &set); err != nil {
		return Entry{}, err
	}
	keys, err := keysOf(set.Keys)
	switch {
	case err != nil:
		return Entry{}, err
	case keys != nil && (set.Key != nil || set.File != ""):
		return Entry{}, errors.New("keys is given, and key or file as well; give key and file for one key, or keys for those that parameters of visits name")
	case keys != nil:
		return openEntryOf(name, keys), nil
	case set.Key == nil:
		return Entry{}, errors.New("key is missing; give the number of a key, or keys for those that parameters of visits name")
	}
	return entry(KeyFile{*set.Key, set.File}), nil
}

func sealEntry(key KeyFile) Entry {
	return Entry{
		Name: "seal",
		Key:  &key,
		make: func(s Surroundings) (Function, error) { return newSealing(key.Number, s) },
		back: func() Entry { return openEntry(key) },
	}
}

func openEntry(key KeyFile) Entry {
	return Entry{
		Name: "open",
		Key:  &key,
		make: func(s Surroundings) (Function, error) {
			f, err := newSealing(key.Number, s)
			return opening{f}, err
		},
		back: func() Entry { return sealEntry(key) },
	}
}

type sealing struct {
	number uint32
	key    Key
	side   Side
	random io.Reader
	event  *atomic.Uint64
}

func newSealing(number uint32, s Surroundings) (*sealing, error) {
	key, ok := s.Keys[number]
	if !ok {
		return nil, fmt.Errorf("there is no key with number %d among the keys", number)
	}
	return &sealing{number: number, key: key, side: s.Side, random: s.Random, event: s.Event}, nil
}

// cipher derives the cipher of one direction of one connection.
func (f *sealing) cipher(salt []byte) (cipher.AEAD, error) {
	key, err := hkdf.Key(sha256.New, f.key[:], salt, "waystamp seal 1 "+f.side.String(), chacha20poly1305.KeySize)
	if err != nil {
		return nil, err
	}
	return chacha20poly1305.New(key)
}

// records counts the records of a direction, for their nonces.
type records struct {
	aead cipher.AEAD
	n    uint64
}

func (r *records) nonce() []byte {
	var nonce [chacha20poly1305.NonceSize]byte
	binary.BigEndian.PutUint64(nonce[4:], r.n)
	r.n++
	return nonce[:]
}

func (f *sealing) Open(Connection) Handler { return Handler{Transform: &sealer{f: f}} }

type sealer struct {
	f *sealing
	r *records // nil: the header is not sent
	// ended: the final record is sent
	ended bool
}

func (s *sealer) Transform(in []byte, at Moment, out []byte) (n int, _ []byte, _ Verdict) {
	if s.r == nil && (len(in) > 0 || at == End) {
		if cap(out)-len(out) < sealHeader {
			return 0, out, Full
		}
		var salt [sealSalt]byte
		if _, err := io.ReadFull(s.f.random, salt[:]); err != nil {
			return 0, out, Reset
		}
		aead, err := s.f.cipher(salt[:])
		if err != nil {
			return 0, out, Reset
		}
		s.r = &records{aead: aead}
		out = append(out, sealMagic...)
		out = binary.BigEndian.AppendUint32(out, s.f.number)
		out = append(out, salt[:]...)
	}
	for n < len(in) {
		k := min(len(in)-n, recordMax, cap(out)-len(out)-recordMore)
		if k <= 0 {
			return n, out, Full
		}
		out = s.record(in[n:n+k], 0, out)
		n += k
	}
	if at == End && !s.ended {
		if cap(out)-len(out) < recordMore {
			return n, out, Full
		}
		out = s.record(nil, finalBit, out)
		s.ended = true
	}
	return n, out, Continue
}

func (s *sealer) record(p []byte, final uint16, out []byte) []byte {
	head := len(out)
	out = binary.BigEndian.AppendUint16(out, final|uint16(len(p)))
	return s.r.aead.Seal(out, s.r.nonce(), p, out[head:head+2])
}

func (s *sealer) Close() {}

type opening struct{ *sealing }

func (f opening) Open(Connection) Handler { return Handler{Transform: &opener{f: f.sealing}} }

type opener struct {
	f     *sealing
	r     *records // nil: the header has not come as a whole
	part  []byte   // of a header or record, as far as it has come
	clear []byte   // decrypted, and not yet taken, for want of room
	ended bool     // the final record has come
}

func (o *opener) Transform(in []byte, at Moment, out []byte) (n int, _ []byte, _ Verdict) {
	for {
		k := min(len(o.clear), cap(out)-len(out))
		out = append(out, o.clear[:k]...)
		if o.clear = o.clear[k:]; len(o.clear) > 0 {
			return n, out, Full
		}
		o.clear = nil
		// One header or record: its bytes are in part, and then in what is left of in.
		want := sealHeader
		if o.r != nil {
			want = 2
			if have := append(append(make([]byte, 0, 4), o.part[:min(len(o.part), 2)]...), in[n:n+min(len(in)-n, 2)]...); len(have) >= 2 {
				length := int(binary.BigEndian.Uint16(have) &^ finalBit)
				if length > recordMax {
					return n, out, o.wrong()
				}
				want = length + recordMore
			}
		}
		if len(o.part)+len(in)-n < want || o.ended && n < len(in) {
			break
		}
		p := in[n : n+want-len(o.part)]
		n += len(p)
		if len(o.part) > 0 {
			p = append(o.part, p...)
			o.part = nil
		}
		if o.r == nil {
			if !o.begin(p) {
				return n, out, o.wrong()
			}
			continue
		}
		to := out
		if cap(out)-len(out) < want-recordMore {
			to = nil
		}
		opened, err := o.r.aead.Open(to, o.r.nonce(), p[2:], p[:2])
		if err != nil {
			return n, out, o.wrong()
		}
		if to != nil {
			out = opened
		} else {
			o.clear = opened
		}
		o.ended = p[0]&(finalBit>>8) != 0
	}
	if o.ended && n < len(in) || at == End && !o.ended {
		return n, out, o.wrong() // bytes behind the end, or none that says that it is there
	}
	o.part = append(o.part, in[n:]...)
	return len(in), out, Continue
}

func (o *opener) begin(p []byte) bool {
	salt := p[len(p)-sealSalt:]
	if string(p[:len(sealMagic)]) != sealMagic || binary.BigEndian.Uint32(p[len(sealMagic):]) != o.f.number {
		return false
	}
	aead, err := o.f.cipher(salt)
	o.r = &records{aead: aead}
	return err == nil
}

// wrong counts input that was refused.
func (o *opener) wrong() Verdict {
	if o.f.event != nil {
		o.f.event.Add(1)
	}
	return Reset
}

func (o *opener) Close() {}
