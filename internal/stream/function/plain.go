package function

import (
	"crypto/subtle"
	"encoding/json"
	"fmt"
)

// plain passes all bytes: identity, and count, which the statistics of the worker do.
type plain struct{}

func (plain) Open(Connection) Handler { return Handler{} }

func parsePlain(name string) func(json.RawMessage) (Entry, error) {
	return func(raw json.RawMessage) (Entry, error) {
		if err := settingsOf(raw, &struct{}{}); err != nil {
			return Entry{}, err
		}
		return itself(name, func(Surroundings) (Function, error) { return plain{}, nil }), nil
	}
}

// PassesMax bounds the work per byte that xor can be told to do.
const PassesMax = 1 << 10

const xorBlock = 4 << 10 // bytes of the repeated key; XORBytes works in vectors on whole blocks

// xor changes each byte, several times over: work that grows with the number of passes.
// An even number of passes gives back the bytes that came; none copies them.
type xor struct {
	passes int
	key    []byte // the byte, xorBlock times
}

func parseXOR(raw json.RawMessage) (Entry, error) {
	set := struct {
		Passes int   `json:"passes"`
		Key    uint8 `json:"key"`
	}{Passes: 1, Key: 0x5a}
	if err := settingsOf(raw, &set); err != nil {
		return Entry{}, err
	}
	if set.Passes < 0 || set.Passes > PassesMax {
		return Entry{}, fmt.Errorf("passes is %d; expect 0 to %d", set.Passes, PassesMax)
	}
	x := &xor{passes: set.Passes, key: make([]byte, xorBlock)}
	for i := range x.key {
		x.key[i] = set.Key
	}
	return itself("xor", func(Surroundings) (Function, error) { return x, nil }), nil
}

func (x *xor) Open(Connection) Handler { return Handler{Transform: x} }

func (x *xor) Transform(in []byte, _ Moment, out []byte) (int, []byte, Verdict) {
	n := min(len(in), cap(out)-len(out))
	from := len(out)
	out = append(out, in[:n]...)
	for range x.passes {
		for b := out[from:]; len(b) > 0; {
			k := subtle.XORBytes(b, b, x.key)
			b = b[k:]
		}
	}
	if n < len(in) {
		return n, out, Full
	}
	return n, out, Continue
}

func (x *xor) Close() {}
