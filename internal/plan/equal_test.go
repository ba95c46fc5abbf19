package plan

import (
	"net/netip"
	"reflect"
	"testing"

	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/pot"
)

// Each field of a part counts, those of a later version too: a change that goes unnoticed
// would not reach the data path.
func TestEqualSeesEachField(t *testing.T) {
	a := netip.MustParseAddr("fc00::1")
	differs(t, Headend{Segments: []netip.Addr{a}, NodeLabels: []uint32{1}, Seal: &Seal{}, Origins: []SealOrigin{{Service: "s"}}}, Headend.Equal)
	differs(t, Endpoint{Sources: []netip.Addr{a}}, Endpoint.Equal)
	differs(t, Egress{Sources: []netip.Addr{a}, Segments: []netip.Addr{a}, Through: &Through{}, Verifier: pot.Verifier{Keys: []pot.Key{{1}}}, Seal: &Seal{}}, Egress.Equal)
	differs(t, Path{
		Ingress: []Ingress{{}}, Hops: []Hop{{Waypoints: []netip.Addr{a}}}, Shares: []pot.Share{{}}, Verifier: pot.Verifier{Keys: []pot.Key{{1}}}, Seal: &PathSeal{},
	}, Path.Equal)
	differs(t, model.Chain{
		Ingress: []string{"a"}, Functions: []string{"b"}, Return: []string{"c"}, Arguments: []model.Argument{{}}, Parameters: []model.Parameters{{}}, Waypoints: []model.Waypoint{{}}, Onward: &model.Onward{},
	}, model.Chain.Equal)
}

func differs[T any](t *testing.T, x T, equal func(T, T) bool) {
	t.Helper()
	if !equal(x, x) {
		t.Errorf("%T differs from itself", x)
	}
	var fields func(path string, at func(reflect.Value) reflect.Value, of reflect.Type)
	try := func(path string, at func(reflect.Value) reflect.Value, set func(reflect.Value)) {
		y := deepCopy(reflect.ValueOf(x))
		set(at(y))
		if equal(x, y.Interface().(T)) || equal(y.Interface().(T), x) {
			t.Errorf("%T: %s does not count", x, path)
		}
	}
	fields = func(path string, at func(reflect.Value) reflect.Value, of reflect.Type) {
		switch {
		case of == reflect.TypeFor[netip.Addr]():
			try(path, at, func(v reflect.Value) { v.Set(reflect.ValueOf(netip.MustParseAddr("2001:db8::77"))) })
		case of == reflect.TypeFor[netip.AddrPort]():
			try(path, at, func(v reflect.Value) { v.Set(reflect.ValueOf(netip.MustParseAddrPort("[2001:db8::77]:7"))) })
		case of == reflect.TypeFor[netip.Prefix]():
			try(path, at, func(v reflect.Value) { v.Set(reflect.ValueOf(netip.MustParsePrefix("2001:db8::/77"))) })
		case of.Kind() == reflect.Struct:
			for i := range of.NumField() {
				f := of.Field(i)
				if !f.IsExported() {
					continue // of a type that compares as a whole
				}
				fields(path+"."+f.Name, func(v reflect.Value) reflect.Value { return at(v).Field(i) }, f.Type)
			}
		case of.Kind() == reflect.Pointer:
			try(path, at, func(v reflect.Value) { v.SetZero() })
			fields(path, func(v reflect.Value) reflect.Value { return at(v).Elem() }, of.Elem())
		case of.Kind() == reflect.Slice:
			try(path, at, func(v reflect.Value) { v.SetZero() })
			fields(path+"[0]", func(v reflect.Value) reflect.Value { return at(v).Index(0) }, of.Elem())
		case of.Kind() == reflect.Array:
			fields(path+"[0]", func(v reflect.Value) reflect.Value { return at(v).Index(0) }, of.Elem())
		default:
			try(path, at, change)
		}
	}
	fields("", func(v reflect.Value) reflect.Value { return v }, reflect.TypeFor[T]())
}

// change sets a value to another one.
func change(v reflect.Value) {
	switch {
	case v.CanUint():
		v.SetUint(v.Uint() ^ 1)
	case v.CanInt():
		v.SetInt(v.Int() ^ 1)
	case v.Kind() == reflect.Bool:
		v.SetBool(!v.Bool())
	case v.Kind() == reflect.String:
		v.SetString(v.String() + "x")
	default:
		panic("no other value of " + v.Type().String())
	}
}

// deepCopy is a copy that can be set, with slices and what is behind pointers.
func deepCopy(v reflect.Value) reflect.Value {
	out := reflect.New(v.Type()).Elem()
	out.Set(v)
	var own func(v reflect.Value)
	own = func(v reflect.Value) {
		if !v.CanSet() {
			return
		}
		switch v.Kind() {
		case reflect.Struct:
			for i := range v.NumField() {
				own(v.Field(i))
			}
		case reflect.Pointer:
			if !v.IsNil() {
				p := reflect.New(v.Type().Elem())
				p.Elem().Set(v.Elem())
				v.Set(p)
				own(v.Elem())
			}
		case reflect.Slice:
			if v.IsNil() {
				return
			}
			s := reflect.MakeSlice(v.Type(), v.Len(), v.Len())
			reflect.Copy(s, v)
			v.Set(s)
			for i := range v.Len() {
				own(v.Index(i))
			}
		}
	}
	own(out)
	return out
}
