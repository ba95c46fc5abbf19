package dataplane

import (
	"errors"
	"fmt"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/tables"
)

// FunctionCount has the counters of a function's proxy. Super-packets count once.
type FunctionCount struct {
	Function    string          `json:"function"`
	Local       bool            `json:"local,omitempty"`
	Recognise   model.Recognise `json:"recognise"`
	Cache       int             `json:"cache"`         // headers that the plan has room for
	RxSuccess   uint64          `json:"rx_success"`    // stripped, cached and handed to the function
	RxIgnored   uint64          `json:"rx_ignored"`    // refused before: no room in the cache
	RxCut       uint64          `json:"rx_cut"`        // super-packets that were cut first
	RxCopies    uint64          `json:"rx_copies"`     // of rx_success: a byte-identical one was under way
	TxSuccess   uint64          `json:"tx_success"`    // came back, got their header, were stamped
	TxIgnored   uint64          `json:"tx_ignored"`    // came back, not for a chain: link-local, own address
	TxNotCached uint64          `json:"tx_not_cached"` // came back, and no header was theirs
	TxPlain     uint64          `json:"tx_plain"`      // of them, let go by ordinary routing
	// TxOriginated: of these, packets that a path from the function on took.
	TxOriginated uint64 `json:"tx_originated"`
	Bypassed     uint64 `json:"bypassed"`  // stamped without it: packets of flows that it is done with
	TxCut        uint64 `json:"tx_cut"`    // super-packets that came back and were cut first
	Expired      uint64 `json:"expired"`   // headers found too old
	Evicted      uint64 `json:"evicted"`   // headers replaced by newer ones
	WaitedNs     uint64 `json:"waited_ns"` // of tx_success: time in the function, all together
	// InFlight are the headers that are kept now. Only FunctionsInFlight counts
	// them.
	InFlight *uint64 `json:"in_flight,omitempty"`
}

func (c *FunctionCount) add(s abi.ProxyStats) {
	c.RxSuccess += s.RxSuccess
	c.RxIgnored += s.RxIgnored
	c.RxCut += s.RxCut
	c.RxCopies += s.RxCopies
	c.TxSuccess += s.TxSuccess
	c.TxIgnored += s.TxIgnored
	c.TxNotCached += s.TxNotCached
	c.TxPlain += s.TxPlain
	c.TxOriginated += s.TxOriginated
	c.Bypassed += s.Bypassed
	c.TxCut += s.TxCut
	c.Expired += s.Expired
	c.Evicted += s.Evicted
	c.WaitedNs += s.WaitedNs
}

// Wait is how long a packet was in the function on average.
func (c FunctionCount) Wait() time.Duration {
	if c.TxSuccess == 0 {
		return 0
	}
	return time.Duration(c.WaitedNs / c.TxSuccess)
}

// Gone lists the functions of the plan in force whose packets are refused as function-gone.
func (d *Dataplane) Gone() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	var gone []string
	if d.node != nil {
		for _, p := range d.node.Proxies {
			if _, ok := d.topology.reach[p.Function]; !ok {
				gone = append(gone, p.Function)
			}
		}
	}
	return gone
}

func (d *Dataplane) readFunctionsLocked() ([]FunctionCount, error) {
	out := []FunctionCount{}
	keys, err := tables.ProxyKeys(d.node.Proxies)
	if err != nil {
		return nil, err
	}
	have := map[uint32]abi.Proxy{}
	if err := readMap(d.gen, tables.MapProxies, have); err != nil {
		return nil, err
	}
	for _, p := range d.node.Proxies {
		c := FunctionCount{Function: p.Function, Local: p.Local, Recognise: p.Recognise, Cache: p.Cache}
		if entry, ok := have[keys[p.Function]]; ok {
			var each []abi.ProxyStats
			if err := d.gen.maps[tables.MapProxyStats].Lookup(entry.Stats, &each); err != nil {
				return nil, fmt.Errorf("read entry %d of map %s: %w", entry.Stats, tables.MapProxyStats, err)
			}
			for _, s := range each {
				c.add(s)
			}
		}
		out = append(out, c)
	}
	return out, nil
}

// FunctionsInFlight is Counters().Functions with the number of headers that are kept now. It
// reads their places: a millisecond per 100 000 headers by content, and some per 10 000 by
// metadata.
func (d *Dataplane) FunctionsInFlight() ([]FunctionCount, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.gen == nil || d.node == nil {
		return []FunctionCount{}, nil
	}
	out, err := d.readFunctionsLocked()
	if err != nil || len(out) == 0 {
		return out, err
	}
	keys, err := tables.ProxyKeys(d.node.Proxies)
	if err != nil {
		return nil, err
	}
	have := map[uint32]abi.Proxy{}
	if err := readMap(d.gen, tables.MapProxies, have); err != nil {
		return nil, err
	}
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC_COARSE, &ts); err != nil {
		return nil, fmt.Errorf("read the clock: %w", err)
	}
	now := uint64(ts.Nano())
	kept := map[uint32]uint64{}
	byContent := map[uint32]uint32{} // the proxy of a bucket
	for id, p := range have {
		if p.Recognise == uint8(abi.RecogniseContent) {
			for i := range p.Slots {
				byContent[p.Slot+i] = id
			}
		}
	}
	if err := errors.Join(
		eachEntry(d.gen, tables.MapBuckets, func(i uint32, b abi.Bucket) {
			if id, ok := byContent[i]; ok {
				kept[id] += liveHeaders(b, now, have[id].LifetimeNs)
			}
		}),
		eachEntry(d.gen, tables.MapSlots, func(_ uint32, c abi.Cached) {
			if c.Expires > now {
				kept[c.Proxy]++
			}
		}),
	); err != nil {
		return nil, err
	}
	for i := range out {
		n := kept[keys[out[i].Function]]
		out[i].InFlight = &n
	}
	return out, nil
}

// liveHeaders counts the headers of a bucket that some packet can still come back for; see
// bpf/lib/detour/cache.h.
func liveHeaders(b abi.Bucket, now, lifetime uint64) (n uint64) {
	const tick, mask = 20, 1<<24 - 1
	for _, tag := range b.Tag {
		// By its tag an entry lives up to two ticks longer.
		left := (tag - now>>tick - 1) & mask
		if tag > 1 && left < lifetime>>tick+2 {
			n++
		}
	}
	return n
}

// eachEntry reads an array by the batch, while programs write to it.
func eachEntry[V any](g *generation, t tables.Map, f func(uint32, V)) error {
	m := g.maps[t]
	size := min(4096, int(m.MaxEntries()))
	keys, values := make([]uint32, size), make([]V, size)
	var at ebpf.MapBatchCursor
	for {
		n, err := m.BatchLookup(&at, keys, values, nil)
		for i := range n {
			f(keys[i], values[i])
		}
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read map %s: %w", t, err)
		}
	}
}
