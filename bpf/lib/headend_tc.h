/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* H.Encaps (RFC 8986 5.1) with the first stamp, on TC. */
#pragma once

#include "binding_tc.h"
#include "endpoint_tc.h"
#include "flow.h"
#include "headend.h"
#include "hook.h"
#include "maps.h"
#include "net.h"
#include "push.h"
#include "refuse.h"
#include "rnd.h"
#include "stats.h"
#include "train.h"

/* ip6: the packet's header, c stands behind it. */
static __always_inline int headend_tc(struct __sk_buff *skb, struct cursor c,
				      struct ip6_hdr *ip6, __u32 index)
{
	const struct ws_headend *h = headend_find(index);
	struct headend_packet pkt;
	struct cursor inner;
	enum ws_reason r;
	__u32 frames;
	long rc;

	if (!h)
		return ws_refuse(skb, WS_REASON_HEADEND_MISSING_BUG, 0);
	pkt.binding = 0;
	if (h->scheme == WS_SCHEME_KEYED_FLOW) {
		if (!binding_pull_plain(skb, &h->share, &pkt.binding))
			return ws_refuse(skb, flow_unreadable(), 0);
		c = ctx_cursor(skb);
		cursor_take(&c, struct eth_hdr);
		ip6 = cursor_take(&c, struct ip6_hdr);
		if (!ip6)
			return ws_refuse(skb, flow_unreadable(), 0);
	}
	inner = c;
	inner.pos = ip6;
	frames = train_frames(skb, inner, sizeof(struct eth_hdr));
	r = headend_prepare(
		h, c, ip6, skb->len - sizeof(struct eth_hdr),
		train_packet_len(skb, inner, sizeof(struct eth_hdr)), frames,
		&pkt);
	if (r)
		return ws_refuse(skb, r, 0);

	ip6->hop_limit--;
	rc = push(skb, pkt.outer_len);
	if (rc)
		return ws_refuse(skb, WS_REASON_PUSH_FAILED, rc);
	rc = bpf_skb_store_bytes(skb, sizeof(struct eth_hdr), h->outer,
				 pkt.outer_len, 0);
	if (rc || !headend_finish(h, ctx_cursor(skb), &pkt))
		return ws_refuse(skb, headend_write_failed(), rc);
	stats_add(h->stats, frames, pkt.inner_len);
	if (headend_first_is_local(h))
		return endpoint_tc(skb, false);
	return ws_forward(skb, h->stats);
}
