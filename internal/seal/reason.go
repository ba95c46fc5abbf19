package seal

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"slices"
	"syscall"
)

// Reason is why an end has refused a connection of the other one.
type Reason string

// Reasons, each of which is counted.
const (
	PartMismatch Reason = "part-mismatch" // its first record names another part than its packets came by
	Unsealed     Reason = "unsealed"      // what came is no TLS
	Peer         Reason = "peer"          // it is not who the plan names, or its bytes were changed
	Untrusted    Reason = "untrusted"     // its certificate has the name, and is not signed by the controller for an end
	Expired      Reason = "expired"       // its certificate has ended, or has not begun
	Revoked      Reason = "revoked"       // its certificate is of before its node was revoked
	Key          Reason = "key"           // this end has no key for the part
	Gone         Reason = "gone"          // it ended, or said nothing, before it had said what it is for
)

// ReasonOf tells why Accept has failed.
func ReasonOf(err error) Reason {
	if _, ok := errors.AsType[tls.RecordHeaderError](err); ok {
		return Unsealed
	}
	var timeout interface{ Timeout() bool }
	isAny := func(of ...error) bool {
		return slices.ContainsFunc(of, func(e error) bool { return errors.Is(err, e) })
	}
	switch {
	case errors.Is(err, errKey):
		return Key
	case errors.Is(err, ErrUntrusted):
		return Untrusted
	case errors.Is(err, ErrExpired):
		return Expired
	case errors.Is(err, ErrRevoked):
		return Revoked
	case errors.Is(err, ErrMismatch):
		return PartMismatch
	case isAny(ErrTruncated, context.Canceled, net.ErrClosed, syscall.ECONNRESET, syscall.EPIPE), errors.As(err, &timeout) && timeout.Timeout():
		return Gone
	}
	return Peer
}
