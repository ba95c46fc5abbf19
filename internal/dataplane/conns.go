package dataplane

import (
	"cmp"
	"container/heap"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/tables"
)

// How long a connection through a function on byte streams is kept that has ended, in
// order or by a reset: as long as segments of it may be under way (RFC 9293 section 3.4.2),
// and sockets wait for them.
const connEnded = 2 * time.Minute

// Connections are the programs' connections of a function on byte streams.
type Connections struct {
	Open int // the function has gone on with them
	New  int // it has not, yet
}

// ErrNoClient means that a client is not connected to the gateway: it never was, or the gateway
// has sent it no payload, or the connection has ended.
var ErrNoClient = errors.New("no client of the gateway has that address and port")

// OpenOnward lets the gateway open a connection, from source to origin, for a client that is
// connected to a service: answers come by the path back, and the gateway's packets take the path
// that the plan has for it. It is for one connection: each further one, also of the same
// addresses and ports, needs another call. An earlier connection between them has ended.
func (d *Dataplane) OpenOnward(client, service, source, origin netip.AddrPort, back uint32) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.gen == nil || d.node == nil {
		return errors.New("there is no data path")
	}
	keys, err := tables.ProxyKeys(d.node.Proxies)
	if err != nil {
		return err
	}
	gateway, ok := keys[model.GatewayName]
	if !ok {
		return errors.New("the plan has no gateway")
	}
	var c abi.Conn
	accepted := tables.ConnKey(gateway|abi.ConnAccepted, client, service)
	err = d.gen.maps[tables.MapConns].Lookup(accepted, &c)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return ErrNoClient
	}
	if err != nil {
		return fmt.Errorf("read map %s: %w", tables.MapConns, err)
	}
	if c.Seen&abi.ConnAnswered == 0 || isOver(c) {
		return ErrNoClient
	}
	now, err := coarseTime()
	if err != nil {
		return err
	}
	c = abi.Conn{Used: now, Part: abi.BE32(back)}
	conns, key := d.gen.maps[tables.MapConns], tables.ConnKey(gateway, source, origin)
	if err := conns.Lookup(key, new(abi.Conn)); errors.Is(err, ebpf.ErrKeyNotExist) {
		if d.onward >= tables.OnwardMax {
			return fmt.Errorf("the gateway has %d connections onward, and may have no more; those that are over are taken out with time", d.onward)
		}
		d.onward++
	} else if err != nil {
		return fmt.Errorf("read map %s: %w", tables.MapConns, err)
	}
	if err := conns.Put(key, c); err != nil {
		return fmt.Errorf("write to map %s: %w", tables.MapConns, err)
	}
	return nil
}

// ErrNoConnection means that no verified SYN has made such a connection of a function.
var ErrNoConnection = errors.New("the function has no connection between these addresses and ports")

// ConnectionPart is the path by which a connection of a function on byte streams has come: the
// path of its SYN's proof.
func (d *Dataplane) ConnectionPart(function string, client, server netip.AddrPort) (uint32, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.gen == nil || d.node == nil {
		return 0, errors.New("there is no data path")
	}
	keys, err := tables.ProxyKeys(d.node.Proxies)
	if err != nil {
		return 0, err
	}
	key, ok := keys[function]
	if !ok {
		return 0, fmt.Errorf("the plan has no function %s", function)
	}
	for _, t := range []tables.Map{tables.MapConns, tables.MapConnsNew, tables.MapConns} { // it moves from one to the other
		var c abi.Conn
		err := d.gen.maps[t].Lookup(tables.ConnKey(key, client, server), &c)
		switch {
		case err == nil:
			return abi.BE32(c.Part), nil
		case !errors.Is(err, ebpf.ErrKeyNotExist):
			return 0, fmt.Errorf("read map %s: %w", t, err)
		}
	}
	return 0, fmt.Errorf("%w: function %s, %s to %s", ErrNoConnection, function, client, server)
}

// Connection is a connection of a function on byte streams, as the programs know it.
type Connection struct {
	Function       string
	Client, Server netip.AddrPort
	Part           uint32        // the path by which the client's packets come
	New            bool          // the function has not gone on with it
	Answered       bool          // the function has acknowledged the server's packets
	ClientEnded    bool          // FIN has come from the client
	ServerEnded    bool          // the same of the server
	Idle           time.Duration // since its last packet, to the second
}

// compare orders connections by function, client and server.
func (c Connection) compare(o Connection) int {
	return cmp.Or(cmp.Compare(c.Function, o.Function), c.Client.Compare(o.Client), c.Server.Compare(o.Server))
}

// lastFirst is a heap with the connection on top that comes last.
type lastFirst []Connection

func (l lastFirst) Len() int           { return len(l) }
func (l lastFirst) Less(i, j int) bool { return l[i].compare(l[j]) > 0 }
func (l lastFirst) Swap(i, j int)      { l[i], l[j] = l[j], l[i] }
func (l *lastFirst) Push(x any)        { *l = append(*l, x.(Connection)) }
func (l *lastFirst) Pop() any {
	last := (*l)[len(*l)-1]
	*l = (*l)[:len(*l)-1]
	return last
}

// Connections are the connections of these functions that have not ended, in their order: the first ones, at most limit, and how many there are. It
// needs memory for so many alone.
func (d *Dataplane) Connections(functions []string, limit int) (first []Connection, all int, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.gen == nil || d.node == nil {
		return nil, 0, nil
	}
	keys, err := tables.ProxyKeys(d.node.Proxies)
	if err != nil {
		return nil, 0, err
	}
	by := map[uint32]string{}
	for _, name := range functions {
		if key, ok := keys[name]; ok {
			by[key] = name
		}
	}
	now, err := coarseTime()
	if err != nil {
		return nil, 0, err
	}
	var top lastFirst
	for _, t := range []tables.Map{tables.MapConns, tables.MapConnsNew} {
		var k abi.ConnKey
		var c abi.Conn
		it := d.gen.maps[t].Iterate()
		for it.Next(&k, &c) {
			name, ok := by[k.Proxy]
			if !ok || isOver(c) {
				continue
			}
			all++
			client, server := tables.ConnEnds(k)
			top.keep(Connection{
				Function: name, Client: client, Server: server, Part: abi.BE32(c.Part), New: t == tables.MapConnsNew, Answered: c.Seen&abi.ConnAnswered != 0,
				ClientEnded: c.Seen&abi.ConnClientFin != 0, ServerEnded: c.Seen&abi.ConnServerFin != 0, Idle: time.Duration(now - min(c.Used, now)),
			}, limit)
		}
		// Programs add and delete at the same time; entries may be missing, or come twice.
		if err := it.Err(); err != nil && !errors.Is(err, ebpf.ErrIterationAborted) {
			return nil, 0, fmt.Errorf("read map %s: %w", t, err)
		}
	}
	slices.SortFunc(top, Connection.compare)
	return slices.CompactFunc(top, func(a, b Connection) bool { return a.compare(b) == 0 }), all, nil
}

// keep adds a connection, and drops the last one if these are more than limit.
func (l *lastFirst) keep(c Connection, limit int) {
	switch {
	case len(*l) < limit:
		heap.Push(l, c)
	case limit > 0 && c.compare((*l)[0]) < 0:
		(*l)[0] = c
		heap.Fix(l, 0)
	}
}

// coarseTime is the clock of bpf_ktime_get_coarse_ns.
func coarseTime() (uint64, error) {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC_COARSE, &ts); err != nil {
		return 0, fmt.Errorf("read the clock: %w", err)
	}
	return uint64(ts.Nano()), nil
}

// SweepConnections removes connections that have ended, or had no packet for longer than idle of
// their function. It counts the remaining ones, by function. A connection of no function has
// ended.
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
	now, err := coarseTime()
	if err != nil {
		return nil, err
	}
	indexes, added, err := d.connsAdded(functions)
	if err != nil {
		return nil, err
	}
	onward, kept := 0, map[uint32]uint64{} // by the function's index
	for _, t := range []tables.Map{tables.MapConns, tables.MapConnsNew} {
		m := d.gen.maps[t]
		var over []abi.ConnKey
		var k abi.ConnKey
		var c abi.Conn
		it := m.Iterate()
		for it.Next(&k, &c) {
			name, known := functions[k.Proxy&^abi.ConnAccepted]
			limit := idle[name]
			if isOver(c) || t == tables.MapConnsNew || c.Seen&abi.ConnAnswered == 0 {
				limit = min(limit, connEnded)
			}
			if !known || now > c.Used && time.Duration(now-c.Used) > limit {
				over = append(over, k)
				continue
			}
			if gateway, ok := keys[model.GatewayName]; ok && k.Proxy == gateway {
				onward++
			} else if t == tables.MapConns {
				kept[indexes[k.Proxy&^abi.ConnAccepted]]++
			}
			n := out[name]
			if t == tables.MapConns {
				n.Open++
			} else {
				n.New++
			}
			out[name] = n
		}
		// Programs add and delete at the same time; the next call finds skipped entries.
		if err := it.Err(); err != nil && !errors.Is(err, ebpf.ErrIterationAborted) {
			return nil, fmt.Errorf("read map %s: %w", t, err)
		}
		for _, k := range over {
			if err := m.Delete(k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
				return nil, fmt.Errorf("delete from map %s: %w", t, err)
			}
		}
	}
	d.onward = onward
	// Whoever was added during the walk may count twice until the next one, and nobody is left out.
	for i, n := range added {
		if err := d.gen.maps[tables.MapConnsGone].Put(i, n-kept[i]); err != nil {
			return nil, fmt.Errorf("write to map %s: %w", tables.MapConnsGone, err)
		}
	}
	return out, nil
}

// endRevoked takes out the connections of functions and of the gateway that came by sealed parts of which an end's node was revoked
// since the plan before: nothing of them goes on when the node has joined again. The clients of a gateway stay.
func (d *Dataplane) endRevoked(was *plan.Node, now plan.Node) error {
	if was == nil {
		return nil
	}
	paths := was.RevokedPaths(now)
	if len(paths) == 0 {
		return nil
	}
	for _, t := range []tables.Map{tables.MapConnsNew, tables.MapConns} { // connections move from the first to the second
		m := d.gen.maps[t]
		var gone []abi.ConnKey
		var k abi.ConnKey
		var c abi.Conn
		it := m.Iterate()
		for it.Next(&k, &c) {
			if k.Proxy&abi.ConnAccepted == 0 && slices.Contains(paths, abi.BE32(c.Part)) {
				gone = append(gone, k)
			}
		}
		if err := it.Err(); err != nil {
			return fmt.Errorf("end connections with a node that was revoked: read map %s: %w", t, err)
		}
		for _, k := range gone {
			if err := m.Delete(k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
				return fmt.Errorf("end connections with a node that was revoked: delete from map %s: %w", t, err)
			}
		}
	}
	return nil
}

// connsAdded are the indexes of functions in the counters of connections, by key, and how many entries programs have added for
// them so far.
func (d *Dataplane) connsAdded(functions map[uint32]string) (indexes map[uint32]uint32, added map[uint32]uint64, err error) {
	indexes, added = map[uint32]uint32{}, map[uint32]uint64{}
	for key, name := range functions {
		var p abi.Proxy
		if err := d.gen.maps[tables.MapProxies].Lookup(key, &p); errors.Is(err, ebpf.ErrKeyNotExist) {
			continue // no packet is the function's
		} else if err != nil {
			return nil, nil, fmt.Errorf("function %s: read map %s: %w", name, tables.MapProxies, err)
		}
		var n uint64
		if err := d.gen.maps[tables.MapConnsAdded].Lookup(p.Stats, &n); err != nil {
			return nil, nil, fmt.Errorf("function %s: read map %s: %w", name, tables.MapConnsAdded, err)
		}
		indexes[key], added[p.Stats] = p.Stats, n
	}
	return indexes, added, nil
}

// isOver reports whether a connection has ended: only late packets can belong to it.
func isOver(c abi.Conn) bool {
	const both = abi.ConnClientFin | abi.ConnServerFin
	return c.Seen&abi.ConnRst != 0 || c.Seen&both == both
}
