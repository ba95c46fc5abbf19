package main

import (
	"strings"
	"testing"

	"github.com/cilium/ebpf/btf"
)

// A struct names those in it, keeps the compiler's offsets, and says its comment; a
// field that Go cannot express is an error.
func TestRenderTypes(t *testing.T) {
	u8, u64 := &btf.Int{Name: "__u8", Size: 1, Encoding: btf.Unsigned}, &btf.Int{Name: "__u64", Size: 8, Encoding: btf.Unsigned}
	key := &btf.Struct{Name: "ws_hop_key", Size: 16, Members: []btf.Member{{Name: "sid", Type: u64}, {Name: "epoch", Type: u8, Offset: 64}}}
	hop := &btf.Struct{Name: "ws_hop", Size: 24, Members: []btf.Member{{Name: "of", Type: key}, {Name: "lpc_shoup", Type: u64, Offset: 128}}}
	c := contract{Structs: []structure{{C: "ws_hop_key", Type: key}, {C: "ws_hop", Comment: "What a node does.", Type: hop}}}
	got, err := renderTypes(c)
	if err != nil {
		t.Fatal(err)
	}
	text := strings.Join(strings.Fields(string(got)), " ")
	for _, want := range []string{
		"type HopKey struct { _ structs.HostLayout Sid uint64 Epoch uint8 _ [7]byte }",
		"// Hop is struct ws_hop. What a node does. type Hop struct { _ structs.HostLayout Of HopKey LpcShoup uint64 }",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("the generated text lacks %q:\n%s", want, got)
		}
	}
	hop.Members[1].Type = &btf.Pointer{Target: u8}
	if _, err := renderTypes(c); err == nil || !strings.Contains(err.Error(), "ws_hop") {
		t.Errorf("a pointer: %v; want an error that names the struct", err)
	}
}
