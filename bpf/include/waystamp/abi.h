/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The contract between the programs in the kernel and user space: the contents of the
 * maps. Nothing else is shared. There is no implicit padding: every gap is a field
 * that must be zero. Addresses and SIDs are in network order, and so are fields of
 * type __be16, __be32 and __be64; all other fields are in the host's order.
 */
#pragma once

#include <linux/types.h>
#include <waystamp/places.h>
#include <waystamp/reasons.h>

/* Segments in one segment list (our bound; RFC 8754 allows 127). */
#define WS_SEGS_MAX 16
/* Positions that stamp: the headend and all segments but the egress. */
#define WS_KEYS_MAX 16
/* Bytes of TLVs after the segment list that a node takes. */
#define WS_TLVS_LEN_MAX 128
/* Bytes of extension headers before the SRH that a node takes. */
#define WS_EXT_MAX 256
/* IPv6 header, SRH, WS_SEGS_MAX segments, proof TLV. */
#define WS_OUTER_MAX (40 + 8 + 16 * WS_SEGS_MAX + 24)
/* Outer header with WS_SEGS_MAX segments and as many TLVs as a node takes. */
#define WS_CACHED_MAX (40 + 8 + 16 * WS_SEGS_MAX + WS_TLVS_LEN_MAX)
/* Bytes behind an inner packet's IP header that its fingerprint covers. */
#define WS_FINGERPRINT_LEN 64
/* Bytes of the packet that an event carries. */
#define WS_EVENT_DATA 448
/* In skb->tc_index: this node has verified the packet as its chain's egress,
 * so that it needs no header when it leaves. No slot has this index.
 */
#define WS_INDEX_PROVEN 65535
/* In skb->tc_index: the first guard has let the packet go without a proof (enum
 * ws_guard), so the second guard does not count it again. No slot has this index.
 */
#define WS_INDEX_LET_GO 65534
/* Events per reason, CPU and second; further ones are counted in the next event. */
#define WS_EVENTS_PER_SECOND 64

/* The proof TLV: type 252 is experimental and, with its first bit set, may
 * change en route (RFC 8754 2.1).
 */
#define WS_TLV_TYPE 252
#define WS_TLV_LEN 22

/* RND: 63-60 zero, 59-48 lane, 47-42 frames in the train - 1, 41-0 counter. */
#define WS_RND_LANE_SHIFT 48
#define WS_RND_FRAMES_SHIFT 42
#define WS_RND_LANES 4096
#define WS_RND_FRAMES_MAX 63
#define WS_RND_COUNTER_MAX ((1ULL << WS_RND_FRAMES_SHIFT) - 1)

enum ws_scheme {
	WS_SCHEME_POT = 0,
	WS_SCHEME_OPOT = 1,
	WS_SCHEME_KEYED = 2,
	WS_SCHEME_KEYED_FLOW = 3,
};

/* The outer header of a path's packets between nodes. */
enum ws_form {
	WS_FORM_SRV6 = 0,
	WS_FORM_CSID = 1, /* SRv6, of the NEXT-C-SID flavour (RFC 9800 4.1) */
	WS_FORM_LABELS = 2, /* a stack of labels (RFC 8660) */
};

enum ws_behaviour {
	WS_BEHAVIOUR_NONE = 0,
	WS_BEHAVIOUR_END = 1, /* RFC 8986 4.1, and the stamp */
	WS_BEHAVIOUR_END_DT46 = 2, /* RFC 8986 4.8, after the verdict */
	/* draft-ietf-spring-sr-service-programming 6.2, with a cache per packet;
	 * for netfilter End.AN (section 5), which is the same with an argument
	 */
	WS_BEHAVIOUR_END_AD = 3, /* an unaware function, or netfilter */
	WS_BEHAVIOUR_STREAM = 4, /* as END_DT46, to a function on bytes */
};

/* How a packet that comes back from a function is recognised. */
enum ws_recognise {
	WS_RECOGNISE_CONTENT = 0, /* by bytes that functions keep */
	WS_RECOGNISE_METADATA = 1, /* by skb->tc_index, kept by the kernel */
};

/* The action for a packet from a function that is not in the cache. */
enum ws_on_unknown {
	WS_ON_UNKNOWN_DROP = 0,
	WS_ON_UNKNOWN_PLAIN = 1, /* ordinary routing */
	/* if the function has made it: it takes the rest of the chain that matches it */
	WS_ON_UNKNOWN_ORIGINATE = 2,
};

enum ws_on_violation {
	WS_ON_VIOLATION_DROP = 0,
	WS_ON_VIOLATION_REPORT = 1,
};

/* The guard's action for a packet without the proof that a chain requires.
 * The chain and the interface have a setting each: the higher number counts.
 */
enum ws_guard {
	WS_GUARD_UNSET = 0, /* not set; if neither is set: ENFORCE */
	WS_GUARD_OFF = 1, /* forwards the packet */
	WS_GUARD_AUDIT = 2, /* forwards the packet, and counts it */
	WS_GUARD_ENFORCE = 3, /* refuses the packet */
};
#define WS_GUARDS 4

enum ws_hook {
	WS_HOOK_TC = 0,
	WS_HOOK_XDP = 1,
};

/* The result of a classification rule for a packet that it matches. */
enum ws_match_action {
	WS_MATCH_NONE = 0, /* nothing: as if there were no rule */
	WS_MATCH_PATH = 1, /* target: headend index, or at the guard the path */
	WS_MATCH_SOURCE = 2, /* target: the head of the source table */
	/* Not an action of a rule: the table is missing, or a part of it. The
	 * action, and whether the address is the node's own, are unknown.
	 */
	WS_MATCH_MISSING = 3,
};

/* Set before load. The upper 64 bits of addresses, and masks over them. */
struct ws_config {
	__be64 block; /* the domain's SID block */
	__be64 block_mask;
	__be64 locator; /* the part of this node */
	__be64 locator_mask;
	__u64 nexthop_ttl; /* life of a remembered next hop, in jiffies */
	__u64 fingerprint_key[2]; /* SipHash key of the content cache; secret */
	__be64 address[2]; /* the node's: source of its ICMP errors */
	__u64 icmp_interval_ns; /* average interval of a CPU's ICMP errors */
	__u64 icmp_burst_ns; /* the interval times the errors that may be sent at once */
	/* 1: the kernel has BPF_F_ADJ_ROOM_DECAP_L3_IPV4 and _IPV6, since 6.3 */
	__u32 decap_l3;
	/* In a domain with labels: the service label of SID 0 of the block;
	 * the label of SID n is n higher. 0: the domain has no labels.
	 */
	__u32 services;
	__u32 label; /* the node's own; 0: it has none */
	__u32 pad;
};

/* Does ws_rules contain a set? */
enum ws_rules_state {
	WS_RULES_NONE = 0,
	WS_RULES_MAYBE = 1, /* while user space adds or removes a set */
	WS_RULES_THERE = 2, /* a missing set is an error */
};

/* ws_node[0]. All zero in a new map: refuse. */
struct ws_node {
	__u32 armed; /* 1: the maps hold a whole plan */
	/* Veth pairs of the agent that segment super-packets: a
	 * super-packet sent into one end arrives as frames at its peer,
	 * which has this MAC address. The first pair's peer has the
	 * core program, the second pair's the function program, and the
	 * third pair's, below, the edge program. 0: there is none.
	 */
	__u32 cut_ifindex;
	__u32 cut_back_ifindex;
	__u8 cut_dmac[6];
	__u8 cut_back_dmac[6];
	__u32 xdp; /* 1: XDP is there and uses the next hops that TC remembers */
	__u32 ways; /* next hops remembered under another number are void */
	__u32 rules; /* enum ws_rules_state */
	/* 1: a path takes packets that this node originates, or marked packets */
	__u32 own;
	__u32 cut_enter_ifindex;
	__u8 cut_enter_dmac[6];
	__u8 pad[2];
	__u32 services; /* 1: ws_services has entries */
};
_Static_assert(sizeof(struct ws_node) == 56, "ws_node is ABI");

/* Proof parameters of one position. The scheme decides which
 * fields are used: keyed uses key, keyed-flow also bind_key,
 * pot and opot the others (pot with masks of zero).
 */
struct ws_share {
	__u64 key[2]; /* SipHash key: its two little-endian words */
	__u64 bind_key[2];
	__u64 prime; /* p < 2^63 */
	__u64 alpha; /* (f1(x) + f2(x) - RND) * LPC mod p */
	__u64 lpc; /* Lagrange polynomial constant, < p */
	__u64 lpc_shoup; /* floor(lpc * 2^64 / p) */
	__u64 up_rnd; /* mask of the link towards the headend */
	__u64 up_cml;
	__u64 down_rnd; /* mask of the link towards the egress */
	__u64 down_cml;
};
_Static_assert(sizeof(struct ws_share) == 96, "ws_share is ABI");

/* ws_hop_index: the index in ws_hops of the entry of a SID, path and epoch. */
struct ws_hop_key {
	__be64 sid; /* upper 64 bits */
	__be32 path;
	__u8 epoch;
	__u8 pad[3];
};
_Static_assert(sizeof(struct ws_hop_key) == 16, "ws_hop_key is ABI");

/* ws_hops. Entry 0 is reserved. An entry is immutable while
 * any index refers to it.
 */
struct ws_hop {
	struct ws_hop_key of; /* the key of the entry */
	__u8 behaviour; /* enum ws_behaviour */
	__u8 scheme; /* enum ws_scheme */
	__u8 position; /* 1 .. k-1 */
	__u8 form; /* enum ws_form */
	__u32 stats; /* index into ws_stats */
	__u32 proxy; /* End.AD, STREAM: key in ws_proxies; else 0 */
	/* End.AD: the argument of its SID in the list; 0: none. End.DT46: as
	 * __be32 the path that guards expect for its packets: the path itself,
	 * or for a path from a function on the path of the whole chain.
	 */
	__u32 argument;
	/* The path's headend, the source of its packets (RFC 8754 5.1); :: if it
	 * has several headends, which are in ws_sources. Labels have no source.
	 */
	__be64 source[2];
	struct ws_share share; /* of keyed, key lies in the first 64 bytes */
	__u64 pad3[6]; /* aligns entries with cache lines */
};
_Static_assert(sizeof(struct ws_hop) == 192, "ws_hop is ABI");

/* ws_sources: the headends of paths that have several. The value is not used. */
struct ws_source_key {
	__be32 path;
	__u32 pad;
	__be64 addr[2];
};
_Static_assert(sizeof(struct ws_source_key) == 24, "ws_source_key is ABI");

/* ws_places: where a SID's entries probably are, by the SID's place in the locator
 * and the last bit of the epoch. A SID usually has one path, and for a while two
 * epochs; any other entry is found only by ws_hop_index and ws_egress_index.
 */
struct ws_place {
	__u32 hop; /* in ws_hops */
	__u32 egress; /* in ws_egresses, if the path ends at this SID */
};
_Static_assert(sizeof(struct ws_place) == 8, "ws_place is ABI");

/* ws_sids: the SIDs and paths of this node, to find the reason why ws_hops has
 * no entry. Key: ws_hop_key with epoch 0; path 0 stands for the SID itself.
 */

/* ws_egress_index: the index in ws_egresses of the entry of a path and epoch. */
struct ws_egress_key {
	__be32 path;
	__u8 epoch;
	__u8 pad[3];
};
_Static_assert(sizeof(struct ws_egress_key) == 8, "ws_egress_key is ABI");

/* ws_egresses, by the rules of ws_hops. */
struct ws_egress {
	struct ws_egress_key of; /* the key of the entry */
	__u8 segments; /* entries in the list */
	__u8 keys; /* positions that stamp; keyed only */
	__u8 on_violation; /* enum ws_on_violation */
	__u8 window_log2; /* W = 2^window_log2 numbers of each lane */
	__u32 window; /* its replay window: the first word in ws_windows */
	__u32 lanes; /* of the window */
	__u32 pad;
	__u64 secret; /* s = f1(0); pot, opot */
	/* As on the wire: last segment first; SIDs, or containers of C-SIDs. */
	__u8 list[WS_SEGS_MAX][16];
	__u64 key[WS_KEYS_MAX][2];
};
_Static_assert(sizeof(struct ws_egress) == 544, "ws_egress is ABI");

/* ws_windows: slabs of WS_WINDOW_SLAB words each; the words are numbered
 * across slabs. A window is a run of words, in one slab or in several:
 * WS_WINDOW_MIN / 4 to WS_WINDOW_MAX / 4 of them for each lane of the path;
 * see lib/proof/replay.h. The WS_WINDOW_HEAD words before it belong to user
 * space, and name its owner. All generations share the slabs, also programs
 * of other versions: the meaning of their contents must not change.
 */
#define WS_WINDOW_SLAB 131072
#define WS_WINDOW_SLABS 2048
#define WS_WINDOW_HEAD 8
#define WS_WINDOW_MIN 64
#define WS_WINDOW_MAX 65536

/* ws_headends: the index is the target of rules. All zero: none. */
struct ws_headend {
	__u16 outer_len; /* SRv6: 72 + 16 * entries of the segment list; labels: 36 + 8 * visits */
	__u16 lane; /* lane of CPU 0 */
	__u16 lanes; /* CPUs that have a lane */
	__u8 scheme;
	__u8 epoch;
	__be32 path;
	__u32 counter; /* the slot of its numbers in ws_numbers */
	__u32 stats; /* index into ws_stats */
	__u16 mtu; /* of the inner packet; 0: not known */
	__u16 mss; /* the highest MSS that SYNs may have; 0: SYNs stay unchanged */
	__u8 own; /* 1: the path also takes packets that this node originates */
	__u8 form; /* enum ws_form */
	/* Its entry of ws_traces, counted from 1; 0: none. User space
	 * changes only this field while rules refer to the entry.
	 */
	__u8 trace;
	__u8 pad[5];
	struct ws_share share;
	/* The outer header as sent. These fields are zero here:
	 * payload length, traffic class, flow or entropy label, RND
	 * and CML. The next header of SRH or word is that of IPv6.
	 */
	__u8 outer[WS_OUTER_MAX];
};
_Static_assert(sizeof(struct ws_headend) == 456, "ws_headend is ABI");

/* ws_traces: the traces of paths whose headend this node is. The headend sets
 * the O-flag in the next packets of the path, or of a flow on it; see ws_traced.
 */
#define WS_TRACES 8
struct ws_trace {
	__s64 left; /* packets; programs count them down; 0 or less: none */
	/* The flow, if the trace is of one. Bits outside of a mask are 0. */
	__be64 src[2]; /* IPv4: ::ffff:a.b.c.d */
	__be64 src_mask[2];
	__be64 dst[2];
	__be64 dst_mask[2];
	__be16 sport; /* 0: any, and packets without */
	__be16 dport;
	__u8 protocol; /* 0: any */
	__u8 flow; /* 1: packets of the flow; 0: all packets of the path */
	__u8 pad[2];
};
_Static_assert(sizeof(struct ws_trace) == 80, "ws_trace is ABI");

/* ws_paths: the key is a path whose headend this node is,
 * the value the index of its entry in ws_headends.
 */

/* ws_guards: the key is a path that ends at this node and whose chain sets
 * the guard's action, the value an enum ws_guard. Other paths have no entry.
 */

/* ws_path_mtus: the MTU that a node on the way has reported
 * to this headend, by the headend's index in ws_stats.
 */
struct ws_path_mtu {
	__u64 expires; /* bpf_ktime_get_coarse_ns */
	__be32 path; /* the path of the MTU: an index may be given to another path */
	__u32 mtu; /* of inner packets; 0: no MTU was reported */
};
_Static_assert(sizeof(struct ws_path_mtu) == 16, "ws_path_mtu is ABI");

/* ws_numbers: slabs of WS_NUMBER_SLOTS slots each; the slots are numbered across
 * slabs. Each path and epoch whose headend this node is has a slot. A slab consists of
 * rows, each with a ws_number for every slot: the first row belongs to user space and
 * names the owners, and then each CPU has one row. All generations share the slabs,
 * also programs of other versions: the meaning of their contents must not change.
 */
#define WS_NUMBER_SLOTS 256
#define WS_NUMBER_SLABS 512

/* The numbers of one slot on one CPU. */
struct ws_number {
	__u64 last; /* the last number in use; programs write it */
	__u64 ceiling; /* the highest number that programs may use; user space writes it */
};
_Static_assert(sizeof(struct ws_number) == 16, "ws_number is ABI");

/* ws_match: a table of prefixes for each use. A change replaces a table as a whole. */
enum ws_match_use {
	WS_MATCH_STEER = 0, /* the headend's rules: target is its index */
	WS_MATCH_REQUIRE = 1, /* the guard's rules: target is the path */
	WS_MATCH_LOCAL = 2, /* of local functions: target is the proxy */
};
#define WS_MATCH_USES 3
/* From here on one table for each function whose own packets take
 * chains, by ws_proxy.origin: target as with WS_MATCH_STEER.
 */
#define WS_MATCH_ORIGIN 3
#define WS_ORIGINS_MAX 60
#define WS_MATCH_TABLES (WS_MATCH_ORIGIN + WS_ORIGINS_MAX)

/* Entries of a line. */
#define WS_MATCH_WAYS 3

/* One cache line of such a table, which is an array of lines. A line is either a part
 * of a head, or has entries.
 *
 * A prefix is stored under its length; the prefixes of one length form a hash table
 * with lines of its own. A search looks for the address's prefix of one length after
 * another: if there is an entry, the longest match has at least that length; if there
 * is none, it is shorter. So the search descends a tree of lengths, which the head
 * holds: the most frequent length first, and from there on the middle of the
 * remaining lengths. On the way to a longer prefix there is an entry at each step,
 * which need not be a rule itself.
 *
 * The head of the destinations is at line 0; heads of the sources, for rules with a
 * source, are at the lines that WS_MATCH_SOURCE entries name. Addresses are in the
 * host's order, upper half first; an IPv4 address is ::ffff:a.b.c.d. If an IPv6 rule
 * covers more than ::ffff:0:0/96, an entry for ::ffff:0:0/96 excludes the IPv4
 * addresses.
 */
struct ws_match_line {
	__u64 addr[WS_MATCH_WAYS][2];
	/* See enum ws_match_action; a path is in network order. */
	__u32 target[WS_MATCH_WAYS];
	__u8 kind[WS_MATCH_WAYS];
	__u8 more; /* 1: the next line has entries that belong here */
};
_Static_assert(sizeof(struct ws_match_line) == 64, "ws_match_line is ABI");

/* In ws_match_line.kind, beside an enum ws_match_action; 0: there is no
 * entry. LOCAL: see ws_match. LONGER: longer prefixes may exist. RULE: the
 * entry is a rule; other entries repeat the longest rule that covers them.
 */
#define WS_MATCH_KIND_ACTION 3
#define WS_MATCH_KIND_LOCAL 4
#define WS_MATCH_KIND_USED 8
#define WS_MATCH_KIND_LONGER 16
#define WS_MATCH_KIND_RULE 32

/* One length in a head; each line of a head has 8. The first one is no length: its hit is
 * the first step of the search, its base the number of the source class, 0 for destinations.
 */
struct ws_match_step {
	__u8 length; /* bits, 0 to 128 */
	__u8 log2; /* bits of its hash */
	__u8 hit; /* the step after an entry with LONGER; 0: none */
	__u8 miss; /* the step where there is no entry; 0: none */
	__u32 base; /* its first line */
};
#define WS_MATCH_HEAD_STEPS 8
struct ws_match_head {
	struct ws_match_step step[WS_MATCH_HEAD_STEPS];
};
_Static_assert(sizeof(struct ws_match_head) == sizeof(struct ws_match_line),
	       "ws_match_head is ABI");
/* The highest number of steps of a search, and of lines that an
 * entry may be in: the line of its hash, and the lines after it.
 */
#define WS_MATCH_DEPTH 9
#define WS_MATCH_RUN 4
/* Multipliers of the hash: odd, otherwise arbitrary. */
#define WS_MATCH_HASH_HI 0x9e3779b97f4a7c15
#define WS_MATCH_HASH_LO 0xc2b2ae3d27d4eb4f
#define WS_MATCH_HASH_MIX 0xd6e8feb86659fd93

/* The result of a search. */
struct ws_match {
	__u32 target; /* see enum ws_match_action; a path is in network order */
	__u8 action; /* enum ws_match_action */
	/* 1: an address of this node: packets to it are never steered and need no
	 * proof. Target and action are those of the longest rule that covers the
	 * address: with them a packet that has a proof is assigned to its chain.
	 */
	__u8 local;
	__u8 pad[2];
};

/* Classification by rules with ports, protocol, DSCP and mark. A node's rules are
 * numbered from 0 in the order of their priorities. A set of rules is a vector of words:
 * rule i is bit i % 64 of word i / 64. Each condition has a table of vectors: the rules
 * whose condition the packet meets. Rules in all vectors match; the first of them counts.
 */
#define WS_RULES_MAX 256
#define WS_RULE_WORDS (WS_RULES_MAX / 64)
/* Ranges of values that WS_RULES_MAX rules can distinguish. */
#define WS_RULE_CUTS (2 * WS_RULES_MAX + 1)

/* Addresses, in the host's order, upper half first. fit[i] is for addresses from
 * from[i] up to, but not including, from[i + 1]. from[0] is the lowest address;
 * the entries behind the last range repeat it, with the highest address.
 */
struct ws_rule_addrs {
	__u32 step; /* first step of a binary search: a power of two, or 0 */
	__u32 start; /* 0 */
	__u64 from[WS_RULE_CUTS][2];
	__u64 fit[WS_RULE_CUTS][WS_RULE_WORDS];
};

/* Numbers, with ranges as in ws_rule_addrs: ports, and numbers that are compared exactly. */
struct ws_rule_numbers {
	__u32 step;
	__u32 start;
	__u32 from[WS_RULE_CUTS];
	__u32 pad;
	__u64 fit[WS_RULE_CUTS][WS_RULE_WORDS];
};

/* The marks that are compared under one mask: in ws_ruleset.marks, from index first on. */
struct ws_rule_mask {
	__u32 mask;
	__u16 first;
	__u16 count;
};

/* The purpose of a look-up. */
enum ws_rule_use {
	WS_RULE_STEER = 0, /* the headend that takes a packet which arrives */
	WS_RULE_REQUIRE = 1, /* the path whose proof a packet must have */
	/* Whether a packet without proof may be one that needs it. The ports of a
	 * fragment, or of an unreadable header, are unknown: rules with any ports match.
	 */
	WS_RULE_SUSPECT = 2,
	WS_RULE_LEAVE = 3, /* the headend that takes a packet which leaves */
};
/* From here on one for each function, as with WS_MATCH_ORIGIN. */
#define WS_RULE_ORIGIN 4
#define WS_RULE_USES 64
_Static_assert(WS_RULE_ORIGIN + WS_ORIGINS_MAX == WS_RULE_USES,
	       "a use is missing");

/* ws_rules[0], if the node has rules. A change replaces the whole set at once. */
struct ws_ruleset {
	__u32 masks;
	__u32 pad;
	/* By use, then 0 for IPv6 and 1 for IPv4. The vectors of WS_RULE_STEER,
	 * of WS_RULE_SUSPECT, and from WS_RULE_ORIGIN on have no rules by mark.
	 */
	__u64 use[WS_RULE_USES][2][WS_RULE_WORDS];
	struct ws_rule_addrs dst;
	struct ws_rule_addrs src;
	struct ws_rule_numbers sport;
	struct ws_rule_numbers dport;
	__u64 protocol[256][WS_RULE_WORDS];
	__u64 any_protocol[WS_RULE_WORDS]; /* rules without a protocol */
	__u64 dscp[64][WS_RULE_WORDS];
	__u64 any_mark[WS_RULE_WORDS];
	/* The rules by mark that have a path, by the path's __be32 as a number. */
	struct ws_rule_numbers proven;
	struct ws_rule_mask mask[WS_RULES_MAX];
	__u32 marks[WS_RULES_MAX]; /* in rising order under each mask */
	__u64 marked[WS_RULES_MAX][WS_RULE_WORDS];
	/* By rule. steer: headend index + 1, with the bits below; 0: its path
	 * has no headend here. require: the path; 0: its path does not end here.
	 */
	__u32 steer[WS_RULES_MAX];
	__be32 require[WS_RULES_MAX];
	/* The rules of require by the setting of their chains, an enum ws_guard. */
	__u64 guard[WS_GUARDS][WS_RULE_WORDS];
};

/* In ws_ruleset.steer. */
#define WS_RULE_BY_MARK (1U << 31)
#define WS_RULE_BY_DSCP (1U << 30)
#define WS_RULE_TARGET (WS_RULE_BY_DSCP - 1)

/* ws_stats: per CPU; headend: stamped, endpoint: stamped, egress: verified. */
struct ws_stats {
	__u64 packets; /* skbs or XDP frames that were stamped */
	__u64 frames; /* frames of these on the link */
	__u64 bytes; /* of the inner packets */
};

#define WS_PORT_VLANS 8
#define WS_VLAN_AD 0x1000 /* of IEEE 802.1ad, not 802.1Q */
#define WS_VLAN_STACKED 0x2000 /* the plan has VLANs on top of this one */

/* ws_ports: the interfaces that waystamp is attached to, by index. */
struct ws_port {
	__u8 xdp_target; /* 1: takes XDP redirects */
	__u8 unmatched_drop; /* edge: refuse packets that match no chain */
	__u8 cutter; /* 1: a segmenter's; for a segmenter of functions, the proxy is in skb->tc_index */
	__u8 edge; /* 1: outside; no encapsulated packet leaves here */
	__u32 proxy; /* of the function behind it; 0: none */
	/* Planned VLAN interfaces on top of it: VLAN id,
	 * with WS_VLAN_AD and WS_VLAN_STACKED.
	 */
	__u16 vlans[WS_PORT_VLANS];
	__u32 guard; /* edge: enum ws_guard */
};

/* A next hop that TC has found, valid for a short time. */
struct ws_nexthop {
	__u64 expires; /* jiffies */
	/* The destination; for a SID its upper half, and 0. */
	__be64 to[2];
	__u32 ifindex;
	__u32 ways; /* ws_node.ways at that time */
	__u16 mtu; /* 65535 at most */
	__u8 dmac[6];
	__u8 smac[6];
	__u8 xdp; /* 1: for XDP too */
	__u8 pad;
	/* Inner packets: the path that their destination
	 * requires, whatever their source; 0: ask the guard.
	 */
	__be32 path;
	__u32 pad2;
};
_Static_assert(sizeof(struct ws_nexthop) == 56, "ws_nexthop is ABI");

/* Buckets of flows, for equal-cost routes: a power of two. */
#define WS_FLOWS 16

/* ws_exits: per CPU, the next hops of a path's packets after a
 * hop, a headend or an egress; the index is that of its ws_stats.
 */
struct ws_exit {
	struct ws_nexthop flow[WS_FLOWS];
};

/* ws_nexthops: the next hops of inner packets behind their egress,
 * for paths with more destinations than ws_exits can hold.
 */
struct ws_nexthop_key {
	__be64 addr[2];
	__u32 flow; /* bucket */
	__u32 pad;
};

/* ws_proxies: one per function of kind unaware; the key is never 0 */
struct ws_proxy {
	__u64 lifetime_ns; /* of a cached header */
	__u32 to; /* interface that the inner packet leaves by; 0: local */
	/* Metadata: its first entry of ws_slots, counted from 1, and the
	 * entries of each CPU, a power of two. From WS_SLOTS_NEAR entries
	 * on, the first entry is a multiple of WS_SLOTS_NEAR, plus 1.
	 * Content: its first entry of ws_buckets, and their number.
	 */
	__u32 slot;
	__u32 slots;
	__u32 stats; /* index into ws_proxy_stats and ws_slot_next */
	__u8 recognise; /* enum ws_recognise */
	__u8 on_unknown; /* enum ws_on_unknown */
	__u8 cut; /* 1: the function gets no super-packets */
	__u8 has_via; /* 1: via is the next hop on interface to */
	__u8 dmac[6]; /* without via: destination of frames to the function */
	__u8 gone; /* 1: one of its interfaces is missing */
	__u8 cuts; /* 1: the device of interface to segments super-packets itself */
	__u8 peer; /* 1: packets go to the peer of to, in another namespace */
	/* 1: the argument is the packet mark inside the function, and the mark is 0 outside */
	__u8 mark;
	/* WS_ON_UNKNOWN_ORIGINATE: its table of ws_match
	 * and of ws_ruleset.use, counted from 1
	 */
	__u8 origin;
	__u8 stream; /* enum ws_bytes */
	__u8 via[16];
	/* The source of its ICMP errors, which are routed if no chain
	 * takes them; ::: there is none. IPv4 as ::ffff:a.b.c.d.
	 */
	__be64 address[2][2];
	/* The conntrack mark of flows that bypass the function;
	 * 0: no flow does. And the namespace that tracks them,
	 * by its id in the node's namespace; -1: the node's own.
	 */
	__u32 bypass;
	__s32 netns;
	__u32 conns; /* of a function on bytes: entries of ws_conns that it may add */
	/* Metadata, 1: packets may come back with other addresses and ports */
	__u8 rewrites;
	__u8 pad[3];
};
_Static_assert(sizeof(struct ws_proxy) == 104, "ws_proxy is ABI");

/* What the proxy keeps of a packet: its outer header, already
 * advanced to the next segment but not stamped, and the hop
 * that stamps it. Entries of ws_slots and of ws_cache.
 */
struct ws_cached {
	/* CLOCK_MONOTONIC, ns. In ws_slots, 0: free, 1: in use by a CPU. */
	__u64 expires;
	struct ws_hop_key hop;
	/* In ws_cache, with the proxy and the number of the
	 * copy in it; in ws_slots, the packet's index.
	 */
	__u64 fingerprint;
	__u32 proxy;
	__u16 outer_len;
	__u16 tlv_off; /* of the proof TLV, from the outer header's start */
	__u8 outer[WS_CACHED_MAX];
};
_Static_assert(sizeof(struct ws_cached) == 40 + WS_CACHED_MAX,
	       "ws_cached is ABI");

/* Entries of ws_slots that a CPU fills in turn for one function, so that they stay
 * in its cache; other entries are for packets that stay longer in the function.
 */
#define WS_SLOTS_NEAR 64

/* ws_buckets: the positions in ws_cache of packets that are recognised by content.
 * One cache line; way w of bucket b is entry b * WS_WAYS + w of ws_cache.
 */
#define WS_WAYS 7
struct ws_bucket {
	/* 0: free; 1: in use by a CPU. Else bits 63-24: bits
	 * 63-24 of the fingerprint; 23-0: expiry, in 2^20 ns.
	 */
	__u64 tag[WS_WAYS];
	/* In 2^20 ns. Until copies: fingerprints with this first bucket may have
	 * copies. Until spilled: such fingerprints may be in their second bucket.
	 */
	__u32 copies;
	__u32 spilled;
};
_Static_assert(sizeof(struct ws_bucket) == 64, "ws_bucket is ABI");

/* ws_copies: byte-identical packets, which are interchangeable, after
 * the first one. Key: their fingerprint. Copies are numbered from 1.
 */
struct ws_copies {
	__u32 in; /* the last copy that went to the function */
	__u32 out; /* the last copy that came back */
	__u64 until; /* CLOCK_MONOTONIC, ns: no copies after this time */
};

/* ws_proxy_stats: per CPU; named as in the paper. */
struct ws_proxy_stats {
	__u64 rx_success; /* stripped, cached and handed to the function */
	__u64 rx_ignored; /* refused: no room in the cache */
	__u64 rx_cut; /* super-packets that were segmented first */
	__u64 rx_copies; /* of rx_success: an identical packet was in the function */
	__u64 tx_cut; /* super-packets that came back and were segmented first */
	__u64 tx_success; /* came back, got their header, were stamped */
	__u64 tx_ignored; /* came back and take no chain: link-local, own address */
	__u64 tx_not_cached; /* came back, and no header was found */
	__u64 tx_plain; /* of tx_not_cached: forwarded by ordinary routing */
	__u64 expired; /* headers that were found too late */
	__u64 evicted; /* headers replaced by newer ones before their time */
	__u64 waited_ns; /* of tx_success: sum of the times in the function */
	/* of tx_not_cached: made by the function, and taken by a path from there on */
	__u64 tx_originated;
	__u64 bypassed; /* stamped without a visit: packets of flows that bypass the function */
};

/* ws_errors[0]: per CPU, the ICMP errors sent for refused
 * packets.
 */
struct ws_errors {
	__u64 due_ns; /* token bucket, as the time by which it is full again */
	__u64 due_too_big_ns; /* the bucket of errors that report an MTU */
	__u64 too_big; /* sent */
	__u64 time_exceeded;
	__u64 parameter;
	__u64 unreachable;
	__u64 suppressed; /* not sent: the rate was reached */
	__u64 unanswerable; /* not sent: RFC 4443 2.4 e, or no route to the sender */
};
_Static_assert(sizeof(struct ws_errors) == 64, "ws_errors is ABI");

/* ws_labels: the key is a node's label, the value the node's address. */
struct ws_label {
	__be64 addr[2]; /* IPv4 as ::ffff:a.b.c.d */
};
_Static_assert(sizeof(struct ws_label) == 16, "ws_label is ABI");

/* ws_programs: the programs for packets with options before their SRH,
 * for packets that a function has made, for packets of functions on byte
 * streams, for packets with labels and packets that take paths over
 * labels, for services, for flows that may bypass their function, and for
 * packets that take paths over labels at egress.
 */
#define WS_PROGRAM_EXT 0
#define WS_PROGRAM_ORIGINATE 1
#define WS_PROGRAM_STREAM 2
#define WS_PROGRAM_MPLS 3
#define WS_PROGRAM_GATEWAY 4
#define WS_PROGRAM_BYPASS 5
#define WS_PROGRAM_MPLS_OUT 6
#define WS_PROGRAM_MPLS_BYPASS 7
#define WS_PROGRAMS 8

/* ws_programs_xdp: the programs for packets with labels,
 * and for packets that take a path over labels.
 */
#define WS_PROGRAM_XDP_CORE 0
#define WS_PROGRAM_XDP_EDGE 1
#define WS_PROGRAMS_XDP 2

/* ws_streams: the key is a path that ends at a function on
 * byte streams; all paths are in network order.
 */
struct ws_stream {
	__be32 part; /* the part of the chain that the path is, or belongs to */
	__be32 onward; /* the next part in the same direction */
	__be32 back; /* the part that answers from the function take */
	__be32 other; /* the part that ends at the function in the other direction */
	__u32 proxy; /* the function: key in ws_proxies */
	__u8 opens; /* 1: clients open connections in this direction */
	__u8 first; /* 1: the function accepts a client after the server has accepted */
	__u8 by; /* enum ws_by */
	__u8 pad[1];
};
_Static_assert(sizeof(struct ws_stream) == 24, "ws_stream is ABI");

/* Which packets, other than TCP, go by a function on byte streams: they leave the part that
 * ends there and enter the next one, without the function.
 */
enum ws_by {
	WS_BY_NOTHING = 0,
	WS_BY_ICMP = 1, /* echo; errors about all but segments of TCP */
	WS_BY_RELAY = 2, /* whatever is certainly not TCP */
};

/* Ethertype (for experiments, IEEE 802) of a SYN that is held at a function on byte
 * streams: the kernel ignores it there, and the worker's packet socket receives it.
 * The worker sends it with the same type when the function's TCP may receive it.
 */
#define WS_ETH_P_HELD 0x88b5

/* ws_proxy.stream: the kind of a function on bytes. STREAM: it sends only on connections
 * that came to it. GATEWAY: it terminates connections of clients outside; for each
 * connection that it opens, user space first writes into ws_conns the path of the answers.
 */
enum ws_bytes {
	WS_BYTES_NONE = 0,
	WS_BYTES_STREAM = 1,
	WS_BYTES_GATEWAY = 2,
};

/* ws_services: addresses and ports of gateways for clients. A gateway's packets are taken before
 * chains are matched. The value is the gateway's key in ws_proxies. IPv4 as ::ffff:a.b.c.d.
 */
struct ws_service_key {
	__be64 addr[2];
	__be16 port;
	__u16 pad[3];
};
_Static_assert(sizeof(struct ws_service_key) == 24, "ws_service_key is ABI");

/* In ws_conn_key.proxy: a client's connection to the gateway. Without this bit: a
 * connection that the gateway has opened, which may have the same addresses and ports.
 */
#define WS_CONN_ACCEPTED 0x80000000

/* Entries of ws_conns, about 120 bytes each. */
#define WS_CONNS_MAX 262144

/* ws_conns and ws_conns_new: a connection through a function on byte
 * streams, by the addresses and ports of both ends; IPv4 as
 * ::ffff:a.b.c.d. ws_conns_new has connections that the function has not
 * continued yet, and clients to which a gateway has sent no payload yet.
 */
struct ws_conn_key {
	__be64 client[2];
	__be64 server[2];
	__be16 client_port;
	__be16 server_port;
	__u32 proxy; /* the function */
};
_Static_assert(sizeof(struct ws_conn_key) == 40, "ws_conn_key is ABI");

struct ws_conn {
	__u64 used; /* bpf_ktime_get_coarse_ns of the last packet, to the second */
	/* The part by which the client's packets come. If a gateway opened the connection: the
	 * part by which the server's packets come. 0 for a client's connection to a gateway.
	 */
	__be32 part;
	__u32 seen; /* WS_CONN_* */
};
_Static_assert(sizeof(struct ws_conn) == 16, "ws_conn is ABI");

#define WS_CONN_CLIENT_FIN 1 /* from the client */
#define WS_CONN_SERVER_FIN 2
#define WS_CONN_RST 4 /* from either */
/* The function has acknowledged the server's packets; a
 * client of a gateway: the gateway has sent payload.
 */
#define WS_CONN_ANSWERED 8

/* ws_refusals: per CPU, by reason. */
struct ws_refusal {
	__u64 dropped;
	__u64 reported; /* forwarded: by on-violation: report, or guard: audit */
	__u64 window_ns; /* start of the current second of events */
	__u32 sent; /* events in it */
	__u32 suppressed; /* events not sent since the last sent event */
};
_Static_assert(sizeof(struct ws_refusal) == 32, "ws_refusal is ABI");

/* A record in the ring buffer ws_events. */
struct ws_event {
	__u64 time_ns; /* CLOCK_MONOTONIC */
	__u32 ifindex;
	__u32 len; /* of the whole packet */
	__u16 caplen; /* bytes in data */
	__u16 line; /* of file, where the reason was decided */
	__u32 suppressed; /* events of this reason and CPU that were not sent before this one */
	__s32 err; /* a helper's result, or 0 */
	__u8 reason; /* enum ws_reason */
	__u8 hook; /* enum ws_hook */
	__u8 reported; /* 1: counted and forwarded */
	__u8 file; /* enum ws_file */
	__u8 data[WS_EVENT_DATA]; /* from the Ethernet header */
};
_Static_assert(sizeof(struct ws_event) == 32 + WS_EVENT_DATA,
	       "ws_event is ABI");

/* Events of traced packets per CPU and second. A packet may visit 16 positions. */
#define WS_TRACED_PER_SECOND 256

/* ws_tracing[0]: per CPU, the limit of these events. */
struct ws_tracing {
	__u64 window_ns; /* start of the current second */
	__u32 sent; /* events in it */
	__u32 suppressed; /* events not sent since the last sent event */
};
_Static_assert(sizeof(struct ws_tracing) == 16, "ws_tracing is ABI");

/* A record in the ring buffer ws_traced: a packet with the
 * O-flag (RFC 9259 2.1) at a position of its path.
 */
struct ws_traced {
	__u64 time_ns; /* CLOCK_MONOTONIC */
	__u64 number; /* RND without masks */
	__be64 before; /* CML as it came; at the headend 0 */
	__be64 after; /* CML with the stamp; if verified 0 */
	__be32 path;
	__u32 ifindex;
	__u32 len; /* of the whole packet, with the outer header */
	__u32 suppressed; /* events of this CPU that were not sent before this one */
	__u8 epoch;
	__u8 scheme; /* enum ws_scheme */
	__u8 position; /* 0: the headend */
	__u8 verified; /* 1: the egress has verified the proof and the number */
	__u8 hook; /* enum ws_hook */
	__u8 pad[3];
};
_Static_assert(sizeof(struct ws_traced) == 56, "ws_traced is ABI");
