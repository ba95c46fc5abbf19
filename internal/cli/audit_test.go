package cli

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/waystamp/waystamp/internal/command"
	"github.com/waystamp/waystamp/internal/gateway"
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
