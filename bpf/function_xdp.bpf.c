/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* XDP on an interface that a function sends to, where its packets are recognised
 * by content. A packet gets its header back here only if it can also be sent on;
 * any other goes on, unchanged, to function_tc.bpf.c, and its header is left for it
 * there.
 */
#define WS_XDP
#include "lib/hook.h"
#include "lib/verifier.h"
#include "lib/proof/binding.h"
#include "lib/node/boundary.h"
#include "lib/match/classify.h"
#include "lib/detour/content.h"
#include "lib/out/nexthop_xdp.h"
#include "lib/detour/detour.h"
#include "lib/detour/restore.h"
#include "lib/node/stats.h"

/* Is the frame for this interface? It may be anything else's that the function
 * lets out.
 */
static __always_inline bool is_for(const struct eth_hdr *eth,
				   const struct ws_proxy *p)
{
	__u32 diff = 0;

	for (__u32 i = 0; i < sizeof(eth->dst); i++)
		diff |= eth->dst[i] ^ p->dmac[i];
	return !diff;
}

/* The entry of a packet, its number plus 1; 0: there is none, or copies of the
 * packet are about, whose order TC keeps.
 */
static __always_inline __u32 entry_take(const struct cache_query *query)
{
	__u32 one = bucket_one(query);
	const struct ws_bucket *b = bpf_map_lookup_elem(&ws_buckets, &one);

	if (!b || tick_is_later(READ_ONCE(b->copies), tick(query->now)))
		return 0;
	return fp_find(query);
}

/* What follows from a kept header: whose share stamps the packet, and its way. */
struct onward {
	const struct ws_hop *hop;
	const struct ws_nexthop *way;
	__u64 binding;
};

/* False: TC must look. */
static __always_inline bool onward_find(struct cursor inner, __u32 len,
					const struct ws_cached *c,
					const struct ws_node *node,
					struct onward *on)
{
	const struct ip6_hdr *outer = (const void *)c->outer;
	struct hop_id w = hop_id(c->hop.sid, c->hop.path, c->hop.epoch);
	__u32 unused;

	on->hop = hop_find(&w, &unused);
	if (!on->hop || in_locator(outer->dst[0]) ||
	    !binding_find(inner, NEXTHDR_IPV6, &on->hop->share, on->hop->scheme,
			  &on->binding))
		return false;
	on->way = nexthop_to_sid(on->hop->stats, nexthop_flow(outer),
				 outer->dst[0], node->ways);
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
	/* The last one moves the packet: every pointer into it is gone. */
	if (outer_len > WS_CACHED_MAX || outer_len < sizeof(struct ip6_hdr) ||
	    !onward_find(inner, len + outer_len, c, node, &on) ||
	    bpf_xdp_adjust_head(ctx, -(__s32)outer_len)) {
		cache_put_back(entry, query.fp, expires);
		return CTX_PASS;
	}
	inner = ctx_cursor(ctx);
	eth = cursor_take(&inner, struct eth_hdr);
	if (eth)
		eth->proto = bpf_htons(ETH_P_IPV6); /* what is inside */
	if (bpf_xdp_store_bytes(
		    ctx, sizeof(*eth), c->outer,
		    within(outer_len, sizeof(struct ip6_hdr), WS_CACHED_MAX)) ||
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
	return nexthop_take(eth, on.way, false);
}

SEC("xdp.frags")
int ws_function_xdp(struct xdp_md *ctx)
{
	struct cursor c = ctx_cursor(ctx);
	__u32 ifindex = ctx->ingress_ifindex;
	const struct ws_node *node;
	const struct ws_proxy *p;
	const struct ws_port *port;
	struct eth_hdr *eth;
	struct ip in;
	struct addrs a;

	eth = cursor_take(&c, struct eth_hdr);
	if (!eth || eth->proto != bpf_htons(ETH_P_IPV6))
		return CTX_PASS;
	if (!ip_take(&c, false, &in) || !ip_is_its_version(&in) ||
	    ip_to_is_never_forwarded(&in))
		return CTX_PASS;
	a = ip_addrs(&in);
	if (ip6_is_mapped(a.dst) || ip6_is_mapped(a.src))
		return CTX_PASS;
	node = node_armed();
	port = bpf_map_lookup_elem(&ws_ports, &ifindex);
	if (!node || !port || port->cutter)
		return CTX_PASS;
	p = proxy_find(port->proxy);
	if (!p || p->recognise != WS_RECOGNISE_CONTENT || !is_for(eth, p))
		return CTX_PASS;
	/* The node's own addresses are asked for again by TC. */
	if (guard(&a).local)
		return CTX_PASS;
	return back_xdp(ctx, p, port->proxy, in.hdr, node);
}

char _license[] SEC("license") = "Dual BSD/GPL";
