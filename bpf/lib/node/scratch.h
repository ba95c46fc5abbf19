/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Data of one packet that is too large for the stack. */
#pragma once

#include <linux/bpf.h>
#include <linux/types.h>
#include <waystamp/abi.h>
#include "lib/proof/siphash.h"
#include "lib/wire/icmp.h"
#include "lib/wire/tuple.h"

/* A query to the table of headers (detour/cache.h). Times are in ns. */
struct cache_query {
	__u64 fp; /* fingerprint */
	__u64 now;
	__u64 lifetime;
	__u32 first; /* bucket */
	__u32 buckets;
	__u32 stats;
	__u32 pad;
};

/* The hop that stamps a kept packet, and the fields stored beside the header's bytes. */
struct header_ref {
	struct ws_hop_key hop;
	__u32 proxy;
	__u16 outer_len;
	__u16 tlv_off;
};

/* A super-packet whose frames' headers are being kept (detour/gso_keep_tc.h). */
struct gso_keep {
	struct siphash begun; /* of the fields that all frames share */
	struct cache_query query;
	struct header_ref ref;
	__be32 head[16]; /* the TCP header, and zeros */
	__u32 off; /* of the TCP header, in bytes from the start of the frame */
	__u32 head_len;
	__u32 payload; /* bytes behind the TCP header, of all frames */
	__u32 size; /* bytes of payload in each frame but the last */
	__u32 first; /* see struct fp_ip */
	__u32 count;
};

/* The state of WS_SLOTS_NEAR consecutive indexes (detour/slots.h). */
struct slot_block {
	__u32 first; /* the first slot of their range; 0: all headers are far */
	__u32 proxy; /* of the indexes, if first is not 0 */
	__u64 far; /* a bit for each index: its header is in its own slot */
};

/* Indexes of a datagram's fragments, in the order of their arrival;
 * if there are more, the last ones (detour/fragments_tc.h).
 */
#define FRAGMENTS_MAX 64
struct fragments {
	__u64 ends; /* hash of addresses, protocol and function */
	/* Of a function that rewrites: scratch.fragment.datagram of the fragment
	 * that came back with the header of its own index; 0: none came back.
	 */
	__u64 rewritten;
	__u32 in; /* fragments that arrived */
	__u32 out; /* indexes of these that were used */
	__u64 expires; /* of the last fragment's header */
	__u16 index[FRAGMENTS_MAX];
};

/* The remembered bypass of a flow (detour/bypass.h). One cache line. */
struct bypass_flow {
	__be64 addr[4]; /* source and destination; IPv4 as ::ffff:a.b.c.d */
	__be32 ports; /* as in the packet */
	__u32 mark; /* the function's bypass mark */
	__u16 proxy;
	__u8 protocol;
	__u8 done; /* 1: its packets bypass the function */
	__u32 left; /* packets until the next one that goes through the function */
	__u64 until; /* CLOCK_MONOTONIC_COARSE, ns: the entry is valid until then */
	__u64 due; /* CLOCK_MONOTONIC_COARSE, ns: then a packet goes through the function */
};

/* TCP's options before and after a change, and zeros. */
struct tcp_options {
	__u8 was[40];
	__u8 is[40];
};

struct rules_fit {
	__u64 word[WS_RULE_WORDS];
};

struct scratch {
	union {
		/* An ICMP error while it is built. */
		struct icmp6_message m;
		struct icmp4_message m4;
		struct gso_keep gso;
		struct tcp_options options;
		struct fragments fragments; /* the initial value of an entry */
	};
	/* The datagram of a fragment, and its key without the identification. */
	struct {
		__be64 addr[4];
		__u64 datagram;
		__u64 ends;
	} fragment;
	/* The route of a packet, looked up before the packet is complete. */
	struct bpf_fib_lookup way;
	struct bpf_redir_neigh nh;
	struct ws_nexthop learned; /* the next hop that is remembered */
	__u32 entered; /* bytes of an IPv4 packet that enters a chain */
	__u32 headend; /* index of the headend for which XDP hands a packet over */
	/* The fields that rules compare, and the rules that match; see match/rules.h. */
	struct tuple tuple;
	__u32 dscp;
	struct rules_fit fit;
	struct rules_fit marked;
	/* The rules that could match a packet with unreadable fields. */
	struct rules_fit could;
	/* Of the rule that takes the packet: the headend's index +
	 * 1, or with WS_RULE_REQUIRE the path, in network order.
	 */
	__u32 rule_target;
	__u32 rule_by; /* WS_RULE_BY_MARK, WS_RULE_BY_DSCP */
};
