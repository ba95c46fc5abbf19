package function

import (
	"encoding/base64"
	"encoding/json"
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

// Text is the key as UnmarshalText reads it, for whoever hands it to a worker.
func (k Key) Text() string { return base64.StdEncoding.EncodeToString(k[:]) }

// KeyFile says where a node has a key of seal and open.
type KeyFile struct {
	Number uint32
	File   string // with the key as UnmarshalText reads it; "": a worker gets the key from elsewhere
}

// KeyFiles are the files of all keys that lists need, by number. The lists' entries are in JSON, as ParseList reads them.
func KeyFiles(lists ...[]string) (map[uint32]string, error) {
	files := map[uint32]string{}
	for _, list := range lists {
		var raw []json.RawMessage
		for _, e := range list {
			raw = append(raw, json.RawMessage(e))
		}
		entries, err := ParseList("", raw)
		if err != nil {
			return nil, err
		}
		for _, e := range entries {
			for number, file := range e.keyFiles() {
				if was, ok := files[number]; ok && was != file {
					return nil, fmt.Errorf("key %d is in %s and in %s; give each key one file, or other numbers", number, was, file)
				}
				files[number] = file
			}
		}
	}
	return files, nil
}

// keyFiles are the files of an entry's keys, by number.
func (e Entry) keyFiles() map[uint32]string {
	if e.Key != nil {
		return map[uint32]string{e.Key.Number: e.Key.File}
	}
	return e.Keys
}
