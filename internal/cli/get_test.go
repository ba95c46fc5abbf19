package cli

import (
	"slices"
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

// What operations on bytes have found and refused is said; nothing is said of those that found nothing.
func TestGetStreamsSaysWhatOperationsFound(t *testing.T) {
	c := &fakeClient{functions: api.Functions{Node: "r2", Functions: []api.Function{{Function: "dpi", Stream: &api.Stream{
		Worker: 9,
		Run:    []api.StreamOperation{{Name: "count"}, {Name: "match", Events: 3}},
		Back:   []api.StreamOperation{{Name: "match"}, {Name: "open", Events: 2}},
	}}}}}
	r, err := readStreams(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"function dpi: match has found something in 3 connections, towards the server", "function dpi: open has refused what came in 2 connections, towards the client"}
	if !slices.Equal(r.notes, want) {
		t.Errorf("it says %q; want %q", r.notes, want)
	}
}
