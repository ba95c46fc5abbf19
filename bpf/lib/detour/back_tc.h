/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* End.AD on TC, from a function: its packets get their headers back, or have none. */
#pragma once

#include "lib/detour/cache.h"
#include "lib/detour/content.h"
#include "lib/detour/detour.h"
#include "lib/detour/fingerprint.h"
#include "lib/detour/fragments_tc.h"
#include "lib/detour/out_tc.h"
#include "lib/detour/slots.h"
#include "lib/encap/labels_tc.h"
#include "lib/hook.h"
#include "lib/node/refuse.h"
#include "lib/reason.h"
#include "lib/sr/guard_tc.h"

/* A packet without a kept header. made: it never had an
 * index, so the function has made it. A packet with an
 * index has lost its header, and no egress has verified it.
 */
static __always_inline int unknown(struct __sk_buff *skb,
				   const struct ws_proxy *p, bool made)
{
	const struct eth_hdr *eth;
	struct cursor c;
	struct ip in;

	proxy_count(p, tx_not_cached);
	if (p->on_unknown == WS_ON_UNKNOWN_ORIGINATE && made)
		bpf_tail_call(skb, &ws_programs, WS_PROGRAM_ORIGINATE);
	if (p->on_unknown != WS_ON_UNKNOWN_PLAIN)
		return ws_refuse(skb, REASON(NOT_CACHED), 0);
	proxy_count(p, tx_plain);
	/* Some verifiers forget pointers taken before a tail call. */
	c = ctx_cursor(skb);
	eth = cursor_take(&c, struct eth_hdr);
	if (!eth || !ip_take(&c, eth_is_ip4(eth), &in))
		return ws_refuse(skb, REASON(BOUNDS_BUG), 0);
	return guard_plain(skb, &in);
}

static __always_inline void by_metadata(struct __sk_buff *skb,
					const struct ws_proxy *p, __u32 id,
					__u32 slot, struct back *back)
{
	__u64 now = bpf_ktime_get_coarse_ns(), expires = 0;
	__u32 kept = slot_back(skb, p, id, slot, now, &expires);
	struct ws_cached *c = slot_find(kept);
	long err = 0;

	if (!c)
		return;
	back->found = true;
	back->bad = restore(skb, c, &back->exit, &err);
	back->err = err;
	if (back->bad == KEPT_OTHER) {
		labels_expire(skb, expires);
		back->by_index = true;
		back->kept = kept;
		return;
	}
	slot_give(c, SLOT_FREE);
	if (!back->bad)
		proxy_waited(p, now, expires);
}

static __always_inline void by_content(struct __sk_buff *skb,
				       const struct ws_proxy *p, __u32 id,
				       struct back *back)
{
	struct cache_query query;
	__u64 now, expires, fp;
	struct ws_cached *c;
	__u32 entry;
	long err = 0;

	fp = ws_fingerprint(skb, sizeof(struct eth_hdr), skb_is_ip4(skb));
	if (!fp)
		return;
	now = bpf_ktime_get_coarse_ns();
	query = cache_query(p, id, fp, now);
	entry = ws_cache_take(&query);
	c = cache_entry(entry);
	if (!c)
		return;
	expires = c->expires;
	back->found = true;
	back->bad = restore(skb, c, &back->exit, &err);
	back->err = err;
	if (back->bad == KEPT_OTHER) {
		back->kept = entry;
		return;
	}
	cache_give(entry, TAG_FREE);
	if (!back->bad)
		proxy_waited(p, now, expires);
}

/* back is zero. A function of its own, so that its stack is free again when
 * the next segment on this node is processed. Neither p nor back is ever NULL.
 */
__noinline int ws_back(struct __sk_buff *skb, const struct ws_proxy *p,
		       __u32 id, __u32 slot, struct back *back)
{
	if (!p || !back)
		return 0;
	if (p->recognise == WS_RECOGNISE_METADATA)
		by_metadata(skb, p, id, slot, back);
	else
		by_content(skb, p, id, back);
	return 0;
}

/* A packet whose header is a stack of labels goes on in the program for labels,
 * which frees the entry, or the slot. Returns the verdict if there is no such program.
 */
static __always_inline int labels_back(struct __sk_buff *skb,
				       const struct back *back)
{
	struct ws_cached *c;

	if (!back->by_index) {
		labels_jump(skb, LABELS_BACK, back->kept);
		cache_give(back->kept, TAG_FREE);
	} else {
		labels_jump(skb, LABELS_BACK_SLOT, back->kept);
		c = slot_find(back->kept);
		if (c)
			slot_give(c, SLOT_FREE);
	}
	return labels_refuse(skb);
}

/* Forwards a packet whose header was found. Returns the verdict. */
static __always_inline int back_next(struct __sk_buff *skb,
				     const struct back *back)
{
	skb->tc_index = 0;
	if (back->bad == KEPT_OTHER)
		return labels_back(skb, back);
	if (back->bad)
		return ws_refuse(skb, back->bad, back->err);
	return restored_next(skb, back->exit);
}

/* slot: the packet's index, 0: none. forged: the packet had
 * an index that this node gives to no packet for a function.
 */
static __always_inline int from_function(struct __sk_buff *skb,
					 const struct ws_proxy *p, __u32 id,
					 __u32 slot, bool forged)
{
	struct back back = {};

	skb->tc_index = 0;
	ws_back(skb, p, id, slot, &back);
	if (!back.found)
		return unknown(skb, p, !slot && !forged);
	return back_next(skb, &back);
}
