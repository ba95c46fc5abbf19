package agent

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"reflect"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/waystamp/waystamp/internal/dataplane"
)

// fill gives every field below v a value of its own that is not zero.
func fill(t *testing.T, v reflect.Value, n *int) {
	*n++
	switch {
	case v.Type() == reflect.TypeFor[netip.Addr]():
		v.Set(reflect.ValueOf(netip.AddrFrom16([16]byte{0xfd, 15: byte(*n)})))
		return
	case v.Kind() == reflect.Uint8: // a named value, of which there are few
		v.SetUint(1)
		return
	}
	switch v.Kind() {
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(t, v.Elem(), n)
	case reflect.Struct:
		for i := range v.NumField() {
			fill(t, v.Field(i), n)
		}
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		for i := range 2 {
			fill(t, v.Index(i), n)
		}
	case reflect.String:
		v.SetString(fmt.Sprint("text", *n))
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int:
		v.SetInt(int64(*n))
	case reflect.Uint32, reflect.Uint64:
		v.SetUint(uint64(*n))
	default:
		t.Fatalf("%s: the test has no value for it", v.Type())
	}
}

// fields lists the values of a struct and what is in it, by their names in Go.
func fields(at string, v reflect.Value, out map[string]string) {
	if v.Kind() == reflect.Pointer {
		if v.IsNil() {
			return
		}
		v = v.Elem()
	}
	_, text := v.Interface().(fmt.Stringer)
	switch {
	case v.Kind() == reflect.Struct && !text:
		for i := range v.NumField() {
			if name := v.Type().Field(i).Name; name != "Version" && name != "Node" {
				fields(at+"."+name, v.Field(i), out)
			}
		}
	case v.Kind() == reflect.Slice:
		for i := range v.Len() {
			fields(fmt.Sprintf("%s[%d]", at, i), v.Index(i), out)
		}
	default:
		out[at] = fmt.Sprint(v.Interface())
	}
}

func flat(v any) map[string]string {
	out := map[string]string{}
	fields("", reflect.ValueOf(v), out)
	return out
}

// Nothing that the data path counts is lost or mixed up on its way to the socket.
func TestAnswersHaveAllThatTheDataPathCounts(t *testing.T) {
	n := 0
	var counts dataplane.Counts
	fill(t, reflect.ValueOf(&counts).Elem(), &n)
	if diff := cmp.Diff(flat(counts), flat(wireCounters("r1", counts))); diff != "" {
		t.Errorf("counters, data path and answer:\n%s", diff)
	}
	var state dataplane.InterfaceState
	fill(t, reflect.ValueOf(&state).Elem(), &n)
	if diff := cmp.Diff(flat(state), flat(wireInterface(state))); diff != "" {
		t.Errorf("interface, data path and answer:\n%s", diff)
	}
}

func TestAnswersHaveListsAlsoIfTheyAreEmpty(t *testing.T) {
	b, err := json.Marshal(wireCounters("r1", dataplane.Counts{}))
	if err != nil {
		t.Fatal(err)
	}
	var v map[string]any
	if err := json.Unmarshal(b, &v); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"refusals", "paths", "functions"} {
		if _, ok := v[name].([]any); !ok {
			t.Errorf("%s is %v; want a list", name, v[name])
		}
	}
}
