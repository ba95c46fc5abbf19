package cli

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/waystamp/waystamp/internal/command"
	"github.com/waystamp/waystamp/internal/gateway"
	"github.com/waystamp/waystamp/internal/identity"
)

func TestAuditVerifyNamesTheLineThatWasChanged(t *testing.T) {
	name := filepath.Join(t.TempDir(), "audit.log")
	a, err := gateway.OpenAudit(name, time.Now)
	if err != nil {
		t.Fatal(err)
	}
	for _, chain := range []string{"light", "deep", "light"} {
		if err := a.Write(gateway.Record{Event: gateway.EventDecided, Chain: chain}); err != nil {
			t.Fatal(err)
		}
	}
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	run := func() (code int, out string) {
		var b bytes.Buffer
		code = Main(context.Background(), []string{"audit", "verify", name}, nil, &b, &b)
		return code, b.String()
	}
	if code, out := run(); code != command.ExitDone || !strings.Contains(out, "3 lines") {
		t.Errorf("a whole log: %d, %s", code, out)
	}
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, bytes.Replace(text, []byte("deep"), []byte("dark"), 1), 0o600); err != nil {
		t.Fatal(err)
	}
	if code, out := run(); code != command.ExitRefused || !strings.Contains(out, "line 3 does not follow from line 2") {
		t.Errorf("a changed log: %d, %s", code, out)
	}
	name += ".missing"
	if code, out := run(); code != command.ExitFailed || !strings.Contains(out, "no such file") {
		t.Errorf("a missing log: %d, %s", code, out)
	}
}

// What was signed is held against what the caller trusts; what was not is said.
func TestAuditVerifyHoldsSignaturesAgainstKeys(t *testing.T) {
	dir := t.TempDir()
	name := filepath.Join(dir, "audit.log")
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	ca, err := identity.NewCA("lab.example", time.Now())
	must(err)
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(err)
	certificate, err := ca.Issue(identity.ID{Node: "r1"}, key.Public(), time.Now())
	must(err)
	public, err := x509.MarshalPKIXPublicKey(key.Public())
	must(err)
	operator, err := json.Marshal(map[string]any{"version": 1, "roots": [][]byte{ca.Root()}})
	must(err)
	for file, text := range map[string][]byte{
		"root.pem": pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: ca.Root()}), "operator.json": operator, "empty": nil,
		"r1.pem": pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: certificate}), "r1.pub": pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: public}),
		"r1.key": pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: []byte("x")}),
	} {
		must(os.WriteFile(filepath.Join(dir, file), text, 0o600))
	}
	f, err := gateway.OpenAuditFile(name)
	must(err)
	log, err := gateway.GoOnAudit(f, name, time.Now)
	must(err)
	run := func(args ...string) (code int, out string) {
		var b bytes.Buffer
		for i, a := range args {
			if i%2 == 1 && a != "r1" && a != "r2" {
				args[i] = filepath.Join(dir, a)
			}
		}
		code = Main(context.Background(), append([]string{"audit", "verify", name}, args...), nil, &b, &b)
		return code, b.String()
	}
	must(log.Write(gateway.Record{Event: gateway.EventChanged}))
	if code, out := run(); code != command.ExitDone || !strings.Contains(out, "not signed\n") {
		t.Errorf("without signatures: %d, %s", code, out)
	}
	if code, out := run("--ca", "root.pem"); code != command.ExitRefused || !strings.Contains(out, "there are no signatures") {
		t.Errorf("without signatures, which are asked for: %d, %s", code, out)
	}
	s, err := gateway.OpenSignatures(f, func() (*gateway.AuditKey, error) {
		return &gateway.AuditKey{Signer: key, Certificate: certificate}, nil
	}, slog.New(slog.DiscardHandler), time.Now)
	must(err)
	if code, out := run("--ca", "root.pem"); code != command.ExitRefused || !strings.Contains(out, "none of its lines is signed") {
		t.Errorf("before the first signature: %d, %s", code, out)
	}
	must(s.Read())
	s.Sign()
	must(s.Close())
	must(log.Write(gateway.Record{Event: gateway.EventChanged}))
	must(log.Close())
	for _, c := range []struct {
		args []string
		code int
		says string
	}{
		{nil, command.ExitDone, "whose key that is, nothing says"},
		{[]string{"--ca", "root.pem"}, command.ExitDone, "signed up to line 1"},
		{[]string{"--ca", "root.pem"}, command.ExitDone, "by node r1, key"},
		{[]string{"--ca", "operator.json", "--node", "r1"}, command.ExitDone, "1 lines behind it are not signed yet"},
		{[]string{"--key", "r1.pub"}, command.ExitDone, "signed up to line 1"},
		{[]string{"--key", "r1.pem"}, command.ExitDone, "signed up to line 1"},
		{[]string{"--signatures", "audit.log.sig", "--key", "r1.pub"}, command.ExitDone, "signed up to line 1"},
		{[]string{"--ca", "root.pem", "--node", "r2"}, command.ExitRefused, "that of node r1; expect r2"},
		{[]string{"--ca", "r1.pem"}, command.ExitFailed, "no authority's"},
		{[]string{"--key", "root.pem"}, command.ExitRefused, "none that is trusted"},
		{[]string{"--key", "r1.key"}, command.ExitFailed, "openssl pkey -pubout"},
		{[]string{"--key", "empty"}, command.ExitFailed, "no public key"},
		{[]string{"--ca", "empty"}, command.ExitFailed, "no certificate in it"},
		{[]string{"--node", "r1"}, command.ExitUsage, "goes with --ca"},
		{[]string{"--signatures", "missing"}, command.ExitFailed, "read the signatures"},
	} {
		args := slices.Clone(c.args)
		if code, out := run(args...); code != c.code || !strings.Contains(out, c.says) {
			t.Errorf("%q: %d, %s; want %d, %q", c.args, code, out, c.code, c.says)
		}
	}
}
