package main

import (
	"os"
	"slices"
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

// A step may ask for some parts of a test and all of another: go test takes the two apart where a | is in no parentheses.
func TestPartsOfATestAreChosen(t *testing.T) {
	s := step{pkg: "test/e2e", run: []string{"TestA$/^(x|y)$", "TestB"}}
	if g := s.forGuest(nil, ""); !slices.Contains(g.Args, "-test.run=^TestA$/^(x|y)$|^TestB") {
		t.Errorf("got %q", g.Args)
	}
	for test, want := range map[string]bool{"TestA": true, "TestA/x": true, "TestAB": false, "TestB/z": true, "TestC": false} {
		if s.has(test) != want {
			t.Errorf("%s: %v, want %v", test, !want, want)
		}
	}
}

// A way that no test has would never run, and nothing would say so.
func TestWaysThroughFunctionsExist(t *testing.T) {
	out, err := os.ReadFile("../e2e/proxy_test.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, way := range functionWays {
		name, ok := "", false
		for _, version := range []string{",_IPv6_over_labels", ",_IPv4_over_labels", ",_IPv6", ",_IPv4"} {
			if name, ok = strings.CutSuffix(way, version); ok {
				break
			}
		}
		// A row of the test; over labels with the version that it has there.
		_, row, found := strings.Cut(string(out), `{"`+strings.ReplaceAll(name, "_", " ")+`", `)
		row, _, _ = strings.Cut(row, "\n")
		over, labels := strings.CutSuffix(strings.TrimPrefix(way, name+",_"), "_over_labels")
		if !ok || !found || labels && !strings.Contains(row, `, "`+over+`", `) {
			t.Errorf("TestTCPThroughAFunctionLosesNoStamp has no %s", way)
		}
	}
}
