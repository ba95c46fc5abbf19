/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* End.AD on XDP, towards a function that is recognised by content, behind a
 * device that takes redirects; also for packets that bypass the function.
 */
#pragma once

#include "lib/detour/bypass.h"
#include "lib/detour/content.h"
#include "lib/detour/detour.h"
#include "lib/hook.h"
#include "lib/node/maps.h"
#include "lib/node/refuse.h"
#include "lib/out/nexthop_xdp.h"
#include "lib/reason.h"
#include "lib/sr/end_xdp.h"
#include "lib/sr/endpoint.h"
#include "lib/wire/net.h"

/* Writes the Ethernet header towards the function; false: not for XDP. */
static __always_inline bool function_way(const struct ws_proxy *p, __u32 id,
					 const struct ws_node *node,
					 const struct endpoint *ep,
					 struct eth_hdr *eth)
{
	struct ws_nexthop_key key;
	const struct ws_nexthop *n;
	const struct ws_port *port;
	__u32 to = p->to;

	*eth = *ep->eth;
	eth->proto = bpf_htons(ETH_P_IPV6);
	if (!p->has_via) {
		port = bpf_map_lookup_elem(&ws_ports, &to);
		__builtin_memcpy(eth->dst, p->dmac, sizeof(eth->dst));
		return port && port->xdp_target;
	}
	key = via_key(p, id);
	n = nexthop_find(&key, node->ways);
	if (!nexthop_takes(n, 0))
		return false;
	__builtin_memcpy(eth->dst, n->dmac, sizeof(eth->dst));
	__builtin_memcpy(eth->src, n->smac, sizeof(eth->src));
	return true;
}

/* Applies a remembered bypass; TC finds out the others. */
static __always_inline int bypass_xdp(ctx_t *ctx, const struct endpoint *ep,
				      const struct ws_proxy *p,
				      const struct ws_node *node)
{
	struct ip inner;
	int verdict;

	if (inner_find(ep, endpoint_has_ip4(ep), &inner) ||
	    inner_is_strange(&inner) || bypass_ask(ep, p, &inner) != BYPASS_YES)
		return CTX_PASS;
	verdict = end_xdp(ctx, ep, node);
	if (verdict != CTX_PASS)
		proxy_count(p, bypassed);
	return verdict;
}

static __always_inline int ad_xdp(ctx_t *ctx, const struct endpoint *ep,
				  const struct ws_node *node)
{
	__u32 outer = outer_len(&ep->outer), id = ep->hop->proxy, mtu = 0;
	const struct ws_proxy *p = proxy_find(id);
	struct eth_hdr way, *eth;
	struct outer_next next;
	struct ip inner;
	struct cache_query query;
	struct header_ref ref;
	struct cursor c;
	__u32 entry;

	if (!outer_argument_is_planned(&ep->outer, ep->hop) || !p || p->gone)
		return CTX_PASS;
	if (p->bypass)
		return bypass_xdp(ctx, ep, p, node);
	if (end_check(ep, true, &next) || inner_find(ep, false, &inner) ||
	    inner_is_strange(&inner) || !p->to ||
	    p->recognise != WS_RECOGNISE_CONTENT)
		return CTX_PASS;
	barrier_var(outer);
	if (outer > WS_CACHED_MAX || !function_way(p, id, node, ep, &way) ||
	    bpf_check_mtu(ctx, p->to, &mtu, -(__s32)outer, 0))
		return CTX_PASS;
	entry = content_reserve(ctx, ep, p, outer, &query);
	if (!entry)
		return CTX_PASS;
	outer_advance(ctx, &ep->outer, &next, true);
	ref = header_ref_of(ep, outer);
	/* The second call moves the packet: every pointer taken before is gone. */
	if (!content_fill(ctx, &ref, &query, entry) ||
	    bpf_xdp_adjust_head(ctx, outer)) {
		cache_give(entry, TAG_FREE);
		return ws_refuse(ctx, REASON(BOUNDS_BUG), 0);
	}
	cache_give(entry, tag_of(&query));
	c = ctx_cursor(ctx);
	eth = cursor_take(&c, struct eth_hdr);
	if (!eth)
		return ws_refuse(ctx, REASON(BOUNDS_BUG), 0);
	*eth = way;
	proxy_count(p, rx_success);
	return bpf_redirect(p->to, 0);
}
