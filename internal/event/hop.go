package event

import (
	"time"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/model"
)

// TracePacketsMax is the highest number of packets of a trace: all their events fit the limit of a CPU of a node that is each of a
// path's positions.
const TracePacketsMax = abi.TracedPerSecond / abi.KeysMax

// Hop is a traced packet at one position of its path: at the headend, which has set the O-flag in it (RFC 9259 section 2.1), at a
// hop that has stamped it, or at the egress that has verified it.
type Hop struct {
	Time      time.Time `json:"time"` // after the stamp
	Node      string    `json:"node"`
	Interface string    `json:"interface"`
	Hook      string    `json:"hook"` // tc or xdp
	Path      uint32    `json:"path"`
	Epoch     uint8     `json:"epoch"`
	Number    uint64    `json:"number"` // of the packet, without masks
	Position  int       `json:"position"`
	Scheme    string    `json:"scheme"`
	Verified  bool      `json:"verified,omitempty"` // by the egress: proof and number
	// Before and After are CML as it came and as it leaves, 8 bytes. There is no After of a verified packet, and neither with opot.
	Before Hex    `json:"before,omitempty"`
	After  Hex    `json:"after,omitempty"`
	Len    uint32 `json:"len"` // of the whole packet, with the outer header, in bytes
	// Suppressed counts the events of this CPU that were not sent before this one.
	Suppressed uint32 `json:"suppressed,omitempty"`
}

// Trace asks the headends of a path to set the O-flag in its next packets, or in those of a flow.
type Trace struct {
	ID      uint64 // of the trace: another one of the same path counts its packets anew
	Path    uint32
	Packets int // that are still to be traced, 1 at least
	// Flow selects the packets; zero: all of the path.
	Flow model.Flow
}
