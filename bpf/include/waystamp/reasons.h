/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Why a packet was refused. Append only: a number, once released, keeps its
 * meaning. A reason is decided in one place of the data path, so that a counter
 * names a cause and not a symptom; one that is decided in more says SEVERAL, and
 * its events tell the places apart. internal/arch counts them. tools/abigen makes
 * the Go side and the reference page from this list.
 */
#pragma once

/* X(name, text): the text says what the packet or the node was like. Behind it may
 * stand, joined by |:
 * REPORT: on-violation: report covers it.
 * AUDIT: guard: audit covers it.
 * SEVERAL: it is decided in more than one place.
 * SPENT: it may be decided behind the replay window, when the number is spent. An
 * agent reads the windows again where one of these was counted.
 */
#define WS_REASONS(X)                                                          \
	X(NONE, "not refused")                                                 \
	X(TRUNCATED, "the IP header runs past the end of the packet")        \
	X(EDGE_TRUNCATED, "the IP header of a packet from outside runs past its end", SEVERAL) \
	X(PAYLOAD_LENGTH, "the outer payload length runs past the end of the packet") \
	X(UNCONFIGURED, "this node has no plan yet")                           \
	X(OUTSIDE_SID, "a packet from outside is addressed to the SID block")  \
	X(OUTSIDE_SRH, "a packet from outside carries a segment routing header") \
	X(UNMATCHED, "no chain takes this packet and its interface drops those") \
	X(UNPROVEN, "a chain requires this packet, yet it came without proof", AUDIT) \
	X(NO_SRH, "addressed to a SID of this node, without a routing header next", SEVERAL) \
	X(ROUTING_TYPE, "addressed to a SID of this node, with a routing header that is not an SRH") \
	X(SRH_TRUNCATED, "the segment routing header runs past the end of the packet") \
	X(SRH_LAST_ENTRY, "Last Entry is beyond what Hdr Ext Len has room for") \
	X(SRH_SEGMENTS_LEFT, "Segments Left is beyond Last Entry + 1")         \
	X(SRH_TOO_LONG, "more segments, or more bytes of TLVs, than this node takes") \
	X(TLV_OVERRUN, "a TLV runs past the end of the segment routing header") \
	X(TLV_LENGTH, "the proof TLV has a wrong length", SEVERAL)             \
	X(TLV_ALIGNMENT, "the proof TLV does not start on an 8-byte boundary") \
	X(TLV_DUPLICATE, "more than one proof TLV")                            \
	X(TLV_MISSING, "no proof TLV", SEVERAL)                                \
	X(UNKNOWN_SID, "the SID lies in this node's locator, but nothing is there") \
	X(UNKNOWN_PATH, "the proof names a path that does not visit this SID") \
	X(UNKNOWN_EPOCH, "the proof names an epoch that this SID does not know") \
	X(SCHEME, "the proof's scheme is not the one that the plan has for its path") \
	X(UPPER_LAYER, "no segments are left, but the SID is not the path's egress", SEVERAL) \
	X(SEGMENTS_REMAIN, "segments are left at the path's egress")           \
	X(SEGMENT_OUTSIDE, "the next segment is not a SID of the domain")      \
	X(MAPPED_ADDRESS, "an IPv6 packet has an address below ::ffff:0:0/96, where nothing can be sent") \
	X(IP4_LENGTH, "the total length of an IPv4 packet for a chain, or behind a proof, does not fit what carries it", SEVERAL) \
	X(IP4_CHECKSUM, "the header checksum of an IPv4 packet for a chain is wrong") \
	X(HOP_LIMIT, "the hop limit, or the TTL of a label, is used up", SEVERAL) \
	X(SEGMENTS, "the segment list carried is not the path's", REPORT) \
	X(PROOF, "the proof does not verify", REPORT) \
	X(RANGE, "the proof's values are not below its prime", REPORT) \
	X(FLOW, "the stamp covers the inner addresses and ports, and they cannot be read", SEVERAL) \
	X(NUMBER, "the proof is right, but its number is none that a headend of the path gives out", REPORT) \
	X(REPLAY, "as many frames as this number stands for have been here before", REPORT) \
	X(STALE, "its number is older than what the replay window remembers", REPORT) \
	X(WINDOW_MISSING_BUG, "a verifier entry names a replay window that is not there") \
	X(WINDOW_BUSY_BUG, "other CPUs changed the replay window more often than they can") \
	X(INNER_PROTOCOL, "what is inside is neither IPv4 nor IPv6, or not what a function here takes") \
	X(INNER_TRUNCATED, "the inner packet runs past the end of the packet") \
	X(INNER_VERSION, "the inner packet's version field is not its protocol's, or its header length is impossible") \
	X(INNER_HOP_LIMIT, "the hop limit or TTL of the inner packet is used up")     \
	X(EDGE_HOP_LIMIT, "the hop limit or TTL of a packet for a chain is used up at the headend") \
	X(ECN, "congestion was marked on a packet whose inner header does not take marks", SPENT) \
	X(WRONG_CHAIN, "the inner packet belongs to another chain than its proof", SEVERAL | SPENT) \
	X(RND_EXHAUSTED, "this headend has used up its numbers for the path")  \
	X(NO_LANE, "the plan has no lane for this CPU of the headend")         \
	X(CHAIN_MTU, "the packet is larger than what its chain can carry")     \
	X(TRAIN_TOO_LONG, "a super-packet has more frames than one stamp can count") \
	X(TRAIN_TOO_BIG, "a super-packet with its outer header has more than 65535 bytes") \
	X(TOO_BIG, "the packet exceeds the MTU of the way out", SEVERAL)                \
	X(NO_ROUTE, "the kernel's table has no way to the next segment", SEVERAL)       \
	X(INNER_NO_ROUTE, "the kernel's table has no way to the inner destination", SEVERAL) \
	X(NOT_CACHED, "a function sent a packet that no header is kept for", SEVERAL)   \
	X(CACHE_FULL, "the proxy has no room to keep one more header")         \
	X(FUNCTION_MTU, "the packet is larger than what its function's interface takes") \
	X(CANNOT_CUT, "a super-packet must be cut for its function or for labels, and the node has no cutter") \
	X(FUNCTION_TRUNCATED, "the IP header of a packet from a function runs past its end") \
	X(RESTORE_FAILED, "the kernel could not put the outer header back", SEVERAL) \
	X(PROXY_MISSING_BUG, "a SID or an interface names a proxy that is not there", SEVERAL) \
	X(SHARE_GONE, "the plan dropped a path while its packet was in the function") \
	X(LOOP, "more consecutive visits of SIDs on this node than a path has") \
	X(PUSH_FAILED, "the kernel could not make room for the outer header")  \
	X(STRIP_FAILED, "the kernel could not remove the outer header", SEVERAL | SPENT) \
	X(WRITE_FAILED, "the kernel could not write the outer header", SEVERAL)         \
	X(VLAN_TAGS, "a frame has VLAN tags that hide what it holds", SEVERAL) \
	X(PULL_FAILED, "the kernel could not make the headers contiguous", SEVERAL) \
	X(HEADEND_MISSING_BUG, "a classification rule, or what is behind a function, names a headend entry that is not there", SEVERAL) \
	X(HEADEND_LENGTH_BUG, "a headend entry has an impossible header length") \
	X(EGRESS_MISSING_BUG, "an egress SID names a verifier entry that is not there") \
	X(COUNTER_MISSING_BUG, "a headend entry names a counter that is not there") \
	X(BOUNDS_BUG, "a bound that was checked before does not hold", SEVERAL | SPENT) \
	X(BEHAVIOUR_BUG, "a SID has a behaviour that this data path does not know") \
	X(PATH_MTU, "the packet is larger than what a node of its chain has said that a link takes") \
	X(OUTSIDE_ERROR, "an ICMPv6 error from outside is about a packet of the domain's own") \
	X(FUNCTION_GONE, "an interface of the packet's function is not there", SEVERAL) \
	X(OUTSIDE_SOURCE, "a packet from outside has a source in the SID block") \
	X(SOURCE, "the outer source is not a headend of the proof's path")     \
	X(LEAK_SID, "a packet that would leave the domain is addressed to the SID block") \
	X(LEAK_SRH, "a packet that would leave the domain carries a segment routing header") \
	X(LEAVE_TRUNCATED, "the IPv6 header of a packet that would leave the domain runs past its end") \
	X(UNVERIFIED, "a chain requires this packet, yet it would leave the domain without having been verified here", AUDIT) \
	X(OUTER_FRAGMENT, "a packet for a SID of this node is a fragment outside: the domain makes none", SEVERAL) \
	X(INNER_ADDRESS, "the inner packet for a function is from or to an address that no headend takes packets of") \
	X(EXTENSION_FIRST, "a packet for a SID of this node has more, longer or other extension headers before its routing header than waystamp takes there", SEVERAL) \
	X(IP6_LENGTH, "the payload length of an IPv6 packet for a chain, or behind a proof, does not fit what carries it", SEVERAL) \
	X(EXTENSION_TRUNCATED, "an extension header before the routing header runs past the end of the packet", SEVERAL) \
	X(OPTION_LENGTH, "a destination option before the routing header runs past the end of its header") \
	X(OPTION_UNKNOWN, "a destination option before the routing header must not be passed over by who does not know it") \
	X(HEADER_TOO_LONG, "the outer header with its options is longer than what can be kept while the packet is in a function") \
	X(EXTENSION_PROGRAM_BUG, "the program for packets with options before their routing header is not there") \
	X(RULES_MISSING_BUG, "the tables that would say whether a chain takes or requires the packet are not there, or not all of them", SEVERAL | SPENT) \
	X(PORTS_UNREAD, "another chain, by protocol or ports, may be this packet's, and they cannot be read", SEVERAL) \
	X(ARGUMENT, "the argument of the SID is not the one that the plan has for the path") \
	X(ORIGIN_UNMATCHED, "a function made this packet itself, and no chain through the function takes it") \
	X(STREAM_UNKNOWN, "a packet to or from a function on byte streams, or the gateway, is of no connection that was opened through its chain, or let open", SEVERAL) \
	X(STREAM_NOT_TCP, "a packet to or from a function on byte streams, or the gateway, is not TCP, or is a fragment, or its TCP header is not the first in it", SEVERAL) \
	X(STREAM_DOWN, "the worker of a function on byte streams, or of the gateway, is not there", SEVERAL) \
	X(STREAMS_FULL, "no room is left for another connection through a function on byte streams, or the gateway", SEVERAL) \
	X(ENCAPSULATION, "a packet with labels has a proof of a path over SRv6, or the other way round") \
	X(LABELS_TRUNCATED, "a label stack runs past the end of the packet", SEVERAL) \
	X(LABELS_TOO_MANY, "none of the first 40 entries of a label stack is its bottom", SEVERAL) \
	X(LABELS_BOTTOM, "a label stack ends where a service label or an entropy label should follow", SEVERAL) \
	X(LABEL_NULL, "a label stack has an explicit null where a label of this node should be") \
	X(LABEL_ALERT, "a label stack has a router alert where a label of this node should be") \
	X(LABEL_UNKNOWN, "a label is neither this node's nor another node's of the domain") \
	X(LABEL_TRAIN, "a super-packet has labels, or comes out of what should have cut it for them", SEVERAL) \
	X(WORD_TRUNCATED, "the word behind a label stack runs past the end of the packet") \
	X(WORD_VERSION, "what is behind a label stack is no word, or one of another version") \
	X(WORD_NEXT, "the word behind a label stack names a next header that is neither IPv4 nor IPv6") \
	X(PROOF_TRUNCATED, "the proof behind a label stack runs past the end of the packet") \
	X(NO_NEIGHBOUR, "the link-layer address of the next hop of a packet with labels is not known") \
	X(OUTSIDE_MPLS, "a packet from outside has labels", SEVERAL) \
	X(LEAK_MPLS, "a packet that would leave the domain has labels") \
	X(LABELS_PROGRAM_BUG, "the program for paths over labels is not there")

enum ws_reason {
#define X(name, ...) WS_REASON_##name,
	WS_REASONS(X)
#undef X
	WS_REASON_COUNT /* not a reason */
};
