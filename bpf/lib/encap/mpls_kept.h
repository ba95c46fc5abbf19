/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Labels that are kept while their packet is in a function. */
#pragma once

#include "lib/encap/mpls.h"
#include "lib/hook.h"
#include "lib/wire/cursor.h"
#include "lib/wire/net.h"

static __always_inline bool outer_head_has_options(const struct outer_head *h)
{
	(void)h;
	return false;
}

/* After a function: the kept labels have been written before the packet that the
 * function sent; they have no length. Returns the proof, which is not stamped; NULL:
 * the packet has another type than the one that went to the function, or a bug.
 * *traced: as outer_is_traced.
 */
static __always_inline struct proof_tlv *
outer_finish_kept(ctx_t *ctx, __u32 tlv_off, __u32 outer_len, __u32 inner_len,
		  bool *traced)
{
	struct cursor c = ctx_cursor(ctx);
	struct proof_tlv *tlv;
	const struct word *word;
	const __u8 *inner;

	(void)outer_len;
	(void)inner_len;
	if (!cursor_take(&c, struct eth_hdr))
		return NULL;
	tlv_off -= sizeof(*word);
	barrier_var(tlv_off);
	word = c.pos + (tlv_off & 255);
	tlv = (void *)(word + 1);
	inner = (void *)(tlv + 1);
	if ((void *)(inner + 1) > c.end)
		return NULL;
	/* The word has the type of the packet that went to the function. */
	if (word->nexthdr != (*inner >> 4 == 4 ? NEXTHDR_IPV4 : NEXTHDR_IPV6))
		return NULL;
	*traced = word->flags & WORD_FLAG_TRACE;
	return tlv;
}
