/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* A packet that has its outer header back, before it goes on. Both hooks. */
#pragma once

#include "lib/encap/ext.h"
#include "lib/encap/srh.h"
#include "lib/hook.h"
#include "lib/node/maps.h"
#include "lib/proof/stamp.h"
#include "lib/wire/net.h"

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

/* What the function has done to the packet's length is the payload length's
 * matter; all else is as it was kept.
 */
static __always_inline bool
restore_finish(ctx_t *ctx, const struct ws_cached *c, const struct ws_hop *hop,
	       __u64 binding, __u32 outer_len, __u32 inner_len)
{
	struct cursor cur = ctx_cursor(ctx);
	__u32 tlv_off = c->tlv_off;
	struct proof_tlv *tlv;
	struct eth_hdr *eth;
	struct ip6_hdr *ip6;
	struct srh *srh;
	int wanted;

	eth = cursor_take(&cur, struct eth_hdr);
	if (!eth)
		return false;
	barrier_var(tlv_off);
	tlv = cur.pos + (tlv_off & 511);
	ip6 = cursor_take(&cur, struct ip6_hdr);
	srh = cur.pos;
	barrier_var(srh);
	if (!ip6 || (void *)(srh + 1) > cur.end || (void *)(tlv + 1) > cur.end)
		return false;
	/* The SRH says what was given to the function: this must be that. */
	wanted = eth_is_ip4(eth) ? NEXTHDR_IPV4 : NEXTHDR_IPV6;
	if (ip6->nexthdr == NEXTHDR_ROUTING ?
		    srh->nexthdr != wanted :
		    ext_inner(ctx, ip6->nexthdr) != wanted)
		return false;
	eth->proto = bpf_htons(ETH_P_IPV6);
	ip6->payload_len = bpf_htons(outer_len - sizeof(*ip6) + inner_len);
	stamp(tlv, &hop->share, hop->scheme, hop->position, binding);
	return true;
}
