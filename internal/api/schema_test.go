package api

import (
	"encoding"
	"flag"
	"fmt"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/waystamp/waystamp/internal/event"
)

var update = flag.Bool("update", false, "write new fields into testdata/schema.golden")

const golden = "testdata/schema.golden"

// outputs are all values that leave the product as JSON objects, by the command or
// path that gives them.
var outputs = []struct {
	name  string
	value any
}{
	{"GET " + PathStatus, Status{}},
	{"GET " + PathCounters, Counters{}},
	{"GET " + PathFunctions, Functions{}},
	{"GET " + PathConnections, Connections{}},
	{"GET " + PathEvents, event.Event{}},
	{"GET " + PathServices, Services{}}, // "get services" and so on are the same
	{"GET " + PathSessions, Sessions{}},
	{"GET " + PathRevoked, Revoked{}},
	{"GET " + PathReaders, HeldReaders{}},            // "get readers" without a file
	{"GET " + PathSessions + "/ID", SessionDetail{}}, // "describe session"
	{"POST " + PathRevoked, RevokeRequest{}},
	{"answer to POST " + PathRevoked, RevokeAnswer{}},
	{"get readers", ReadersOutput{}},
	{"get refusals", RefusalsOutput{}}, // "status" is GET /v1/status
	{"get errors", ErrorsOutput{}},
	{"get paths", PathsOutput{}},
	{"get functions", FunctionsOutput{}},
	{"get interfaces", InterfacesOutput{}},
	{"get nodes", NodesOutput{}},
	{"get changes", ChangesOutput{}},
	{"get chains", ChainsOutput{}},
	{"get epochs", EpochsOutput{}},
	{"get roots", RootsOutput{}},
	{"describe", DescribeOutput{}},
	{"trace", TraceOutput{}},
	{"get events", EventsOutput{}},
}

// fields gives a line for each field of a value's JSON: where it is, and its type.
func fields(at string, typ reflect.Type) (out []string) {
	text := reflect.TypeFor[encoding.TextMarshaler]()
	switch {
	case typ.Kind() == reflect.Pointer:
		return fields(at, typ.Elem())
	case typ == reflect.TypeFor[time.Time](), typ.Implements(text):
		return []string{at + " string"}
	case typ.Kind() == reflect.Slice:
		return fields(at+"[]", typ.Elem())
	case typ.Kind() == reflect.Struct:
		for i := range typ.NumField() {
			f := typ.Field(i)
			name, options, _ := strings.Cut(f.Tag.Get("json"), ",")
			if name == "-" || !f.IsExported() {
				continue
			}
			if name == "" {
				name = "(no name) " + f.Name
			}
			for _, line := range fields(at+"."+name, f.Type) {
				if strings.Contains(options, "omitempty") {
					line += ", may be missing"
				}
				out = append(out, line)
			}
		}
		return out
	}
	return []string{at + " " + typ.Kind().String()}
}

func schema() (lines []string) {
	for _, o := range outputs {
		lines = append(lines, fields(o.name, reflect.TypeOf(o.value))...)
	}
	return lines
}

// A field that is gone breaks everybody who reads it; -update does not help then,
// but a new Version.
func TestTheSchemaKeepsEveryField(t *testing.T) {
	first := fmt.Sprintf("version %d", Version)
	now := schema()
	b, err := os.ReadFile(golden)
	if err != nil && !*update {
		t.Fatal(err)
	}
	var before []string
	if len(b) > 0 {
		before = strings.Split(strings.TrimRight(string(b), "\n"), "\n")
	}
	sameVersion := len(before) > 0 && before[0] == first
	for _, line := range before {
		if sameVersion && line != first && !slices.Contains(now, line) {
			t.Errorf("version %d has the field %q, and it is gone or another: put it back, or raise api.Version and say so in CHANGELOG.md", Version, line)
		}
	}
	if t.Failed() {
		return
	}
	want := append([]string{first}, now...)
	if slices.Equal(before, want) {
		return
	}
	if !*update {
		t.Fatalf("the schema has changed; if that is meant, run: go test ./internal/api -update")
	}
	if err := os.WriteFile(golden, []byte(strings.Join(want, "\n")+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
}

func TestEveryFieldHasANameOfItsOwn(t *testing.T) {
	seen := map[string]bool{}
	for _, line := range schema() {
		if strings.Contains(line, "(no name)") {
			t.Errorf("%s: give it a json tag", line)
		}
		if seen[line] {
			t.Errorf("%s: there are two", line)
		}
		seen[line] = true
	}
}
