package pot

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"github.com/waystamp/waystamp/internal/model"
)

// Every secret below is a run of the byte 0xee, which nothing else here is.
const secretNumber = 0xeeeeeeeeeeeeeeee

func secretShare() Share {
	k := Key(bytes.Repeat([]byte{0xee}, 16))
	m := Mask{RND: secretNumber, CML: secretNumber}
	return Share{Position: 3, Key: k, Bind: k, Polynomial: Polynomial{
		Prime: secretNumber, Share: secretNumber, Public: secretNumber, LPC: secretNumber, Up: m, Down: m,
	}}
}

func leaks(s string) bool {
	s = strings.ToLower(s)
	for _, f := range []string{"ee", "238", "356", "11101110", fmt.Sprint(uint64(secretNumber)), fmt.Sprintf("%o", uint64(secretNumber))} {
		if strings.Contains(s, f) {
			return true
		}
	}
	return false
}

func TestLeaksIsAbleToSeeALeak(t *testing.T) {
	for _, verb := range []string{"%v", "%d", "%x", "%X", "%o", "%b", "%#v"} {
		if s := fmt.Sprintf(verb, uint64(secretNumber)); !leaks(s) {
			t.Errorf("%s: %s", verb, s)
		}
		if s := fmt.Sprintf(verb, []byte{0xee, 0xee}); !leaks(s) {
			t.Errorf("%s: %s", verb, s)
		}
	}
}

func secrets() map[string]any {
	s := secretShare()
	v := Verifier{Secret: secretNumber, Keys: []Key{s.Key, s.Key}}
	p := Profile{Header: Header{Scheme: model.SchemeOPoT, Path: 1}, Shares: []Share{s}, Verifier: v}
	return map[string]any{
		"Key": s.Key, "*Key": &s.Key, "Mask": s.Polynomial.Up, "Polynomial": s.Polynomial,
		"*Polynomial": &s.Polynomial, "Share": s, "*Share": &s, "Verifier": v, "*Verifier": &v,
		"Profile": p, "*Profile": &p, "[]Share": p.Shares, "map": map[string]Key{"k": s.Key},
	}
}

func TestSecretsPrintRedacted(t *testing.T) {
	for name, v := range secrets() {
		for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%X", "%d", "%o", "%b", "%c", "%U", "%e", "%t", "% x", "%#x"} {
			s := fmt.Sprintf(verb, v)
			if leaks(s) || !strings.Contains(s, Redacted) {
				t.Errorf("%s under %s: %s", name, verb, s)
			}
		}
		if s := fmt.Sprint(fmt.Errorf("with %v", v)); leaks(s) {
			t.Errorf("%s in an error: %s", name, s)
		}
	}
}

func TestSecretsLogRedacted(t *testing.T) {
	for name, v := range secrets() {
		var b bytes.Buffer
		slog.New(slog.NewTextHandler(&b, nil)).Info("m", "v", v)
		slog.New(slog.NewJSONHandler(&b, nil)).Info("m", "v", v)
		switch v.(type) {
		case Key, Mask, Polynomial, Verifier, Share:
			if n := strings.Count(b.String(), Redacted); n != 2 {
				t.Errorf("%s is [redacted] %d times: %s", name, n, b.String())
			}
		}
		// The time of the record holds digits of all kinds.
		for line := range strings.Lines(b.String()) {
			if _, rest, ok := strings.Cut(line, "m"); !ok || leaks(rest[strings.Index(rest, "v"):]) {
				t.Errorf("%s: %s", name, line)
			}
		}
	}
}

func TestSecretsRefuseToBeMarshalled(t *testing.T) {
	for name, v := range secrets() {
		if b, err := json.Marshal(v); err == nil {
			t.Errorf("%s: %s", name, b)
		}
	}
}

func TestZeroOverwritesSecrets(t *testing.T) {
	s := secretShare()
	s.Zero()
	if s != (Share{Position: 3}) {
		t.Errorf("left of the share: %x %x", s.Key[:], s.Bind[:])
	}
	keys := []Key{secretShare().Key, secretShare().Key}
	v := Verifier{Secret: secretNumber, Keys: keys}
	v.Zero()
	if v.Secret != 0 || v.Keys != nil || keys[0] != (Key{}) || keys[1] != (Key{}) {
		t.Errorf("left of the verifier: %d, %x %x", v.Secret, keys[0][:], keys[1][:])
	}
}
