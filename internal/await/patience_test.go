package await

import (
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
)

func TestPatienceIsANumber(t *testing.T) {
	for text, want := range map[string]float64{"": 1, "1": 1, "2.5": 2.5, "100": 100} {
		if got, err := parsePatience(text); err != nil || got != want {
			t.Errorf("%q: got %v, %v; want %v", text, got, err, want)
		}
	}
	for _, text := range []string{"0", "0.5", "-1", "101", "NaN", "Inf", "ten", "5x", " 5"} {
		got, err := parsePatience(text)
		if err == nil || got != 1 || !strings.Contains(err.Error(), PatienceVariable) || !strings.Contains(err.Error(), "1 to 100") {
			t.Errorf("%q: got %v, %v; want an error that names the variable and its range", text, got, err)
		}
	}
}

// The environment is read once, so that a process of its own reads it here.
func TestDeadlinesFollowTheEnvironment(t *testing.T) {
	if os.Getenv("AWAIT_TEST_CHILD") != "" {
		if got := Limit(time.Minute); got != 150*time.Second {
			t.Errorf("Limit(1m) is %s, want 2m30s", got)
		}
		return
	}
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestDeadlinesFollowTheEnvironment$")
	cmd.Env = append(os.Environ(), "AWAIT_TEST_CHILD=1", PatienceVariable+"=2.5")
	if said, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, said)
	}
}
