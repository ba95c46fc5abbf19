package pot

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
)

// Redacted is what stands for a secret wherever it is printed.
const Redacted = "[redacted]"

var errMarshal = errors.New("a secret of the proof is not written by accident: the encoder of a file that holds it must name its fields")

// The types that hold secrets print as Redacted under every verb of fmt and in
// slog, and refuse to be marshalled.

func (Key) String() string               { return Redacted }
func (Key) GoString() string             { return Redacted }
func (Key) Format(f fmt.State, _ rune)   { redact(f) }
func (Key) LogValue() slog.Value         { return slog.StringValue(Redacted) }
func (Key) MarshalText() ([]byte, error) { return nil, errMarshal }

func (Mask) String() string               { return Redacted }
func (Mask) GoString() string             { return Redacted }
func (Mask) Format(f fmt.State, _ rune)   { redact(f) }
func (Mask) LogValue() slog.Value         { return slog.StringValue(Redacted) }
func (Mask) MarshalText() ([]byte, error) { return nil, errMarshal }

func (Polynomial) String() string               { return Redacted }
func (Polynomial) GoString() string             { return Redacted }
func (Polynomial) Format(f fmt.State, _ rune)   { redact(f) }
func (Polynomial) LogValue() slog.Value         { return slog.StringValue(Redacted) }
func (Polynomial) MarshalText() ([]byte, error) { return nil, errMarshal }

func (Verifier) String() string               { return Redacted }
func (Verifier) GoString() string             { return Redacted }
func (Verifier) Format(f fmt.State, _ rune)   { redact(f) }
func (Verifier) LogValue() slog.Value         { return slog.StringValue(Redacted) }
func (Verifier) MarshalText() ([]byte, error) { return nil, errMarshal }

func redact(f fmt.State) { io.WriteString(f, Redacted) }

// LogValue says whose share it is, and no more.
func (s Share) LogValue() slog.Value {
	return slog.GroupValue(slog.Int("position", int(s.Position)), slog.String("share", Redacted))
}

// Zero overwrites the key. Copies made before live on: Go moves values as it
// likes, so this shortens a secret's life and does not end it.
func (k *Key) Zero() { clear(k[:]) }

// Zero overwrites all secrets of the share; its position stays.
func (s *Share) Zero() {
	s.Key.Zero()
	s.Bind.Zero()
	s.Polynomial = Polynomial{}
}

// Zero overwrites the secret and, in place, all keys, then lets go of them.
func (v *Verifier) Zero() {
	v.Secret = 0
	for i := range v.Keys {
		v.Keys[i].Zero()
	}
	v.Keys = nil
}
