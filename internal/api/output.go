package api

import "time"

// These are printed by waystamp get NOUN -o json, and waystamp describe.

// RefusalsOutput is "get refusals".
type RefusalsOutput struct {
	Version  int       `json:"version"`
	Node     string    `json:"node"`
	Refusals []Refusal `json:"refusals"`
}

// ErrorsOutput is "get errors".
type ErrorsOutput struct {
	Version int    `json:"version"`
	Node    string `json:"node"`
	Errors  Errors `json:"errors"`
}

// PathsOutput is "get paths".
type PathsOutput struct {
	Version int    `json:"version"`
	Node    string `json:"node"`
	Paths   []Path `json:"paths"`
}

// FunctionsOutput is "get functions".
type FunctionsOutput struct {
	Version   int        `json:"version"`
	Node      string     `json:"node"`
	Functions []Function `json:"functions"`
}

// StreamsOutput is "get streams": the functions of kind stream.
type StreamsOutput struct {
	Version int        `json:"version"`
	Node    string     `json:"node"`
	Streams []Function `json:"streams"`
}

// InterfacesOutput is "get interfaces".
type InterfacesOutput struct {
	Version    int         `json:"version"`
	Node       string      `json:"node"`
	Interfaces []Interface `json:"interfaces"`
	Error      string      `json:"error"`
	Problems   []string    `json:"problems"`
	Warnings   []string    `json:"warnings"`
}

// NodesOutput is "get nodes".
type NodesOutput struct {
	Version int           `json:"version"`
	Nodes   []ControlNode `json:"nodes"`
}

// ControlNode is a node as its controller sees it.
type ControlNode struct {
	Name     string `json:"name"`
	State    string `json:"state"` // ready, behind, refusing, incompatible, away, expected or revoked
	Reason   string `json:"reason"`
	Wanted   uint64 `json:"wanted_revision"` // of the plan that it shall hold
	Revision uint64 `json:"revision"`        // of the plan that its kernel holds
	// Since when it does; null: it has said nothing.
	Since    *time.Time `json:"since"`
	Problems []string   `json:"problems"` // parts of the plan that are not in force, and warnings
	// StateSince is when it came into its state; null: before this controller began to lead.
	StateSince *time.Time `json:"state_since"`
}

// ChangesOutput is "get changes".
type ChangesOutput struct {
	Version int              `json:"version"`
	Step    string           `json:"step"` // prepare, turn, or nothing if no change is under way
	Since   *time.Time       `json:"since"`
	Waiting []ControlWaiting `json:"waiting"`
	// When some chain, or all, get fresh secrets by the controller's clock, if no change is under way; null: never.
	NextRotation *time.Time `json:"next_rotation"`
}

// ControlWaiting is a node that a change waits for.
type ControlWaiting struct {
	Step   string    `json:"step"` // prepare, or turn; that one also if another change went over it
	Node   string    `json:"node"`
	State  string    `json:"state"` // as in ControlNode
	Reason string    `json:"reason"`
	Since  time.Time `json:"since"` // when it refused its plan; else since when the step lasts
}

// ChainsOutput is "get chains".
type ChainsOutput struct {
	Version int            `json:"version"`
	Chains  []ControlChain `json:"chains"`
}

// ControlChain is a chain as its controller sees it.
type ControlChain struct {
	Name   string `json:"name"`
	State  string `json:"state"` // active, preparing, degraded or blocked
	Reason string `json:"reason"`
	// Since when; null: before this controller began to lead.
	Since *time.Time `json:"since"`
}

// EpochsOutput is "get epochs".
type EpochsOutput struct {
	Version int            `json:"version"`
	Epochs  []ControlEpoch `json:"epochs"`
}

// ControlEpoch is an epoch that nodes hold.
type ControlEpoch struct {
	Chain     string `json:"chain"`
	Direction string `json:"direction"`
	From      string `json:"from"` // the function that the path starts at, or empty
	Path      uint32 `json:"path"`
	Epoch     uint32 `json:"epoch"`
	State     string `json:"state"` // preparing, active or draining
	// Until when its packets may still come; null: that is not known yet.
	Until      *time.Time `json:"until"`
	WaitingFor []string   `json:"waiting_for"` // nodes that have to acknowledge something before it goes on
	Drain      string     `json:"drain"`       // of one that drains: what it waits for until it is erased, in words; else empty
}

// DescribeOutput is "describe".
type DescribeOutput struct {
	Version  int              `json:"version"`
	Kind     string           `json:"kind"` // node, chain or function
	Name     string           `json:"name"`
	Facts    []ControlFact    `json:"facts"`    // of the domain file
	Nodes    []ControlNode    `json:"nodes"`    // the node; of a function its node; of a chain those that it passes
	Chains   []ControlChain   `json:"chains"`   // the chain; of a node and of a function those that pass it
	Epochs   []ControlEpoch   `json:"epochs"`   // of these chains
	Step     string           `json:"step"`     // of the change in progress, or nothing
	Since    *time.Time       `json:"since"`    // of the step
	Problem  string           `json:"problem"`  // why the last applied file is not in progress
	Waiting  []ControlWaiting `json:"waiting"`  // those of Nodes
	Refusals []ControlRefusal `json:"refusals"` // since this controller leads, the latest first
	Events   []ControlEvent   `json:"events"`   // since this controller leads, the latest last
}

// ControlFact is something that the domain file says, for people.
type ControlFact struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

// ControlRefusal is how many packets a node has refused for a reason, as far as it has told its controller.
type ControlRefusal struct {
	Node     string    `json:"node"`
	Reason   string    `json:"reason"`
	Packets  uint64    `json:"packets"`
	Last     time.Time `json:"last"`
	Sentence string    `json:"sentence"` // what the last one shows
}

// EventsOutput is "get events".
type EventsOutput struct {
	Version int            `json:"version"`
	Since   time.Time      `json:"since"` // nothing is known of before
	Events  []ControlEvent `json:"events"`
}

// ControlEvent is something that has happened in a controller's domain.
type ControlEvent struct {
	Time time.Time `json:"time"`
	Kind string    `json:"kind"` // node, chain, change or call
	Name string    `json:"name"` // of the node or the chain, the commit or the call
	Text string    `json:"text"`
}

// RootsOutput is "get roots".
type RootsOutput struct {
	Version int           `json:"version"`
	Roots   []ControlRoot `json:"roots"` // the one that signs first
}

// ControlRoot is a root that nodes and controllers trust.
type ControlRoot struct {
	Pin        string     `json:"pin"`   // SHA-256 of the certificate
	State      string     `json:"state"` // signs, coming or going
	Ends       time.Time  `json:"ends"`
	Since      *time.Time `json:"since,omitempty"` // of coming and going
	WaitingFor []string   `json:"waiting_for"`     // nodes
}

// ReadersOutput is "get readers", from a domain file.
type ReadersOutput struct {
	Version int             `json:"version"`
	Chains  []ChainsReaders `json:"chains"`
}

// ChainsReaders says who can read the payload of a chain.
type ChainsReaders struct {
	Chain   string       `json:"chain"`
	Service string       `json:"service,omitempty"` // none: no gateway seals what the chain carries
	Readers []string     `json:"readers"`           // that have payload in clear; empty without a service: everybody on the way
	Parts   []SealedPart `json:"parts"`             // in the order of the way to the origin
}

// SealedPart is what is sealed between two ends.
type SealedPart struct {
	From         string   `json:"from"`
	FromIdentity string   `json:"from_identity,omitempty"` // that its certificate says; none: it shows none to the other end
	To           string   `json:"to"`
	ToIdentity   string   `json:"to_identity"`
	Sealed       []string `json:"functions,omitempty"` // that see packets, and no payload
}

// TraceOutput is "trace".
type TraceOutput struct {
	Version    int           `json:"version"`
	Chain      string        `json:"chain"`
	Flow       string        `json:"flow,omitempty"` // of the packets, as the forward direction has it; nothing: any
	Paths      []TracePath   `json:"paths"`
	Packets    []TracePacket `json:"packets"`    // in the order in which they came to an end
	Warnings   []string      `json:"warnings"`   // nodes whose hops are missing
	TimedOut   bool          `json:"timed_out"`  // before all packets had come
	Foreign    uint64        `json:"foreign"`    // packets with the O-flag that no headend has told of
	Suppressed uint64        `json:"suppressed"` // hops that nodes did not tell of: there were too many
}

// TracePath is a path of the chain: one for each direction, and one more for each function on byte streams.
type TracePath struct {
	Path      uint32          `json:"path"`
	Direction string          `json:"direction"`
	From      string          `json:"from"` // the function that it starts at, or nothing
	To        string          `json:"to"`   // the function that it ends at, or nothing
	Scheme    string          `json:"scheme"`
	Headends  []string        `json:"headends"`
	Positions []TracePosition `json:"positions"` // the headend first, the egress last
}

// TracePosition is a visit of a path.
type TracePosition struct {
	Node     string `json:"node"`
	Function string `json:"function"` // nothing: the headend or the egress
}

// TracePacket is one traced packet.
type TracePacket struct {
	Path     uint32         `json:"path"`
	Epoch    uint32         `json:"epoch"`
	Number   string         `json:"number"` // hexadecimal; nothing with opot
	Hops     []TraceHop     `json:"hops"`   // in the order of their positions
	Refusals []TraceRefusal `json:"refusals"`
	Outcome  string         `json:"outcome"` // verified, refused or lost
	Sentence string         `json:"sentence"`
}

// TraceHop is a traced packet at one position.
type TraceHop struct {
	Time      time.Time `json:"time"` // by the node's clock
	Position  uint32    `json:"position"`
	Node      string    `json:"node"`
	Function  string    `json:"function"` // nothing: the headend or the egress
	Interface string    `json:"interface"`
	Hook      string    `json:"hook"`
	Before    string    `json:"before"` // CML as it came, hexadecimal; nothing at the headend, and with opot
	After     string    `json:"after"`  // CML as it left; nothing if verified, and with opot
	Verified  bool      `json:"verified"`
	Bytes     uint32    `json:"bytes"` // of the whole packet, with the outer header
}

// TraceRefusal is a node's refusal of a traced packet.
type TraceRefusal struct {
	Time      time.Time `json:"time"`
	Node      string    `json:"node"`
	Interface string    `json:"interface"`
	Hook      string    `json:"hook"`
	Reason    string    `json:"reason"`
	Text      string    `json:"text"`
	Reported  bool      `json:"reported"` // and it was let go on
}
