package api

import (
	"net/netip"
	"time"
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
