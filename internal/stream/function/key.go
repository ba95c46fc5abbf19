package function

import (
	"encoding/base64"
	"fmt"
	"log/slog"
)

// KeySize is the length of a key of seal and open, in bytes.
const KeySize = 32

// Key is a secret of seal and open. It prints as [redacted].
type Key [KeySize]byte

func (Key) String() string { return "[redacted]" }

// GoString keeps %#v from printing the key.
func (Key) GoString() string { return "[redacted]" }

// LogValue keeps a logger from printing the key.
func (Key) LogValue() slog.Value { return slog.StringValue("[redacted]") }

// MarshalText keeps JSON from holding the key.
func (Key) MarshalText() ([]byte, error) { return []byte("[redacted]"), nil }

// UnmarshalText reads a key from base64 (RFC 4648 section 4).
func (k *Key) UnmarshalText(text []byte) error {
	b, err := base64.StdEncoding.DecodeString(string(text))
	if err != nil || len(b) != KeySize {
		return fmt.Errorf("a key is %d bytes in base64 (RFC 4648 section 4), as openssl rand -base64 %d prints them", KeySize, KeySize)
	}
	copy(k[:], b)
	return nil
}

// Keys are the keys of a worker, by number.
type Keys map[uint32]Key
