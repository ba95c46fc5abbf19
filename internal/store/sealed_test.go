package store

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func sealKey(b byte) (k SealKey) {
	for i := range k {
		k[i] = b
	}
	return k
}

func TestASealedStoreHasNoValueOnDisk(t *testing.T) {
	file := filepath.Join(t.TempDir(), "store")
	bolt, err := OpenBolt(file)
	if err != nil {
		t.Fatal(err)
	}
	secret := strings.Repeat("a secret of some path ", 10)
	s := Seal(bolt, sealKey(1))
	commit(t, s, Txn{Put: put("a", secret, "b", secret)})
	commit(t, s, Txn{Put: put("a", secret+"again")})
	if v := snapshot(t, s, "a").Records["a"].Value; string(v) != secret+"again" {
		t.Errorf("it reads %q", v)
	}
	raw := snapshot(t, bolt, "")
	if bytes.Equal(raw.Records["a"].Value[len(sealedHead):][:64], raw.Records["b"].Value[len(sealedHead):][:64]) {
		t.Error("two records with the same value look the same")
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Contains(b, []byte("a secret")) {
		t.Error("the file has a value in clear")
	}
	if !bytes.Contains(b, []byte(sealedHead)) {
		t.Error("the file has no sealed value: the search finds nothing")
	}
}

func TestASealedRecordOpensWithItsKeyAtItsPlaceAlone(t *testing.T) {
	bolt, err := OpenBolt(filepath.Join(t.TempDir(), "store"))
	if err != nil {
		t.Fatal(err)
	}
	s := Seal(bolt, sealKey(1))
	defer s.Close()
	commit(t, s, Txn{Put: put("a", "of a", "b", "of b")})
	is := func(what string, key SealKey, want error) {
		t.Helper()
		_, err := Seal(bolt, key).Snapshot(t.Context(), "a")
		if !errors.Is(err, want) || want != nil && !strings.Contains(err.Error(), "the record a") {
			t.Errorf("%s: %v, want %v", what, err, want)
		}
	}
	is("as it was written", sealKey(1), nil)
	is("with another key", sealKey(2), ErrSealKey)
	raw := snapshot(t, bolt, "").Records
	commit(t, bolt, Txn{Put: map[string][]byte{"a": raw["b"].Value}})
	is("at another's place", sealKey(1), ErrSealKey)
	for i := range raw["a"].Value[len(sealedHead):] {
		changed := bytes.Clone(raw["a"].Value)
		changed[len(sealedHead)+i] ^= 1
		commit(t, bolt, Txn{Put: map[string][]byte{"a": changed}})
		is(fmt.Sprintf("with byte %d changed", i), sealKey(1), ErrSealKey)
	}
	commit(t, bolt, Txn{Put: put("a", sealedHead+"short")})
	is("cut off", sealKey(1), ErrSealKey)
	commit(t, bolt, Txn{Put: put("a", "of a")})
	is("in clear", sealKey(1), ErrNotSealed)
}

func TestASealKeyIs64Digits(t *testing.T) {
	k, err := ParseSealKey([]byte(strings.Repeat("0F", SealKeySize) + "\n"))
	if err != nil || k != sealKey(0x0f) {
		t.Errorf("%v", err)
	}
	if said := fmt.Sprintf("%v %+v %#v %s", k, k, k, k); strings.Contains(strings.ToLower(said), "f0f") || strings.Contains(said, "15") {
		t.Errorf("the key shows: %s", said)
	}
	for _, bad := range []string{"", strings.Repeat("0f", SealKeySize-1), strings.Repeat("0g", SealKeySize), strings.Repeat("0f", SealKeySize) + "0"} {
		if _, err := ParseSealKey([]byte(bad)); err == nil || bad != "" && strings.Contains(err.Error(), bad) {
			t.Errorf("%q: %v", bad, err)
		}
	}
}
