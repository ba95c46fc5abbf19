/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* End.AD on XDP, from a function whose packets are recognised by content. */
#pragma once

#include "lib/detour/content.h"
#include "lib/detour/detour.h"
#include "lib/detour/restore.h"
#include "lib/encap/outer.h"
#include "lib/hook.h"
#include "lib/node/boundary.h"
#include "lib/node/refuse.h"
#include "lib/node/stats.h"
#include "lib/out/nexthop_xdp.h"
#include "lib/proof/binding.h"
#include "lib/reason.h"
#include "lib/verifier.h"

/* The number of a packet's entry plus 1; 0: there is none, or
 * the function has copies of the packet, whose order TC keeps.
 */
static __always_inline __u32 entry_take(const struct cache_query *query)
{
	__u32 one = bucket_one(query);
	const struct ws_bucket *b = bpf_map_lookup_elem(&ws_buckets, &one);

	if (!b || tick_is_later(READ_ONCE(b->copies), tick(query->now)))
		return 0;
	return fp_find(query);
}

/* Read from a kept header: the hop whose share stamps the packet, and the next hop. */
struct onward {
	const struct ws_hop *hop;
	const struct ws_nexthop *way;
	__u64 binding;
};

/* False: not for XDP. */
static __always_inline bool onward_find(struct cursor inner, __u32 len,
					const struct ws_cached *c,
					const struct ws_node *node,
					struct onward *on)
{
	const struct outer_head *outer = outer_head_of(c->outer);
	struct hop_id w = hop_id(c->hop.sid, c->hop.path, c->hop.epoch);
	__u32 unused;

	on->hop = hop_find(&w, &unused);
	if (!on->hop || !form_is_outer(on->hop->form) ||
	    in_locator(outer_head_sid(outer)) ||
	    !binding_find(inner, NEXTHDR_IPV6, &on->hop->share, on->hop->scheme,
			  &on->binding))
		return false;
	on->way = nexthop_to_sid(on->hop->stats, outer_head_flow(outer),
				 outer_head_sid(outer), node->ways);
	return nexthop_takes(on->way, len);
}

static __always_inline int back_xdp(ctx_t *ctx, const struct ws_proxy *p,
				    __u32 id, struct ip6_hdr *ip6,
				    const struct ws_node *node)
{
	struct cursor inner = { ip6, ctx_cursor(ctx).end };
	__u32 len = xdp_packet_len(ctx, ip6, inner.end), outer_len, entry;
	__u64 fp = ws_fingerprint(ctx, sizeof(struct eth_hdr), false), expires;
	struct onward on = {};
	struct ws_cached *c;
	struct cache_query query;
	struct eth_hdr *eth;

	if (!fp)
		return CTX_PASS;
	query = cache_query(p, id, fp, bpf_ktime_get_coarse_ns());
	entry = entry_take(&query);
	c = cache_entry(entry);
	if (!c)
		return CTX_PASS;
	expires = c->expires;
	outer_len = c->outer_len;
	barrier_var(outer_len);
	/* The last call moves the packet: every pointer taken before is gone. */
	if (outer_len > WS_CACHED_MAX ||
	    outer_len < sizeof(struct outer_head) ||
	    !onward_find(inner, len + outer_len, c, node, &on) ||
	    bpf_xdp_adjust_head(ctx, -(__s32)outer_len)) {
		cache_put_back(entry, query.fp, expires);
		return CTX_PASS;
	}
	inner = ctx_cursor(ctx);
	eth = cursor_take(&inner, struct eth_hdr);
	if (eth)
		eth->proto = bpf_htons(ETH_P_IPV6); /* the inner packet */
	if (bpf_xdp_store_bytes(ctx, sizeof(*eth), c->outer,
				within(outer_len, sizeof(struct outer_head),
				       WS_CACHED_MAX)) ||
	    !restore_finish(ctx, c, on.hop, on.binding, outer_len, len)) {
		cache_give(entry, TAG_FREE);
		return ws_refuse(ctx, REASON(RESTORE_FAILED), 0);
	}
	cache_give(entry, TAG_FREE);
	inner = ctx_cursor(ctx);
	eth = cursor_take(&inner, struct eth_hdr);
	if (!eth)
		return ws_refuse(ctx, REASON(RESTORE_FAILED), 0);
	stats_add(on.hop->stats, 1, len);
	proxy_waited(p, query.now, expires);
	return nexthop_take(eth, on.way, OUTER_PROTO);
}
