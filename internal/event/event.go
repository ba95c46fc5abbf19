// Package event is the form in which a refusal leaves a node: what the agent
// makes of a record of the kernel's ring buffer, streams as JSON lines, and
// waystamp watch and explain read. It knows nothing of the kernel's own layout
// and nothing of what a packet means: internal/agent writes events,
// internal/explain and internal/cli read them.
package event

import (
	"bufio"
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"slices"
	"strings"
	"time"

	"github.com/waystamp/waystamp/internal/abi"
)

// LineMax is the longest line that Read takes. A real one has about 1.3 KB.
const LineMax = 64 << 10

// HookWorker is the Hook of a connection that a worker of a function of kind stream has refused, or a function has reset: such an event has no packet.
const HookWorker = "worker"

// Event is one packet that a node refused, or reported and let go on; or a connection that a worker refused.
type Event struct {
	Time      time.Time `json:"time"`
	Node      string    `json:"node"`
	Interface string    `json:"interface"`
	Hook      string    `json:"hook"`   // tc or xdp; worker: a function's, for a connection
	Reason    string    `json:"reason"` // as in the reference of reasons, such as wrong-chain
	Text      string    `json:"text"`   // the reason as a sentence
	// Place is the line of the data path's source that decided it, such as
	// sr/endpoint_tc.h:123, below bpf/lib or bpf of the version that is loaded.
	Place string `json:"place,omitempty"`
	// Reported: the packet was let go on: by on-violation: report, or, where the reason
	// is one of the guard's (unproven, unverified), by guard: audit.
	Reported bool `json:"reported,omitempty"`
	// Suppressed counts the events of this reason and CPU that were not sent
	// since the last one that was.
	Suppressed uint32 `json:"suppressed,omitempty"`
	// Missed counts the events before this one that the agent has forgotten before
	// this reader took them.
	Missed uint64 `json:"missed,omitempty"`
	Len    uint32 `json:"len"`              // of the whole packet, from the Ethernet header, in bytes
	Errno  int32  `json:"errno,omitempty"`  // what a helper of the kernel returned, or 0
	Packet Hex    `json:"packet,omitempty"` // its first bytes, from the Ethernet header
}

// Hex are bytes that are hexadecimal digits in text.
type Hex []byte

func (h Hex) String() string { return hex.EncodeToString(h) }

// MarshalText implements encoding.TextMarshaler.
func (h Hex) MarshalText() ([]byte, error) { return hex.AppendEncode(nil, h), nil }

// UnmarshalText implements encoding.TextUnmarshaler. It takes digits of both
// cases, without anything between them.
func (h *Hex) UnmarshalText(b []byte) error {
	d, err := hex.AppendDecode(nil, b)
	if err != nil {
		return fmt.Errorf("%q is not hexadecimal: %w", shorten(b), err)
	}
	*h = d
	return nil
}

// ReasonName is the name that the reasons of bpf/include/waystamp/reasons.h
// have outside of C: WRONG_CHAIN is wrong-chain. It leaves a name that has that
// form already as it is.
func ReasonName(c string) string {
	return strings.ReplaceAll(strings.ToLower(c), "_", "-")
}

// Verdict says in a word what became of a packet, whose reason has either form of
// ReasonName: refused; or forwarded, by on-violation: report or by guard: audit.
func Verdict(reason string, forwarded bool) string {
	var r abi.Reason
	switch err := r.UnmarshalText([]byte(ReasonName(reason))); {
	case !forwarded:
		return "refused"
	case err == nil && slices.Contains(abi.AuditReasons, r):
		return "audited"
	}
	return "reported"
}

// Parse reads one event from one line of JSON. Unknown fields, and a second
// value on the line, are refused.
func Parse(line []byte) (Event, error) {
	d := json.NewDecoder(bytes.NewReader(line))
	d.DisallowUnknownFields()
	var e Event
	if err := d.Decode(&e); err != nil {
		return Event{}, fmt.Errorf("%q is not an event: %w", shorten(line), err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return Event{}, fmt.Errorf("%q has something behind the event: expect one event per line", shorten(line))
	}
	if e.Reason == "" {
		return Event{}, fmt.Errorf("%q is not an event: it has no reason", shorten(line))
	}
	return e, nil
}

// Append writes e to b as one line of JSON, with its newline.
func Append(b []byte, e Event) ([]byte, error) {
	j, err := json.Marshal(e)
	if err != nil {
		return b, fmt.Errorf("write the event as JSON: %w", err)
	}
	return append(append(b, j...), '\n'), nil
}

// Read gives the events of r, one per line, and passes empty lines over. It
// ends at the first error, which names the line and is given with the zero
// Event, and at the end of r.
func Read(r io.Reader) iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		s := bufio.NewScanner(r)
		s.Buffer(nil, LineMax)
		n := 0
		for s.Scan() {
			n++
			line := bytes.TrimSpace(s.Bytes())
			if len(line) == 0 {
				continue
			}
			e, err := Parse(line)
			if err != nil {
				yield(Event{}, fmt.Errorf("line %d: %w", n, err))
				return
			}
			if !yield(e, nil) {
				return
			}
		}
		if err := s.Err(); err != nil {
			yield(Event{}, fmt.Errorf("read events after line %d: %w", n, err))
		}
	}
}

func shorten(b []byte) string {
	const most = 60
	if len(b) <= most {
		return string(b)
	}
	return string(b[:most]) + "…"
}
