package store

import (
	"bytes"
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
)

// SealKeySize is the length in bytes of the key that seals a store's records.
const SealKeySize = 32

// SealKey seals records. It is a secret, and prints as nothing.
type SealKey [SealKeySize]byte

// String hides the key.
func (SealKey) String() string { return "[redacted]" }

// GoString hides it from %#v, too.
func (SealKey) GoString() string { return "[redacted]" }

// ParseSealKey reads a key as a file has it: 64 hexadecimal digits.
func ParseSealKey(text []byte) (k SealKey, err error) {
	text = bytes.TrimSpace(text)
	if len(text) != 2*SealKeySize {
		return k, fmt.Errorf("it has %d characters, and a key is %d hexadecimal digits; try: openssl rand -hex %d", len(text), 2*SealKeySize, SealKeySize)
	}
	if _, err := hex.Decode(k[:], text); err != nil {
		return k, fmt.Errorf("it is not %d hexadecimal digits; try: openssl rand -hex %d", 2*SealKeySize, SealKeySize) // without what is there
	}
	return k, nil
}

// A sealed value is sealedHead, a salt, and AES-256-GCM of the value under a key that HKDF-SHA256 (RFC 5869) makes of
// the seal key and the salt, with a nonce of zeros: each such key seals one value. Salts are 24 random bytes, so that
// no two are the same, however many values there are. The record's key is the associated data.
const (
	sealedHead = "waystamp-sealed-1\n"
	sealedSalt = 24
	sealedInfo = "waystamp record"
)

// IsSealed tells whether a value is sealed. A record of the controller, which is JSON, never looks like that.
func IsSealed(value []byte) bool { return bytes.HasPrefix(value, []byte(sealedHead)) }

var (
	// ErrSealed means that records are sealed, and no key was given.
	ErrSealed = errors.New("the records in the store are sealed; give the key with --seal-key")
	// ErrNotSealed means that a record is in clear in a store that is opened with a key.
	ErrNotSealed = errors.New("it is not sealed; to seal the records of a store, back it up and restore it into an empty one with --seal-key")
	// ErrSealKey means that a record does not open.
	ErrSealKey = errors.New("it does not open with this key: it was sealed with another one, or was changed, or is of another place")
)

// Seal gives a store whose values are sealed in s: at rest, in etcd, and on the way there. Keys of records, their
// number, lengths and revisions are in clear. The store that it returns owns s. It is Shared if s is.
func Seal(s Store, key SealKey) Store {
	x := sealed{s, key}
	if shared, ok := s.(Shared); ok {
		return sealedShared{x, shared}
	}
	return x
}

type sealed struct {
	Store
	master SealKey
}

type sealedShared struct {
	sealed
	shared Shared
}

// Lead implements Shared.
func (s sealedShared) Lead(ctx context.Context, self string) (Leadership, error) {
	return s.shared.Lead(ctx, self)
}

// Leader implements Shared.
func (s sealedShared) Leader(ctx context.Context) (string, error) { return s.shared.Leader(ctx) }

// aead is what seals the one value with that salt.
func (s sealed) aead(salt []byte) (cipher.AEAD, error) {
	key, err := hkdf.Key(sha256.New, s.master[:], salt, sealedInfo, SealKeySize)
	if err != nil {
		return nil, fmt.Errorf("make the key of a record: %w", err)
	}
	block, err := aes.NewCipher(key)
	if err != nil {
		return nil, fmt.Errorf("make the key of a record: %w", err)
	}
	return cipher.NewGCM(block)
}

func (s sealed) seal(key string, value []byte) ([]byte, error) {
	out := append(make([]byte, 0, len(sealedHead)+sealedSalt+len(value)+16), sealedHead...)
	salt := out[len(out) : len(out)+sealedSalt]
	if _, err := rand.Read(salt); err != nil {
		return nil, fmt.Errorf("seal the record %s: %w", key, err)
	}
	a, err := s.aead(salt)
	if err != nil {
		return nil, err
	}
	return a.Seal(out[:len(out)+sealedSalt], make([]byte, a.NonceSize()), value, []byte(key)), nil
}

func (s sealed) open(key string, value []byte) ([]byte, error) {
	if !IsSealed(value) {
		return nil, fmt.Errorf("the record %s: %w", key, ErrNotSealed)
	}
	body := value[len(sealedHead):]
	if len(body) < sealedSalt {
		return nil, fmt.Errorf("the record %s: %w", key, ErrSealKey)
	}
	a, err := s.aead(body[:sealedSalt])
	if err != nil {
		return nil, err
	}
	out, err := a.Open([]byte{}, make([]byte, a.NonceSize()), body[sealedSalt:], []byte(key))
	if err != nil {
		return nil, fmt.Errorf("the record %s: %w", key, ErrSealKey)
	}
	return out, nil
}

// Snapshot implements Store.
func (s sealed) Snapshot(ctx context.Context, prefix string) (Snapshot, error) {
	snap, err := s.Store.Snapshot(ctx, prefix)
	if err != nil {
		return snap, err
	}
	for key, r := range snap.Records {
		if r.Value, err = s.open(key, r.Value); err != nil {
			return Snapshot{}, err
		}
		snap.Records[key] = r
	}
	return snap, nil
}

// Commit implements Store.
func (s sealed) Commit(ctx context.Context, t Txn) (revision uint64, err error) {
	t.Put = maps.Clone(t.Put)
	for key, value := range t.Put {
		if t.Put[key], err = s.seal(key, value); err != nil {
			return 0, err
		}
	}
	return s.Store.Commit(ctx, t)
}
