/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The outer header on XDP: packets as our own headends send them, and no others. */
#pragma once

#include "lib/encap/srh.h"
#include "lib/encap/srv6.h"
#include "lib/hook.h"
#include "lib/node/boundary.h"
#include "lib/out/nexthop_xdp.h"
#include "lib/wire/cursor.h"
#include "lib/wire/net.h"

/* Parses a packet for a SID of this node from the outer header, at
 * c, to its proof. *len: bytes of the IP packet. False: not for XDP.
 */
static __always_inline bool
outer_parse_xdp(ctx_t *ctx, const struct eth_hdr *eth, struct cursor c,
		struct outer *o, struct proof_tlv **proof, __u32 *len)
{
	o->end = c.end;
	if (!eth_is_ip6_unicast(eth))
		return false;
	o->ip6 = cursor_take(&c, struct ip6_hdr);
	if (!o->ip6 || !ip6_is_ip6(o->ip6) || !in_locator(o->ip6->dst[0]) ||
	    o->ip6->nexthdr != NEXTHDR_ROUTING)
		return false;
	*len = xdp_packet_len(ctx, o->ip6, o->end);
	if (sizeof(*o->ip6) + bpf_ntohs(o->ip6->payload_len) > *len)
		return false;
	if (srh_check(&c, &o->srh, &o->segments))
		return false;
	o->list = c.pos;
	*proof = c.pos + 16 * o->segments;
	return (void *)(*proof + 1) <= o->end &&
	       tlv_at_once(o->srh, o->segments, *proof);
}

/* Pieces of a segment's size in every outer header, behind its first 8 bytes. */
#define OUTER_LEAST ((40 + 8 + 16 + 24 - 8) / sizeof(struct sid))

/* Copies a segment at a time: a helper would take as long as a look-up. False: a bug. len:
 * in the bounds of ws_headend.outer, which outer points to, and a multiple of 16, plus 8.
 */
static __always_inline bool outer_write(ctx_t *ctx, const __u8 *outer,
					__u32 len)
{
	struct cursor c = ctx_cursor(ctx);
	const struct sid *from = (const void *)(outer + 8);
	/* Not len, of which each turn would leave the verifier another bound. */
	__u32 pieces = (len - 8) / sizeof(struct sid);
	struct sid *to;

	if (!cursor_take(&c, struct eth_hdr))
		return false;
	to = c.pos;
	/* Every outer header has this length: IPv6 header, SRH, one segment, TLV. */
	if ((void *)to + 8 + OUTER_LEAST * sizeof(*to) > c.end)
		return false;
	*(__u64 *)to = *(const __u64 *)outer;
	to = (void *)to + 8;
#pragma unroll
	for (__u32 i = 0; i < OUTER_LEAST; i++)
		*to++ = from[i];
	for (__u32 i = OUTER_LEAST; i < (WS_OUTER_MAX - 8) / sizeof(*to); i++) {
		if (i >= pieces)
			break;
		if ((void *)(to + 1) > c.end)
			return false;
		*to++ = from[i];
	}
	return true;
}
