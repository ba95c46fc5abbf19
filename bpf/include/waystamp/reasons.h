/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Why a packet was refused. Append only: a number, once released, keeps its
 * meaning. A reason is decided in one place of the data path, so that a
 * counter names a cause and not a symptom. A reason that is decided in several
 * places has SEVERAL, and its events name the place. internal/arch checks
 * this. tools/abigen makes the Go side and the reference page from this list.
 */
#pragma once

/* X(name, text): the text describes the packet or the node. It may be
 * followed by, joined by |:
 * REPORT: on-violation: report covers it.
 * AUDIT: guard: audit covers it.
 * SEVERAL: it is decided in more than one place.
 * SPENT: it may be decided after the replay window has spent the number.
 * An agent reads the windows again if such a reason was counted.
 */
#define WS_REASONS(X)                                                          \
	X(NONE, "not refused")                                                 \
	X(TRUNCATED, "the IP header runs past the end of the packet")        \
	X(EDGE_TRUNCATED, "the IP header of a packet from outside runs past its end", SEVERAL) \
	X(PAYLOAD_LENGTH, "the outer payload length runs past the end of the packet") \
	X(UNCONFIGURED, "this node has no plan yet")                           \
	X(OUTSIDE_SID, "a packet from outside is addressed to the SID block")  \
	X(OUTSIDE_SRH, "a packet from outside carries a segment routing header") \
	X(UNMATCHED, "no chain takes this packet, and its interface refuses such packets") \
	X(UNPROVEN, "a chain requires this packet, and it has no proof", AUDIT) \
	X(NO_SRH, "a packet for a SID of this node has no routing header next", SEVERAL) \
	X(ROUTING_TYPE, "a packet for a SID of this node has a routing header that is not an SRH") \
	X(SRH_TRUNCATED, "the segment routing header runs past the end of the packet") \
	X(SRH_LAST_ENTRY, "Last Entry is greater than Hdr Ext Len has room for") \
	X(SRH_SEGMENTS_LEFT, "Segments Left is greater than Last Entry + 1")         \
	X(SRH_TOO_LONG, "the segment routing header has more segments, or more bytes of TLVs, than this node accepts") \
	X(TLV_OVERRUN, "a TLV runs past the end of the segment routing header") \
	X(TLV_LENGTH, "the proof TLV has a wrong length", SEVERAL)             \
	X(TLV_ALIGNMENT, "the proof TLV does not start on an 8-byte boundary") \
	X(TLV_DUPLICATE, "there is more than one proof TLV")                            \
	X(TLV_MISSING, "there is no proof TLV", SEVERAL)                                \
	X(UNKNOWN_SID, "the SID is in this node's locator, but the node has no such SID") \
	X(UNKNOWN_PATH, "the proof names a path that does not visit this SID") \
	X(UNKNOWN_EPOCH, "the proof names an epoch that this SID does not have") \
	X(SCHEME, "the proof's scheme differs from the plan's scheme for its path") \
	X(UPPER_LAYER, "no segments are left, but the SID is not the path's egress", SEVERAL) \
	X(SEGMENTS_REMAIN, "segments are left at the path's egress")           \
	X(SEGMENT_OUTSIDE, "the next segment is not a SID of the domain")      \
	X(MAPPED_ADDRESS, "an IPv6 packet has an address in ::ffff:0:0/96, which stands for IPv4 addresses") \
	X(IP4_LENGTH, "the total length of an IPv4 packet for a chain, or behind a proof, does not fit the packet or header that contains it", SEVERAL) \
	X(IP4_CHECKSUM, "the header checksum of an IPv4 packet for a chain is wrong") \
	X(HOP_LIMIT, "the hop limit, or the TTL of a label, is used up", SEVERAL) \
	X(SEGMENTS, "the segment list differs from the path's", REPORT) \
	X(PROOF, "the proof does not verify", REPORT) \
	X(RANGE, "the proof's values are not less than its prime", REPORT) \
	X(FLOW, "the stamp covers the inner addresses and ports, and they cannot be read", SEVERAL) \
	X(NUMBER, "the proof is correct, but no headend of the path assigns its number", REPORT) \
	X(REPLAY, "the packet's number was used before, as often as it has frames", REPORT) \
	X(STALE, "the packet's number is older than the numbers in the replay window", REPORT) \
	X(WINDOW_MISSING_BUG, "a verifier entry names a replay window that does not exist") \
	X(WINDOW_BUSY_BUG, "other CPUs changed the replay window more often than is possible") \
	X(INNER_PROTOCOL, "the inner packet is neither IPv4 nor IPv6, or its function does not accept it") \
	X(INNER_TRUNCATED, "the inner packet runs past the end of the packet") \
	X(INNER_VERSION, "the inner packet's version field does not match its protocol, or its header length is impossible") \
	X(INNER_HOP_LIMIT, "the hop limit or TTL of the inner packet is used up")     \
	X(EDGE_HOP_LIMIT, "the hop limit or TTL of a packet for a chain is used up at the headend") \
	X(ECN, "the outer header has a congestion mark, and the inner header does not support marks", SPENT) \
	X(WRONG_CHAIN, "the inner packet belongs to another chain than its proof", SEVERAL | SPENT) \
	X(RND_EXHAUSTED, "this headend has used up its numbers for the path")  \
	X(NO_LANE, "the plan has no lane for this CPU of the headend")         \
	X(CHAIN_MTU, "the packet is larger than the MTU of its chain")     \
	X(TRAIN_TOO_LONG, "a super-packet has more frames than one stamp can count") \
	X(TRAIN_TOO_BIG, "a super-packet with its outer header has more than 65535 bytes") \
	X(TOO_BIG, "the packet is larger than the MTU of its route", SEVERAL)                \
	X(NO_ROUTE, "the kernel's table has no route to the next segment", SEVERAL)       \
	X(INNER_NO_ROUTE, "the kernel's table has no route to the inner destination", SEVERAL) \
	X(NOT_CACHED, "a function sent a packet, and no header is kept for it", SEVERAL)   \
	X(CACHE_FULL, "the proxy has no room for another header")         \
	X(FUNCTION_MTU, "the packet is larger than the MTU of its function's interface") \
	X(CANNOT_CUT, "a super-packet must be segmented for its function or for labels, and the node has no segmenter") \
	X(FUNCTION_TRUNCATED, "the IP header of a packet from a function runs past its end") \
	X(RESTORE_FAILED, "the kernel could not put the outer header back", SEVERAL) \
	X(PROXY_MISSING_BUG, "a SID or an interface names a proxy that does not exist", SEVERAL) \
	X(SHARE_GONE, "a new plan removed the path while its packet was in the function") \
	X(LOOP, "more consecutive visits of SIDs on this node than a path has") \
	X(PUSH_FAILED, "the kernel could not make room for the outer header")  \
	X(STRIP_FAILED, "the kernel could not remove the outer header", SEVERAL | SPENT) \
	X(WRITE_FAILED, "the kernel could not write the outer header", SEVERAL)         \
	X(VLAN_TAGS, "a frame has VLAN tags that hide its contents", SEVERAL) \
	X(PULL_FAILED, "the kernel could not make the headers contiguous", SEVERAL) \
	X(HEADEND_MISSING_BUG, "a classification rule, or the path behind a function, names a headend entry that does not exist", SEVERAL) \
	X(HEADEND_LENGTH_BUG, "a headend entry has an impossible header length") \
	X(EGRESS_MISSING_BUG, "an egress SID names a verifier entry that does not exist") \
	X(COUNTER_MISSING_BUG, "a headend entry names a counter that does not exist") \
	X(BOUNDS_BUG, "a bound that was checked before does not hold", SEVERAL | SPENT) \
	X(BEHAVIOUR_BUG, "a SID has a behaviour that this data path does not support") \
	X(PATH_MTU, "the packet is larger than the MTU that a node of its chain has reported") \
	X(OUTSIDE_ERROR, "an ICMPv6 error from outside is about a packet to a SID") \
	X(FUNCTION_GONE, "an interface of the packet's function is missing", SEVERAL) \
	X(OUTSIDE_SOURCE, "a packet from outside has a source in the SID block") \
	X(SOURCE, "the outer source is not a headend of the proof's path")     \
	X(LEAK_SID, "a packet that would leave the domain is addressed to the SID block") \
	X(LEAK_SRH, "a packet that would leave the domain carries a segment routing header") \
	X(LEAVE_TRUNCATED, "the IPv6 header of a packet that would leave the domain runs past its end") \
	X(UNVERIFIED, "a chain requires this packet, and it would leave the domain without verification by this node", AUDIT) \
	X(OUTER_FRAGMENT, "a packet for a SID of this node is a fragment; waystamp nodes do not fragment such packets", SEVERAL) \
	X(INNER_ADDRESS, "the inner packet for a function has a source or destination that no headend accepts") \
	X(EXTENSION_FIRST, "a packet for a SID of this node has more, longer or other extension headers before its routing header than waystamp accepts there", SEVERAL) \
	X(IP6_LENGTH, "the payload length of an IPv6 packet for a chain, or behind a proof, does not fit the packet or header that contains it", SEVERAL) \
	X(EXTENSION_TRUNCATED, "an extension header before the routing header runs past the end of the packet", SEVERAL) \
	X(OPTION_LENGTH, "a destination option before the routing header runs past the end of its header") \
	X(OPTION_UNKNOWN, "a destination option before the routing header is unknown, and by its type it must not be skipped") \
	X(HEADER_TOO_LONG, "the outer header with its options is too long to be kept while the packet is in a function") \
	X(EXTENSION_PROGRAM_BUG, "the program for packets with options before their routing header is missing") \
	X(RULES_MISSING_BUG, "the tables of chains that take or require packets are missing, or incomplete", SEVERAL | SPENT) \
	X(PORTS_UNREAD, "another chain, by protocol or ports, could take this packet, and they cannot be read", SEVERAL) \
	X(ARGUMENT, "the argument of the SID differs from the plan's argument for the path") \
	X(ORIGIN_UNMATCHED, "a function made this packet itself, and no chain through the function takes it") \
	X(STREAM_UNKNOWN, "a packet to or from a function on byte streams, or a gateway, belongs to no connection that was opened through its chain, or that a gateway may open", SEVERAL) \
	X(STREAM_NOT_TCP, "a packet to or from a function on byte streams, or a gateway, is not TCP, or is a fragment, or its TCP header is not the first in it", SEVERAL) \
	X(STREAM_DOWN, "the worker of a function on byte streams, or of a gateway, is not running", SEVERAL) \
	X(STREAMS_FULL, "there is no room for another connection through a function on byte streams, or a gateway", SEVERAL) \
	X(ENCAPSULATION, "a packet with labels has a proof of a path over SRv6, or a packet over SRv6 has one of a path over labels") \
	X(LABELS_TRUNCATED, "a label stack runs past the end of the packet", SEVERAL) \
	X(LABELS_TOO_MANY, "none of the first 40 entries of a label stack is its bottom", SEVERAL) \
	X(LABELS_BOTTOM, "a label stack ends where a service label or an entropy label should follow", SEVERAL) \
	X(LABEL_NULL, "a label stack has an explicit null where a label of this node should be") \
	X(LABEL_ALERT, "a label stack has a router alert where a label of this node should be") \
	X(LABEL_UNKNOWN, "a label belongs neither to this node nor to another node of the domain") \
	X(LABEL_TRAIN, "a super-packet has labels, or was not segmented by the segmenter for paths over labels", SEVERAL) \
	X(WORD_TRUNCATED, "the word behind a label stack runs past the end of the packet") \
	X(WORD_VERSION, "a label stack is not followed by a word, or by one of another version") \
	X(WORD_NEXT, "the word behind a label stack names a next header that is neither IPv4 nor IPv6") \
	X(PROOF_TRUNCATED, "the proof behind a label stack runs past the end of the packet") \
	X(NO_NEIGHBOUR, "the link-layer address of the next hop of a packet with labels is unknown") \
	X(OUTSIDE_MPLS, "a packet from outside has labels", SEVERAL) \
	X(LEAK_MPLS, "a packet that would leave the domain has labels") \
	X(LABELS_PROGRAM_BUG, "the program for paths over labels is not there") \
	X(STREAM_QUOTA, "a function on byte streams, or a gateway, has its share of the connections that the node keeps")

enum ws_reason {
#define X(name, ...) WS_REASON_##name,
	WS_REASONS(X)
#undef X
	WS_REASON_COUNT /* not a reason */
};
