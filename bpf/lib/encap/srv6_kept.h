/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* An outer header that was kept while its packet was in a function. Both hooks. */
#pragma once

#include "lib/encap/ext.h"
#include "lib/encap/srv6.h"
#include "lib/hook.h"
#include "lib/wire/net.h"

/* Options stand before the SRH, which another program has to look for. */
static __always_inline bool outer_head_has_options(const struct outer_head *h)
{
	return nexthdr_is(h->ip6.nexthdr, EXT_OPTIONS);
}

/* What the SRH says is behind it, of a packet with options before it; -1: it has
 * none.
 */
static __always_inline int ext_inner(ctx_t *ctx, __u32 next)
{
	int ext = ws_ext_skip(ctx, sizeof(struct eth_hdr), next);
	__u8 inner = 0;

	if (ext < 0 || ctx_load_bytes(ctx,
				      sizeof(struct eth_hdr) +
					      sizeof(struct ip6_hdr) + ext,
				      &inner, sizeof(inner)))
		return -1;
	return inner;
}

/* After a function: an outer header that was kept has been written before what the
 * function has sent. What it has done to the packet's length is the payload
 * length's matter; all else is as it was kept. Returns the proof, which is not
 * stamped; NULL: the packet is not what was given to the function, or a bug.
 */
static __always_inline struct proof_tlv *
outer_finish_kept(ctx_t *ctx, __u32 tlv_off, __u32 outer_len, __u32 inner_len)
{
	struct outer_written w;
	int wanted;

	if (!outer_find_written(ctx_cursor(ctx), tlv_off, &w))
		return NULL;
	/* The SRH says what was given to the function: this must be that. */
	wanted = eth_is_ip4(w.eth) ? NEXTHDR_IPV4 : NEXTHDR_IPV6;
	if (w.ip6->nexthdr == NEXTHDR_ROUTING ?
		    w.srh->nexthdr != wanted :
		    ext_inner(ctx, w.ip6->nexthdr) != wanted)
		return NULL;
	w.eth->proto = bpf_htons(ETH_P_IPV6);
	w.ip6->payload_len = bpf_htons(outer_len - sizeof(*w.ip6) + inner_len);
	return w.tlv;
}
