package signer

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"math/big"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/waystamp/waystamp/internal/await"
)

func serve(t *testing.T, key crypto.Signer) (path string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- Serve(ctx, l, key, slog.New(slog.DiscardHandler)) }()
	t.Cleanup(func() {
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return path
}

func keys(t *testing.T) map[string]crypto.Signer {
	t.Helper()
	all := map[string]crypto.Signer{}
	for name, curve := range map[string]elliptic.Curve{"ecdsa_secp256r1_sha256": elliptic.P256(), "ecdsa_secp384r1_sha384": elliptic.P384(), "ecdsa_secp521r1_sha512": elliptic.P521()} {
		k, err := ecdsa.GenerateKey(curve, rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		all[name] = k
	}
	_, ed, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	r, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	all["ed25519"], all["rsa_pss_rsae_sha256"], all["rsa_pss_rsae_sha512"] = ed, r, r
	return all
}

func message(n int) []byte { return append(bytes.Clone(serverContext), make([]byte, n)...) }

func TestHandshakesAreSignedByEachKindOfKey(t *testing.T) {
	for algorithm, key := range keys(t) {
		der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{SerialNumber: big.NewInt(1)}, &x509.Certificate{}, key.Public(), key)
		if err != nil {
			t.Fatal(err)
		}
		cert, err := x509.ParseCertificate(der)
		if err != nil {
			t.Fatal(err)
		}
		path := serve(t, key)
		for _, size := range []int{32, 48} {
			m := message(size)
			signature, err := Ask(t.Context(), path, "shop", algorithm, m)
			if err != nil {
				t.Errorf("%s: %v", algorithm, err)
				continue
			}
			if err := Verify(cert, algorithm, m, signature); err != nil {
				t.Errorf("%s: %v", algorithm, err)
			}
			m[len(m)-1] ^= 1
			if Verify(cert, algorithm, m, signature) == nil {
				t.Errorf("%s: the signature is of another message too", algorithm)
			}
		}
	}
}

// Whoever may ask gets signatures of handshakes, and nothing else signed.
func TestNothingElseIsSigned(t *testing.T) {
	path := serve(t, keys(t)["ecdsa_secp256r1_sha256"])
	client := bytes.Replace(message(32), []byte("server"), []byte("client"), 1)
	for name, test := range map[string]struct {
		algorithm string
		message   []byte
		want      string
	}{
		"nothing":                  {"ecdsa_secp256r1_sha256", nil, "no CertificateVerify"},
		"a hash":                   {"ecdsa_secp256r1_sha256", make([]byte, 32), "no CertificateVerify"},
		"what a client signs":      {"ecdsa_secp256r1_sha256", client, "no CertificateVerify"},
		"a handshake without hash": {"ecdsa_secp256r1_sha256", message(0), "no CertificateVerify"},
		"a handshake and more":     {"ecdsa_secp256r1_sha256", message(49), "no CertificateVerify"},
		"something before it":      {"ecdsa_secp256r1_sha256", append([]byte{0x30}, message(32)...), "no CertificateVerify"},
		"by another key's":         {"ed25519", message(32), "does not sign by"},
		"by none":                  {"", message(32), "does not sign by"},
		"more than is read":        {"ecdsa_secp256r1_sha256", message(100_000), "bytes"},
	} {
		if signature, err := Ask(t.Context(), path, "shop", test.algorithm, test.message); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %x, %v; want %q", name, signature, err, test.want)
		}
	}
	if _, err := Ask(t.Context(), path, "shop", "ecdsa_secp256r1_sha256", message(32)); err != nil {
		t.Errorf("after all that a handshake is not signed: %v", err)
	}
}

// What is no question ends its connection, and those that say nothing take no other's place for long.
func TestQuestionsThatAreNone(t *testing.T) {
	path := serve(t, keys(t)["ed25519"])
	framed := func(text string) []byte {
		return append(binary.BigEndian.AppendUint32(nil, uint32(len(text))), text...)
	}
	for name, b := range map[string][]byte{
		"a length of 4 GB": {255, 255, 255, 255}, "no JSON": framed("nope"), "half": framed(`{"version":1}`)[:10], "an HTTP request": []byte("GET / HTTP/1.1\r\n\r\n"),
	} {
		c, err := net.Dial("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		c.Write(b)
		c.(*net.UnixConn).CloseWrite()
		c.SetReadDeadline(time.Now().Add(await.Limit(20 * time.Second)))
		got, err := io.ReadAll(c) // RST where not all was read
		if n, ok := errors.AsType[net.Error](err); ok && n.Timeout() || len(got) > 0 {
			t.Errorf("%s: answered with %q, %v", name, got, err)
		}
		c.Close()
	}
	text, err := json.Marshal(Question{Version: 2, Algorithm: "ed25519", Message: message(32)})
	if err != nil {
		t.Fatal(err)
	}
	c, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.Write(framed(string(text)))
	var a Answer
	if err := receive(c, &a); err != nil || !strings.Contains(a.Error, "version 2") || a.Signature != nil {
		t.Errorf("another version: %+v, %v", a, err)
	}
	for range asksMax {
		c, err := net.Dial("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
	}
	for deadline := time.Now().Add(await.Limit(20 * time.Second)); ; {
		if _, err = Ask(t.Context(), path, "shop", "ed25519", message(32)); err == nil || time.Now().After(deadline) {
			break
		}
	}
	if err != nil {
		t.Errorf("beside connections that say nothing: %v", err)
	}
}

// A signer that answers wrongly, or not at all, is an error that says so.
func TestSignersThatAreNone(t *testing.T) {
	for name, test := range map[string]struct {
		does func(c net.Conn)
		want string
		why  Failure
	}{
		"says nothing":           {func(c net.Conn) { io.Copy(io.Discard, c) }, "has not answered in", Unreachable},
		"ends":                   {func(c net.Conn) { receive(c, &Question{}) }, "cannot be read", Invalid},
		"answers without length": {func(c net.Conn) { receive(c, &Question{}); c.Write([]byte("nope")) }, "bytes", Invalid},
		"answers nothing":        {func(c net.Conn) { receive(c, &Question{}); send(c, Answer{}) }, "no signature", Invalid},
		"refuses":                {func(c net.Conn) { receive(c, &Question{}); send(c, Answer{Error: "the token is not there"}) }, "the token is not there", Refused},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			path := filepath.Join(t.TempDir(), "s")
			l, err := net.Listen("unix", path)
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			go func() {
				if c, err := l.Accept(); err == nil {
					test.does(c)
					c.Close()
				}
			}()
			ctx, stop := t.Context(), func() {}
			if name == "says nothing" {
				ctx, stop = context.WithTimeout(ctx, 200*time.Millisecond)
			}
			defer stop()
			_, err = Ask(ctx, path, "shop", "ed25519", message(32))
			if e, ok := errors.AsType[*Error](err); !ok || e.Why != test.why || !strings.Contains(err.Error(), test.want) {
				t.Errorf("%#v, %v; want failure %d with %q", err, err, test.why, test.want)
			}
		})
	}
	_, err := Ask(t.Context(), filepath.Join(t.TempDir(), "none"), "shop", "ed25519", message(32))
	if e, ok := errors.AsType[*Error](err); !ok || e.Why != Unreachable {
		t.Errorf("where nobody listens: %v", err)
	}
}
