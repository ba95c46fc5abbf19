package command

import (
	"errors"
	"fmt"
	"testing"
)

func TestExitCode(t *testing.T) {
	cause := errors.New("no route")
	for _, c := range []struct {
		err  error
		code int
	}{
		{nil, ExitDone},
		{cause, ExitFailed},
		{&ExitError{Code: ExitRefused}, ExitRefused},
		{&ExitError{Code: ExitRefused, Err: cause}, ExitRefused},
		{fmt.Errorf("apply: %w", Usagef("--rnd: %w", cause)), ExitUsage},
		{errors.Join(&ExitError{Code: ExitRefused}, cause), ExitRefused},
	} {
		if got := ExitCode(c.err); got != c.code {
			t.Errorf("%v: exit %d, want %d", c.err, got, c.code)
		}
	}
	if !errors.Is(Usagef("x: %w", cause), cause) {
		t.Error("the cause is lost")
	}
}
