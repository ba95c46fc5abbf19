/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* H.Encaps (RFC 8986 5.1) with the first stamp, on XDP. */
#pragma once

#include "lib/encap/labels_xdp.h"
#include "lib/encap/outer_xdp.h"
#include "lib/hook.h"
#include "lib/node/refuse.h"
#include "lib/node/stats.h"
#include "lib/out/nexthop_xdp.h"
#include "lib/reason.h"
#include "lib/sr/headend.h"
#include "lib/wire/ip.h"
#include "lib/wire/mss.h"

/* Bytes of the packet, and bytes of padding behind it.
 * False: not for XDP.
 */
static __always_inline bool enter_len(ctx_t *ctx, const struct cursor *c,
				      const struct ip *in, __u32 *len,
				      __u32 *pad)
{
	const struct ip4_hdr *ip4 = in->hdr;
	__u32 room;

	*pad = 0;
	*len = ip_len(in);
	if (in->is_ip4 &&
	    (ip4_header_len(ip4) != sizeof(*ip4) || *len < sizeof(*ip4) ||
	     ip4_fold(ip4_sum(ip4)) != 0xffff))
		return false;
	if (in->hdr + *len == c->end)
		return true;
	room = ctx_len(ctx) - sizeof(struct eth_hdr);
	*pad = room - *len;
	return *len <= room;
}

static __always_inline int headend_xdp(ctx_t *ctx, struct cursor c,
				       const struct ip *in, __u32 index,
				       const struct ws_node *node)
{
	const struct ws_headend *h = headend_find(index);
	__u32 next = in->is_ip4 ? NEXTHDR_IPV4 : NEXTHDR_IPV6;
	struct headend_packet pkt;
	const struct ws_nexthop *n;
	struct eth_hdr *eth;
	struct ip inner;
	__u32 len, pad;

	if (!h)
		return CTX_PASS;
	if (!form_is_outer(h->form))
		return OUTER_IS_IP ? labels_enter_xdp(ctx, index) : CTX_PASS;
	if (headend_first_is_local(h) || !enter_len(ctx, &c, in, &len, &pad))
		return CTX_PASS;
	if (h->mss && mss_may_be_said(c, in))
		return CTX_PASS;
	pkt.routed = false;
	pkt.marks = outer_marks_of(c, in);
	n = nexthop_to_sid(h->stats, outer_marks_flow(pkt.marks), headend_to(h),
			   node->ways);
	if (!nexthop_takes(n, len + h->outer_len) ||
	    !binding_find((struct cursor){ in->hdr, c.end }, next, &h->share,
			  h->scheme, &pkt.binding))
		return CTX_PASS;
	/* A number is used up even if the next step fails: numbers may have gaps. */
	if (headend_check(h, in, len, len, &pkt) || rnd_take(h, 1, &pkt.rnd))
		return CTX_PASS;
	/* Moves the packet: every pointer taken before is gone. */
	if (bpf_xdp_adjust_head(ctx, -(__s32)pkt.outer_len))
		return CTX_PASS;

	if (pad && bpf_xdp_adjust_tail(ctx, -(__s32)pad))
		return ws_refuse(ctx, REASON(WRITE_FAILED), 0);
	if (!outer_write(ctx, h->outer, pkt.outer_len) ||
	    !headend_finish(ctx, h, &pkt))
		return ws_refuse(ctx, REASON(WRITE_FAILED), 0);
	c = ctx_cursor(ctx);
	eth = cursor_take(&c, struct eth_hdr);
	c.pos += pkt.outer_len;
	if (!eth || !ip_take(&c, pkt.is_ip4, &inner))
		return ws_refuse(ctx, REASON(WRITE_FAILED), 0);
	ip_decrement(&inner);
	stats_add(h->stats, 1, pkt.inner_len);
	return nexthop_take(eth, n, OUTER_PROTO);
}
