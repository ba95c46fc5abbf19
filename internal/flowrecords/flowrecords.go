// Package flowrecords makes flow records of IPFIX (RFC 7011) from a node's counters: how many packets
// and bytes a path had in an interval, in each of the node's roles in it, and how many were refused for each reason.
package flowrecords

import (
	"cmp"
	"fmt"
	"hash/fnv"
	"net/netip"
	"time"

	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/ipfix"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/routing"
)

// MessageSize bounds the messages, in bytes: with the headers of UDP and IPv6 they fit the
// least MTU of IPv6 (RFC 8200 5).
const MessageSize = 1280 - 40 - 8

// Values of forwardingStatus (IANA's element 89): the upper two bits are the status, and no lower bit
// gives a reason.
const (
	forwarded = 1 << 6
	dropped   = 2 << 6
)

// Elements of IANA's registry.
var (
	octetDeltaCount              = ipfix.Element{ID: 1, Type: ipfix.Unsigned64}
	packetDeltaCount             = ipfix.Element{ID: 2, Type: ipfix.Unsigned64}
	sourceIPv6Address            = ipfix.Element{ID: 27, Type: ipfix.IPv6Address}
	destinationIPv6Address       = ipfix.Element{ID: 28, Type: ipfix.IPv6Address}
	forwardingStatus             = ipfix.Element{ID: 89, Type: ipfix.Unsigned8}
	applicationDescription       = ipfix.Element{ID: 94, Type: ipfix.String}
	applicationName              = ipfix.Element{ID: 96, Type: ipfix.String}
	flowID                       = ipfix.Element{ID: 148, Type: ipfix.Unsigned64}
	flowStartMilliseconds        = ipfix.Element{ID: 152, Type: ipfix.Milliseconds}
	flowEndMilliseconds          = ipfix.Element{ID: 153, Type: ipfix.Milliseconds}
	observationDomainName        = ipfix.Element{ID: 300, Type: ipfix.String}
	srhActiveSegmentIPv6         = ipfix.Element{ID: 495, Type: ipfix.IPv6Address} // RFC 9487
	srhSegmentIPv6EndpointBehave = ipfix.Element{ID: 502, Type: ipfix.Unsigned16}  // RFC 9487
)

// Own elements, of the enterprise that the operator names.
const (
	ownRole      = 1 // string: headend, endpoint or egress
	ownChain     = 2 // string
	ownDirection = 3 // string: forward or reverse
	ownFrom      = 4 // string: the function that the path starts at
	ownTo        = 5 // string: the function that it ends at
	ownFunction  = 6 // string: the function behind the SID
	ownReason    = 7 // string: why packets were refused
)

// Identifiers of the templates. They stay what they are: filters of collectors name them.
const (
	templatePath    = 256 // a node's role in a path
	templateSRv6    = 257 // a node's role in a path over SRv6, with the active segment
	templateSID     = 258 // likewise, with the behaviour of the node's SID
	templateRefused = 259 // refused packets
)

// Their indexes among the exporter's.
const (
	indexPath = iota
	indexSRv6
	indexSID
	indexRefused
)

// flow is what all templates begin with. The addresses are those of the outer header, or :: where there is none or it is
// not known, and the bytes of refused packets, which nothing counts, are 0: collectors take a record without addresses or bytes for
// no flow.
var flow = []ipfix.Element{
	flowStartMilliseconds, flowEndMilliseconds, observationDomainName, packetDeltaCount, octetDeltaCount, forwardingStatus,
	sourceIPv6Address, destinationIPv6Address,
	applicationName, applicationDescription,
}

// Recorder makes the records of one node. It is not safe for concurrent use.
type Recorder struct {
	exporter *ipfix.Exporter
	node     string
	own      bool      // its own elements, too
	last     time.Time // of the latest sample; zero: there was none
	paths    map[pathKey]count
	refusals map[string]api.Refusal
}

type pathKey struct {
	role, function string
	path           uint32
	sid            netip.Addr
}

type count struct{ frames, bytes uint64 }

// New makes a recorder for a node. The observation domain (RFC 7011 3.1) is a hash of
// instance and node, and does not change with time. enterprise is IANA's private enterprise number of the
// organisation that the elements of waystamp are taken from; 0: records have IANA's elements alone.
func New(node, instance string, enterprise uint32) (*Recorder, error) {
	h := fnv.New32a()
	fmt.Fprintf(h, "%s\x00%s", instance, node)
	domain := cmp.Or(h.Sum32(), 1) // 0 means that no domain is meant
	r := &Recorder{node: node, own: enterprise != 0}
	own := func(ids ...uint16) []ipfix.Element {
		var all []ipfix.Element
		for _, id := range ids {
			if r.own {
				all = append(all, ipfix.Element{ID: id, Enterprise: enterprise, Type: ipfix.String})
			}
		}
		return all
	}
	join := func(id uint16, all ...[]ipfix.Element) ipfix.Template {
		t := ipfix.Template{ID: id, Fields: append([]ipfix.Element(nil), flow...)}
		for _, some := range all {
			t.Fields = append(t.Fields, some...)
		}
		return t
	}
	path := append([]ipfix.Element{flowID}, own(ownRole, ownChain, ownDirection, ownFrom, ownTo, ownFunction)...)
	segment := []ipfix.Element{srhActiveSegmentIPv6}
	var err error
	r.exporter, err = ipfix.NewExporter(domain, MessageSize, []ipfix.Template{
		join(templatePath, path),
		join(templateSRv6, path, segment),
		join(templateSID, path, segment, []ipfix.Element{srhSegmentIPv6EndpointBehave}),
		join(templateRefused, own(ownReason)),
	})
	return r, err
}

// Messages are the messages for what the counters say of the time since the call before. The first
// call has nothing to compare with, and gives the templates alone.
// Where a counter is less than before, its data path has been made anew and has counted from 0.
func (r *Recorder) Messages(now time.Time, n *plan.Node, c api.Counters) ([][]byte, error) {
	outer := outerHeaders(n)
	first, began := r.last.IsZero(), r.last
	paths, refusals := map[pathKey]count{}, map[string]api.Refusal{}
	var records []ipfix.Record
	add := func(template int, d count, status uint64, h header, name, what string, more []any) {
		v := []any{began, now, r.node, d.frames, d.bytes, status, h.source, h.segment, name, what}
		records = append(records, ipfix.Record{Template: template, Values: append(v, more...)})
	}
	for _, p := range c.Paths {
		k := pathKey{role: p.Role, path: p.Path, function: p.Function}
		if p.SID != nil {
			k.sid = *p.SID
		}
		paths[k] = count{p.Frames, p.Bytes}
		d := since(r.paths[k], paths[k])
		if first || d.frames == 0 {
			continue
		}
		more := []any{uint64(p.Path)}
		if r.own {
			more = append(more, p.Role, p.Chain, p.Direction, p.From, p.To, p.Function)
		}
		template, h := indexPath, outer[k]
		switch {
		case h == header{}:
			h = unknown
		case h.behaviour == 0:
			template, more = indexSRv6, append(more, h.segment)
		default:
			template, more = indexSID, append(more, h.segment, uint64(h.behaviour))
		}
		add(template, d, forwarded, h, p.Chain, describe(p), more)
	}
	for _, x := range c.Refusals {
		before := r.refusals[x.Reason]
		refusals[x.Reason] = x
		if first {
			continue
		}
		for _, d := range []struct {
			was, is, status uint64
			what            string
		}{{before.Dropped, x.Dropped, dropped, "refused: "}, {before.Reported, x.Reported, forwarded, "reported: "}} {
			if n := grown(d.was, d.is); n > 0 {
				var more []any
				if r.own {
					more = append(more, x.Reason)
				}
				add(indexRefused, count{frames: n}, d.status, unknown, "", d.what+x.Reason, more)
			}
		}
	}
	messages, err := r.exporter.Messages(now, records)
	if err != nil {
		return nil, err
	}
	r.last, r.paths, r.refusals = now, paths, refusals
	return messages, nil
}

// describe says in words which role in which path a record is about.
func describe(p api.Path) string {
	what := p.Role
	if p.Function != "" {
		what += " " + p.Function
	}
	what += ", " + p.Direction
	if p.From != "" {
		what += ", from " + p.From
	}
	if p.To != "" {
		what += ", to " + p.To
	}
	return what
}

func since(before, now count) count {
	if now.frames < before.frames || now.bytes < before.bytes {
		return now
	}
	return count{now.frames - before.frames, now.bytes - before.bytes}
}

func grown(before, now uint64) uint64 {
	if now < before {
		return now
	}
	return now - before
}

// header is what is known of the outer IPv6 header of a role's packets: as they arrive, or
// at a headend as they leave.
type header struct {
	source    netip.Addr // ::, if the path has several headends
	segment   netip.Addr // the active one, which is the destination too
	behaviour routing.Behaviour
}

var unknown = header{source: netip.IPv6Unspecified(), segment: netip.IPv6Unspecified()}

// outerHeaders has the roles over SRv6 with plain lists. A compressed list has its SIDs in containers, whose
// destination changes at each of them.
func outerHeaders(n *plan.Node) map[pathKey]header {
	all := map[pathKey]header{}
	if n == nil {
		return all
	}
	plain := func(id plan.PathID) bool {
		return id.Encapsulation.Type == model.EncapsulationSRv6 && id.Encapsulation.SIDs != model.SIDsCompressed
	}
	only := func(sources []netip.Addr) netip.Addr {
		if len(sources) == 1 {
			return sources[0]
		}
		return netip.IPv6Unspecified()
	}
	for _, h := range n.Headends {
		if plain(h.PathID) && len(h.Segments) > 0 {
			all[pathKey{role: "headend", path: h.Path}] = header{source: n.Address, segment: h.Segments[0]}
		}
	}
	for _, e := range n.Endpoints {
		if plain(e.PathID) {
			all[pathKey{"endpoint", e.Function, e.Path, e.SID}] = header{only(e.Sources), e.SID, routing.Codepoint(e.Behaviour)}
		}
	}
	for _, e := range n.Egresses {
		if plain(e.PathID) {
			all[pathKey{role: "egress", path: e.Path, sid: e.SID}] = header{only(e.Sources), e.SID, routing.EndDT46}
		}
	}
	return all
}
