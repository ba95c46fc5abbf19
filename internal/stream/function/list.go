package function

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
)

// errParameters is why an operation cannot be made that takes a visit's parameters.
func errParameters(name string) error {
	return fmt.Errorf("%s, and there are none", wants[name])
}

// open is an entry that a visit's parameters make whole.
func openEntryOf(name string, keys map[uint32]string) Entry {
	e := Entry{Name: name, Keys: keys, make: func(Surroundings) (Function, error) { return nil, errParameters(name) }}
	e.back = func() Entry {
		back := map[string]string{"seal": "open", "open": "seal"}[name]
		if back == "" {
			back = name
		}
		return openEntryOf(back, keys)
	}
	return e
}

// ListMax is the number of functions that one list may have.
const ListMax = 16

// Entry is one function of a list, with its settings. It may be shared by event loops.
type Entry struct {
	Name string
	Key  *KeyFile                             // of seal and open; else nil
	Keys map[uint32]string                    // files of seal's and open's keys, of which parameters name one; else nil
	make func(Surroundings) (Function, error) // of one event loop
	back func() Entry                         // the function for the other direction
}

// Make returns the function of one event loop.
func (e Entry) Make(s Surroundings) (Function, error) {
	f, err := e.make(s)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", e.Name, err)
	}
	return f, nil
}

// kinds reads the settings of each function; nil settings mean that there are none.
func kinds() map[string]func(settings json.RawMessage) (Entry, error) {
	return map[string]func(json.RawMessage) (Entry, error){
		"count":    parsePlain("count"),
		"gunzip":   parseGunzip,
		"gzip":     parseGzip,
		"identity": parsePlain("identity"),
		"limit":    parseLimit,
		"match":    parseMatch,
		"open":     parseOpen,
		"seal":     parseSeal,
		"xor":      parseXOR,
	}
}

// Names are the names of all functions, sorted.
func Names() []string { return slices.Sorted(maps.Keys(kinds())) }

// ParseList reads a list of functions from JSON: each entry is a name, or an object with
// a name as its only key and the settings as its value. All mistakes are in the error,
// each on a line that begins with path and the number of the entry.
func ParseList(path string, list []json.RawMessage) ([]Entry, error) {
	if len(list) > ListMax {
		return nil, fmt.Errorf("%s has %d functions; at most %d are allowed", path, len(list), ListMax)
	}
	var entries []Entry
	var errs []error
	for i, raw := range list {
		e, err := parseEntry(raw)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s[%d]: %w", path, i, err))
			continue
		}
		entries = append(entries, e)
	}
	return entries, errors.Join(errs...)
}

func parseEntry(raw json.RawMessage) (Entry, error) {
	var name string
	var settings json.RawMessage
	if err := json.Unmarshal(raw, &name); err != nil {
		var object map[string]json.RawMessage
		if err := json.Unmarshal(raw, &object); err != nil || len(object) != 1 {
			return Entry{}, fmt.Errorf("expect the name of a function, or an object with the name as its only key")
		}
		for name, settings = range object {
			if bytes.Equal(settings, []byte("null")) {
				settings = nil
			}
		}
	}
	parse, ok := kinds()[name]
	if !ok {
		return Entry{}, fmt.Errorf("%q is not a function; expect one of %s", name, strings.Join(Names(), ", "))
	}
	e, err := parse(settings)
	if err != nil {
		return Entry{}, fmt.Errorf("%s: %w", name, err)
	}
	e.Name = name
	return e, nil
}

// Reverse is the list for the other direction: from the last entry to the first, each
// one's inverse, or the same function where it has none.
func Reverse(list []Entry) []Entry {
	var back []Entry
	for _, e := range slices.Backward(list) {
		back = append(back, e.back())
	}
	return back
}

// settingsOf reads settings into v, which has the defaults, and refuses unknown ones.
func settingsOf(raw json.RawMessage, v any) error {
	if raw == nil {
		return nil
	}
	d := json.NewDecoder(bytes.NewReader(raw))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return fmt.Errorf("settings: %w", err)
	}
	return nil
}

// itself makes an entry that is its own inverse.
func itself(name string, make func(Surroundings) (Function, error)) Entry {
	e := Entry{Name: name, make: make}
	e.back = func() Entry { return e }
	return e
}
