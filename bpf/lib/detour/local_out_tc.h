/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Packets from a function in the node's own kernel get their outer headers
 * back, whichever route the kernel has chosen for them. TC egress only.
 */
#pragma once

#include "lib/detour/detour.h"
#include "lib/detour/fragments_tc.h"
#include "lib/detour/in_tc.h"
#include "lib/detour/out_tc.h"
#include "lib/encap/ext_tc.h"
#include "lib/encap/labels_tc.h"
#include "lib/encap/outer.h"
#include "lib/encap/outer_kept.h"
#include "lib/hook.h"
#include "lib/node/boundary.h"
#include "lib/reason.h"
#include "lib/wire/ip.h"
#include "lib/wire/net.h"

/* A packet from function p that has its outer header back leaves; exit: see restore.
 * core: by an interface inside the domain. Returns the verdict.
 */
static __always_inline int restored_out(struct __sk_buff *skb,
					const struct ws_proxy *p, __u32 exit,
					bool core)
{
	struct cursor cur = ctx_cursor(skb);
	struct eth_hdr *eth = cursor_take(&cur, struct eth_hdr);
	const struct outer_head *head = cursor_take(&cur, struct outer_head);

	if (p->mark)
		skb->mark = 0; /* of the inner packet */
	/* A packet for a next segment on this node goes to an ingress again. */
	if (eth && head && in_locator(outer_head_sid(head)))
		return segment_in(skb, eth);
	if (OUTER_IS_IP && head && outer_head_has_options(head))
		return ext_program(skb, EXT_LEAVES_OUT, 0);
	return forward_out(skb, exit, core);
}

/* A packet with an index of a kept header, lower than
 * WS_INDEX_LET_GO. whole: it is an IP packet with a complete header.
 * core: this interface is inside the domain. Returns the verdict.
 */
static __always_inline int local_out(struct __sk_buff *skb, __u32 slot,
				     bool whole, bool core)
{
	__u32 proxy = slot_proxy(slot);
	const struct ws_proxy *p = proxy_find(proxy);
	struct ws_cached *c;
	reason_t r;
	__u64 now, expires = 0;
	__u32 exit, kept = 0;
	long err = 0;

	if (p && p->to && p->to == skb->ifindex)
		return CTX_PASS; /* on its way to a function */
	skb->tc_index = 0;
	now = bpf_ktime_get_coarse_ns();
	if (whole && p && !p->to)
		kept = slot_back(skb, p, proxy, slot, now, &expires);
	c = slot_find(kept);
	if (!c) {
		if (p)
			proxy_count(p, tx_not_cached);
		return ws_refuse(skb, REASON(NOT_CACHED), 0);
	}
	r = restore(skb, c, &exit, &err);
	if (r == KEPT_OTHER) {
		labels_expire(skb, expires);
		labels_jump(skb, core ? LABELS_BACK_CORE : LABELS_BACK_EDGE,
			    kept);
		slot_give(c, SLOT_FREE);
		return labels_refuse(skb);
	}
	slot_give(c, SLOT_FREE);
	if (r)
		return ws_refuse(skb, r, err);
	proxy_waited(p, now, expires);
	return restored_out(skb, p, exit, core);
}

/* A packet without an index: plain, or it has lost the
 * index in the function. Returns the verdict.
 */
static __always_inline int local_lost(struct __sk_buff *skb,
				      const struct ip *in)
{
	const struct ws_proxy *p;
	struct ws_match m;
	struct addrs a;

	if (ip_to_is_never_forwarded(in))
		return CTX_PASS;
	a = ip_addrs(in);
	if (!in->is_ip4 && in_block(a.dst[0]))
		return CTX_PASS;
	m = local_guard(&a);
	if (m.action == WS_MATCH_MISSING)
		return ws_refuse(skb, REASON(RULES_MISSING_BUG), 0);
	if (m.action != WS_MATCH_PATH)
		return CTX_PASS;
	p = proxy_find(m.target);
	if (!p)
		return ws_refuse(skb, REASON(PROXY_MISSING_BUG), 0);
	proxy_count(p, tx_not_cached);
	if (p->on_unknown != WS_ON_UNKNOWN_PLAIN)
		return ws_refuse(skb, REASON(NOT_CACHED), 0);
	proxy_count(p, tx_plain);
	return CTX_PASS;
}
