package gateway

import (
	"errors"
	"fmt"
)

// Reason says why a client or a request was refused.
type Reason string

// The reasons, as the audit log has them.
const (
	CertMissing     Reason = "cert-missing"
	CertUntrusted   Reason = "cert-untrusted"
	CertExpired     Reason = "cert-expired"
	CertRevoked     Reason = "cert-revoked"
	CertIdentity    Reason = "cert-identity"
	RevocationStale Reason = "revocation-stale"
	// The responder of OCSP (RFC 6960) does not answer, what it answers does not count, or is too old.
	OCSPUnreachable Reason = "ocsp-unreachable"
	OCSPInvalid     Reason = "ocsp-invalid"
	OCSPStale       Reason = "ocsp-stale"
	// The process with a service's key has not signed a handshake.
	SignerUnreachable Reason = "signer-unreachable" // it does not listen, or has not answered
	SignerRefused     Reason = "signer-refused"
	SignerInvalid     Reason = "signer-invalid" // its answer is none, or another key's
	SNIUnknown        Reason = "sni-unknown"
	HostMismatch      Reason = "host-mismatch"
	RuleNone          Reason = "rule-none"
	PathAmbiguous     Reason = "path-ambiguous"
	MethodRefused     Reason = "method-refused"
	Limit             Reason = "limit"
	Handshake         Reason = "handshake"
	AuditFailed       Reason = "audit-failed"
	OriginFailed      Reason = "origin-failed"
	IdentityRevoked   Reason = "identity-revoked" // by an operator, whatever the certificate says
	SessionEnded      Reason = "session-ended"    // by an operator
	// RequestMalformed is of a proxy's clients whose CONNECT is not one.
	RequestMalformed Reason = "request-malformed"
	// DestinationUnknown is of a proxy's clients that ask for what its service does not name.
	DestinationUnknown Reason = "destination-unknown"
	Idle               Reason = "idle" // of a session that had no byte for too long; it is no refusal
)

// Reasons are all reasons, in the order of the reference.
func Reasons() []Reason {
	return []Reason{CertMissing, CertUntrusted, CertExpired, CertRevoked, CertIdentity, RevocationStale, OCSPUnreachable, OCSPInvalid, OCSPStale, SignerUnreachable, SignerRefused, SignerInvalid, SNIUnknown, HostMismatch,
		RuleNone, PathAmbiguous, MethodRefused, Limit, Handshake, AuditFailed, OriginFailed, IdentityRevoked, SessionEnded, Idle, RequestMalformed, DestinationUnknown}
}

// Refusal is an error with its reason.
type Refusal struct {
	Reason Reason
	Err    error
}

func (r *Refusal) Error() string { return string(r.Reason) + ": " + r.Err.Error() }

// Unwrap gives the cause.
func (r *Refusal) Unwrap() error { return r.Err }

func refuse(r Reason, format string, args ...any) error {
	return &Refusal{r, fmt.Errorf(format, args...)}
}

// reasonOf is the reason of an error, or another one if it has none.
func reasonOf(err error, otherwise Reason) Reason {
	if r, ok := errors.AsType[*Refusal](err); ok {
		return r.Reason
	}
	return otherwise
}
