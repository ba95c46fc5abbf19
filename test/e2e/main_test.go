package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"
	"testing"

	"go.uber.org/goleak"

	"github.com/waystamp/waystamp/internal/await"
	"github.com/waystamp/waystamp/internal/host"
)

// What TestMain makes for all tests.
var (
	program     string          // the waystamp that is tested
	interrupted context.Context // ends with Ctrl-C, so that tests end and clean up
)

// errInterrupted is why a test ends early after Ctrl-C.
var errInterrupted = errors.New("interrupted")

// The tests fail where they cannot run: a test that did not run has shown
// nothing.
func TestMain(m *testing.M) {
	dir, err := prepare()
	if err != nil {
		fmt.Fprintln(os.Stderr, "test/e2e:", err)
		os.RemoveAll(dir)
		os.Exit(1)
	}
	ctx, end := context.WithCancelCause(context.Background())
	interrupted = ctx
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	// Also a second time: one Ctrl-C may come from the terminal and from whoever
	// runs the tests.
	go func() {
		for range signals {
			end(errInterrupted)
		}
	}()
	goleak.VerifyTestMain(tests{m},
		goleak.IgnoreCurrent(),
		goleak.Cleanup(func(code int) {
			os.RemoveAll(dir)
			os.Exit(code)
		}))
}

// tests are all tests, and then no lab is left that they have shared.
type tests struct{ *testing.M }

func (m tests) Run() int {
	code := m.M.Run()
	if err := takeAwayRested(); err != nil {
		fmt.Fprintln(os.Stderr, "test/e2e: take away the labs that tests have shared:", err)
		return max(code, 1)
	}
	return code
}

// prepare checks that the tests can run and builds what they test.
func prepare() (dir string, err error) {
	if _, err := await.Patience(); err != nil {
		return "", err
	}
	if os.Geteuid() != 0 {
		return "", errors.New("these tests make network namespaces and load programs: run them as root")
	}
	err = host.Require(host.FeatureNetAdmin, host.FeatureNamespaces, host.FeatureIPv6, host.FeatureVeth, host.FeatureSEG6Local)
	if err != nil {
		return "", err
	}
	// A short path: those of the agents' sockets may have 107 bytes.
	if dir, err = os.MkdirTemp("", "ws-e2e-"); err != nil {
		return "", err
	}
	// Tests of missing permissions run it as somebody else.
	if err := os.Chmod(dir, 0o755); err != nil {
		return dir, err
	}
	// On a machine without Go somebody else has built it.
	if program = os.Getenv("WAYSTAMP_PROGRAM"); program != "" {
		return dir, nil
	}
	program = filepath.Join(dir, "waystamp")
	cmd := exec.Command("go", "build", "-buildvcs=false", "-o", dir+"/", "../../cmd/...")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if said, err := cmd.CombinedOutput(); err != nil {
		return dir, fmt.Errorf("build waystamp: %w\n%s", err, said)
	}
	return dir, nil
}
