package worker

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net/netip"

	"github.com/waystamp/waystamp/internal/gateway"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/seal"
	"github.com/waystamp/waystamp/internal/signer"
)

// A worker and its parent speak over a pair of sockets: each message is its length in bytes, 32 bits in
// network order, and JSON.

// The longest messages, in bytes. A configuration has lists of revoked certificates.
const (
	toWorkerMax = 256 << 20
	toParentMax = 64 << 10
)

// Configuration is what a gateway does.
type Configuration struct {
	Clients  []model.Clients
	Services []model.Service
	Chains   []Chain // that rules name
}

// Chain is how connections onward take a chain.
type Chain struct {
	Name   string
	Origin netip.AddrPort // the only one that it leads to
	// Source ports of its connections; both 0: any.
	First, Last uint16
	// Sealed: its next end opens the session with the origin, and connections are sealed up to there
	// with what the answer to an Ask has.
	Sealed bool
}

// Ask is what a worker asks before it opens a connection onward.
type Ask struct {
	Chain  string
	Client netip.AddrPort // whose request it is for, as it has connected
	Source netip.AddrPort // that the connection will have: the client's address, and a port of the chain's
	Origin netip.AddrPort
}

// toWorker is one of its fields.
type toWorker struct {
	Configuration *configuration `json:",omitempty"`
	Answer        *answer        `json:",omitempty"`
	Query         *query         `json:",omitempty"`
	Status        *statusAnswer  `json:",omitempty"` // of a responder, or of a signer
}

// query is what a parent wants of sessions: one of its fields.
type query struct {
	Number uint64
	List   *listQuery   `json:",omitempty"`
	End    *endQuery    `json:",omitempty"`
	Revoke *revokeQuery `json:",omitempty"`
}

type (
	listQuery   struct{ After uint64 } // sessions with higher IDs
	endQuery    struct{ ID uint64 }
	revokeQuery struct{ Identities []string } // all; see gateway.Gateway.Revoke
)

// reply answers a query.
type reply struct {
	Number   uint64
	Sessions []gateway.SessionState `json:",omitempty"`
	More     bool                   // there are sessions with higher IDs than the last one's
	Ended    int                    // sessions
}

type configuration struct {
	Number uint64
	Configuration
	Files   gateway.Snapshot
	Audit   string   // the log's name, for messages
	Revoked []string // identities, when the worker starts; later a query replaces them
}

type answer struct {
	Number uint64
	Error  string     // "": it is allowed
	Seal   *seal.Part `json:",omitempty"` // of a sealed chain
}

// toParent is one of its fields.
type toParent struct {
	Taken      *answer     `json:",omitempty"` // a configuration
	Ask        *ask        `json:",omitempty"`
	Reply      *reply      `json:",omitempty"`
	Status     *statusAsk  `json:",omitempty"`
	Sign       *signAsk    `json:",omitempty"`
	Statistics *Statistics `json:",omitempty"`
}

// Statistics are a worker's numbers since its start. They are its word.
type Statistics struct {
	Now     int    // sessions that are open
	Opened  uint64 // sessions
	Refused map[gateway.Reason]uint64
	Counts  map[string]gateway.ServiceCount // by service
}

type ask struct {
	Number uint64
	Ask
}

// statusAsk is a question to a responder of OCSP.
type statusAsk struct {
	Number uint64
	gateway.StatusQuestion
}

// signAsk is a question to the signer of a service.
type signAsk struct {
	Number             uint64
	Service, Algorithm string
	Message            []byte
}

// statusAnswer is what the parent has got for the worker.
type statusAnswer struct {
	Number uint64
	DER    []byte // as the responder gave it, or a signature
	Error  string // "": it answered
	// Why is what kept a signer from signing.
	Why signer.Failure `json:",omitempty"`
}

func send(w io.Writer, message any, most int) error {
	text, err := json.Marshal(message)
	if err != nil {
		return err
	}
	if len(text) > most {
		return fmt.Errorf("a message has %d bytes; at most %d are sent", len(text), most)
	}
	_, err = w.Write(append(binary.BigEndian.AppendUint32(make([]byte, 0, 4+len(text)), uint32(len(text))), text...))
	return err
}

// receive gives io.EOF if the other side has ended between two messages.
func receive(r io.Reader, into any, most int) error {
	var head [4]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return err
	}
	n := binary.BigEndian.Uint32(head[:])
	if int64(n) > int64(most) {
		return fmt.Errorf("a message has %d bytes; at most %d are read", n, most)
	}
	text := make([]byte, n)
	if _, err := io.ReadFull(r, text); err != nil {
		return fmt.Errorf("a message is not whole: %w", io.ErrUnexpectedEOF)
	}
	return json.Unmarshal(text, into)
}
