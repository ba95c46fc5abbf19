package model

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"
)

// Stream has a node's settings for a function on the bytes of TCP connections.
type Stream struct {
	// Run are the functions towards the server, Back towards the client, each entry as
	// internal/stream/function reads it from JSON. Without Back: Run in reverse, each
	// one's inverse.
	Run, Back []string

	// Early: the client is accepted at once; otherwise when its server has accepted.
	Early bool

	// Other says what becomes of packets that are not TCP.
	Other Other

	Connections int           // open at once
	Buffer      int           // bytes held per connection and direction
	Idle        time.Duration // without a byte, until a connection is reset
	HalfClosed  time.Duration // the same, once one side has ended

	// Attached: in place of Run, each connection goes in plain through what is behind two
	// interfaces of the node, which knows nothing of waystamp. Zero: through nothing.
	Attached Attached
}

// Other is what becomes of packets that come to a function of kind stream and are not TCP.
type Other uint8

const (
	OtherRefuse Other = iota
	OtherICMP         // echo, and errors about anything but TCP, go by it, in the next part of their chain
	OtherRelay        // all that is certainly not TCP goes by
)

var otherNames = []string{"refuse", "icmp", "relay"}

func (o Other) String() string { return enumString("Other", otherNames, int(o)) }

// MarshalText implements encoding.TextMarshaler.
func (o Other) MarshalText() ([]byte, error) {
	return enumMarshal("setting of other", otherNames, int(o))
}

// UnmarshalText implements encoding.TextUnmarshaler.
func (o *Other) UnmarshalText(b []byte) error {
	return enumUnmarshal(o, "setting of other", otherNames, b)
}

// Attached is where a function is that plain connections go through.
type Attached struct {
	To   string     // interface that clients' packets leave by
	From string     // interface that they come back on
	Via  netip.Addr // the function's link-local address on both links; zero: it takes any frame, as a bridge does
}

// StreamPlainPort is the port of servers in plain connections through a function, so that tools
// take them for HTTP. The origin of a service has another one.
const StreamPlainPort = 80

// FilterAttached is where a function of kind netfilter is that plain connections go through: behind the two interfaces
// of its namespace, which routes.
func FilterAttached(function string) Attached {
	p := NetfilterDetour(function, NamespaceOwn)
	return Attached{To: p.To, From: p.From, Via: netip.MustParseAddr("fe80::2")}
}

// CheckFilter checks the packet filter that plain connections of a function go through.
func (s Stream) CheckFilter(function string, n Netfilter) error {
	switch {
	case s.Attached != FilterAttached(function):
		return errors.New("attached: does not lead to the function's namespace")
	case n.Namespace != NamespaceOwn:
		return CheckFilterNamespace(n.Namespace)
	case len(n.Arguments) > 0 || n.Zones || n.Bypass || len(n.Addresses) > 0:
		return errors.New("an intrusive function has no arguments, no zones, no bypass and no address: nothing but plain connections goes through it")
	}
	return n.Check()
}

// CheckFilterNamespace holds where rules of an intrusive function run.
func CheckFilterNamespace(namespace string) error {
	switch namespace {
	case NamespaceOwn:
		return nil
	case NamespaceNode:
		return errors.New("is the node's own kernel, where opened payload would be in clear on all of the node; leave namespace out, so that the agent makes one (own)")
	}
	return errors.New("is a namespace of another program, whose routes the agent does not set; leave namespace out (own), or connect that namespace to two interfaces and use kind: unaware with attach")
}

// Bounds and defaults of a function of kind stream.
const (
	StreamConnectionsDefault = 100_000
	StreamConnectionsMax     = 1 << 20
	StreamBufferDefault      = 1 << 20
	StreamBufferMin          = 16 << 10
	StreamBufferMax          = 16 << 20
	StreamIdleDefault        = 2 * time.Hour
	StreamHalfClosedDefault  = 10 * time.Minute
	StreamLimitMin           = time.Second
	StreamLimitMax           = 30 * 24 * time.Hour
)

// Check checks one function of kind stream by itself, except the contents of its list.
func (s Stream) Check() error {
	switch {
	case s.Attached == Attached{} && len(s.Run) == 0:
		return errors.New("run: has no functions")
	case s.Attached != Attached{} && (len(s.Run) > 0 || len(s.Back) > 0 || s.Early || s.Other != OtherRefuse):
		return errors.New("attached: what goes in plain through a function has no run, no back, no connect: early and no other")
	case s.Attached != Attached{} && (s.Attached.To == "" || s.Attached.From == ""):
		return errors.New("attached: needs two interfaces, to and from")
	case s.Attached != Attached{}:
		if err := s.Attached.Check(); err != nil {
			return fmt.Errorf("attached: %w", err)
		}
	}
	switch {
	case s.Connections < 1 || s.Connections > StreamConnectionsMax:
		return fmt.Errorf("connections: %d is not from 1 to %d", s.Connections, StreamConnectionsMax)
	case s.Buffer < StreamBufferMin || s.Buffer > StreamBufferMax:
		return fmt.Errorf("buffer: %d is not from %d to %d", s.Buffer, StreamBufferMin, StreamBufferMax)
	case s.Idle < StreamLimitMin || s.Idle > StreamLimitMax:
		return fmt.Errorf("idle: %s is not from %s to %s", s.Idle, StreamLimitMin, StreamLimitMax)
	case s.HalfClosed < StreamLimitMin || s.HalfClosed > StreamLimitMax:
		return fmt.Errorf("half-closed: %s is not from %s to %s", s.HalfClosed, StreamLimitMin, StreamLimitMax)
	}
	return nil
}

// Check holds what the place of a function must keep by itself.
func (a Attached) Check() error {
	switch {
	case a.To == a.From:
		return fmt.Errorf("%q is to and from; an intrusive function has two interfaces, since both ends of a plain connection would meet on one", a.To)
	case a.Via.IsValid() && !(a.Via.Is6() && a.Via.IsLinkLocalUnicast() && a.Via.Zone() == ""):
		return fmt.Errorf("via %s is not a link-local address of IPv6; nothing else is routed on the links of an intrusive function: expect one such as fe80::2, which the function has on both", a.Via)
	}
	return nil
}

// StreamLinkPrefix begins the names of the interfaces behind which functions of kind stream are.
const StreamLinkPrefix = "wss-"

// StreamDetour is how packets reach a function of kind stream, and come from it: one
// interface, to a namespace that the agent makes. No header waits for a packet.
func StreamDetour(function string) Proxy {
	link := StreamLinkPrefix + shortName(function)
	return Proxy{
		To: link, From: link,
		Recognise: RecogniseMetadata,
		Segments:  SegmentsKeep,
		Cache:     1,
		Lifetime:  LifetimeDefault,
	}
}

// ChainPart is a piece of a chain between two of its functions of kind stream, or between
// one and an end of the chain.
type ChainPart struct {
	Chain           // in one direction; its ingress and egress are the part's
	From, To string // functions of kind stream; "": the chain's own end
}

// Parts cuts a chain, as one of its directions sees it, at its functions of kind stream.
// A chain without any is one part. node is that of a function.
func (c Chain) Parts(stream func(function string) bool, node func(function string) string) []ChainPart {
	var out []ChainPart
	start := 0 // the part's first function
	p := ChainPart{Chain: c}
	end := func(i int, egress, to string) {
		p.Egress, p.To = egress, to
		p.Functions = c.Functions[start:i]
		p.Arguments, p.Waypoints = nil, nil
		for _, a := range c.Arguments {
			if a.Of >= start && a.Of < i {
				a.Of -= start
				p.Arguments = append(p.Arguments, a)
			}
		}
		for _, w := range c.Waypoints {
			if w.Before >= start && w.Before <= i {
				w.Before -= start
				p.Waypoints = append(p.Waypoints, w)
			}
		}
		out = append(out, p)
	}
	for i, f := range c.Functions {
		if !stream(f) {
			continue
		}
		end(i, node(f), f)
		p = ChainPart{Chain: c, From: f}
		p.Ingress, p.OwnTraffic = []string{node(f)}, false
		start = i + 1
	}
	end(len(c.Functions), c.Egress, "")
	return out
}

// CheckReturn checks the functions that a chain's answers pass: those of kind stream have each connection, so that answers pass
// all of them, the other way round. Other functions may be left out, and further ones visited.
func (c Chain) CheckReturn(stream func(function string) bool) error {
	streams := func(list []string) []string {
		return slices.DeleteFunc(slices.Clone(list), func(f string) bool { return !stream(f) })
	}
	want := streams(c.Functions)
	slices.Reverse(want)
	switch {
	case c.Return == nil:
		return nil
	case !c.Both:
		return errors.New("return is given, and the chain has one direction; set direction: both, or leave return out")
	case len(want) == 0:
		return errors.New("return is given, and no function is of kind stream; answers of other chains pass the same functions: leave return out, or give each direction a chain of its own")
	case c.Onward != nil:
		return errors.New("return is given, and rules of services name the chain, whose answers pass the same functions; leave return out")
	case len(c.Waypoints) > 0:
		return errors.New("return is given, and the chain has waypoints, whose places on the way back are not known; leave return or the waypoints out")
	case len(c.Arguments) > 0:
		return errors.New("return is given, and functions of the chain have arguments, which the visits of the way back would not have; leave return or the arguments out")
	case len(c.Return)+1 > SegmentsMax:
		return fmt.Errorf("return has %d functions; a chain has at most %d, and the egress", len(c.Return), SegmentsMax-1)
	}
	if have := streams(c.Return); !slices.Equal(have, want) {
		got := "none"
		if len(have) > 0 {
			got = strings.Join(have, ", ")
		}
		return fmt.Errorf("return visits functions of kind stream in this order: %s; the connections' answers must pass %s, in this order: give these, and other functions before, between or behind them", got, strings.Join(want, ", "))
	}
	return nil
}

// CheckStreams checks a chain with functions of kind stream.
func (c Chain) CheckStreams(stream func(function string) bool, node func(function string) string) error {
	seen := map[string]bool{}
	for _, f := range c.Functions {
		if !stream(f) {
			continue
		}
		if seen[f] {
			return fmt.Errorf("visits function %s twice, and the connections of the visits could not be distinguished; make a second function of kind stream", f)
		}
		seen[f] = true
	}
	switch {
	case len(seen) == 0:
		return nil
	case !c.Both:
		return errors.New("has functions of kind stream and one direction, so that answers would not reach the function; set direction: both")
	case c.Match.ByMark():
		return errors.New("has functions of kind stream and a match by mark, which answers do not have; match by prefixes, protocol, ports or DSCP")
	case len(c.Ingress) != 1:
		return nil // reported as that
	}
	for _, p := range c.Parts(stream, node) {
		if p.Ingress[0] != p.Egress {
			continue
		}
		from, to := "its ingress", "its egress"
		if p.From != "" {
			from = "function " + p.From
		}
		if p.To != "" {
			to = "function " + p.To
		}
		if p.From != "" && p.To != "" && len(p.Functions) == 0 {
			return fmt.Errorf("goes from %s to %s on the same node, %s; put both into one function, one after the other in run", from, to, p.Egress)
		}
		return fmt.Errorf("begins and ends its part from %s to %s at the same node, %s; a part needs two nodes: put the function on another one", from, to, p.Egress)
	}
	return nil
}
