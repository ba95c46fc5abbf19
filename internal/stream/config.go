package stream

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"runtime"
	"strings"
	"time"

	"github.com/waystamp/waystamp/internal/stream/function"
)

// loopsMost is how many loops a worker has that may run on more CPUs: others have work on these, too, and all workers of
// a machine have a number of threads together.
const loopsMost = 16

// configMax bounds the configuration, in bytes.
const configMax = 1 << 20

// Config says what a worker does.
type Config struct {
	Name  string           // of the function, for messages
	Port  uint16           // that the listeners are bound to
	Loops int              // event loops; a text without has one for each CPU that this process may run on
	Run   []function.Entry // towards the server
	Back  []function.Entry // towards the client
	Keys  function.Keys
	// Sealed: all connections are sealed on both sides, and nothing else is taken; the parent is
	// asked by which keys.
	Sealed bool
	Hold   *Hold // clients are answered when their servers have answered; nil: at once
	Limits
}

// Limits bound what connections may take.
type Limits struct {
	Connections int           // open at once, in all loops
	Buffer      int           // bytes held per connection and direction in the worker, besides the sockets' own
	Idle        time.Duration // without a byte in any direction, until a connection is reset
	HalfClosed  time.Duration // the same, once one side has ended
	Memory      uint64        // bytes that the process may have of its own; 0: no limit. More ends it
}

// duration is a time.Duration that JSON has as text, such as "10m".
type duration time.Duration

func (d *duration) UnmarshalText(text []byte) error {
	v, err := time.ParseDuration(string(text))
	if err != nil {
		return fmt.Errorf("%q is not a duration such as 10m or 2h", text)
	}
	*d = duration(v)
	return nil
}

type jsonConfig struct {
	Name   string                   `json:"name"`
	Port   uint16                   `json:"port"`
	Loops  int                      `json:"loops"`
	Run    []json.RawMessage        `json:"run"`
	Back   []json.RawMessage        `json:"back"`
	Keys   map[uint32]*function.Key `json:"keys"`
	Sealed bool                     `json:"sealed"`
	Hold   *jsonHold                `json:"hold"`
	Limits struct {
		Connections int      `json:"connections"`
		Buffer      int      `json:"buffer"`
		Idle        duration `json:"idle"`
		HalfClosed  duration `json:"half-closed"`
		Memory      uint64   `json:"memory"`
	} `json:"limits"`
}

// The bounds of a configuration.
const (
	ConnectionsMax = 1 << 20
	BufferMin      = 16 << 10
	BufferMax      = 16 << 20
	MemoryMin      = 256 << 20 // Go's runtime takes memory in pieces of 64 MB
)

// Placed is a configuration of Text for one machine, and one worker there: the port of its listeners, and its limit of
// memory.
func Placed(text []byte, port uint16, memory uint64) ([]byte, error) {
	var m map[string]any
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	if err := d.Decode(&m); err != nil {
		return nil, fmt.Errorf("read a worker's configuration: %w", err)
	}
	limits, ok := m["limits"].(map[string]any)
	if !ok {
		return nil, errors.New("a worker's configuration has no limits")
	}
	m["port"], limits["memory"] = port, memory
	return json.Marshal(m)
}

// WithKeys is a configuration of Text with the keys of its functions. Nobody but a worker is to see it.
func WithKeys(text []byte, keys function.Keys) ([]byte, error) {
	var m map[string]json.RawMessage
	if err := json.Unmarshal(text, &m); err != nil {
		return nil, fmt.Errorf("read a worker's configuration: %w", err)
	}
	texts := map[uint32]string{}
	for n, k := range keys {
		texts[n] = k.Text()
	}
	raw, err := json.Marshal(texts)
	if err != nil {
		return nil, err
	}
	m["keys"] = raw
	return json.Marshal(m)
}

// ReadConfig reads the configuration of a worker, as JSON. It names all mistakes at
// once, unless the JSON itself is wrong.
func ReadConfig(r io.Reader) (*Config, error) {
	var in jsonConfig
	in.Loops = min(runtime.NumCPU(), loopsMost)
	in.Limits.Connections = 100_000
	in.Limits.Buffer = 1 << 20
	in.Limits.Idle = duration(2 * time.Hour)
	in.Limits.HalfClosed = duration(10 * time.Minute)
	limited := &io.LimitedReader{R: r, N: configMax + 1}
	d := json.NewDecoder(limited)
	d.DisallowUnknownFields()
	if err := d.Decode(&in); err != nil {
		if limited.N <= 0 {
			return nil, fmt.Errorf("the worker's configuration is longer than %d bytes", configMax)
		}
		return nil, fmt.Errorf("read the worker's configuration: %s", strings.TrimPrefix(err.Error(), "json: "))
	}
	if d.More() {
		return nil, errors.New("the worker's configuration has something behind its object; remove it")
	}
	c := &Config{Name: in.Name, Port: in.Port, Loops: in.Loops, Keys: function.Keys{}, Sealed: in.Sealed, Limits: Limits{
		Connections: in.Limits.Connections,
		Buffer:      in.Limits.Buffer,
		Idle:        time.Duration(in.Limits.Idle),
		HalfClosed:  time.Duration(in.Limits.HalfClosed),
		Memory:      in.Limits.Memory,
	}}
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if in.Name == "" {
		bad("name is missing; give the function's")
	}
	if in.Port == 0 {
		bad("port is missing; give the TCP port that the listeners are bound to")
	}
	if in.Loops < 1 || in.Loops > LoopsMax {
		bad("loops is %d; expect 1 to %d", in.Loops, LoopsMax)
	}
	if n := in.Limits.Connections; n < 1 || n > ConnectionsMax {
		bad("limits.connections is %d; expect 1 to %d", n, ConnectionsMax)
	}
	if n := in.Limits.Buffer; n < BufferMin || n > BufferMax {
		bad("limits.buffer is %d bytes; expect %d to %d", n, BufferMin, BufferMax)
	}
	if n := in.Limits.Memory; n > 0 && n < MemoryMin {
		bad("limits.memory is %d bytes; expect %d or more, or 0 for no limit", n, MemoryMin)
	}
	if c.Idle < time.Second {
		bad("limits.idle is %s; expect 1s or more", c.Idle)
	}
	if c.HalfClosed < time.Second {
		bad("limits.half-closed is %s; expect 1s or more", c.HalfClosed)
	}
	var err error
	if c.Hold, err = in.Hold.hold(); err != nil {
		bad("hold: %w", err)
	}
	for n, k := range in.Keys {
		if k == nil {
			bad("keys: number %d has no key", n)
			continue
		}
		c.Keys[n] = *k
	}
	if c.Run, err = function.ParseList("run", in.Run); err != nil {
		errs = append(errs, err)
	}
	if in.Back != nil {
		if c.Back, err = function.ParseList("back", in.Back); err != nil {
			errs = append(errs, err)
		}
	} else if err == nil {
		c.Back = function.Reverse(c.Run)
	}
	if len(errs) == 0 {
		// What a function needs from its surroundings shows when it is made.
		for side, list := range [][]function.Entry{c.Run, c.Back} {
			for i, e := range list {
				if _, err := e.Make(function.Surroundings{Side: function.Side(side), Keys: c.Keys}); err != nil {
					bad("%s[%d]: %w", function.Side(side), i, err)
				}
			}
		}
	}
	if len(errs) > 0 {
		return nil, fmt.Errorf("the worker's configuration is wrong:\n%w", errors.Join(errs...))
	}
	return c, nil
}
