package main

import (
	"strings"
	"testing"
)

func TestStepsAreChosenByName(t *testing.T) {
	all := []step{{name: "a"}, {name: "b", asked: true}, {name: "c"}}
	for names, want := range map[string]string{
		"":      "a, c",
		"b":     "b",
		"c,b":   "b, c",
		"a,b,c": "a, b, c",
	} {
		got, err := chosen(all, names)
		if err != nil || stepNames(got) != want {
			t.Errorf("%q: %s, %v; want %s", names, stepNames(got), err, want)
		}
	}
	for _, names := range []string{"d", "a,d", "a,", ","} {
		if got, err := chosen(all, names); err == nil || !strings.Contains(err.Error(), "expect one of a, b, c") {
			t.Errorf("%q: %s, %v; want an error that names all steps", names, stepNames(got), err)
		}
	}
}
