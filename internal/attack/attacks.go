package attack

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/agent"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/lab"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/mpls"
	"github.com/waystamp/waystamp/internal/netfilter"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/pot"
	"github.com/waystamp/waystamp/internal/srv6"
)

// attack is one entry of the list.
type attack struct {
	Attack
	mount  func(context.Context, *mounting) error
	expect func(model.Scheme) outcome
}

// The attackers.
const (
	onLink  = "somebody on core links"
	onBoth  = "somebody on both links of r2"
	insider = "r3 itself"
	outside = "a host outside"
	inside  = "root of the function's namespace on r2"
	worker  = "the process of a function on byte streams on r2"
)

// The ends of sentences that explanations have.
const (
	nothingFits   = "nothing that was tried gives the values of this packet"
	neverStamped  = "r2 (fw) never stamped this packet"
	withoutHeader = "a function sent a packet, and no header is kept for it"
)

// always is one outcome for every scheme; $ in its explanation stands for the scheme.
func always(o outcome) func(model.Scheme) outcome {
	return func(s model.Scheme) outcome {
		o := o
		o.says = strings.ReplaceAll(o.says, "$", s.String())
		return o
	}
}

// but replaces the outcome for one scheme.
func but(s model.Scheme, o outcome, rest func(model.Scheme) outcome) func(model.Scheme) outcome {
	return func(is model.Scheme) outcome {
		if is == s {
			return always(o)(is)
		}
		return rest(is)
	}
}

func attacks() []attack {
	last := func(do func(*mounting, srv6.Packet) []lab.Sent) func(context.Context, *mounting) error {
		return inFlight("r3", do)
	}
	proof := func(says string) func(model.Scheme) outcome { return always(refused("r6", "proof", says)) }
	edit := func(do func(*srv6.Proof)) func(*mounting, srv6.Packet) []lab.Sent {
		return func(_ *mounting, p srv6.Packet) []lab.Sent { return whole(p.WithProof(do)) }
	}
	return []attack{
		{Attack{"skip-hop", "a packet is sent past r2; its segment list is left as it is", onLink},
			inFlight("r1", func(_ *mounting, p srv6.Packet) []lab.Sent { return whole(p.AtSegment(1)) }),
			proof(neverStamped)},
		{Attack{"reorder-hops", "a packet visits r3 before r2; its segment list is left as it is", onLink},
			reorder,
			but(model.SchemePoT, delivered(), proof("r3 (dpi) stamped this packet before r2 (fw)"))},
		{Attack{"visit-twice", "a packet visits r2 twice", onLink},
			visitTwice,
			proof("r2 (fw) stamped this packet twice")},
		{Attack{"extra-hop", "a packet takes a detour over another router, which does not stamp", onLink},
			detour,
			always(delivered())},
		{Attack{"splice", "a packet of chain b gets the complete proof of a packet of chain a", onLink},
			splice,
			but(model.SchemeKeyedFlow, refused("r6", "proof", nothingFits),
				proof("this packet carries the stamps of chain $-a, while its proof names chain $-b"))},
		{Attack{"replay", "a whole packet is sent again", onLink},
			replay,
			always(refused("r6", "replay", "has been here before"))},
		{Attack{"replay-late", "a packet that was held back is sent when 1100 younger ones have passed", onLink},
			late,
			always(refused("r6", "stale", "is older than the numbers in the replay window"))},
		{Attack{"preplay", "the complete proof of a packet that was held back is put on another payload to another port", onLink},
			preplay(otherPort),
			but(model.SchemeKeyedFlow, refused("r6", "proof", "its destination port was 4242, here it is 4243"), always(delivered()))},
		{Attack{"preplay-same-flow", "the same, on another payload of the same flow", onLink},
			preplay(servicePort),
			always(delivered())},
		{Attack{"cml-bit", "a bit of CML is flipped", onLink},
			last(edit(func(v *srv6.Proof) { v.CML ^= 1 << 17 })),
			proof("bit 17 of its CML was changed")},
		{Attack{"rnd-bit", "a bit of RND is flipped", onLink},
			inFlight("r1", edit(func(v *srv6.Proof) { v.RND ^= 1 << 3 })),
			proof("bit 3 of its RND was changed")},
		{Attack{"list-edited", "the segment list is edited, the proof left as it is", onLink},
			last(func(_ *mounting, p srv6.Packet) []lab.Sent { return whole(otherList(p)) }),
			always(refused("r6", "segments", "its segment list says fc00:0:0:400::, r3 (dpi)"))},
		{Attack{"list-restored", "the segment list is edited, and put back before the egress", onLink},
			restoredList,
			always(delivered())},
		{Attack{"path-flip", "the proof names another path", onLink},
			last(edit(func(v *srv6.Proof) { v.Path ^= 1 })),
			always(refused("r6", "unknown-path", "which no chain has"))},
		{Attack{"epoch-flip", "the proof names another epoch", onLink},
			last(edit(func(v *srv6.Proof) { v.Epoch += 7 })),
			always(refused("r6", "unknown-epoch", "this packet carries the stamps of epoch"))},
		{Attack{"scheme-flip", "the proof names another scheme", onLink},
			last(edit(func(v *srv6.Proof) { v.Scheme = (v.Scheme + 1) % 4 })),
			always(refused("r6", "scheme", "but chain $-a has $"))},
		{Attack{"rnd-not-below-p", "RND is made as large as the prime, or larger", insider},
			last(largeRND),
			func(s model.Scheme) outcome {
				if s.Keyed() {
					return refused("r6", "proof", "bit 63 of its RND was changed")
				}
				return refused("r6", "range", "which is not below the prime")
			}},
		{Attack{"zero", "RND and CML are made zero", onLink},
			last(edit(func(v *srv6.Proof) { v.RND, v.CML = 0, 0 })),
			proof("this packet carries no stamp, not even that of its headend")},
		{Attack{"tlv-missing", "the proof is taken off", onLink},
			last(func(_ *mounting, p srv6.Packet) []lab.Sent {
				return whole(p.WithSRH(func(s *srv6.SRH) { s.TLVs = nil }))
			}),
			always(refused("r6", "tlv-missing", "there is no proof TLV"))},
		{Attack{"tlv-doubled", "the proof is there twice", onLink},
			last(func(_ *mounting, p srv6.Packet) []lab.Sent {
				return whole(p.WithSRH(func(s *srv6.SRH) { s.TLVs = append(s.TLVs, s.TLVs...) }))
			}),
			always(refused("r6", "tlv-duplicate", "there is more than one proof TLV"))},
		{Attack{"tlv-truncated", "the last 8 bytes of the proof are cut off", onLink},
			last(truncateTLV),
			always(refused("r6", "tlv-overrun", "a TLV runs past the end"))},
		{Attack{"tlv-mistyped", "the proof gets another type", onLink},
			last(func(_ *mounting, p srv6.Packet) []lab.Sent {
				return whole(p.WithSRH(func(s *srv6.SRH) { s.TLVs[0].Type = 124 }))
			}),
			always(refused("r6", "tlv-missing", "there is no proof TLV"))},
		{Attack{"forged-stamp", "up to 512 packets are looked at on both links of r2, then one is stamped in its place", onBoth},
			forge,
			func(s model.Scheme) outcome {
				if s.Keyed() {
					return refused("r6", "proof", nothingFits)
				}
				return delivered()
			}},
		{Attack{"plain", "a packet that a chain requires comes without any outer header", onLink},
			last(func(_ *mounting, p srv6.Packet) []lab.Sent { return asIs(p.Payload) }),
			always(refused("r6", "unproven", "which chain $-a requires, came without proof"))},
		{Attack{"back-door", "the same, into the egress node by an interface that is not in its plan", "somebody on another link of r6"},
			backDoor,
			always(refused("r6", "unverified", "without having been verified"))},
		{Attack{"tagged-back-door", "the same, behind two priority tags, through a bridge that the egress's edge interface is in", "somebody on a bridge at r6"},
			taggedBackDoor,
			always(refused("r6", "vlan-tags", "has VLAN tags that hide its contents"))},
		{Attack{"foreign-source", "the outer source is changed to an address that is no headend's", onLink},
			last(func(_ *mounting, p srv6.Packet) []lab.Sent {
				p.Header.Source = netip.MustParseAddr("fc00:4::1")
				return whole(p)
			}),
			always(refused("r6", "source", "the outer source is not a headend"))},
		{Attack{"wrong-chain", "the complete proof of a packet of chain a is put around a packet of chain b", onLink},
			wrongChain,
			but(model.SchemeKeyedFlow, refused("r6", "proof", nothingFits),
				always(refused("r6", "wrong-chain", "came with a proof of chain $-a, but chain $-b takes it")))},
		{Attack{"inner-length", "the inner packet gets a payload length that takes 8 bytes more than there are", onLink},
			last(func(_ *mounting, p srv6.Packet) []lab.Sent {
				p.Payload = bytes.Clone(p.Payload)
				length := p.Payload[4:6]
				binary.BigEndian.PutUint16(length, binary.BigEndian.Uint16(length)+8)
				return whole(p)
			}),
			always(refused("r6", "ip6-length", "does not fit the packet or header that contains it"))},
		{Attack{"outside-sid", "a host sends to a SID", outside},
			fromOutside(func(m *mounting) (srv6.Packet, error) {
				return m.plain(m.chain("a").Hops[1].SID), nil
			}),
			always(refused("r1", "outside-sid", "a packet from outside is addressed to the SID block"))},
		{Attack{"outside-srh", "a host sends a segment routing header", outside},
			fromOutside(func(m *mounting) (srv6.Packet, error) {
				p := m.plain(m.address("h2"))
				p.SRH = &srv6.SRH{NextHeader: p.Header.NextHeader, Segments: []netip.Addr{p.Header.Destination}}
				return p, nil
			}),
			always(refused("r1", "outside-srh", "a packet from outside carries a segment routing header"))},
		{Attack{"outside-source", "a host sends to h2 from an address of the SID block", outside},
			fromOutside(func(m *mounting) (srv6.Packet, error) {
				p := m.plain(m.address("h2"))
				p.Header.Source = m.chain("a").Hops[1].SID.Next()
				return p, nil
			}),
			always(refused("r1", "outside-source", "a packet from outside has a source in the SID block"))},
		{Attack{"hidden-protocol", "a host puts a Fragment header and destination options before what chain c takes, to get it into chain a", outside},
			hiddenProtocol,
			always(refused("r1", "ports-unread", "another chain, by protocol or ports, could take this packet"))},
		{Attack{"outside-captured", "a host sends a whole packet that was captured inside, from an address of the domain", outside},
			capturedOutside,
			always(refused("r1", "outside-sid", "a packet from outside is addressed to the SID block"))},
		{Attack{"forged-argument", "a packet of chain d gets another argument in the SID of its function", onLink},
			forgedArgument,
			always(refused("r2", "argument", "the argument of the SID differs from the plan's"))},
		{Attack{"function-index", "a packet is sent from the namespace of chain d's function, with an index that no packet in it has", inside},
			fromFunction(forgedIndex),
			always(refused("r2", "not-cached", withoutHeader))},
		{Attack{"function-chain", "a packet of chain b is sent from the namespace of chain d's function", inside},
			fromFunction(func(_ context.Context, m *mounting) ([]lab.Sent, error) {
				return asIs(udp(m.host(), m.service("h3", servicePort), []byte(m.tag))), nil
			}),
			always(refused("r2", "origin-unmatched", "a function made this packet itself, and no chain through the function takes it"))},
		{Attack{"function-srh", "a whole packet that was held back on the last link, with its SRH and proof, is sent from the namespace of chain d's function", inside},
			fromFunction(func(ctx context.Context, m *mounting) ([]lab.Sent, error) {
				p, err := m.capture(ctx, m.tag, true)
				return whole(p), err
			}),
			always(refused("r2", "outside-sid", "a packet from outside is addressed to the SID block"))},
		{Attack{"function-made", "a packet of chain d is sent from the namespace of its function, and was at no headend", inside},
			fromFunction(func(_ context.Context, m *mounting) ([]lab.Sent, error) { return asIs(m.ofFunction()), nil }),
			always(delivered())},
		{Attack{"function-as-whole", "the complete proof of such a packet is put where a packet of chain d has that of the whole chain", onLink},
			madeAsWhole,
			proof("this packet carries the stamps of chain $-d from nf on, while its proof names chain $-d")},
		{Attack{"function-as-chain", "the complete proof of such a packet is put around a packet of chain b", onLink},
			madeAroundOther,
			but(model.SchemeKeyedFlow, refused("r6", "proof", nothingFits),
				always(refused("r6", "wrong-chain", "but chain $-b takes it")))},
		{Attack{"node-plain", "a packet that chain i requires comes without any outer header to r3, whose own netfilter is a function of the chain", onLink},
			toNodesOwn,
			always(refused("r3", "not-cached", withoutHeader))},
		labelled("labels-skip-hop", "a packet with labels is sent past r2", "r1", pastLabels, proof(neverStamped)),
		labelled("labels-node", "the label of r2 is changed to that of r3", "r1", func(m *mounting, p mpls.Packet) []lab.Sent {
			return stacked(relabelled(p, 0, m.labels("e")[1].NodeLabel))
		}, always(refused("r3", "unknown-sid", "the service label of a packet is that of r2 (fw), which r3 has not"))),
		labelled("labels-service", "the service label of a visit is changed to that of chain f on the same node", "r1", func(m *mounting, p mpls.Packet) []lab.Sent {
			return stacked(relabelled(p, serviceAt, m.labels("f")[0].ServiceLabel))
		}, always(refused("r2", "unknown-path", "names chain $-e, which has another SID there"))),
		labelled("labels-bottom", "the bottom of the stack is moved up to the first service label", "r1", func(_ *mounting, p mpls.Packet) []lab.Sent {
			p.Stack = slices.Clone(p.Stack)
			p.Stack[serviceAt] = p.Stack[serviceAt].WithBottom(true)
			p.Stack[len(p.Stack)-1] = p.Stack[len(p.Stack)-1].WithBottom(false)
			return stacked(p)
		}, always(refused("r2", "word-version", "a label stack is not followed by a word"))),
		labelled("labels-entropy", "the entropy label is forged", "r1", func(_ *mounting, p mpls.Packet) []lab.Sent {
			return stacked(relabelled(p, serviceAt-1, p.Stack[serviceAt-1].Label()^0x5a5a0|16))
		}, always(delivered())),
		{Attack{"labels-replay", "a whole packet with labels is sent again", onLink},
			replayLabels,
			always(refused("r6", "replay", "has been here before"))},
		{Attack{"labels-wrong-chain", "labels and the complete proof of a packet of chain e are put around a packet of chain f", onLink},
			wrongChainLabels,
			but(model.SchemeKeyedFlow, refused("r6", "proof", nothingFits),
				always(refused("r6", "wrong-chain", "came with a proof of chain $-e, but chain $-f takes it")))},
		{Attack{"labels-outside", "a host sends a whole packet with labels that was captured inside", outside},
			labelsOutside,
			always(refused("r1", "outside-mpls", "a packet from outside has labels"))},
		labelledTo("labels-function-skip", "a packet of chain j with labels is sent past r2, where its function is", "r1", toFunction, pastLabels,
			proof("r2 (nf) never stamped this packet")),
		labelledTo("labels-function-forged", "a packet of chain j gets another stamp before its function, which takes it without its labels", "r1", toFunction,
			func(_ *mounting, p mpls.Packet) []lab.Sent {
				return stacked(withValues(p, func(v *srv6.Proof) { v.CML ^= 5 << 17 }))
			}, proof(nothingFits)),
		labelledTo("labels-function-plain", "the labels of a packet of chain j are taken off before its function", "r1", toFunction,
			func(_ *mounting, p mpls.Packet) []lab.Sent { return asIs(p.Payload) },
			always(refused("r6", "unproven", "which chain $-j requires, came without proof"))),
		{Attack{"labels-function-chain", "a packet of chain f is sent from the namespace of chain j's function", inside},
			fromFunctionOf(labelFilterPort, func(_ context.Context, m *mounting) ([]lab.Sent, error) {
				return asIs(udp(m.host(), m.service("h3", labelPort), []byte(m.tag))), nil
			}),
			always(refused("r2", "origin-unmatched", "a function made this packet itself, and no chain through the function takes it"))},
		{Attack{"labels-function-made", "a packet of chain j is sent from the namespace of its function, and was at no headend", inside},
			fromFunctionOf(labelFilterPort, func(_ context.Context, m *mounting) ([]lab.Sent, error) {
				return asIs(udp(m.host(), m.service("h2", labelFilterPort), []byte(m.tag))), nil
			}),
			always(delivered())},
		labelledTo("labels-own-skip-hop", "a packet that r1 itself sends, of chain k with labels, is sent past r2", "r1", ownTraffic, pastLabels, proof(neverStamped)),
		labelledTo("labels-own-plain", "the labels of a packet that r1 itself sends are taken off", "r1", ownTraffic,
			func(_ *mounting, p mpls.Packet) []lab.Sent { return asIs(p.Payload) },
			always(refused("r6", "unproven", "which chain $-k requires, came without proof"))),
		{Attack{"stream-plain", "data of a connection that is open comes to the function on byte streams without any outer header", onLink},
			plainSegment("r2", tcpACK|tcpPSH),
			always(refused("r2", "unproven", "which chain $-g requires, came without proof"))},
		{Attack{"stream-reset", "a RST of a connection that is open comes to the function without any outer header", onLink},
			plainSegment("r2", tcpRST),
			always(refused("r2", "unproven", "which chain $-g requires, came without proof"))},
		{Attack{"stream-plain-answer", "an answer on a connection that is open comes to the function in the same way", onLink},
			plainAnswer("r2"),
			always(refused("r2", "unproven", "which chain $-g (reverse) requires, came without proof"))},
		{Attack{"stream-plain-egress", "data of a connection that is open comes to the chain's egress without any outer header", onLink},
			plainSegment("r6", tcpACK|tcpPSH),
			always(refused("r6", "unproven", "which chain $-g from tap on requires, came without proof"))},
		{Attack{"stream-plain-client", "an answer on a connection that is open comes to the egress before the client without any outer header", onLink},
			plainAnswer("r1"),
			always(refused("r1", "unproven", "which chain $-g (reverse) from tap on requires, came without proof"))},
		{Attack{"stream-back-door", "data of a connection that is open comes into the egress node by an interface that is not in its plan", "somebody on another link of r6"},
			segmentBackDoor,
			always(refused("r6", "unverified", "without having been verified"))},
		{Attack{"stream-unopened", "a host sends data of a connection that it has not opened", outside},
			func(_ context.Context, m *mounting) error { return m.fromHost(asIs(unopened(m))) },
			always(refused("r2", "stream-unknown", "belongs to no connection that was opened through its chain"))},
		{Attack{"stream-wrong-chain", "data of a connection of chain g comes with the complete proof of a packet of chain h, to the same function", onLink},
			ofConnection(func(ctx context.Context, m *mounting, n numbers) error {
				p, err := m.heldSegment(ctx, "h3", n.segment(tcpACK|tcpPSH, m.tag))
				if err != nil {
					return err
				}
				return m.inject(whole(p))
			}),
			but(model.SchemeKeyedFlow, refused("r2", "proof", nothingFits), always(refused("r2", "wrong-chain", "came with a proof of chain $-h")))},
		{Attack{"stream-wrong-syn", "a SYN for chain g comes with the complete proof of a packet of chain h, to the same function", onLink},
			func(ctx context.Context, m *mounting) error {
				p, err := m.heldSegment(ctx, "h3", tcp(m.service(m.scheme.String(), neverOpened), m.service("h2", streamPort), 1, 0, tcpSYN, []byte(m.tag)))
				if err != nil {
					return err
				}
				return m.inject(whole(p))
			},
			but(model.SchemeKeyedFlow, refused("r2", "proof", nothingFits), always(refused("r2", "wrong-chain", "came with a proof of chain $-h")))},
		{Attack{"stream-replay", "a whole packet of a connection is sent to the function again", onLink},
			replaySegment,
			always(refused("r2", "replay", "has been here before"))},
		{Attack{"stream-replay-all", "all packets of a connection, from its SYN to its end, are sent to the function again", onLink},
			replayConnection,
			always(refused("r2", "replay", "has been here before"))},
		{Attack{"stream-other-reset", "a RST of a connection that is open comes with the complete proof of a packet of another connection of its chain", onLink},
			otherReset,
			but(model.SchemeKeyedFlow, refused("r2", "proof", "its source port was"), always(delivered()))},
		{Attack{"stream-other-data", "a packet of a connection is held back, and sent on with other data of the same length", onLink},
			otherData,
			always(delivered())},
		{Attack{"stream-past", "a packet that is on its way to the function is sent to the chain's egress instead", onLink},
			ofConnection(pastFunction),
			always(refused("r6", "unknown-path", "names chain $-g"))},
		{Attack{"stream-worker", "the function's process sends data of a connection that nobody has opened", worker},
			fromWorker(unopened),
			always(refused("r2", "stream-unknown", "belongs to no connection that was opened through its chain"))},
		{Attack{"stream-worker-udp", "the function's process sends a datagram", worker},
			fromWorker(func(m *mounting) []byte { return udp(m.host(), m.service("h2", servicePort), []byte(m.tag)) }),
			always(refused("r2", "stream-not-tcp", "is not TCP"))},
		{Attack{"stream-worker-sid", "the function's process sends data to a SID", worker},
			fromWorker(func(m *mounting) []byte { return unopenedTo(m, m.chain("a").Hops[1].SID) }),
			always(refused("r2", "stream-unknown", "belongs to no connection that was opened through its chain"))},
		{Attack{"stream-worker-srh", "the function's process sends a whole packet that was held back on the last link, with its SRH and proof", worker},
			workerSRH,
			always(refused("r2", "stream-not-tcp", "is not TCP"))},
		{Attack{"stream-worker-neighbour", "the function's process says by neighbour discovery that it has the node's address", worker},
			fromWorker(advertisement),
			always(refused("r2", "stream-not-tcp", "is not TCP"))},
		{Attack{"stream-worker-data", "the function's process sends data of its own on a connection that is open", worker},
			workerData,
			always(delivered())},
		// The last attacks, since they change the secrets of paths.
		{Attack{"labels-stale-epoch", "a whole packet with labels that was held back is sent when the path has a new epoch", onLink},
			staleEpochLabels,
			always(refused("r6", "unknown-epoch", "names epoch"))},
		{Attack{"stale-epoch", "a whole packet that was held back is sent when the path has a new epoch", onLink},
			staleEpoch,
			always(refused("r6", "unknown-epoch", "names epoch"))},
	}
}

// mounting is one attack on one scheme while it is mounted.
type mounting struct {
	*stage
	scheme model.Scheme
	tag    string // in the payload of the attack's packets
	ends   int    // of packets with the tag: the last is the one that counts
	// after restores the lab when the packet has arrived or was refused; nil: no change.
	after func() error
}

// chain is a chain of the scheme, in the epoch that its headend has.
func (m *mounting) chain(name string) plan.Path {
	var found plan.Path
	for _, p := range m.paths {
		if p.Chain == m.scheme.String()+"-"+name && p.Epoch >= found.Epoch {
			found = p
		}
	}
	return found
}

// host is where the scheme's traffic comes from.
func (m *mounting) host() netip.AddrPort { return m.service(m.scheme.String(), servicePort) }

// send sends a datagram from the scheme's host, as any program does.
func (m *mounting) send(payload string, to netip.AddrPort) error {
	_, err := m.senders[m.scheme].WriteToUDPAddrPort([]byte(payload), to)
	return err
}

// honest sends a datagram that nothing is done to, and waits for it.
func (m *mounting) honest(ctx context.Context) error {
	m.count++
	tag := fmt.Sprintf("<honest %s %d>", m.scheme, m.count)
	if err := m.send(tag, m.service("h2", servicePort)); err != nil {
		return err
	}
	end, err := m.await(ctx, tag, 1)
	if err == nil && end.host == "" {
		err = fmt.Errorf("an honest packet was refused at %s: %s: %s", end.event.Node, end.event.Reason, m.explained(end.event))
	}
	return err
}

// alter has do done to packets with a tag that come to the router from one
// neighbour, and to no others.
func (m *mounting) alter(tag string, do map[string]func(p srv6.Packet, raw []byte) []lab.Sent) {
	m.router.Set(func(from string, p srv6.Packet, raw []byte) []lab.Sent {
		if f := do[from]; f != nil && bytes.Contains(p.Payload, []byte(tag)) {
			return f(p, raw)
		}
		return asIs(raw)
	})
}

// inFlight changes one packet of chain a as it comes from a neighbour.
func inFlight(from string, do func(*mounting, srv6.Packet) []lab.Sent) func(context.Context, *mounting) error {
	return func(_ context.Context, m *mounting) error {
		m.alter(m.tag, map[string]func(srv6.Packet, []byte) []lab.Sent{
			from: func(p srv6.Packet, _ []byte) []lab.Sent { return do(m, p) },
		})
		return m.send(m.tag, m.service("h2", servicePort))
	}
}

// capture sends a datagram and takes the packet on its last link. keep: it does
// not arrive.
func (m *mounting) capture(ctx context.Context, payload string, keep bool) (srv6.Packet, error) {
	took := make(chan srv6.Packet, 1)
	m.alter(payload, map[string]func(srv6.Packet, []byte) []lab.Sent{
		"r3": func(p srv6.Packet, raw []byte) []lab.Sent {
			select {
			case took <- p:
			default: // the kernel's copy of it: none
			}
			if keep {
				return nil
			}
			return asIs(raw)
		},
	})
	defer m.router.Set(nil)
	if err := m.send(payload, m.service("h2", servicePort)); err != nil {
		return srv6.Packet{}, err
	}
	select {
	case p := <-took:
		return p, nil
	case <-time.After(verdictTime):
		return srv6.Packet{}, errors.New("no packet of chain a came to its last link")
	case <-ctx.Done():
		return srv6.Packet{}, context.Cause(ctx)
	}
}

// inject sends packets from the router.
func (m *mounting) inject(out []lab.Sent) error {
	if len(out) == 0 {
		return errors.New("the attack made no packet")
	}
	for _, s := range out {
		m.router.Send(s)
	}
	return nil
}

func reorder(_ context.Context, m *mounting) error {
	to := func(left uint8) func(srv6.Packet, []byte) []lab.Sent {
		return func(p srv6.Packet, _ []byte) []lab.Sent { return whole(p.AtSegment(left)) }
	}
	m.alter(m.tag, map[string]func(srv6.Packet, []byte) []lab.Sent{"r1": to(1), "r3": to(2), "r2": to(0)})
	return m.send(m.tag, m.service("h2", servicePort))
}

func visitTwice(_ context.Context, m *mounting) error {
	again := true
	m.alter(m.tag, map[string]func(srv6.Packet, []byte) []lab.Sent{"r2": func(p srv6.Packet, raw []byte) []lab.Sent {
		if again {
			again = false
			return whole(p.AtSegment(2))
		}
		return asIs(raw)
	}})
	return m.send(m.tag, m.service("h2", servicePort))
}

// detour: x routes the packet, and by its routes back to where it came from.
func detour(_ context.Context, m *mounting) error {
	m.alter(m.tag, map[string]func(srv6.Packet, []byte) []lab.Sent{"r2": func(_ srv6.Packet, raw []byte) []lab.Sent {
		return []lab.Sent{{Packet: raw, To: "x"}}
	}})
	return m.send(m.tag, m.service("h2", servicePort))
}

func splice(ctx context.Context, m *mounting) error {
	a, err := m.capture(ctx, "<held back "+m.tag[1:], true)
	if err != nil {
		return err
	}
	stolen, _ := a.Proof()
	m.alter(m.tag, map[string]func(srv6.Packet, []byte) []lab.Sent{"r3": func(p srv6.Packet, _ []byte) []lab.Sent {
		return whole(p.WithProof(func(v *srv6.Proof) { v.RND, v.CML = stolen.RND, stolen.CML }))
	}})
	return m.send(m.tag, m.service("h3", servicePort))
}

func replay(ctx context.Context, m *mounting) error {
	p, err := m.capture(ctx, m.tag, false)
	if err != nil {
		return err
	}
	if end, err := m.await(ctx, m.tag, 1); err != nil || end.host == "" {
		return errors.Join(err, errors.New("the packet was not delivered the first time"))
	}
	m.ends = 2
	return m.inject(whole(p))
}

// Sizes of late: more than a replay window remembers by default.
const (
	youngerLeast = 1100
	youngerTries = 10
)

// late holds a packet back until younger ones of the same lane have gone beyond
// the replay window. A lane is a CPU of the headend, which over veth is the
// sender's; should packets go another way all the same, it begins again.
func late(ctx context.Context, m *mounting) error {
	return m.lab.Do(m.scheme.String(), func() error {
		return host.OnCPU(host.AnyCPU, func() error { return holdBack(ctx, m) })
	})
}

func holdBack(ctx context.Context, m *mounting) error {
	defer m.router.Listen(nil)
	base := m.tag[:len(m.tag)-1]
	for try := range youngerTries {
		m.tag = fmt.Sprintf("%s try %d>", base, try)
		p, err := m.capture(ctx, m.tag, true)
		if err != nil {
			return err
		}
		held, _ := p.Proof()
		var younger atomic.Int64
		m.router.Listen(func(from string, q srv6.Packet) {
			// Masks are the same for all, so that lanes compare as they are.
			if v, ok := q.Proof(); ok && from == "r3" && v.Path == held.Path && v.RND>>42 == held.RND>>42 {
				younger.Add(1)
			}
		})
		for sent := 0; sent < youngerLeast+tapBatch; sent += tapBatch {
			for i := range tapBatch {
				if err := m.send(fmt.Sprintf("<younger %d of %s", sent+i, m.tag[1:]), m.service("h2", servicePort)); err != nil {
					return err
				}
			}
			for i := range tapBatch {
				if _, err := m.await(ctx, fmt.Sprintf("<younger %d of %s", sent+i, m.tag[1:]), 1); err != nil {
					return err
				}
			}
		}
		if younger.Load() >= youngerLeast {
			return m.inject(whole(p))
		}
	}
	return errors.New("the headend's CPU changed all the time")
}

// preplay puts another datagram behind the outer header of one that was held
// back.
func preplay(port uint16) func(context.Context, *mounting) error {
	return func(ctx context.Context, m *mounting) error {
		p, err := m.capture(ctx, "held back", true)
		if err != nil {
			return err
		}
		p.Payload = udp(m.host(), m.service("h2", port), []byte(m.tag))
		return m.inject(whole(p))
	}
}

func wrongChain(ctx context.Context, m *mounting) error {
	p, err := m.capture(ctx, "held back", true)
	if err != nil {
		return err
	}
	p.Payload = udp(m.host(), m.service("h3", servicePort), []byte(m.tag))
	return m.inject(whole(p))
}

// otherList is the packet with a segment that it has visited replaced.
func otherList(p srv6.Packet) srv6.Packet {
	return p.WithSRH(func(s *srv6.SRH) { s.Segments[2] = netip.MustParseAddr("fc00:0:0:400::") })
}

func restoredList(_ context.Context, m *mounting) error {
	var was netip.Addr
	m.alter(m.tag, map[string]func(srv6.Packet, []byte) []lab.Sent{
		"r2": func(p srv6.Packet, _ []byte) []lab.Sent {
			was = p.SRH.Segments[2]
			return whole(otherList(p))
		},
		"r3": func(p srv6.Packet, _ []byte) []lab.Sent {
			return whole(p.WithSRH(func(s *srv6.SRH) { s.Segments[2] = was }))
		},
	})
	return m.send(m.tag, m.service("h2", servicePort))
}

// largeRND is possible for r3, which has prime and mask: the sum stays right.
func largeRND(m *mounting, p srv6.Packet) []lab.Sent {
	return whole(p.WithProof(func(v *srv6.Proof) {
		if m.scheme.Keyed() {
			v.RND |= 1 << 63
			return
		}
		own := m.chain("a").Shares[2].Polynomial
		v.RND = (v.RND ^ own.Down.RND) + own.Prime ^ own.Down.RND
	}))
}

func truncateTLV(_ *mounting, p srv6.Packet) []lab.Sent {
	out := whole(p)
	if len(out) == 0 {
		return nil
	}
	const cut = 8
	b := out[0].Packet
	end := srv6.IPv6Len + 8*(int(b[srv6.IPv6Len+1])+1) // of the SRH
	b = append(b[:end-cut:end-cut], b[end:]...)
	b[srv6.IPv6Len+1] -= cut / 8
	length := len(b) - srv6.IPv6Len
	b[4], b[5] = byte(length>>8), byte(length)
	return asIs(b)
}

// Sizes of the wiretap.
const (
	tapBatch = 64
	tapLeast = 32
	tapMost  = 512
	// Of another CPU of the headend nothing may have been learned yet; its
	// packets are let go.
	forgeTries = 300
)

// wiretap has the packets of chain a seen on both links of r2, by the CPU of the headend that
// numbered them: the upper bits of RND identify it.
type wiretap struct {
	seen  map[uint64][]tapped // by rnd >> 42, in the order on the link to r2
	index map[string]place    // by the inner packet
}

type place struct {
	lane uint64
	at   int
}

func (w *wiretap) listen(path uint32) func(from string, p srv6.Packet) {
	return func(from string, p srv6.Packet) {
		v, ok := p.Proof()
		if !ok || v.Path != path {
			return
		}
		inside, now := string(p.Payload), values{v.RND, v.CML}
		switch from {
		case "r1":
			lane := v.RND >> 42
			w.index[inside] = place{lane, len(w.seen[lane])}
			w.seen[lane] = append(w.seen[lane], tapped{in: now})
		case "r2":
			if at, ok := w.index[inside]; ok {
				w.seen[at.lane][at.at].out = now
			}
		}
	}
}

// learn returns forgers for the lanes with enough packets. Each was tried on packets from which
// it was not learned.
func (w *wiretap) learn() map[uint64]forger {
	found := map[uint64]forger{}
	for lane, seen := range w.seen {
		if len(seen) < tapLeast {
			continue
		}
		half := len(seen) - tapLeast/2
		for _, how := range []func([]tapped) (forger, error){learnPlain, learnMasked} {
			f, err := how(seen[:half])
			for i := half; err == nil && i < len(seen); i++ {
				if f(seen[i].in, i) != seen[i].out {
					err = errNothingLearned
				}
			}
			if err == nil {
				found[lane] = f
			}
		}
	}
	return found
}

// guess goes on from the last two stamps before a packet as if all were on a
// line.
func (w *wiretap) guess(lane uint64) forger {
	return func(in values, number int) values {
		last, before := w.seen[lane][number-1].out.cml, w.seen[lane][number-2].out.cml
		return values{in.rnd, 2*last - before}
	}
}

// forge observes packets on both links of r2 until it can compute stamps of r2, or else guesses.
func forge(ctx context.Context, m *mounting) error {
	w := &wiretap{seen: map[uint64][]tapped{}, index: map[string]place{}}
	m.router.Listen(w.listen(m.chain("a").Path))
	defer m.router.Listen(nil)
	forgers := map[uint64]forger{}
	for n := 0; n < tapMost && len(forgers) == 0; n += tapBatch {
		for i := range tapBatch {
			if err := m.send(fmt.Sprintf("<tapped %d of %s", n+i, m.tag[1:]), m.service("h2", servicePort)); err != nil {
				return err
			}
		}
		for i := range tapBatch {
			if _, err := m.await(ctx, fmt.Sprintf("<tapped %d of %s", n+i, m.tag[1:]), 1); err != nil {
				return err
			}
		}
		forgers = w.learn() // nothing is under way
	}
	guessing := len(forgers) == 0
	base := m.tag[:len(m.tag)-1]
	for try := range forgeTries {
		m.tag = fmt.Sprintf("%s try %d>", base, try)
		forged := make(chan bool, 1)
		m.alter(m.tag, map[string]func(srv6.Packet, []byte) []lab.Sent{"r1": func(p srv6.Packet, raw []byte) []lab.Sent {
			at := w.index[string(p.Payload)]
			f := forgers[at.lane]
			if guessing && at.at >= 2 {
				f = w.guess(at.lane)
			}
			forged <- f != nil
			if f == nil {
				return asIs(raw)
			}
			return whole(p.AtSegment(1).WithProof(func(v *srv6.Proof) {
				out := f(values{v.RND, v.CML}, at.at)
				v.RND, v.CML = out.rnd, out.cml
			}))
		}})
		if err := m.send(m.tag, m.service("h2", servicePort)); err != nil {
			return err
		}
		if _, err := m.await(ctx, m.tag, 1); err != nil {
			return err
		}
		if <-forged {
			return nil
		}
		forgers = w.learn()
	}
	return errors.New("too little was seen of the CPU that numbers packets now")
}

// plain is a packet from the scheme's host.
func (m *mounting) plain(to netip.Addr) srv6.Packet {
	return srv6.Packet{
		Header:  srv6.Header{NextHeader: 59, HopLimit: 64, Source: m.host().Addr(), Destination: to},
		Payload: []byte(m.tag),
	}
}

// fromOutside sends a frame from the scheme's host past its kernel.
func fromOutside(what func(*mounting) (srv6.Packet, error)) func(context.Context, *mounting) error {
	return func(_ context.Context, m *mounting) error {
		p, err := what(m)
		if err != nil {
			return err
		}
		return m.fromHost(whole(p))
	}
}

func (m *mounting) fromHost(out []lab.Sent) error { return m.from(m.scheme.String(), "r1", out) }

// hiddenProtocol sends a whole datagram in one fragment (RFC 6946), whose header names an
// extension header and not UDP.
func hiddenProtocol(_ context.Context, m *mounting) error {
	b := udp(m.host(), m.service("h2", rulePort), []byte(m.tag))
	const fragment, options, pad = 44, 60, 1
	headers := []byte{
		options, 0, 0, 0, 0, 0, 0, 1, // offset 0, no more fragments
		b[6], 0, pad, 4, 0, 0, 0, 0,
	}
	b = slices.Insert(b, srv6.IPv6Len, headers...)
	b[6] = fragment
	binary.BigEndian.PutUint16(b[4:], uint16(len(b)-srv6.IPv6Len))
	return m.fromHost(asIs(b))
}

// backDoor sends a plain packet of chain a to its egress, by a link that is not in r6's plan.
func backDoor(ctx context.Context, m *mounting) error {
	if err := m.linkToEgress(ctx); err != nil {
		return err
	}
	return m.from("x", "r6", asIs(udp(m.host(), m.service("h2", servicePort), []byte(m.tag))))
}

// taggedBackDoor sends the packet of backDoor to h2 itself, from a host on one link with h2.
// Linux removes any number of priority tags.
func taggedBackDoor(ctx context.Context, m *mounting) error {
	if err := m.linkToEgress(ctx); err != nil {
		return err
	}
	r6, err := m.lab.Net("r6")
	if err != nil {
		return err
	}
	const bridge = "bridge"
	if err := r6.AddBridge(bridge, "r6-h2", "r6-x"); err != nil {
		return errors.Join(err, r6.Close())
	}
	m.after = func() error { return errors.Join(r6.DeleteLink(bridge), r6.Close()) }
	if err := r6.WaitUp(ctx, bridge); err != nil {
		return err
	}
	h2, err := m.lab.Net("h2")
	if err != nil {
		return err
	}
	defer h2.Close()
	mac, err := h2.HardwareAddress("h2-r6")
	if err != nil {
		return err
	}
	x, err := m.lab.NetNS("x")
	if err != nil {
		return err
	}
	defer x.Close()
	link, err := host.OpenFrames(x, "x-r6", unix.ETH_P_IPV6)
	if err != nil {
		return err
	}
	defer link.Close()
	tag := []byte{0x81, 0, 0, 0}
	return link.Send(slices.Concat(mac[:], link.MAC[:], tag, tag, []byte{0x86, 0xdd}, udp(m.host(), m.service("h2", servicePort), []byte(m.tag))))
}

// linkToEgress connects r6 with a host that is not in its plan.
func (m *mounting) linkToEgress(ctx context.Context) error {
	if m.linked {
		return nil
	}
	m.linked = true
	return m.link(ctx, "x", "r6")
}

// link connects two members of the lab.
func (m *mounting) link(ctx context.Context, a, b string) error {
	one, err := m.lab.Net(a)
	if err != nil {
		return err
	}
	defer one.Close()
	other, err := m.lab.Net(b)
	if err != nil {
		return err
	}
	defer other.Close()
	if err := one.AddVeth(host.Veth{Name: a + "-" + b, PeerName: b + "-" + a, Peer: other.NetNS(), MTU: 1500}); err != nil {
		return err
	}
	if err := errors.Join(one.SetUp(a+"-"+b), other.SetUp(b+"-"+a)); err != nil {
		return err
	}
	return errors.Join(one.WaitUp(ctx, a+"-"+b), other.WaitUp(ctx, b+"-"+a))
}

// from sends frames from a member of the lab to a neighbour, past its kernel.
func (m *mounting) from(name, neighbour string, out []lab.Sent) error {
	if len(out) == 0 {
		return errors.New("the attack made no packet")
	}
	var packets [][]byte
	for _, s := range out {
		packets = append(packets, s.Packet)
	}
	return m.lab.SendFrom(name, neighbour, packets...)
}

func capturedOutside(ctx context.Context, m *mounting) error {
	p, err := m.capture(ctx, m.tag, true)
	if err != nil {
		return err
	}
	return m.fromHost(whole(p))
}

func staleEpoch(ctx context.Context, m *mounting) error {
	p, err := m.capture(ctx, m.tag, true)
	if err != nil {
		return err
	}
	if err := m.rotate(ctx, m.chain("a")); err != nil {
		return err
	}
	return m.inject(whole(p))
}

// forgedArgument changes the lowest bits of the SID of chain d's function.
func forgedArgument(_ context.Context, m *mounting) error {
	m.alter(m.tag, map[string]func(srv6.Packet, []byte) []lab.Sent{"r1": func(p srv6.Packet, _ []byte) []lab.Sent {
		return whole(p.WithSRH(func(s *srv6.SRH) {
			at := &s.Segments[s.SegmentsLeft]
			*at = at.Next()
		}).AtSegment(p.SRH.SegmentsLeft))
	}})
	return m.send(m.tag, m.service("h2", filterPort))
}

// fromFunction sends frames on the interface that chain d's function returns its packets
// by, when a packet of the chain has passed it.
func fromFunction(what func(context.Context, *mounting) ([]lab.Sent, error)) func(context.Context, *mounting) error {
	return fromFunctionOf(filterPort, what)
}

// fromFunctionOf is the same behind a packet of the chain to a port, which the function takes.
func fromFunctionOf(port uint16, what func(context.Context, *mounting) ([]lab.Sent, error)) func(context.Context, *mounting) error {
	return func(ctx context.Context, m *mounting) error {
		m.count++
		passes := fmt.Sprintf("<passes %d of %s", m.count, m.tag[1:])
		if err := m.send(passes, m.service("h2", port)); err != nil {
			return err
		}
		if end, err := m.await(ctx, passes, 1); err != nil || end.host == "" {
			return errors.Join(err, fmt.Errorf("a packet through the function to port %d was not delivered", port))
		}
		out, err := what(ctx, m)
		if err != nil {
			return err
		}
		r2, err := m.lab.Net("r2")
		if err != nil {
			return err
		}
		defer r2.Close()
		to, err := r2.HardwareAddress(model.NetfilterDetour("nf", model.NamespaceOwn).From)
		if err != nil {
			return err
		}
		ns, err := m.functionNamespace()
		if err != nil {
			return err
		}
		defer ns.Close()
		link, err := host.OpenFrames(ns, netfilter.InsideOut, unix.ETH_P_IPV6)
		if err != nil {
			return err
		}
		defer link.Close()
		for _, s := range out {
			if err := link.Send(slices.Concat(to[:], link.MAC[:], []byte{0x86, 0xdd}, s.Packet)); err != nil {
				return err
			}
		}
		return nil
	}
}

func (m *mounting) functionNamespace() (*host.NetNS, error) {
	return host.OpenNamed("waystamp-" + m.lab.Instance("r2") + "-nf")
}

// forgedIndex makes a packet of chain d with an index of its own choice, as a filter of the
// kernel can set it.
func forgedIndex(_ context.Context, m *mounting) ([]lab.Sent, error) {
	ns, err := m.functionNamespace()
	if err != nil {
		return nil, err
	}
	net, err := host.Open(ns)
	if err != nil {
		return nil, errors.Join(err, ns.Close())
	}
	const index = 0x1234
	if err := net.SetIndex(netfilter.InsideOut, index); err != nil {
		return nil, errors.Join(err, net.Close(), ns.Close())
	}
	m.after = func() error { return errors.Join(net.UnsetIndex(netfilter.InsideOut), net.Close(), ns.Close()) }
	return asIs(udp(m.host(), m.service("h2", filterPort), []byte(m.tag))), nil
}

// ofFunction is a datagram of chain d with the attack's tag.
func (m *mounting) ofFunction() []byte {
	return udp(m.host(), m.service("h2", filterPort), []byte(m.tag))
}

// captureMade has chain d's function make a datagram, and takes the packet on its last link. It does
// not arrive.
func (m *mounting) captureMade(ctx context.Context) (srv6.Packet, error) {
	return m.take(ctx, m.tag, func() error {
		return fromFunction(func(_ context.Context, m *mounting) ([]lab.Sent, error) { return asIs(m.ofFunction()), nil })(ctx, m)
	})
}

// take takes the packet with a tag from its last link while do runs, and behind it.
func (m *mounting) take(ctx context.Context, tag string, do func() error) (srv6.Packet, error) {
	took := make(chan srv6.Packet, 1)
	m.alter(tag, map[string]func(srv6.Packet, []byte) []lab.Sent{"r3": func(p srv6.Packet, _ []byte) []lab.Sent {
		select {
		case took <- p:
		default:
		}
		return nil
	}})
	defer m.router.Set(nil)
	if err := do(); err != nil {
		return srv6.Packet{}, err
	}
	select {
	case p := <-took:
		return p, nil
	case <-time.After(verdictTime):
		return srv6.Packet{}, errors.New("no packet of chain d came to its last link")
	case <-ctx.Done():
		return srv6.Packet{}, context.Cause(ctx)
	}
}

// madeAsWhole exchanges the values of a proof of chain d for those that the path from the
// function on has given to a packet of its own.
func madeAsWhole(ctx context.Context, m *mounting) error {
	held, err := m.take(ctx, "<held back "+m.tag[1:], func() error { return m.send("<held back "+m.tag[1:], m.service("h2", filterPort)) })
	if err != nil {
		return err
	}
	made, err := m.captureMade(ctx)
	if err != nil {
		return err
	}
	values, _ := made.Proof()
	held.Payload = made.Payload
	return m.inject(whole(held.WithProof(func(v *srv6.Proof) { v.RND, v.CML = values.RND, values.CML })))
}

func madeAroundOther(ctx context.Context, m *mounting) error {
	p, err := m.captureMade(ctx)
	if err != nil {
		return err
	}
	p.Payload = udp(m.host(), m.service("h3", servicePort), []byte(m.tag))
	return m.inject(whole(p))
}

// toNodesOwn sends a plain packet of chain i to r3 when one with its header has passed.
func toNodesOwn(ctx context.Context, m *mounting) error {
	m.count++
	passes := fmt.Sprintf("<passes %d of %s", m.count, m.tag[1:])
	to := m.service("h4", servicePort)
	if err := m.send(passes, to); err != nil {
		return err
	}
	if end, err := m.await(ctx, passes, 1); err != nil || end.host == "" {
		return errors.Join(err, errors.New("a packet of chain i was not delivered"))
	}
	return m.inject([]lab.Sent{{Packet: udp(m.host(), to, []byte(m.tag)), To: "r3"}})
}

// rotate gives a path a new epoch with fresh secrets, as compiling the plans
// again would, and waits until all nodes have it.
func (m *mounting) rotate(ctx context.Context, p plan.Path) error {
	ctx, cancel := context.WithTimeoutCause(ctx, followTime, fmt.Errorf("the nodes do not follow their plans within %s", followTime))
	defer cancel()
	shares, verifier, err := pot.Generate(rand.Reader, m.scheme, len(p.Hops))
	if err != nil {
		return err
	}
	p.Epoch++
	p.Shares, p.Verifier = shares, verifier
	for _, known := range m.plan.Nodes {
		n, err := m.lab.NodePlan(known.Name)
		if err != nil {
			return err
		}
		for i := range n.Headends {
			if e := &n.Headends[i]; e.Path == p.Path {
				e.Epoch, e.Share = p.Epoch, shares[0]
			}
		}
		for i := range n.Endpoints {
			if e := &n.Endpoints[i]; e.Path == p.Path {
				e.Epoch, e.Share = p.Epoch, shares[e.Share.Position]
			}
		}
		for i := range n.Egresses {
			if e := &n.Egresses[i]; e.Path == p.Path {
				e.Epoch, e.Share, e.Verifier = p.Epoch, shares[len(shares)-1], verifier
			}
		}
		if err := m.lab.WriteNodePlan(n.Name, n); err != nil {
			return err
		}
	}
	for _, n := range m.plan.Nodes {
		if err := m.followed(ctx, n.Name); err != nil {
			return err
		}
	}
	m.paths = append(m.paths, p)
	return nil
}

// followed waits until a node has its plan file in force.
func (m *mounting) followed(ctx context.Context, node string) error {
	file, err := os.ReadFile(m.lab.NodePlanPath(node))
	if err != nil {
		return err
	}
	want := fmt.Sprintf("%x", sha256.Sum256(file))
	c := agent.NewClient(agent.SocketPath(m.lab.AgentDir(node)))
	defer c.Close()
	for {
		s, err := c.Status(ctx)
		switch {
		case err != nil:
			return err
		case s.Plan == want && s.Error == "":
			return nil
		}
		select {
		case <-time.After(pollEvery):
		case <-ctx.Done():
			return fmt.Errorf("%s: %w", node, context.Cause(ctx))
		}
	}
}
