package pot

import (
	"errors"
	"net/netip"
	"reflect"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/waystamp/waystamp/internal/model"
)

const goodProfile = `prime-number: 53
validator-key: 10
hops:
  - {secret-share: 28, lpc: 21, public-polynomial: 1, downstream-mask: 00112233445566778899aabbccddeeff}
  - secret-share: 0x11
    lpc: "48"
    public-polynomial: 29
    upstream-mask: "00112233445566778899AABBCCDDEEFF"
    downstream-mask: 00000000000000000000000000000123
  - {secret-share: 47, lpc: 38, public-polynomial: 20, upstream-mask: 12345678e12345678901234567890123}
`

func TestProfileIsRead(t *testing.T) {
	p, err := ParseProfile("p.yaml", []byte(goodProfile))
	if err != nil {
		t.Fatal(err)
	}
	first := Mask{RND: 0x0011223344556677, CML: 0x8899aabbccddeeff}
	want := Profile{
		Header:   Header{Scheme: model.SchemeOPoT, Path: 1},
		Verifier: Verifier{Secret: 10},
		Shares: []Share{
			{Position: 0, Polynomial: Polynomial{Prime: 53, Share: 28, LPC: 21, Public: 1, Down: first}},
			{Position: 1, Polynomial: Polynomial{Prime: 53, Share: 17, LPC: 48, Public: 29, Up: first, Down: Mask{CML: 0x123}}},
			{Position: 2, Polynomial: Polynomial{Prime: 53, Share: 47, LPC: 38, Public: 20, Up: Mask{RND: 0x12345678e1234567, CML: 0x8901234567890123}}},
		},
	}
	if !reflect.DeepEqual(want, p) {
		t.Error("the profile is read as another") // cmp would print [redacted]
	}
	if crlf, err := ParseProfile("p.yaml", []byte(strings.ReplaceAll(goodProfile, "\n", "\r\n"))); err != nil || !reflect.DeepEqual(want, crlf) {
		t.Errorf("with CRLF: %v", err)
	}
	if p := readProfile(t, "draft-08-3.3.yaml"); p.Header.Scheme != model.SchemePoT {
		t.Errorf("without masks: %v", p.Header.Scheme)
	}
}

// Each is the good profile with one text replaced, and what is said of it.
func TestBadProfileIsRefusedWithFieldValueAndRule(t *testing.T) {
	for _, c := range []struct{ old, new, want string }{
		{"53", "55", `p.yaml:1:15: prime-number: 55 is not a prime number`},
		{"53", "0", `p.yaml:1:15: prime-number: 0 is not a prime number`},
		{"53", "1", `p.yaml:1:15: prime-number: 1 is not a prime number`},
		{"53", "9223372036854775837", `p.yaml:1:15: prime-number: 9223372036854775837 is not below 2^63`},
		{"53", "0x7fffffffffffffe6", `p.yaml:1:15: prime-number: 0x7fffffffffffffe6 is not a prime number`},
		{"53", "-53", `p.yaml:1:15: prime-number: "-53" is not a number from 0 to 2^64-1, decimal or hexadecimal with 0x`},
		{"53", "18446744073709551616", `p.yaml:1:15: prime-number: 18446744073709551616 does not fit in 64 bits`},
		{"53", "", `p.yaml:1:14: prime-number: expect a number, found nothing`},
		{"53", "[53]", `p.yaml:1:15: prime-number: expect a number, found a list`},
		{"key: 10", "key: 53", `p.yaml:2:16: validator-key: 53 is not below the prime number 53`},
		{"key: 10", "key: 010", `p.yaml:2:16: validator-key: "010" starts with a zero; write it in decimal without, or in hexadecimal with 0x`},
		{"key: 10", "key: 1_0", `p.yaml:2:16: validator-key: "1_0" is not a number from 0 to 2^64-1, decimal or hexadecimal with 0x`},
		{"key: 10", "key: 1e1", `p.yaml:2:16: validator-key: "1e1" is not a number from 0 to 2^64-1, decimal or hexadecimal with 0x`},
		{"key: 10", "key: 0o12", `p.yaml:2:16: validator-key: "0o12" is not a number from 0 to 2^64-1, decimal or hexadecimal with 0x`},
		{"key: 10", "key: 0x", `p.yaml:2:16: validator-key: "0x" is not a number from 0 to 2^64-1, decimal or hexadecimal with 0x`},
		{"key: 10", "key: 0x-1", `p.yaml:2:16: validator-key: "0x-1" is not a number from 0 to 2^64-1, decimal or hexadecimal with 0x`},
		{"validator-key: 10\n", "", `p.yaml:1:1: validator-key: the field is missing`},
		{"validator-key: 10\n", "validator-key: 10\nsecret: 3\n", `p.yaml:3:1: unknown field "secret"; expect prime-number, validator-key and hops`},
		{"validator-key: 10\n", "validator-key: 10\nvalidator-key: 11\n", `p.yaml:3:1: the file is not YAML: mapping key "validator-key" already defined at [2:1]`},
		{"share: 28", "share: 53", `p.yaml:4:20: hops[0].secret-share: 53 is not below the prime number 53`},
		{"0x11", "0xffffffffffffffff", `p.yaml:5:19: hops[1].secret-share: 0xffffffffffffffff is not below the prime number 53`},
		{`"48"`, `"53"`, `p.yaml:6:10: hops[1].lpc: 53 is not below the prime number 53`},
		{"polynomial: 20", "polynomial: 54", `p.yaml:10:52: hops[2].public-polynomial: 54 is not below the prime number 53`},
		{"lpc: 21, ", "", `p.yaml:4:6: hops[0].lpc: the field is missing`},
		{"lpc: 21, ", "lpc: 21, x: 2, ", `p.yaml:4:33: hops[0]: unknown field "x"; expect secret-share, lpc, public-polynomial, upstream-mask and downstream-mask`},
		{"00000000000000000000000000000123", "0123", `p.yaml:9:22: hops[1].downstream-mask: "0123" has 4 characters; a mask is 32 hex digits, 16 for RND and then 16 for CML`},
		{"00000000000000000000000000000123", "000000000000000000000000000001234", `p.yaml:9:22: hops[1].downstream-mask: "000000000000000000000000000001234" has 33 characters; a mask is 32 hex digits, 16 for RND and then 16 for CML`},
		{"00000000000000000000000000000123", `""`, `p.yaml:9:22: hops[1].downstream-mask: "" has 0 characters; a mask is 32 hex digits, 16 for RND and then 16 for CML`},
		{"00000000000000000000000000000123", "0x000000000000000000000000000123", `p.yaml:9:22: hops[1].downstream-mask: "0x000000000000000000000000000123" is not all hex digits; a mask is 32 of them, 16 for RND and then 16 for CML`},
		{"00000000000000000000000000000123", "+0000000000000000000000000000123", `p.yaml:9:22: hops[1].downstream-mask: "+0000000000000000000000000000123" is not all hex digits; a mask is 32 of them, 16 for RND and then 16 for CML`},
		{"00000000000000000000000000000123", "", `p.yaml:9:21: hops[1].downstream-mask: expect 32 hex digits, found nothing`},
		{"hops:", "hops: 3\nh:", `p.yaml:3:7: hops: expect a list of hops, found "3"`},
	} {
		text := strings.Replace(goodProfile, c.old, c.new, 1)
		if text == goodProfile {
			t.Fatalf("%q is not in the good profile", c.old)
		}
		_, err := ParseProfile("p.yaml", []byte(text))
		if err == nil {
			t.Errorf("%q for %q: no error, want %q", c.new, c.old, c.want)
			continue
		}
		got, ok := errors.AsType[*ProfileError](err)
		if !ok || !strings.HasPrefix(got.Problems[0], c.want+"\n") {
			t.Errorf("%q for %q:\n%v\nwant\n%s", c.new, c.old, err, c.want)
		}
		// One fault, one problem.
		if ok && len(got.Problems) != 1 && c.old != "hops:" {
			t.Errorf("%q for %q: %d problems:\n%v", c.new, c.old, len(got.Problems), err)
		}
	}
}

func TestProfileOfAnotherShapeIsRefused(t *testing.T) {
	head := "prime-number: 53\nvalidator-key: 10\n"
	hop := "{secret-share: 1, lpc: 1, public-polynomial: 1}"
	for _, c := range []struct{ text, want string }{
		{"", "p.yaml: the file is empty; a profile has prime-number, validator-key and hops"},
		{"# nothing\n", "p.yaml: the file is empty; a profile has prime-number, validator-key and hops"},
		{"53", `p.yaml:1:1: expect prime-number, validator-key and hops, each with a value; found "53"`},
		{"- 53", `expect prime-number, validator-key and hops, each with a value; found a list`},
		{"a: [", `p.yaml:1:4: the file is not YAML: sequence end token ']' not found`},
		{head + "hops: []\n", "hops: a path has 2 to 256 hops; this list has 0"},
		{head + "hops: [" + hop + "]\n", "hops: a path has 2 to 256 hops; this list has 1"},
		{head + "hops: [" + strings.Repeat(hop+", ", 257) + "]\n", "hops: a path has 2 to 256 hops; this list has 257"},
		{head + "hops: [" + hop + ", 7]\n", `hops[1]: expect secret-share, lpc and public-polynomial, each with a value; found "7"`},
		{head + "hops: [&x " + hop + ", *x]\n", "hops[0]: expect secret-share, lpc and public-polynomial, each with a value; found an anchor, alias or tag"},
		{head + "hops: [" + hop + ", " + hop + "]\n---\na: 1\n", "a second document; a profile file holds one"},
		{strings.Repeat("#", 1<<20+1), "p.yaml: the file is longer than 1048576 bytes; that is no profile"},
	} {
		_, err := ParseProfile("p.yaml", []byte(c.text))
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%.80q: got %v, want %q", c.text, err, c.want)
		}
	}
}

func TestAllProblemsOfAProfileAreNamedByLineWithACaret(t *testing.T) {
	_, err := ParseProfile("p.yaml", []byte("prime-number: 53\nvalidator-key: x\nhops:\n  - {secret-share: 60, lpc: 1, public-polynomial: 1}\n  - {secret-share: 1, lpc: 1, public-polynomial: 70}\nmore: 1\n"))
	want := `p.yaml:2:16: validator-key: "x" is not a number from 0 to 2^64-1, decimal or hexadecimal with 0x
   2 | validator-key: x
                      ^
p.yaml:4:20: hops[0].secret-share: 60 is not below the prime number 53
   4 |   - {secret-share: 60, lpc: 1, public-polynomial: 1}
                          ^
p.yaml:5:50: hops[1].public-polynomial: 70 is not below the prime number 53
   5 |   - {secret-share: 1, lpc: 1, public-polynomial: 70}
                                                        ^
p.yaml:6:1: unknown field "more"; expect prime-number, validator-key and hops
   6 | more: 1
       ^`
	if err == nil {
		t.Fatal("no error")
	}
	if d := cmp.Diff(want, err.Error()); d != "" {
		t.Errorf("-want +got:\n%s", d)
	}
}

func TestEvaluateRefusesAnOrderOfHopsThatAreNotThere(t *testing.T) {
	p := readProfile(t, "draft-08-3.3.yaml")
	for _, order := range [][]int{{}, {0}, {1, 4}, {-1}} {
		if _, err := Evaluate(Model{}, p, 1, order); err == nil {
			t.Errorf("order %v is taken", order)
		}
	}
	if ev := evaluateModel(t, p, 45, 2); len(ev.Visits) != 1 || ev.Result != Proof {
		t.Errorf("one hop alone: %v", ev)
	}
}

func FuzzProfile(f *testing.F) {
	f.Add([]byte(goodProfile))
	f.Add([]byte("prime-number: 53\nvalidator-key: 1\nhops: [{}, [], *a, &a 3, !!int 3, ~]"))
	f.Add([]byte("a: |\n  b\n<<: {}\n? [1]\n: 2\n--- x\n...\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		p, err := ParseProfile("f", text)
		if err != nil {
			if err.Error() == "" {
				t.Error("an error without words")
			}
			return
		}
		if len(p.Shares) < 2 {
			t.Fatalf("%d hops", len(p.Shares))
		}
		for _, s := range p.Shares {
			if err := s.Polynomial.Check(); err != nil {
				t.Error(err)
			}
		}
		if err := p.Verifier.Check(p.Header.Scheme, p.Shares[0]); err != nil {
			t.Error(err)
		}
		if _, err := Evaluate(Model{}, p, 1, nil); err != nil {
			t.Error(err)
		}
	})
}

const goodKeyed = `scheme: keyed-flow
path: 0x01020304
epoch: 3
binding-key: f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff
flow: {source: 192.0.2.1, source-port: 4242, destination: "::ffff:198.51.100.2", destination-port: 53, protocol: 17}
hops:
  - key: 000102030405060708090a0b0c0d0e0f
  - key: "10111213141516171819101112131415"
`

func TestKeyedProfileIsRead(t *testing.T) {
	p, err := ParseProfile("p.yaml", []byte(goodKeyed))
	if err != nil {
		t.Fatal(err)
	}
	var bind Key
	for i := range bind {
		bind[i] = byte(0xf0 + i)
	}
	first, second := Key(ascending(16)), Key{0x10, 0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18, 0x19, 0x10, 0x11, 0x12, 0x13, 0x14, 0x15}
	want := Profile{
		Header:   Header{Scheme: model.SchemeKeyedFlow, Epoch: 3, Path: 0x01020304},
		Shares:   []Share{{Key: first, Bind: bind}, {Position: 1, Key: second, Bind: bind}},
		Verifier: Verifier{Keys: []Key{first, second}},
		Flow: Flow{
			Source: netip.MustParseAddr("192.0.2.1"), Destination: netip.MustParseAddr("198.51.100.2"),
			Protocol: 17, SourcePort: 4242, DestinationPort: 53,
		},
	}
	if !reflect.DeepEqual(want, p) {
		t.Error("the profile is read as another") // its keys print as [redacted]
	}
	ev, err := Evaluate(Model{}, p, 7, nil)
	if err != nil || ev.Result != Verified || len(ev.Visits) != 2 {
		t.Errorf("%v after %d visits, %v; want it verified after 2", ev.Result, len(ev.Visits), err)
	}
	if ev, err = Evaluate(Model{}, p, 7, []int{2, 1}); err != nil || ev.Result != Proof {
		t.Errorf("in the wrong order: %v, %v; want proof", ev.Result, err)
	}
}

// Each is the good profile with one text replaced, and what is said of it.
func TestBadKeyedProfileIsRefused(t *testing.T) {
	for _, c := range []struct{ old, new, want string }{
		{"keyed-flow", "opot", `p.yaml:1:9: scheme: "opot" is not keyed or keyed-flow; pot and opot are not named: their profile has prime-number, validator-key and hops`},
		{"keyed-flow", "keyed", "p.yaml:4:14: binding-key: keyed has none; expect scheme: keyed-flow"},
		{"binding-key: f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff\n", "", "p.yaml:1:9: binding-key: the field is missing; keyed-flow needs it"},
		{"path: 0x01020304\n", "", "path: the field is missing"},
		{"0x01020304", "0x100000000", "p.yaml:2:7: path: 4294967296 is above 4294967295"},
		{"epoch: 3", "epoch: 256", "p.yaml:3:8: epoch: 256 is above 255"},
		{"192.0.2.1", "192.0.2.256", `p.yaml:5:16: flow.source: "192.0.2.256" is not an IPv4 or IPv6 address`},
		{"192.0.2.1", "2001:db8::1%1", `is not an IPv4 or IPv6 address`},
		{"::ffff:198.51.100.2", "2001:db8::1", "flow.destination: 192.0.2.1 and 2001:db8::1 are not of one version of IP"},
		{"protocol: 17", "protocol: tcp", `flow.protocol: "tcp" is not a number`},
		{"destination-port: 53", "destination-port: 65536", "flow.destination-port: 65536 is above 65535"},
		{"- key: 000102030405060708090a0b0c0d0e0f", "- key: 00", "p.yaml:7:10: hops[0].key: a key is 32 hex digits, the bytes in the order of SipHash's reference code; this has 2 characters"},
		{"- key: 000102030405060708090a0b0c0d0e0f", "- lpc: 3", `p.yaml:7:5: hops[0]: unknown field "lpc"; expect key`},
		{"f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff", "x0f1f2f3f4f5f6f7f8f9fafbfcfdfeff", "p.yaml:4:14: binding-key: a key is 32 hex digits"},
	} {
		text := strings.Replace(goodKeyed, c.old, c.new, 1)
		_, err := ParseProfile("p.yaml", []byte(text))
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%q for %q: %v; want %s", c.new, c.old, err, c.want)
		}
	}
}
