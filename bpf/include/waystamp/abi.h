/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The contract between the programs in the kernel and user space: what the
 * maps hold. Nothing else is shared. No padding by accident: every gap is a
 * field that must be zero. Addresses and SIDs are in network order; a field of
 * type __be32 is in network order; all else is in the host's.
 */
#pragma once

#include <linux/types.h>
#include <waystamp/reasons.h>

/* Segments in one segment list (our bound; RFC 8754 allows 127). */
#define WS_SEGS_MAX 16
/* Positions that stamp: the headend and all segments but the egress. */
#define WS_KEYS_MAX 16
/* Bytes of TLVs after the segment list that a node takes. */
#define WS_TLVS_LEN_MAX 128
/* IPv6 header, SRH, WS_SEGS_MAX segments, proof TLV. */
#define WS_OUTER_MAX (40 + 8 + 16 * WS_SEGS_MAX + 24)
/* Bytes of the packet that an event carries. */
#define WS_EVENT_DATA 448
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

enum ws_behaviour {
	WS_BEHAVIOUR_NONE = 0,
	WS_BEHAVIOUR_END = 1, /* RFC 8986 4.1, and the stamp */
	WS_BEHAVIOUR_END_DT46 = 2, /* RFC 8986 4.8, after the verdict */
};

enum ws_on_violation {
	WS_ON_VIOLATION_DROP = 0,
	WS_ON_VIOLATION_REPORT = 1,
};

enum ws_hook {
	WS_HOOK_TC = 0,
	WS_HOOK_XDP = 1,
};

/* What a classification rule says of a packet that it matches. */
enum ws_match_action {
	WS_MATCH_NONE = 0, /* nothing: as if there were no rule */
	WS_MATCH_PATH = 1, /* target: headend index, or at the guard the path */
	WS_MATCH_SOURCE = 2, /* target: class to look the source up in */
};

/* Set before load. The upper 64 bits of addresses, and masks over them. */
struct ws_config {
	__be64 block; /* the domain's SID block */
	__be64 block_mask;
	__be64 locator; /* this node's part of it */
	__be64 locator_mask;
	__u64 nexthop_ttl_ns; /* life of a next-hop cache entry */
};

/* ws_node[0]. Zero, as the map is made: refuse. */
struct ws_node {
	__u32 armed; /* 1: the maps hold a whole plan */
	__u32 pad;
};

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

/* ws_hops: one entry per SID, path and epoch; about 180 bytes each. */
struct ws_hop_key {
	__be64 sid; /* upper 64 bits */
	__be32 path;
	__u8 epoch;
	__u8 pad[3];
};
_Static_assert(sizeof(struct ws_hop_key) == 16, "ws_hop_key is ABI");

struct ws_hop {
	__u8 behaviour; /* enum ws_behaviour */
	__u8 scheme; /* enum ws_scheme */
	__u8 position; /* 1 .. k-1 */
	__u8 pad;
	__u32 stats; /* index into ws_stats */
	struct ws_share share;
};
_Static_assert(sizeof(struct ws_hop) == 104, "ws_hop is ABI");

/* ws_sids: which SIDs and paths there are, to tell apart why ws_hops has no
 * entry. Key: ws_hop_key with epoch 0; path 0 stands for the SID itself.
 */

/* ws_egresses: key is ws_egress_key. */
struct ws_egress_key {
	__be32 path;
	__u8 epoch;
	__u8 pad[3];
};
_Static_assert(sizeof(struct ws_egress_key) == 8, "ws_egress_key is ABI");

struct ws_egress {
	__u8 segments; /* in the list */
	__u8 keys; /* positions that stamp; keyed only */
	__u8 on_violation; /* enum ws_on_violation */
	__u8 pad[5];
	__u64 secret; /* s = f1(0); pot, opot */
	__u8 list[WS_SEGS_MAX][16]; /* as on the wire: last segment first */
	__u64 key[WS_KEYS_MAX][2];
};
_Static_assert(sizeof(struct ws_egress) == 528, "ws_egress is ABI");

/* ws_headends: key is an index that rules name. */
struct ws_headend {
	__u16 outer_len; /* 72 + 16 * segments */
	__u16 lane; /* lane of CPU 0 */
	__u16 lanes; /* CPUs that have one */
	__u8 scheme;
	__u8 epoch;
	__be32 path;
	__u32 counter; /* index into ws_counters */
	__u32 stats; /* index into ws_stats */
	__u32 mtu; /* of the inner packet; 0: not known */
	struct ws_share share;
	/* The outer header as sent, but for payload length, traffic class, flow
	 * label, RND and CML, which are zero here.
	 */
	__u8 outer[WS_OUTER_MAX];
};
_Static_assert(sizeof(struct ws_headend) == 448, "ws_headend is ABI");

/* ws_counters: per CPU, one per path and epoch that this node is a headend of. */
struct ws_counter {
	__u64 last; /* the last number given out; 0: none */
	__u64 ceiling; /* numbers up to here may be given out */
};

/* ws_match_dst, ws_guard_dst: longest destination prefix. */
struct ws_dst_key {
	__u32 prefixlen;
	__u8 addr[16];
};

/* ws_match_src, ws_guard_src: longest source prefix within a class. prefixlen
 * counts the 32 bits of the class.
 */
struct ws_src_key {
	__u32 prefixlen;
	__be32 class_id;
	__u8 addr[16];
};

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

/* ws_stats: per CPU; headend: stamped, endpoint: stamped, egress: verified. */
struct ws_stats {
	__u64 packets; /* skbs or XDP frames: stamps */
	__u64 frames; /* what they are on a wire */
	__u64 bytes; /* of the inner packets */
};

/* ws_ports: the interfaces that waystamp is attached to, by index. */
struct ws_port {
	__u8 xdp_target; /* 1: takes XDP redirects */
	__u8 unmatched_drop; /* edge: refuse what matches no chain */
	__u8 pad[2];
};

/* ws_nexthops: filled by TC, read by XDP. A SID's lower 64 bits are zero. */
struct ws_nexthop_key {
	__u8 addr[16];
	__u32 flow; /* some bits of the flow, for ECMP */
	__u32 pad;
};

struct ws_nexthop {
	__u64 expires; /* bpf_ktime_get_coarse_ns */
	__u32 ifindex;
	__u16 mtu; /* 65535 at most */
	__u8 dmac[6];
	__u8 smac[6];
	__u8 pad[6];
};
_Static_assert(sizeof(struct ws_nexthop) == 32, "ws_nexthop is ABI");

/* ws_refusals: per CPU, by reason. */
struct ws_refusal {
	__u64 dropped;
	__u64 reported; /* on-violation: report let it go on */
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
	__u32 caplen; /* bytes in data */
	__u32 suppressed; /* events of this reason and CPU not sent before it */
	__s32 err; /* what a helper returned, or 0 */
	__u8 reason; /* enum ws_reason */
	__u8 hook; /* enum ws_hook */
	__u8 reported; /* 1: counted and let go on */
	__u8 pad;
	__u8 data[WS_EVENT_DATA]; /* from the Ethernet header */
};
_Static_assert(sizeof(struct ws_event) == 32 + WS_EVENT_DATA,
	       "ws_event is ABI");
