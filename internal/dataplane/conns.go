package dataplane

import (
	"errors"
	"fmt"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/tables"
)

// How long a connection through a function on byte streams is kept that has ended, in
// order or by a reset: as long as segments of it may be under way (RFC 9293 section 3.4.2),
// and sockets wait for them.
const connEnded = 2 * time.Minute

// Connections are those that programs keep of a function on byte streams.
type Connections struct {
	Open int // the function has gone on with them
	New  int // it has not, yet
}

// SweepConnections takes out connections that are over: ended, or without a packet for
// longer than idle says of their function. It counts what is left, by function. What is of
// no function is over.
func (d *Dataplane) SweepConnections(idle map[string]time.Duration) (map[string]Connections, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	out := map[string]Connections{}
	if d.gen == nil || d.node == nil {
		return out, nil
	}
	keys, err := tables.ProxyKeys(d.node.Proxies)
	if err != nil {
		return nil, err
	}
	functions := map[uint32]string{}
	for name, key := range keys {
		if _, ok := idle[name]; ok {
			functions[key] = name
		}
	}
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC_COARSE, &ts); err != nil {
		return nil, fmt.Errorf("read the clock: %w", err)
	}
	now := uint64(ts.Nano())
	for _, t := range []tables.Map{tables.MapConns, tables.MapConnsNew} {
		m := d.gen.maps[t]
		var over []abi.ConnKey
		var k abi.ConnKey
		var c abi.Conn
		it := m.Iterate()
		for it.Next(&k, &c) {
			name, known := functions[k.Proxy]
			limit := idle[name]
			if isOver(c) || t == tables.MapConnsNew || c.Seen&abi.ConnAnswered == 0 {
				limit = min(limit, connEnded)
			}
			if !known || now > c.Used && time.Duration(now-c.Used) > limit {
				over = append(over, k)
				continue
			}
			n := out[name]
			if t == tables.MapConns {
				n.Open++
			} else {
				n.New++
			}
			out[name] = n
		}
		// Programs add and delete meanwhile; what was passed over is met the next time.
		if err := it.Err(); err != nil && !errors.Is(err, ebpf.ErrIterationAborted) {
			return nil, fmt.Errorf("read map %s: %w", t, err)
		}
		for _, k := range over {
			if err := m.Delete(k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
				return nil, fmt.Errorf("delete from map %s: %w", t, err)
			}
		}
	}
	return out, nil
}

// isOver says whether nothing but what is under way belongs to a connection any more.
func isOver(c abi.Conn) bool {
	const both = abi.ConnClientFin | abi.ConnServerFin
	return c.Seen&abi.ConnRst != 0 || c.Seen&both == both
}
