/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* What is too large for the stack, and no longer needed when the packet is done. */
#pragma once

#include <linux/bpf.h>
#include <linux/types.h>
#include <waystamp/abi.h>
#include "lib/proof/siphash.h"
#include "lib/wire/icmp.h"
#include "lib/wire/tuple.h"

/* A question to the table of headers (detour/cache.h). Times are in ns. */
struct cache_query {
	__u64 fp; /* fingerprint */
	__u64 now;
	__u64 lifetime;
	__u32 first; /* bucket */
	__u32 buckets;
	__u32 stats;
	__u32 pad;
};

/* Whose header is kept, and what of it is written down beside its bytes. */
struct header_ref {
	struct ws_hop_key hop;
	__u32 proxy;
	__u16 outer_len;
	__u16 tlv_off;
};

/* A super-packet whose frames' headers are being kept (detour/gso_keep_tc.h). */
struct gso_keep {
	struct siphash begun; /* the fingerprint of what all frames have */
	struct cache_query query;
	struct header_ref ref;
	__be32 head[16]; /* the TCP header, and zeros */
	__u32 off; /* of it, in bytes from the start of the frame */
	__u32 head_len;
	__u32 payload; /* bytes behind it, in all frames */
	__u32 size; /* of these in each but the last */
	__u32 first; /* see struct fp_ip */
	__u32 count;
};

/* WS_SLOTS_NEAR indexes in a row (detour/slots.h). */
struct slot_block {
	__u32 first; /* slot of the range that they are in; 0: all of it is far */
	__u32 proxy; /* whose they are, where first is not 0 */
	__u64 far; /* a bit for each: its header is at its own slot */
};

/* Indexes of a datagram's fragments, in the order in which they came; the last ones,
 * if there are more (detour/fragments_tc.h).
 */
#define FRAGMENTS_MAX 64
struct fragments {
	__u64 ends; /* between whom, by which protocol, through which function */
	__u32 in; /* how many came */
	__u32 out; /* how many of them have been given away */
	__u64 expires; /* when the last one is too late */
	__u16 index[FRAGMENTS_MAX];
};

/* What a function said of a flow (detour/bypass.h). One cache line. */
struct bypass_flow {
	__be64 addr[4]; /* source and destination; IPv4 as ::ffff:a.b.c.d */
	__be32 ports; /* as they lie in the packet */
	__u32 mark; /* that of the function's rules */
	__u16 proxy;
	__u8 protocol;
	__u8 done; /* 1: its packets go past the function */
	__u32 left; /* packets until one goes through it nevertheless */
	__u64 until; /* CLOCK_MONOTONIC_COARSE, ns: later it is asked again */
	__u64 due; /* the same: when a packet goes through it nevertheless */
};

/* TCP's options before and after they are changed, and zeros. */
struct tcp_options {
	__u8 was[40];
	__u8 is[40];
};

struct rules_fit {
	__u64 word[WS_RULE_WORDS];
};

struct scratch {
	union {
		/* Where an error is put together. */
		struct icmp6_message m;
		struct icmp4_message m4;
		struct gso_keep gso;
		struct tcp_options options;
		struct fragments fragments; /* as a new one begins */
	};
	/* Which datagram a fragment is of, and without its identification. */
	struct {
		__be64 addr[4];
		__u64 datagram;
		__u64 ends;
	} fragment;
	/* The way of a packet while it is made ready for it. */
	struct bpf_fib_lookup way;
	struct bpf_redir_neigh nh;
	struct ws_nexthop learned; /* it, as it is remembered */
	__u32 entered; /* bytes of an IPv4 packet that enters a chain */
	__u32 headend; /* index of the one that XDP hands a packet over for */
	/* What rules look at, and the rules that it fits; see match/rules.h. */
	struct tuple tuple;
	__u32 dscp;
	struct rules_fit fit;
	struct rules_fit marked;
	/* Those that a packet could fit of which not all can be read. */
	struct rules_fit could;
	/* Of the rule that takes the packet: the headend's index + 1, or by
	 * WS_RULE_REQUIRE the path, in network order.
	 */
	__u32 rule_target;
	__u32 rule_by; /* WS_RULE_BY_MARK, WS_RULE_BY_DSCP */
};
