package cli

import (
	"strings"
	"testing"

	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/command"
)

// A slip in a function's name looks like a function whose rules count nothing.
func TestGetFunctionsWarnsOfANameThatNobodyHas(t *testing.T) {
	rules := func(names ...string) *fakeClient {
		c := &fakeClient{}
		for _, n := range names {
			c.functions.Functions = append(c.functions.Functions, api.Function{Function: n, Rules: &api.Rules{}})
		}
		return c
	}
	for name, warned := range map[string]bool{"fw": false, "fww": true} {
		agents := fakeAgents{"/1": rules(), "/2": rules("fw")}
		_, stderr, code := agents.run(t, t.Context(), "get", "functions", name, "--socket", "/1", "--socket", "/2")
		if got := strings.Contains(stderr, "warning: the selected nodes have no function "+name); got != warned || code != command.ExitDone {
			t.Errorf("%s: exit code %d, %q; want a warning: %t", name, code, stderr, warned)
		}
	}
}
