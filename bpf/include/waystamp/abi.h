/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The contract between the programs in the kernel and user space: what the
 * maps hold. Nothing else is shared. No padding by accident: every gap is a
 * field that must be zero. Addresses and SIDs are in network order; a field of
 * type __be32 is in network order; all else is in the host's.
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
/* In skb->tc_index: verified by this node as its chain's egress, so that it needs
 * no header on its way out. No slot has this index.
 */
#define WS_INDEX_PROVEN 65535
/* In skb->tc_index: the first guard let it go without a proof, by an enum ws_guard,
 * so that the second does not count it again. No slot has this index either.
 */
#define WS_INDEX_LET_GO 65534
/* Events per reason, CPU and second; the rest is counted in the next one. */
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

/* What carries packets of a path between nodes. */
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
	 * and End.AN for netfilter, section 5: the same with an argument
	 */
	WS_BEHAVIOUR_END_AD = 3,
	/* The verdict, as END_DT46; what is verified goes to a function on byte streams. */
	WS_BEHAVIOUR_STREAM = 4,
};

/* How a packet that comes back from a function is recognised. */
enum ws_recognise {
	WS_RECOGNISE_CONTENT = 0, /* by what a function leaves as it is */
	WS_RECOGNISE_METADATA = 1, /* by skb->tc_index, which stays with it */
};

/* What becomes of a packet from a function that is not in the cache. */
enum ws_on_unknown {
	WS_ON_UNKNOWN_DROP = 0,
	WS_ON_UNKNOWN_PLAIN = 1, /* ordinary routing */
	/* If the function has made it, the rest of the chain that takes it */
	WS_ON_UNKNOWN_ORIGINATE = 2,
};

enum ws_on_violation {
	WS_ON_VIOLATION_DROP = 0,
	WS_ON_VIOLATION_REPORT = 1,
};

/* What the guard does with a packet that a chain requires and that has no proof. A
 * chain and an interface say one each: the higher number counts.
 */
enum ws_guard {
	WS_GUARD_UNSET = 0, /* says nothing; where neither does: ENFORCE */
	WS_GUARD_OFF = 1, /* lets it go */
	WS_GUARD_AUDIT = 2, /* lets it go, and counts it */
	WS_GUARD_ENFORCE = 3, /* refuses it */
};
#define WS_GUARDS 4

enum ws_hook {
	WS_HOOK_TC = 0,
	WS_HOOK_XDP = 1,
};

/* What a classification rule says of a packet that it matches. */
enum ws_match_action {
	WS_MATCH_NONE = 0, /* nothing: as if there were no rule */
	WS_MATCH_PATH = 1, /* target: headend index, or at the guard the path */
	WS_MATCH_SOURCE = 2, /* target: the head to look the source up in */
	/* No rule's word: there is no table, or not all of it. What it would say, and
	 * whether the address is the node's own, nobody knows.
	 */
	WS_MATCH_MISSING = 3,
};

/* Set before load. The upper 64 bits of addresses, and masks over them. */
struct ws_config {
	__be64 block; /* the domain's SID block */
	__be64 block_mask;
	__be64 locator; /* this node's part of it */
	__be64 locator_mask;
	__u64 nexthop_ttl; /* life of a remembered way out, in jiffies */
	__u64 fingerprint_key[2]; /* SipHash key of the content cache; secret */
	__be64 address[2]; /* the node's: ICMP errors come from it */
	__u64 icmp_interval_ns; /* between two ICMP errors of a CPU, in the long run */
	__u64 icmp_burst_ns; /* as many intervals as may be sent at once */
	/* 1: the kernel has BPF_F_ADJ_ROOM_DECAP_L3_IPV4 and its like, since 6.3 */
	__u32 decap_l3;
	/* Of a domain with labels: the service label of SID 0 of the block, that of
	 * another being as far above; 0: the domain has none.
	 */
	__u32 services;
	__u32 label; /* the node's own; 0: it has none */
	__u32 pad;
};

/* Is there a set in ws_rules? */
enum ws_rules_state {
	WS_RULES_NONE = 0,
	WS_RULES_MAYBE = 1, /* while a plan with rules comes or goes */
	WS_RULES_THERE = 2, /* if not, nobody knows what it would say */
};

/* ws_node[0]. Zero, as the map is made: refuse. */
struct ws_node {
	__u32 armed; /* 1: the maps hold a whole plan */
	/* Veth pairs of the agent's own that cut super-packets: what is sent
	 * into one comes back frame by frame at its peer, which has that MAC
	 * address. The first one's peer has the core program, the second one's
	 * the function program, and the third one's, below, the edge program.
	 * 0: there is none.
	 */
	__u32 cut_ifindex;
	__u32 cut_back_ifindex;
	__u8 cut_dmac[6];
	__u8 cut_back_dmac[6];
	__u32 xdp; /* 1: XDP is there to use the ways that TC remembers */
	__u32 ways; /* ways remembered under another number do not count */
	__u32 rules; /* enum ws_rules_state */
	/* 1: some path takes what this node sends itself, or what is marked */
	__u32 own;
	__u32 cut_enter_ifindex;
	__u8 cut_enter_dmac[6];
	__u8 pad[2];
	__u32 services; /* 1: there is something in ws_services */
};
_Static_assert(sizeof(struct ws_node) == 56, "ws_node is ABI");

/* Proof parameters of one position. Which of them count is the scheme's
 * matter: keyed uses key, keyed-flow bind_key too, pot and opot the rest (pot
 * with masks of zero).
 */
struct ws_share {
	__u64 key[2]; /* SipHash key: its two little-endian words */
	__u64 bind_key[2];
	__u64 prime; /* p < 2^63 */
	__u64 alpha; /* (f1(x) + rest of f2 at x) * LPC mod p */
	__u64 lpc; /* Lagrange polynomial constant, < p */
	__u64 lpc_shoup; /* floor(lpc * 2^64 / p) */
	__u64 up_rnd; /* mask of the link towards the headend */
	__u64 up_cml;
	__u64 down_rnd; /* mask of the link towards the egress */
	__u64 down_cml;
};
_Static_assert(sizeof(struct ws_share) == 96, "ws_share is ABI");

/* ws_hop_index: where in ws_hops the entry of a SID, path and epoch is. */
struct ws_hop_key {
	__be64 sid; /* upper 64 bits */
	__be32 path;
	__u8 epoch;
	__u8 pad[3];
};
_Static_assert(sizeof(struct ws_hop_key) == 16, "ws_hop_key is ABI");

/* ws_hops: the first entry is none; the others never change while something names
 * them.
 */
struct ws_hop {
	struct ws_hop_key of; /* whose entry it is */
	__u8 behaviour; /* enum ws_behaviour */
	__u8 scheme; /* enum ws_scheme */
	__u8 position; /* 1 .. k-1 */
	__u8 form; /* enum ws_form */
	__u32 stats; /* index into ws_stats */
	__u32 proxy; /* End.AD, STREAM: key in ws_proxies; else 0 */
	/* End.AD: that of its SID in the list; 0: none. End.DT46: as __be32 the path that
	 * guards name for its packets, which is its own, or that of the whole chain for
	 * one that starts at a function.
	 */
	__u32 argument;
	/* The path's headend, which its packets come from (RFC 8754 5.1); ::
	 * where it has several: those are in ws_sources. Labels have no source.
	 */
	__be64 source[2];
	struct ws_share share; /* keyed's is in the entry's first 64 bytes */
	__u64 pad3[6]; /* entries begin where cache lines do */
};
_Static_assert(sizeof(struct ws_hop) == 192, "ws_hop is ABI");

/* ws_sources: the headends of paths that have several. The value says nothing. */
struct ws_source_key {
	__be32 path;
	__u32 pad;
	__be64 addr[2];
};
_Static_assert(sizeof(struct ws_source_key) == 24, "ws_source_key is ABI");

/* ws_places: where a SID's entries probably are, by its place in the locator and
 * its epoch's last bit. A SID has one path, as a rule, and two epochs for a while;
 * what else it has is found by ws_hop_index and ws_egress_index alone.
 */
struct ws_place {
	__u32 hop; /* in ws_hops */
	__u32 egress; /* in ws_egresses, for one that is verified there */
};
_Static_assert(sizeof(struct ws_place) == 8, "ws_place is ABI");

/* ws_sids: which SIDs and paths there are, to tell apart why ws_hops has no
 * entry. Key: ws_hop_key with epoch 0; path 0 stands for the SID itself.
 */

/* ws_egress_index: where in ws_egresses the entry of a path and epoch is. */
struct ws_egress_key {
	__be32 path;
	__u8 epoch;
	__u8 pad[3];
};
_Static_assert(sizeof(struct ws_egress_key) == 8, "ws_egress_key is ABI");

/* ws_egresses: as ws_hops. */
struct ws_egress {
	struct ws_egress_key of; /* whose entry it is */
	__u8 segments; /* entries in the list */
	__u8 keys; /* positions that stamp; keyed only */
	__u8 on_violation; /* enum ws_on_violation */
	__u8 window_log2; /* W = 2^window_log2 numbers of each lane */
	__u32 window; /* its replay window: the first word in ws_windows */
	__u32 lanes; /* that the window has */
	__u32 pad;
	__u64 secret; /* s = f1(0); pot, opot */
	/* As on the wire: last segment first; SIDs, or containers of C-SIDs. */
	__u8 list[WS_SEGS_MAX][16];
	__u64 key[WS_KEYS_MAX][2];
};
_Static_assert(sizeof(struct ws_egress) == 544, "ws_egress is ABI");

/* ws_windows: slabs of WS_WINDOW_SLAB words each, which are numbered through. A
 * window is a run of words, whichever slabs they are in: WS_WINDOW_MIN / 4 to
 * WS_WINDOW_MAX / 4 of them for each lane of the path; see lib/proof/replay.h. Before
 * them are WS_WINDOW_HEAD words that say whose they are, which are user space's. All
 * generations share the slabs, and programs of other versions too: what is in them
 * must not change.
 */
#define WS_WINDOW_SLAB 131072
#define WS_WINDOW_SLABS 2048
#define WS_WINDOW_HEAD 8
#define WS_WINDOW_MIN 64
#define WS_WINDOW_MAX 65536

/* ws_headends: the index is what rules name. All zero: none. */
struct ws_headend {
	__u16 outer_len; /* SRv6: 72 + 16 * entries of the segment list; labels: 36 + 8 * visits */
	__u16 lane; /* lane of CPU 0 */
	__u16 lanes; /* CPUs that have one */
	__u8 scheme;
	__u8 epoch;
	__be32 path;
	__u32 counter; /* its numbers: the slot in ws_numbers */
	__u32 stats; /* index into ws_stats */
	__u16 mtu; /* of the inner packet; 0: not known */
	__u16 mss; /* the most that TCP's SYNs may say; 0: they are left alone */
	__u8 own; /* 1: the path takes what this node sends itself, too */
	__u8 form; /* enum ws_form */
	__u8 pad[6];
	struct ws_share share;
	/* The outer header as sent, but for payload length, traffic class, flow
	 * or entropy label, RND and CML, which are zero here, and the next header of
	 * SRH or word, which is that of IPv6.
	 */
	__u8 outer[WS_OUTER_MAX];
};
_Static_assert(sizeof(struct ws_headend) == 456, "ws_headend is ABI");

/* ws_paths: key is a path that this node is a headend of, value the index of its
 * entry in ws_headends.
 */

/* ws_guards: key is a path that ends at this node and whose chain says what its guard
 * does, value the enum ws_guard. Of other paths there is no entry.
 */

/* ws_path_mtus: what a node on the way has told this headend; the index is that of
 * its ws_stats.
 */
struct ws_path_mtu {
	__u64 expires; /* bpf_ktime_get_coarse_ns */
	__be32 path; /* that it is of: an index may become another path's */
	__u32 mtu; /* of inner packets; 0: nothing was told */
};
_Static_assert(sizeof(struct ws_path_mtu) == 16, "ws_path_mtu is ABI");

/* ws_numbers: slabs of WS_NUMBER_SLOTS slots each, which are numbered through. A
 * path and epoch that this node is a headend of has a slot. In a slab are as many
 * ws_number in a row as it has slots: first a row that says whose they are, which is
 * user space's, and then one for each CPU. All generations share the slabs, and
 * programs of other versions too: what is in them must not change.
 */
#define WS_NUMBER_SLOTS 256
#define WS_NUMBER_SLABS 512

/* On one CPU. */
struct ws_number {
	__u64 last; /* that was given out; programs write it */
	__u64 ceiling; /* up to which they may; user space writes it */
};
_Static_assert(sizeof(struct ws_number) == 16, "ws_number is ABI");

/* ws_match: a table of prefixes each, which a change replaces as a whole. */
enum ws_match_use {
	WS_MATCH_STEER = 0, /* the headend's rules: target is its index */
	WS_MATCH_REQUIRE = 1, /* what chains that end here require: the path */
	WS_MATCH_LOCAL = 2, /* what must pass a local function: its proxy */
};
#define WS_MATCH_USES 3
/* From here on one for each function that packets originate at, by ws_proxy.origin:
 * what its chains take of them, as WS_MATCH_STEER.
 */
#define WS_MATCH_ORIGIN 3
#define WS_ORIGINS_MAX 60
#define WS_MATCH_TABLES (WS_MATCH_ORIGIN + WS_ORIGINS_MAX)

/* Entries of a line. */
#define WS_MATCH_WAYS 3

/* One cache line of such a table, which is an array of them. A line is either a
 * part of a head, or has entries.
 *
 * Prefixes are kept by their length, those of each length in lines of their own,
 * as a hash table. A search looks for an address's prefixes of some lengths: that
 * one is there says that the longest match is that long at least, that none is says
 * that it is shorter. So it goes down a tree of lengths, which the head holds: the
 * most frequent one first, and from there on the middle of those that are left.
 * Where a longer prefix is to be found, an entry leads there at each step of the
 * way, whether it is itself a rule or not.
 *
 * The head of the destinations is at line 0; heads of the sources, for rules that
 * name one, are where WS_MATCH_SOURCE says. Addresses are in the host's order,
 * upper half first; an IPv4 address is ::ffff:a.b.c.d; where a rule covers more
 * than all of these, one for them says that it does not mean them.
 */
struct ws_match_line {
	__u64 addr[WS_MATCH_WAYS][2];
	/* See enum ws_match_action; a path is in network order. */
	__u32 target[WS_MATCH_WAYS];
	__u8 kind[WS_MATCH_WAYS];
	__u8 more; /* 1: the next line has entries that belong here */
};
_Static_assert(sizeof(struct ws_match_line) == 64, "ws_match_line is ABI");

/* In ws_match_line.kind, beside an enum ws_match_action; 0: there is no entry.
 * LOCAL: see ws_match. LONGER: there may be longer ones. RULE: it is a rule; what
 * others say is of the longest rule that covers them.
 */
#define WS_MATCH_KIND_ACTION 3
#define WS_MATCH_KIND_LOCAL 4
#define WS_MATCH_KIND_USED 8
#define WS_MATCH_KIND_LONGER 16
#define WS_MATCH_KIND_RULE 32

/* A length in a head, of which each line has 8. The first one is none: its hit is
 * where to begin, its base the number of the source class, 0 for destinations.
 */
struct ws_match_step {
	__u8 length; /* bits, 0 to 128 */
	__u8 log2; /* its hash has so many bits */
	__u8 hit; /* the step after an entry that says LONGER; 0: none */
	__u8 miss; /* the step where there is no entry; 0: none */
	__u32 base; /* its first line */
};
#define WS_MATCH_HEAD_STEPS 8
struct ws_match_head {
	struct ws_match_step step[WS_MATCH_HEAD_STEPS];
};
_Static_assert(sizeof(struct ws_match_head) == sizeof(struct ws_match_line),
	       "ws_match_head is ABI");
/* Steps of a search at most, and lines that an entry may be in: its own by the
 * hash, and the next ones.
 */
#define WS_MATCH_DEPTH 9
#define WS_MATCH_RUN 4
/* Of the hash, odd numbers that nothing else is asked of. */
#define WS_MATCH_HASH_HI 0x9e3779b97f4a7c15
#define WS_MATCH_HASH_LO 0xc2b2ae3d27d4eb4f
#define WS_MATCH_HASH_MIX 0xd6e8feb86659fd93

/* What a search finds. */
struct ws_match {
	__u32 target; /* see enum ws_match_action; a path is in network order */
	__u8 action; /* enum ws_match_action */
	/* 1: an address of this node, which is never steered and needs no proof.
	 * Target and action are those of the longest rule that covers it: they
	 * still say which chain a packet belongs to that came with a proof.
	 */
	__u8 local;
	__u8 pad[2];
};

/* Classification by more than prefixes. The rules of a node are numbered from 0 in
 * the order of their priorities. A set of them is a vector of words: rule i is
 * bit i % 64 of word i / 64. For each condition a table says which rules a packet
 * fits; those that are in all vectors fit the packet, and the first of them counts.
 */
#define WS_RULES_MAX 256
#define WS_RULE_WORDS (WS_RULES_MAX / 64)
/* Ranges that WS_RULES_MAX of them cut all values into. */
#define WS_RULE_CUTS (2 * WS_RULES_MAX + 1)

/* Addresses, in the host's order, upper half first. From from[i] on, and below
 * from[i + 1], fit[i] counts. from[0] is the lowest there is; entries behind the
 * last one repeat it, from the highest there is.
 */
struct ws_rule_addrs {
	__u32 step; /* of a binary search, the first: a power of two, or 0 */
	__u32 start; /* 0 */
	__u64 from[WS_RULE_CUTS][2];
	__u64 fit[WS_RULE_CUTS][WS_RULE_WORDS];
};

/* The same for numbers: ports, and those that are looked for exactly. */
struct ws_rule_numbers {
	__u32 step;
	__u32 start;
	__u32 from[WS_RULE_CUTS];
	__u32 pad;
	__u64 fit[WS_RULE_CUTS][WS_RULE_WORDS];
};

/* Marks that are compared under the same mask: ws_ruleset.marks from first on. */
struct ws_rule_mask {
	__u32 mask;
	__u16 first;
	__u16 count;
};

/* What a packet is looked up for. */
enum ws_rule_use {
	WS_RULE_STEER = 0, /* which headend takes what comes in */
	WS_RULE_REQUIRE = 1, /* which path a packet must have a proof of */
	/* Whether a packet without proof may be one that needs it. Of a fragment,
	 * or of what cannot be read, nobody knows the ports: all count.
	 */
	WS_RULE_SUSPECT = 2,
	WS_RULE_LEAVE = 3, /* which headend takes what leaves, with its mark */
};
/* From here on one for each function, as WS_MATCH_ORIGIN. */
#define WS_RULE_ORIGIN 4
#define WS_RULE_USES 64
_Static_assert(WS_RULE_ORIGIN + WS_ORIGINS_MAX == WS_RULE_USES,
	       "a use is missing");

/* ws_rules: at 0, if there are any. A change replaces all of it at once. */
struct ws_ruleset {
	__u32 masks;
	__u32 pad;
	/* By use, and 1 for IPv4. Rules by mark are not in those of WS_RULE_STEER,
	 * of WS_RULE_SUSPECT, and from WS_RULE_ORIGIN on.
	 */
	__u64 use[WS_RULE_USES][2][WS_RULE_WORDS];
	struct ws_rule_addrs dst;
	struct ws_rule_addrs src;
	struct ws_rule_numbers sport;
	struct ws_rule_numbers dport;
	__u64 protocol[256][WS_RULE_WORDS];
	__u64 any_protocol[WS_RULE_WORDS]; /* those that name none */
	__u64 dscp[64][WS_RULE_WORDS];
	__u64 any_mark[WS_RULE_WORDS];
	/* The rules by mark with a path, by the path as __be32, as a number. */
	struct ws_rule_numbers proven;
	struct ws_rule_mask mask[WS_RULES_MAX];
	__u32 marks[WS_RULES_MAX]; /* in rising order under each mask */
	__u64 marked[WS_RULES_MAX][WS_RULE_WORDS];
	/* By rule. steer: headend index + 1 with the bits below, 0: its path does
	 * not start here. require: the path, 0: it does not end here.
	 */
	__u32 steer[WS_RULES_MAX];
	__be32 require[WS_RULES_MAX];
	/* The rules of require by what their chains say, an enum ws_guard. */
	__u64 guard[WS_GUARDS][WS_RULE_WORDS];
};

/* In ws_ruleset.steer. */
#define WS_RULE_BY_MARK (1U << 31)
#define WS_RULE_BY_DSCP (1U << 30)
#define WS_RULE_TARGET (WS_RULE_BY_DSCP - 1)

/* ws_stats: per CPU; headend: stamped, endpoint: stamped, egress: verified. */
struct ws_stats {
	__u64 packets; /* skbs or XDP frames: stamps */
	__u64 frames; /* what they are on a wire */
	__u64 bytes; /* of the inner packets */
};

#define WS_PORT_VLANS 8
#define WS_VLAN_AD 0x1000 /* of IEEE 802.1ad, not 802.1Q */
#define WS_VLAN_STACKED 0x2000 /* the plan has VLANs on top of this one */

/* ws_ports: the interfaces that waystamp is attached to, by index. */
struct ws_port {
	__u8 xdp_target; /* 1: takes XDP redirects */
	__u8 unmatched_drop; /* edge: refuse what matches no chain */
	__u8 cutter; /* 1: a cutter's; where it is the functions', the proxy is in skb->tc_index */
	__u8 edge; /* 1: outside, where nothing encapsulated goes */
	__u32 proxy; /* of the function that is behind it; 0: none is */
	/* VLAN interfaces on top of it that are in the plan: VLAN id, with
	 * WS_VLAN_AD and WS_VLAN_STACKED.
	 */
	__u16 vlans[WS_PORT_VLANS];
	__u32 guard; /* edge: enum ws_guard */
};

/* A way out that TC has found and that may be taken for a while. */
struct ws_nexthop {
	__u64 expires; /* jiffies */
	/* The destination that it is for; where that is a SID, its upper half
	 * and 0.
	 */
	__be64 to[2];
	__u32 ifindex;
	__u32 ways; /* ws_node.ways when it was found */
	__u16 mtu; /* 65535 at most */
	__u8 dmac[6];
	__u8 smac[6];
	__u8 xdp; /* 1: by XDP too */
	__u8 pad;
	/* Of an inner packet: the path that its destination alone requires; 0:
	 * ask the guard.
	 */
	__be32 path;
	__u32 pad2;
};
_Static_assert(sizeof(struct ws_nexthop) == 56, "ws_nexthop is ABI");

/* Buckets of flows, for equal-cost routes. A power of two. */
#define WS_FLOWS 16

/* ws_exits: per CPU, where packets of a path go from a hop, a headend or an
 * egress; the index is that of its ws_stats.
 */
struct ws_exit {
	struct ws_nexthop flow[WS_FLOWS];
};

/* ws_nexthops: where inner packets go from their egress, for paths to so many
 * destinations that ws_exits cannot hold them.
 */
struct ws_nexthop_key {
	__be64 addr[2];
	__u32 flow; /* bucket */
	__u32 pad;
};

/* ws_proxies: one per function that knows nothing of SRv6; key: never 0 */
struct ws_proxy {
	__u64 lifetime_ns; /* of a cached header */
	__u32 to; /* interface that the inner packet leaves by; 0: local */
	/* Metadata: its first entry of ws_slots, from 1, and how many each CPU
	 * has, a power of two. Where that is WS_SLOTS_NEAR at least, the first one
	 * is a multiple of it, and 1. Content: its first entry of ws_buckets, and how
	 * many it has.
	 */
	__u32 slot;
	__u32 slots;
	__u32 stats; /* index into ws_proxy_stats and ws_slot_next */
	__u8 recognise; /* enum ws_recognise */
	__u8 on_unknown; /* enum ws_on_unknown */
	__u8 cut; /* 1: a function gets no super-packets */
	__u8 has_via; /* 1: via is the next hop on the interface to */
	__u8 dmac[6]; /* without via: destination of frames to the function */
	__u8 gone; /* 1: one of its interfaces is not there */
	__u8 cuts; /* 1: the interface to cuts super-packets by itself */
	__u8 peer; /* 1: packets go to the other end of to, in another namespace */
	/* 1: the argument is the packet mark inside, which is 0 again outside */
	__u8 mark;
	/* WS_ON_UNKNOWN_ORIGINATE: which of ws_match and ws_ruleset.use is its own,
	 * counted from 1
	 */
	__u8 origin;
	__u8 stream; /* enum ws_bytes */
	__u8 via[16];
	/* Where its ICMP errors come from, which are routed if no chain takes them;
	 * ::: there is none. IPv4 as ::ffff:a.b.c.d.
	 */
	__be64 address[2][2];
	/* The conntrack mark of flows that its rules are done with, which go past it;
	 * 0: none do. And where these are tracked: the namespace of this id, as the
	 * node's numbers them; -1: the node's own.
	 */
	__u32 bypass;
	__s32 netns;
};
_Static_assert(sizeof(struct ws_proxy) == 96, "ws_proxy is ABI");

/* What the proxy keeps of a packet: its outer header, already advanced to the
 * next segment but not stamped, and whose share stamps it. Entries of ws_slots
 * and of ws_cache.
 */
struct ws_cached {
	/* CLOCK_MONOTONIC, ns. In ws_slots, 0: free, 1: some CPU has it. */
	__u64 expires;
	struct ws_hop_key hop;
	/* In ws_cache, with the proxy and the copy in it; in ws_slots, the index
	 * that the packet has.
	 */
	__u64 fingerprint;
	__u32 proxy;
	__u16 outer_len;
	__u16 tlv_off; /* of the proof TLV, from the outer header's start */
	__u8 outer[WS_CACHED_MAX];
};
_Static_assert(sizeof(struct ws_cached) == 40 + WS_CACHED_MAX,
	       "ws_cached is ABI");

/* Headers of ws_slots that a CPU fills in turn for one function, so that they stay
 * in its cache; all others wait for packets that stay in the function for longer.
 */
#define WS_SLOTS_NEAR 64

/* ws_buckets: where in ws_cache the packets are that are recognised by content.
 * One cache line; way w of bucket b is entry b * WS_WAYS + w there.
 */
#define WS_WAYS 7
struct ws_bucket {
	/* 0: free; 1: some CPU has the entry. Else bits 63-24: those of the
	 * fingerprint; 23-0: when it expires, in 2^20 ns.
	 */
	__u64 tag[WS_WAYS];
	/* In 2^20 ns: until then there may be copies of fingerprints whose first
	 * bucket this is, and some of those that have gone to their second one.
	 */
	__u32 copies;
	__u32 spilled;
};
_Static_assert(sizeof(struct ws_bucket) == 64, "ws_bucket is ABI");

/* ws_copies: byte-identical packets, which are interchangeable, beyond the first
 * one. Key: their fingerprint. Copies are numbered from 1.
 */
struct ws_copies {
	__u32 in; /* the last that went to the function */
	__u32 out; /* the last that came back */
	__u64 until; /* CLOCK_MONOTONIC, ns: later there are none */
};

/* ws_proxy_stats: per CPU; the names are those of the paper. */
struct ws_proxy_stats {
	__u64 rx_success; /* stripped, cached and handed to the function */
	__u64 rx_ignored; /* refused before: no room in the cache */
	__u64 rx_cut; /* super-packets that were cut first */
	__u64 rx_copies; /* of rx_success: a byte-identical one was under way */
	__u64 tx_cut; /* super-packets that came back and were cut first */
	__u64 tx_success; /* came back, got their header, were stamped */
	__u64 tx_ignored; /* came back, not for a chain: link-local, own address */
	__u64 tx_not_cached; /* came back, and no header was theirs */
	__u64 tx_plain; /* of them, let go by ordinary routing */
	__u64 expired; /* headers found too old */
	__u64 evicted; /* headers that gave way to newer ones before their time */
	__u64 waited_ns; /* of tx_success: time in the function, all together */
	/* Of tx_not_cached: made by the function, and taken by a path from there on */
	__u64 tx_originated;
	__u64 bypassed; /* stamped without it: packets of flows that it is done with */
};

/* ws_errors[0]: per CPU, the ICMP errors that refused packets were answered
 * with.
 */
struct ws_errors {
	__u64 due_ns; /* token bucket, as the time by which it is full again */
	__u64 due_too_big_ns; /* that of those which tell of sizes */
	__u64 too_big; /* sent */
	__u64 time_exceeded;
	__u64 parameter;
	__u64 unreachable;
	__u64 suppressed; /* not sent: too many */
	__u64 unanswerable; /* not sent: RFC 4443 2.4 e, or no way to the sender */
};
_Static_assert(sizeof(struct ws_errors) == 64, "ws_errors is ABI");

/* ws_labels: key is the label of a node, value where that is. */
struct ws_label {
	__be64 addr[2]; /* IPv4 as ::ffff:a.b.c.d */
};
_Static_assert(sizeof(struct ws_label) == 16, "ws_label is ABI");

/* ws_programs: that for packets with options before their SRH, that for packets
 * that a function has made, that for packets of functions on byte streams, that
 * for packets with labels and of paths over labels, that for services, and that which
 * asks whether a function is done with a flow.
 */
#define WS_PROGRAM_EXT 0
#define WS_PROGRAM_ORIGINATE 1
#define WS_PROGRAM_STREAM 2
#define WS_PROGRAM_MPLS 3
#define WS_PROGRAM_GATEWAY 4
#define WS_PROGRAM_BYPASS 5
#define WS_PROGRAMS 6

/* ws_programs_xdp: those for packets with labels, and for packets that take a path over
 * labels.
 */
#define WS_PROGRAM_XDP_CORE 0
#define WS_PROGRAM_XDP_EDGE 1
#define WS_PROGRAMS_XDP 2

/* ws_streams: key is a path that ends at a function on byte streams; all paths are in
 * network order.
 */
struct ws_stream {
	__be32 part; /* that the path is, or belongs to */
	__be32 onward; /* the next part in the same direction */
	__be32 back; /* what answers take, from the function on */
	__be32 other; /* the part that ends at the function in the other direction */
	__u32 proxy; /* the function: key in ws_proxies */
	__u8 opens; /* 1: connections are opened in this direction */
	__u8 first; /* 1: clients are answered when their servers have answered */
	__u8 pad[2];
};
_Static_assert(sizeof(struct ws_stream) == 24, "ws_stream is ABI");

/* Ethertype, of those for experiments (IEEE 802), of a SYN that waits at a function on byte
 * streams: the kernel has no use for it there, and the worker's packet socket gets it. The
 * worker sends it the same way when the function's TCP shall have it.
 */
#define WS_ETH_P_HELD 0x88b5

/* ws_proxy.stream: what a function does with bytes. STREAM: what it sends belongs to
 * connections that came to it. GATEWAY: it ends those of clients from outside; what it
 * opens, user space has put into ws_conns before, with the path that answers come by.
 */
enum ws_bytes {
	WS_BYTES_NONE = 0,
	WS_BYTES_STREAM = 1,
	WS_BYTES_GATEWAY = 2,
};

/* ws_services: where clients connect to a gateway, which takes it before any chain does.
 * The value is the gateway's key in ws_proxies. IPv4 as ::ffff:a.b.c.d.
 */
struct ws_service_key {
	__be64 addr[2];
	__be16 port;
	__u16 pad[3];
};
_Static_assert(sizeof(struct ws_service_key) == 24, "ws_service_key is ABI");

/* In ws_conn_key.proxy: a client's connection to the gateway. Without it: one that the
 * gateway has opened, which may have the same addresses and ports.
 */
#define WS_CONN_ACCEPTED 0x80000000

/* ws_conns and ws_conns_new: a connection through a function on byte streams, by the
 * addresses and ports of both ends; IPv4 as ::ffff:a.b.c.d. In the second are those
 * that the function has not gone on with yet, and clients that a gateway has sent no
 * payload.
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
	__u64 used; /* bpf_ktime_get_coarse_ns of the last packet, but for a second */
	/* That the client's packets come by; of a connection that a gateway has opened, that
	 * the server's come by; 0 for one of its client's.
	 */
	__be32 part;
	__u32 seen; /* WS_CONN_* */
};
_Static_assert(sizeof(struct ws_conn) == 16, "ws_conn is ABI");

#define WS_CONN_CLIENT_FIN 1 /* from the client */
#define WS_CONN_SERVER_FIN 2
#define WS_CONN_RST 4 /* from either */
/* The function acknowledges what the server says; of a gateway's client: the gateway has sent
 * payload.
 */
#define WS_CONN_ANSWERED 8

/* ws_refusals: per CPU, by reason. */
struct ws_refusal {
	__u64 dropped;
	__u64 reported; /* let go: by on-violation: report, or guard: audit */
	__u64 window_ns; /* start of the current second of events */
	__u32 sent; /* events in it */
	__u32 suppressed; /* events not sent since the last that was */
};
_Static_assert(sizeof(struct ws_refusal) == 32, "ws_refusal is ABI");

/* A record in the ring buffer ws_events. */
struct ws_event {
	__u64 time_ns; /* CLOCK_MONOTONIC */
	__u32 ifindex;
	__u32 len; /* of the packet, all of it */
	__u16 caplen; /* bytes in data */
	__u16 line; /* of file, where it was decided */
	__u32 suppressed; /* events of this reason and CPU not sent before it */
	__s32 err; /* what a helper returned, or 0 */
	__u8 reason; /* enum ws_reason */
	__u8 hook; /* enum ws_hook */
	__u8 reported; /* 1: counted and let go on */
	__u8 file; /* enum ws_file */
	__u8 data[WS_EVENT_DATA]; /* from the Ethernet header */
};
_Static_assert(sizeof(struct ws_event) == 32 + WS_EVENT_DATA,
	       "ws_event is ABI");
