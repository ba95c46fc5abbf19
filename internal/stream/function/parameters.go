package function

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// A visit of a chain may have parameters: a number that operations take which the function's settings
// leave open. xor takes its byte and its passes, limit the rate of a connection, seal and open the number of
// their key.

// raw is an entry of a list, not read further.
type raw struct {
	name     string
	settings map[string]json.RawMessage // nil: none
	text     string                     // as it was read
}

func readRaw(text string) (raw, error) {
	e := raw{text: text}
	if json.Unmarshal([]byte(text), &e.name) == nil {
		return e, nil
	}
	var object map[string]json.RawMessage
	if err := json.Unmarshal([]byte(text), &object); err != nil || len(object) != 1 {
		return e, errors.New("expect the name of a function, or an object with the name as its only key")
	}
	for name, settings := range object {
		e.name = name
		if err := json.Unmarshal(settings, &e.settings); err != nil {
			return e, fmt.Errorf("%s: settings are not an object", name)
		}
	}
	return e, nil
}

func (e raw) has(settings ...string) bool {
	return slices.ContainsFunc(settings, func(s string) bool { return e.settings[s] != nil })
}

// takes reports whether the operation takes a visit's parameters, and whether it needs them.
func (e raw) takes() (takes, needs bool) {
	switch e.name {
	case "xor":
		return !e.has("key", "passes"), false
	case "limit":
		takes = !e.has("connection", "all")
		return takes, takes
	case "seal", "open":
		takes = e.has("keys")
		return takes, takes
	}
	return false, false
}

// entryText is an entry as JSON; settings nil: it has none.
func entryText(name string, settings any) (string, error) {
	if settings == nil {
		b, err := json.Marshal(name)
		return string(b), err
	}
	b, err := json.Marshal(map[string]any{name: settings})
	return string(b), err
}

// with is the entry with parameters in place of what its settings leave open. It takes them.
func (e raw) with(parameters uint64) (string, error) {
	switch e.name {
	case "xor":
		passes := max(parameters>>8, 1)
		if passes > PassesMax {
			return "", fmt.Errorf("xor: parameters %#x are %d passes, in the bits above the lowest eight; give at most %d", parameters, passes, PassesMax)
		}
		return entryText("xor", map[string]uint64{"key": parameters & 0xff, "passes": passes})
	case "limit":
		if parameters > rateMax {
			return "", fmt.Errorf("limit: parameters %#x are %d bytes per second; give 1 to %d", parameters, parameters, int64(rateMax))
		}
		return entryText("limit", map[string]uint64{"connection": parameters})
	}
	var keys map[uint64]string
	if err := json.Unmarshal(e.settings["keys"], &keys); err != nil {
		return "", fmt.Errorf("%s: keys: expect a mapping of numbers to files, as in {7: /etc/waystamp/seal-7.key}", e.name)
	}
	file, ok := keys[parameters]
	if !ok {
		var known []string
		for _, n := range slices.Sorted(maps.Keys(keys)) {
			known = append(known, strconv.FormatUint(n, 10))
		}
		return "", fmt.Errorf("%s: there is no key %d (%#x) among its keys; expect one of %s", e.name, parameters, parameters, strings.Join(known, ", "))
	}
	return entryText(e.name, map[string]any{"key": parameters, "file": file})
}

// inverse is the entry for the other direction, as Reverse has it.
func (e raw) inverse() (raw, error) {
	of := map[string]string{"gzip": "gunzip", "gunzip": "gzip", "seal": "open", "open": "seal"}
	name, other := of[e.name]
	if !other {
		return e, nil
	}
	var settings any // gunzip has none, and gzip then has its own level
	if e.name == "seal" || e.name == "open" {
		settings = e.settings
	}
	text, err := entryText(name, settings)
	if err != nil {
		return e, err
	}
	return readRaw(text)
}

// list is a list of entries for one direction.
type list []raw

func readList(texts []string) (l list, err error) {
	for i, t := range texts {
		e, err := readRaw(t)
		if err != nil {
			return nil, fmt.Errorf("[%d]: %w", i, err)
		}
		l = append(l, e)
	}
	return l, nil
}

func (l list) texts() (out []string) {
	for _, e := range l {
		out = append(out, e.text)
	}
	return out
}

// taker is the place of the operation that takes parameters; -1: there is none.
func (l list) taker() (at int, err error) {
	at = -1
	for i, e := range l {
		switch takes, _ := e.takes(); {
		case takes && at >= 0:
			return at, fmt.Errorf("%s and %s both take the parameters of a visit; give one of them its settings", l[at].name, e.name)
		case takes:
			at = i
		}
	}
	return at, nil
}

// needer is an operation that needs parameters.
func (l list) needer() (raw, bool) {
	i := slices.IndexFunc(l, func(e raw) bool {
		_, needs := e.takes()
		return needs
	})
	if i < 0 {
		return raw{}, false
	}
	return l[i], true
}

// with is the list with parameters; taken: an operation takes them.
func (l list) with(parameters uint64) (_ list, taken bool, err error) {
	if parameters == 0 {
		if e, needs := l.needer(); needs {
			return l, false, fmt.Errorf("%s: %s, and the visit has none; give it, as in {name: FUNCTION, parameters: NUMBER}, or give %s its settings", e.name, wants[e.name], e.name)
		}
		return l, false, nil
	}
	at, err := l.taker()
	if err != nil || at < 0 {
		return l, false, err
	}
	text, err := l[at].with(parameters)
	if err != nil {
		return l, false, err
	}
	l = slices.Clone(l)
	l[at], err = readRaw(text)
	return l, true, err
}

var wants = map[string]string{
	"limit": "its rate is the parameters of a visit",
	"open":  "the number of its key is the parameters of a visit",
	"seal":  "the number of its key is the parameters of a visit",
}

// NeedsParameters reports whether a function works for visits with parameters alone.
func NeedsParameters(run, back []string) bool {
	for _, texts := range [][]string{run, back} {
		l, err := readList(texts)
		if err != nil {
			continue
		}
		if _, needs := l.needer(); needs {
			return true
		}
	}
	return false
}

// WithParameters are the lists of a function for visits with these parameters: forward towards the server, reverse towards the client; 0:
// none. back is nil for the inverse of run, and then stays so where that inverse has the same parameters. Parameters that no operation takes are
// a mistake.
func WithParameters(run, back []string, forward, reverse uint64) (toServer, toClient []string, err error) {
	r, err := readList(run)
	if err != nil {
		return nil, nil, fmt.Errorf("run%w", err)
	}
	b, err := readList(back)
	if err != nil {
		return nil, nil, fmt.Errorf("back%w", err)
	}
	inverse := back == nil
	if inverse {
		for _, e := range slices.Backward(r) {
			o, err := e.inverse()
			if err != nil {
				return nil, nil, err
			}
			b = append(b, o)
		}
	}
	r, there, err := r.with(forward)
	if err != nil {
		return nil, nil, fmt.Errorf("run: %w", err)
	}
	b, too, err := b.with(reverse)
	if err != nil {
		return nil, nil, fmt.Errorf("back: %w", err)
	}
	none := func(way string, l list) error {
		var names []string
		for _, e := range l {
			names = append(names, e.name)
		}
		return fmt.Errorf("none of its operations%s takes parameters (%s): xor and limit without settings do, and seal and open with keys; leave the parameters out", way, strings.Join(names, ", "))
	}
	switch {
	case forward == reverse && forward != 0 && !there && !too:
		return nil, nil, none("", r)
	case forward != reverse && forward != 0 && !there:
		return nil, nil, none(" towards the server", r)
	case forward != reverse && reverse != 0 && !too:
		return nil, nil, none(" towards the client", b)
	case inverse && (forward == reverse || !there && !too):
		return r.texts(), nil, nil
	}
	return r.texts(), b.texts(), nil
}

// keysOf reads the keys of seal and open by number, of which a visit's parameters name one.
func keysOf(raw json.RawMessage) (map[uint32]string, error) {
	if raw == nil {
		return nil, nil
	}
	var texts map[string]string
	d := json.NewDecoder(bytes.NewReader(raw))
	if err := d.Decode(&texts); err != nil || len(texts) == 0 {
		return nil, errors.New("keys: expect a mapping of numbers to files, as in {7: /etc/waystamp/seal-7.key}")
	}
	keys := map[uint32]string{}
	for text, file := range texts {
		n, err := strconv.ParseUint(text, 10, 32)
		if err != nil || n == 0 || strconv.FormatUint(n, 10) != text {
			return nil, fmt.Errorf("keys: %.20q is not the number of a key, a whole number from 1 to 4294967295", text)
		}
		keys[uint32(n)] = file
	}
	return keys, nil
}
