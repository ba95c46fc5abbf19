/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Labels on XDP. */
#pragma once

#include "lib/encap/mpls.h"
#include "lib/hook.h"
#include "lib/wire/cursor.h"
#include "lib/wire/ip.h"
#include "lib/wire/net.h"

/* Bytes from the stack to the end of the frame. No helper is called if
 * the first buffer ends exactly where the inner header's length says.
 */
static __always_inline __u32 labels_frame_len(ctx_t *ctx, const struct outer *o)
{
	struct cursor c = outer_inner(o);
	struct ip in;

	if (ip_take(&c, o->word->nexthdr == NEXTHDR_IPV4, &in) &&
	    o->end - in.hdr == ip_len(&in))
		return outer_len(o) + ip_len(&in);
	return ctx_len(ctx) - sizeof(struct eth_hdr);
}

/* Parses a packet for a SID of this node from the stack, at c, to
 * the proof. *len: bytes from the stack on. False: not for XDP.
 */
static __always_inline bool
outer_parse_xdp(ctx_t *ctx, const struct eth_hdr *eth, struct cursor c,
		struct outer *o, struct proof_tlv **proof, __u32 *len)
{
	if (eth->proto != bpf_htons(ETH_P_MPLS_UC) || eth_is_for_many(eth) ||
	    labels_parse(ctx, c, o, proof, 0) != WS_REASON_NONE)
		return false;
	o->len = labels_frame_len(ctx, o);
	*len = o->len;
	return true;
}

/* Pieces of 8 bytes in every outer header, behind its first entry. */
#define OUTER_LEAST ((OUTER_LEN_MIN - 4) / 8)

/* Copies a pair of entries at a time: a helper would take as long as
 * a look-up. False: a bug. len: in the bounds of ws_headend.outer,
 * which outer points to, and a multiple of 8, plus 4.
 */
static __always_inline bool outer_write(ctx_t *ctx, const __u8 *outer,
					__u32 len)
{
	struct cursor c = ctx_cursor(ctx);
	const __u64 *from = (const void *)(outer + 4);
	/* Not len, of which each turn would leave the verifier another bound. */
	__u32 pieces = (len - 4) / sizeof(*from);
	__u64 *to;

	if (!cursor_take(&c, struct eth_hdr))
		return false;
	to = c.pos;
	if ((void *)to + OUTER_LEN_MIN > c.end)
		return false;
	*(__u32 *)to = *(const __u32 *)outer;
	to = (void *)to + 4;
#pragma unroll
	for (__u32 i = 0; i < OUTER_LEAST; i++)
		*to++ = from[i];
	for (__u32 i = OUTER_LEAST; i < (WS_OUTER_MAX - 4) / sizeof(*to); i++) {
		if (i >= pieces)
			break;
		if ((void *)(to + 1) > c.end)
			return false;
		*to++ = from[i];
	}
	return true;
}
