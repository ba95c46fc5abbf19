package gateway

import (
	"context"
	"crypto"
	"crypto/x509"
	"errors"
	"io"

	"github.com/waystamp/waystamp/internal/signer"
)

// remoteKey is the key of a service that another process has.
type remoteKey struct {
	service string
	cert    *x509.Certificate
}

// Public is the key of the certificate.
func (k *remoteKey) Public() crypto.PublicKey { return k.cert.PublicKey }

// Sign signs nothing: each handshake has an askedKey.
func (k *remoteKey) Sign(io.Reader, []byte, crypto.SignerOpts) ([]byte, error) {
	return nil, errors.New("the key is in another process")
}

// askedKey is a remoteKey that one handshake signs with.
type askedKey struct {
	*remoteKey
	h   *handshake
	ctx context.Context // of the handshake
}

var _ crypto.MessageSigner = (*askedKey)(nil)

// SignMessage has the message signed, and holds that the signature is the certificate's.
func (k *askedKey) SignMessage(_ io.Reader, message []byte, opts crypto.SignerOpts) ([]byte, error) {
	failed := func(why Reason, err error) ([]byte, error) {
		k.h.refusal = refuse(why, "the handshake is not signed: %w", err)
		return nil, k.h.refusal
	}
	algorithm, err := signer.AlgorithmOf(k.cert.PublicKey, opts)
	if err != nil {
		return failed(SignerInvalid, err)
	}
	signature, err := k.h.gateway.config.Sign(k.ctx, k.service, algorithm, message)
	if err != nil {
		why := SignerUnreachable
		if e, ok := errors.AsType[*signer.Error](err); ok {
			switch e.Why {
			case signer.Refused:
				why = SignerRefused
			case signer.Invalid:
				why = SignerInvalid
			}
		}
		return failed(why, err)
	}
	if err := signer.Verify(k.cert, algorithm, message, signature); err != nil {
		return failed(SignerInvalid, errors.New("the signature is not by the key of the certificate; give the signer the key that the certificate is for"))
	}
	return signature, nil
}
