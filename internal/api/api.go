// Package api has the types of the JSON that leaves the product: the answers of
// an agent on its socket, and what waystamp get and status print with -o json.
// They are apart from the data path's own structs, so that either can change
// without the other. It only has values: internal/agent fills them in and asks
// for them, internal/cli prints them. Refused packets are in internal/event.
package api

import (
	"net/netip"
	"time"
)

// Version is the version of all these types; each answer carries it. It grows
// when a field is renamed, removed or gets another meaning. A new field leaves it
// as it is: readers ignore fields that they do not know.
const Version = 1

// Paths of the agent's HTTP server, for GET. DELETE of PathSessions/ID ends a session, and POST of PathRevoked takes a
// RevokeRequest; both are for root and the agent's user.
const (
	PathStatus    = "/v1/status"
	PathCounters  = "/v1/counters"
	PathFunctions = "/v1/functions"
	// Connections of functions of kind stream; ?function=NAME asks for one function's, ?limit=N for at most so many.
	PathConnections = "/v1/connections"
	PathEvents      = "/v1/events" // lines of event.Event; ?follow=false ends after the past ones
	PathServices    = "/v1/services"
	PathSessions    = "/v1/sessions"
	PathRevoked     = "/v1/revoked"
	PathReaders     = "/v1/readers"
)

// Status is the state of an agent.
type Status struct {
	Version  int    `json:"version"`
	Ready    bool   `json:"ready"` // a whole plan is in force
	Node     string `json:"node"`
	Instance string `json:"instance"`
	// Generation counts the plans that were put in force since the agent
	// started; Plan tells them apart (SHA-256 of the file).
	Generation int       `json:"generation"`
	Plan       string    `json:"plan"`
	Since      time.Time `json:"since"` // when that plan came into force
	// Error is the last failure that is not mended: a refused plan, a data path
	// that could not be repaired.
	Error string `json:"error,omitempty"`
	// Problems are the parts of the plan that are not in force.
	Problems []string `json:"problems,omitempty"`
	// Warnings are settings of the node that block packets of the plan, a clock that is far from the controller's, and,
	// for an hour, the removal of pins.
	Warnings   []string    `json:"warnings,omitempty"`
	Interfaces []Interface `json:"interfaces"`
	// Paths are the node's roles in the paths of the plan in force.
	Paths   []PathState `json:"paths"`
	Recent  Recent      `json:"recent"`
	Readers Readers     `json:"readers"`
}

// PathState is a role of the node in a path.
type PathState struct {
	Role      string      `json:"role"`
	Chain     string      `json:"chain"`
	Direction string      `json:"direction"`
	From      string      `json:"from,omitempty"` // the function that the path starts at; "": the chain's ingress
	To        string      `json:"to,omitempty"`   // the function of kind stream that it ends at; "": the chain's egress
	Path      uint32      `json:"path"`
	Epoch     int         `json:"epoch"`
	Function  string      `json:"function,omitempty"`
	SID       *netip.Addr `json:"sid,omitempty"` // a headend has none
}

// Recent is what was refused in the last minute.
type Recent struct {
	Seconds  int       `json:"seconds"` // about 60; less if the agent has not run for that long
	Refusals []Refusal `json:"refusals"`
}

// Interface is what the data path does on an interface.
type Interface struct {
	Name      string `json:"name"`
	Role      string `json:"role"`                // edge, core
	Datapath  string `json:"datapath"`            // as in the plan: auto, tc, xdp
	Unmatched string `json:"unmatched,omitempty"` // of an edge interface: route, drop
	TC        bool   `json:"tc"`                  // the program at TC ingress is attached
	XDP       bool   `json:"xdp"`                 // the program at XDP is attached
	// Out: the program at TC egress is attached: the second guard, and the way back
	// of functions in the node's own kernel.
	Out bool `json:"out,omitempty"`
	// Clsact: filters of clsact hold the programs at TC, since the kernel has no tcx.
	Clsact bool `json:"clsact,omitempty"`
	// Functions send here: the program at TC ingress is that of their proxies.
	Functions []string `json:"functions,omitempty"`
}

// Readers are the readers of the agent's events. Counts are since its start.
type Readers struct {
	Now     int    `json:"now"`
	Most    int    `json:"most"`    // one more is refused
	Missed  uint64 `json:"missed"`  // events that a reader was too slow for
	Dropped uint64 `json:"dropped"` // readers that took none
	Refused uint64 `json:"refused"` // readers above the limit
	// LastDropped are the names of the readers dropped last, the latest at the end.
	LastDropped []string `json:"last_dropped,omitempty"`
}

// Counters are the counters of the programs. They go on when the agent restarts.
type Counters struct {
	Version   int        `json:"version"`
	Node      string     `json:"node"`
	Refusals  []Refusal  `json:"refusals"`  // by reason; those that occurred
	Paths     []Path     `json:"paths"`     // in the plan's order
	Functions []Function `json:"functions"` // with a proxy, in the plan's order
	Errors    Errors     `json:"errors"`
}

// Refusal counts the packets refused for one reason.
type Refusal struct {
	Reason   string `json:"reason"` // as in docs/reference/refusals.md
	Text     string `json:"text"`   // the reason as a sentence
	Dropped  uint64 `json:"dropped"`
	Reported uint64 `json:"reported"` // counted and forwarded: on-violation: report, guard: audit
}

// The roles of a node in a path.
const (
	RoleHeadend  = "headend"
	RoleEndpoint = "endpoint"
	RoleEgress   = "egress"
)

// Path counts the packets of a path in one of the node's roles: stamped as headend
// or endpoint, verified as egress. All epochs together,
// and with the first of several SIDs those that the node has given up.
type Path struct {
	Role      string      `json:"role"`
	Chain     string      `json:"chain"`
	Direction string      `json:"direction"`
	From      string      `json:"from,omitempty"` // the function that the path starts at; "": the chain's ingress
	To        string      `json:"to,omitempty"`   // the function of kind stream that it ends at; "": the chain's egress
	Path      uint32      `json:"path"`
	Function  string      `json:"function,omitempty"`
	SID       *netip.Addr `json:"sid,omitempty"` // a headend has none
	Packets   uint64      `json:"packets"`       // super-packets count once
	Frames    uint64      `json:"frames"`        // on a wire
	Bytes     uint64      `json:"bytes"`         // of the inner packets
}

// Errors counts the ICMP errors sent for refused packets. Each of those packets
// counts as a refusal, too.
type Errors struct {
	TooBig       uint64 `json:"too_big"`
	TimeExceeded uint64 `json:"time_exceeded"`
	Parameter    uint64 `json:"parameter_problem"`
	Unreachable  uint64 `json:"unreachable"`
	Suppressed   uint64 `json:"suppressed"`   // not sent: above the rate limit
	Unanswerable uint64 `json:"unanswerable"` // not sent: no valid receiver
}

// Function counts the packets of a function's proxy. Super-packets count once.
type Function struct {
	Function    string `json:"function"`
	Local       bool   `json:"local,omitempty"`
	Recognise   string `json:"recognise"`
	Cache       int    `json:"cache"`         // headers that the plan has room for
	RxSuccess   uint64 `json:"rx_success"`    // stripped, cached and handed to the function
	RxIgnored   uint64 `json:"rx_ignored"`    // refused before: no room in the cache
	RxCut       uint64 `json:"rx_cut"`        // super-packets that were cut first
	RxCopies    uint64 `json:"rx_copies"`     // of rx_success: a byte-identical one was under way
	TxSuccess   uint64 `json:"tx_success"`    // came back, got their header, were stamped
	TxIgnored   uint64 `json:"tx_ignored"`    // came back, not for a chain: link-local, own address
	TxNotCached uint64 `json:"tx_not_cached"` // came back without a matching header
	TxPlain     uint64 `json:"tx_plain"`      // of them, forwarded by ordinary routing
	// TxOriginated are those of them that a path from the function on took.
	TxOriginated uint64 `json:"tx_originated"`
	Bypassed     uint64 `json:"bypassed"`  // stamped without it: packets of flows that it is done with
	TxCut        uint64 `json:"tx_cut"`    // super-packets that came back and were cut first
	Expired      uint64 `json:"expired"`   // headers found too old
	Evicted      uint64 `json:"evicted"`   // headers that gave way to newer ones
	WaitedNs     uint64 `json:"waited_ns"` // of tx_success: time in the function, all together
	// InFlight are the headers kept now. Only an answer of Functions has it.
	InFlight *uint64 `json:"in_flight,omitempty"`
	// Rules are those of a function of kind netfilter. Only an answer of Functions has them.
	Rules *Rules `json:"rules,omitempty"`
	// Stream is of a function of kind stream. Only an answer of Functions has it.
	Stream *Stream `json:"stream,omitempty"`
}

// Stream is what became of the connections of a function of kind stream since its worker
// was started. The numbers are the worker's word.
type Stream struct {
	Worker          int    `json:"worker"`          // the process; 0: there is none
	Error           string `json:"error,omitempty"` // why
	Restarts        int    `json:"restarts"`        // of the worker, since the agent started
	Kept            int    `json:"kept"`            // connections that the data path knows, those that have just ended among them
	Loops           int    `json:"loops"`           // event loops of the worker; some may rest until they are needed
	Room            uint64 `json:"room,omitempty"`  // connections that it has descriptors for, if these are fewer than its limit allows
	Now             uint64 `json:"now"`             // connections that are open
	Opened          uint64 `json:"opened"`
	Refused         uint64 `json:"refused"`   // reset at once: limits of connections or descriptors
	Ended           uint64 `json:"ended"`     // in order, by both sides
	Unreached       uint64 `json:"unreached"` // the server refused, or there was no way to it
	ResetByClient   uint64 `json:"reset_by_client"`
	ResetByServer   uint64 `json:"reset_by_server"`
	ResetByFunction uint64 `json:"reset_by_function"`
	// Of an intrusive function: connections refused that were sealed for another part than they came by, were
	// not sealed, were of another end than the plan names, or for whose part there is no key.
	PartMismatch uint64      `json:"part_mismatch"`
	Unsealed     uint64      `json:"unsealed"`
	Peer         uint64      `json:"peer"`
	Untrusted    uint64      `json:"untrusted"`
	Expired      uint64      `json:"expired"`
	Revoked      uint64      `json:"revoked"`
	NoKey        uint64      `json:"no_key"`
	Batches      uint64      `json:"batches"`        // of 64 KiB that sealed connections hold now, beside their buffers
	Unbatched    uint64      `json:"unbatched"`      // reads and writes of sealed connections for which no batch was left: they are slower
	ResetByLimit uint64      `json:"reset_by_limit"` // idle, or half-closed for too long
	ToServer     StreamBytes `json:"to_server"`
	ToClient     StreamBytes `json:"to_client"`
	// The function's operations on bytes, in their order.
	Run  []StreamOperation `json:"run,omitempty"`
	Back []StreamOperation `json:"back,omitempty"`
	// Workers of before, of another version or configuration, that go on with their connections; the oldest first.
	Draining []StreamDrain `json:"draining,omitempty"`
}

// StreamDrain is a worker that takes no more connections.
type StreamDrain struct {
	Worker  int     `json:"worker"`        // the process
	Now     *uint64 `json:"now,omitempty"` // connections that are open; missing: not known, as of a worker of another version, or after a restart of the agent
	Seconds uint64  `json:"seconds"`       // until it is ended, if it has connections then
}

// StreamOperation is one operation on the bytes of one direction.
type StreamOperation struct {
	Name   string `json:"name"`
	In     uint64 `json:"in"`     // bytes given to it
	Out    uint64 `json:"out"`    // bytes that came out of it
	Events uint64 `json:"events"` // of match: connections in which it found something; of gunzip and open: input that it refused
}

// StreamBytes are the bytes of one direction.
type StreamBytes struct {
	In      uint64 `json:"in"`      // read from the sender
	Out     uint64 `json:"out"`     // written to the receiver
	Spliced uint64 `json:"spliced"` // those of Out that were never copied
}

// ConnectionsMax is how many connections one answer has at most.
const ConnectionsMax = 10_000

// Connections are connections of the node's functions of kind stream, in the order of functions, clients and servers. Those that
// have ended are not among them.
type Connections struct {
	Version     int          `json:"version"`
	Node        string       `json:"node"`
	Functions   []string     `json:"functions"`   // of kind stream, of those that were asked about
	All         int          `json:"all"`         // how many there are
	Connections []Connection `json:"connections"` // the first of them
}

// Connection is a connection through a function of kind stream. The kernel says all of it, and the function's worker nothing.
type Connection struct {
	Function string         `json:"function"`
	Client   netip.AddrPort `json:"client"`
	Server   netip.AddrPort `json:"server"`
	Chain    string         `json:"chain"` // "": its path is not in the plan any more
	State    string         `json:"state"` // opening, open, client-ended or server-ended
	Idle     uint64         `json:"idle"`  // seconds since the last packet
	// What the function has on either side.
	ClientSide ConnectionSide `json:"client_side"`
	ServerSide ConnectionSide `json:"server_side"`
}

// ConnectionSide is one of a connection's two sides: between the function and the client, or the function and the server.
type ConnectionSide struct {
	State    string          `json:"state,omitempty"` // of the socket, as RFC 9293 names it in lower case; missing: there is none
	Received uint64          `json:"received"`        // bytes of payload that came to the function
	Sent     uint64          `json:"sent"`            // bytes of payload from the function
	Comes    *ConnectionPath `json:"comes,omitempty"` // the path by which packets come to the function; missing: it is not in the plan
	Goes     *ConnectionPath `json:"goes,omitempty"`  // the path that packets of the function take
}

// ConnectionPath names a path.
type ConnectionPath struct {
	Path      uint32 `json:"path"`
	Direction string `json:"direction"`
	From      string `json:"from,omitempty"` // the function that it starts at; missing: the chain's ingress
	To        string `json:"to,omitempty"`   // the function that it ends at; missing: the chain's egress
}

// Rules are what the rules of a function of kind netfilter have counted.
type Rules struct {
	Namespace string        `json:"namespace,omitempty"` // "": the node's own
	Error     string        `json:"error,omitempty"`     // why the counters could not be read
	Counters  []RuleCounter `json:"counters"`            // named counters, by name
	Arguments []RuleCounter `json:"arguments"`           // packets that came in, by argument; of the whole namespace
}

// RuleCounter is a counter of nftables.
type RuleCounter struct {
	Name    string `json:"name"`
	Packets uint64 `json:"packets"`
	Bytes   uint64 `json:"bytes"`
}

// Wait is how long a packet was in the function on average.
func (f Function) Wait() time.Duration {
	if f.TxSuccess == 0 {
		return 0
	}
	return time.Duration(f.WaitedNs / f.TxSuccess)
}

// Functions are the functions with a proxy, with the number of headers kept now.
type Functions struct {
	Version   int        `json:"version"`
	Node      string     `json:"node"`
	Functions []Function `json:"functions"`
}
