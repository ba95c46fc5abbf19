package arch

import (
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/reflect/protoreflect"

	v1 "github.com/waystamp/waystamp/internal/rpc/waystampv1"
)

var update = flag.Bool("update", false, "write what the controller's API has now into "+released)

const released = "../rpc/proto/waystamp.released"

// api has a line for each call, and each field, by which agents, operators and controllers of two versions understand
// each other. What a field is called does not go over the wire; but it is in JSON, and in the code of others.
func api(f protoreflect.FileDescriptor) (lines []string) {
	for i := range f.Services().Len() {
		s := f.Services().Get(i)
		for j := range s.Methods().Len() {
			m := s.Methods().Get(j)
			stream := func(b bool) string {
				if b {
					return "stream "
				}
				return ""
			}
			lines = append(lines, fmt.Sprintf("rpc %s %s%s -> %s%s", m.FullName(), stream(m.IsStreamingClient()), m.Input().FullName(), stream(m.IsStreamingServer()), m.Output().FullName()))
		}
	}
	for i := range f.Messages().Len() {
		m := f.Messages().Get(i)
		for j := range m.Fields().Len() {
			x := m.Fields().Get(j)
			kind := x.Kind().String()
			switch {
			case x.IsMap():
				kind = fmt.Sprintf("map of %v to %v", x.MapKey().Kind(), x.MapValue().Kind())
			case x.Kind() == protoreflect.MessageKind:
				kind = string(x.Message().FullName())
			}
			if x.IsList() {
				kind = "list of " + kind
			}
			lines = append(lines, fmt.Sprintf("field %s = %d: %s", x.FullName(), x.Number(), kind))
		}
	}
	return lines
}

// Agents of one release talk to controllers of another: what a release had stays, under its number.
func TestTheAPIKeepsWhatTheLastReleaseHas(t *testing.T) {
	now := api(v1.File_waystamp_proto)
	b, err := os.ReadFile(released)
	if err != nil && !*update {
		t.Fatal(err)
	}
	if *update {
		if err := os.WriteFile(released, []byte(strings.Join(now, "\n")+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	before := strings.Split(strings.TrimRight(string(b), "\n"), "\n")
	for _, line := range before {
		if !slices.Contains(now, line) {
			t.Errorf("the last release has %q in its API, and this one has not: put it back into internal/rpc/proto/waystamp.proto, and add something new beside it", line)
		}
	}
	if len(before) < 50 {
		t.Errorf("%s has %d lines", released, len(before))
	}
}
