package api

import (
	"net/netip"
	"time"

	"github.com/waystamp/waystamp/internal/model"
)

// Services are the services of a node's gateway.
type Services struct {
	Version  int              `json:"version"`
	Node     string           `json:"node"`
	Services []Service        `json:"services"`        // none: the node has no gateway
	Refused  []GatewayRefusal `json:"refused"`         // clients and requests, by reason, since the gateway's process was started
	Revoked  int              `json:"revoked"`         // identities, by waystamp revoke identity
	Error    string           `json:"error,omitempty"` // why the gateway does not run
}

// Service is a service behind a gateway.
type Service struct {
	Name     string         `json:"name"`
	Hosts    []string       `json:"hosts"`
	Address  netip.AddrPort `json:"address"`
	Clients  string         `json:"clients"`
	Kind     string         `json:"identity_kind"`
	Within   string         `json:"identity_within"`
	Protocol string         `json:"protocol"` // http; tls: bytes that the gateway does not read; or connect: the same, behind a CONNECT
	Mode     string         `json:"mode"`     // of the gateway: transparent, own or connect
	Origin   netip.AddrPort `json:"origin"`   // empty in mode connect
	Rules    int            `json:"rules"`
	Chains   []string       `json:"chains"` // that rules name
	// Destinations are what clients in mode connect may ask for.
	Destinations []string `json:"destinations,omitempty"`
	Sessions     int      `json:"sessions"` // that are open
}

// GatewayRefusal counts what a gateway has refused for one reason.
type GatewayRefusal struct {
	Reason string `json:"reason"` // as in the audit log
	Count  uint64 `json:"count"`
}

// Sessions are the open sessions of a node's gateway: clients' connections that have shaken hands.
type Sessions struct {
	Version  int       `json:"version"`
	Node     string    `json:"node"`
	Sessions []Session `json:"sessions"`
}

// Session is one of them.
type Session struct {
	ID       uint64         `json:"id"` // as in the audit log; they begin with 1 when the gateway's process starts
	Service  string         `json:"service"`
	Host     string         `json:"host"`
	Identity string         `json:"identity"`
	Serial   string         `json:"serial"` // of the certificate, hexadecimal
	Client   netip.AddrPort `json:"client"`
	Since    time.Time      `json:"since"`
	Until    time.Time      `json:"until"`     // the certificate's end
	Resumed  bool           `json:"resumed"`   // by a ticket
	Requests uint64         `json:"requests"`  // that were let in
	UnderWay int            `json:"under_way"` // of these, those that have not ended
	Chains   []string       `json:"chains"`    // that they have taken
}

// Revoked are the identities that an operator has revoked at a node's gateway.
type Revoked struct {
	Version    int               `json:"version"`
	Node       string            `json:"node"`
	Identities []RevokedIdentity `json:"identities"` // in alphabetical order
}

// RevokedIdentity is one of them.
type RevokedIdentity struct {
	Identity string    `json:"identity"`
	Since    time.Time `json:"since"`
}

// RevokeRequest is what an agent is sent to revoke an identity, or to take that back.
type RevokeRequest struct {
	Identity string `json:"identity"`
	Undo     bool   `json:"undo"`
}

// RevokeAnswer is what it answers.
type RevokeAnswer struct {
	Version  int    `json:"version"`
	Node     string `json:"node"`
	Identity string `json:"identity"` // as the audit log has it
	Changed  bool   `json:"changed"`  // the list was
	Ended    int    `json:"ended"`    // sessions
	Running  bool   `json:"running"`  // the gateway; else it takes the list when it starts
}

// SessionDetail is a session of a node's gateway with its requests, from the gateway's audit log.
type SessionDetail struct {
	Version  int        `json:"version"`
	Node     string     `json:"node"`
	ID       uint64     `json:"id"`
	Open     bool       `json:"open"`
	Opened   time.Time  `json:"opened"`
	Closed   *time.Time `json:"closed,omitempty"` // none: it is open, or the gateway's process ended before it
	Reason   string     `json:"reason,omitempty"` // for which the gateway ended it
	Service  string     `json:"service"`
	Host     string     `json:"host"`
	Client   string     `json:"client"` // address and port
	Identity string     `json:"identity"`
	Serial   string     `json:"serial"` // of the certificate, hexadecimal
	Resumed  bool       `json:"resumed"`

	Requests []SessionRequest `json:"requests"` // the last ones
	Omitted  int              `json:"omitted"`  // earlier ones, which the log has
	Chains   []SessionChain   `json:"chains"`   // that they have taken, as the plan in force has them
}

// SessionRequest is a request of a session, or a connection of a service that is not HTTP.
type SessionRequest struct {
	Number   uint64     `json:"number,omitempty"` // none: it was refused
	At       time.Time  `json:"at"`
	Ended    *time.Time `json:"ended,omitempty"` // none: it has not, or the log has no end of it
	Method   string     `json:"method,omitempty"`
	Host     string     `json:"host,omitempty"`
	Path     string     `json:"path,omitempty"`
	Rule     int        `json:"rule,omitempty"` // from 1
	Chain    string     `json:"chain,omitempty"`
	Status   int        `json:"status,omitempty"`
	Bytes    int64      `json:"bytes"`              // to the client
	Received int64      `json:"received,omitempty"` // from the client, of what is not HTTP
	Reason   string     `json:"reason,omitempty"`   // for which it was refused
	Text     string     `json:"text,omitempty"`
}

// SessionChain is a chain from the gateway's node on.
type SessionChain struct {
	Chain    string      `json:"chain"`
	Path     string      `json:"path,omitempty"` // that begins at the gateway; none: the plan has the chain no more
	Epochs   []int       `json:"epochs,omitempty"`
	Ports    model.Ports `json:"source_ports,omitzero"`
	Identity string      `json:"identity,omitempty"` // that the gateway shows to the next end; none: it shows none
	Sealed   string      `json:"sealed_to"`          // who opens what the gateway has sealed: the identity of an end, or the origin's name
}

// HeldReaders are the ends on a node that hold payload in clear, by its plan in force: they have the keys for it.
type HeldReaders struct {
	Version int          `json:"version"`
	Node    string       `json:"node"`
	Readers []HeldReader `json:"readers"`
}

// HeldReader is one of them, on one chain.
type HeldReader struct {
	Chain    string   `json:"chain"`
	Function string   `json:"function"` // gateway: the node's gateway
	Identity string   `json:"identity,omitempty"`
	From     string   `json:"opens_from"` // whose sessions it opens
	To       string   `json:"seals_for"`  // who opens what it sends on
	Epochs   []int    `json:"epochs"`     // of the keys that it has for the end before, or of the gateway's for the next; none without another end
	Process  int      `json:"process,omitempty"`
	Error    string   `json:"error,omitempty"` // why there is no process
	Clear    []string `json:"clear,omitempty"` // the node's interfaces on which payload is in clear
	Key      string   `json:"key,omitempty"`   // plan: whoever made the plan has its key, too; node: it was made on the node, and a controller has signed it
	// CertificateEnds is when the certificate of a node's own key does; not there: there is none.
	CertificateEnds *time.Time `json:"certificate_ends,omitempty"`
}
