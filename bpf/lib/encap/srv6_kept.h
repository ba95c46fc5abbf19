/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* An outer header that is kept while its packet is in a function. Both hooks. */
#pragma once

#include "lib/encap/ext.h"
#include "lib/encap/srv6.h"
#include "lib/hook.h"
#include "lib/wire/net.h"

/* Are options before the SRH? Another program searches the SRH behind them. */
static __always_inline bool outer_head_has_options(const struct outer_head *h)
{
	return nexthdr_is(h->ip6.nexthdr, EXT_OPTIONS);
}

/* Reads the SRH of a packet with options before the SRH. False: there is none. */
static __always_inline bool ext_srh(ctx_t *ctx, __u32 next, struct srh *srh)
{
	int ext = ws_ext_skip(ctx, sizeof(struct eth_hdr), next);

	return ext >= 0 && !ctx_load_bytes(ctx,
					   sizeof(struct eth_hdr) +
						   sizeof(struct ip6_hdr) + ext,
					   srh, sizeof(*srh));
}

/* After a function: the kept outer header has been written before the packet that
 * the function sent. Only the payload length changes, as the function may have
 * changed the packet's length. Returns the proof, which is not stamped; NULL: the
 * packet has another type than the one that went to the function, or a bug. *traced:
 * as outer_is_traced.
 */
static __always_inline struct proof_tlv *
outer_finish_kept(ctx_t *ctx, __u32 tlv_off, __u32 outer_len, __u32 inner_len,
		  bool *traced)
{
	struct srh srh = {};
	struct outer_written w;
	__u32 wanted;

	if (!outer_find_written(ctx_cursor(ctx), tlv_off, &w))
		return NULL;
	/* The SRH has the type of the packet that went to the function. */
	wanted = eth_is_ip4(w.eth) ? NEXTHDR_IPV4 : NEXTHDR_IPV6;
	if (w.ip6->nexthdr == NEXTHDR_ROUTING)
		srh = *w.srh;
	else if (!ext_srh(ctx, w.ip6->nexthdr, &srh))
		return NULL;
	if (srh.nexthdr != wanted)
		return NULL;
	*traced = srh.flags & SRH_FLAG_OAM;
	w.eth->proto = bpf_htons(ETH_P_IPV6);
	w.ip6->payload_len = bpf_htons(outer_len - sizeof(*w.ip6) + inner_len);
	return w.tlv;
}
