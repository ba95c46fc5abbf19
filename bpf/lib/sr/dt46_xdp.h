/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* End.DT46 (RFC 8986 4.8) behind the verdict, on XDP. */
#pragma once

#include "lib/hook.h"
#include "lib/match/rules.h"
#include "lib/node/refuse.h"
#include "lib/node/stats.h"
#include "lib/out/nexthop_xdp.h"
#include "lib/reason.h"
#include "lib/sr/endpoint.h"
#include "lib/wire/flow.h"
#include "lib/wire/ip.h"

/* End.DT46 of a verified packet. is_ip4 is a constant at compile time. */
static __always_inline int deliver_xdp(ctx_t *ctx, const struct endpoint *ep,
				       const struct ws_egress *e, bool report,
				       const struct ws_node *node, bool is_ip4)
{
	__u32 outer = outer_len(&ep->outer);
	__u32 len = ep->len - outer;
	__u32 stats = ep->hop->stats, ecn = outer_ecn(&ep->outer);
	struct ws_nexthop way;
	const struct ws_nexthop *n;
	struct ws_nexthop_key key;
	struct eth_hdr *eth;
	struct ip inner;
	reason_t r;
	struct cursor c;
	struct ws_match required = {};
	long rc;

	if (inner_find(ep, is_ip4, &inner) || inner_fits(ep, &inner, len, true))
		return CTX_PASS;
	c = (struct cursor){ inner.hdr + ip_header_len(is_ip4),
			     outer_inner(&ep->outer).end };
	key = nexthop_key_inner(&inner, flow_hash(c, &inner));
	n = nexthop_inner(stats, &key, node->ways);
	if (!n)
		return CTX_PASS;
	/* Another CPU may change the entry to another destination at any
	 * time. The copy that is checked here is the copy that is used below.
	 */
	way = *n;
	barrier();
	if (!nexthop_counts(&way, key.addr[0], key.addr[1], node->ways) ||
	    !nexthop_takes(&way, len))
		return CTX_PASS;
	/* The guard's result for this destination is valid as
	 * long as the next hop, if there are no ordered rules.
	 */
	if (node->rules) {
		required = required_find(ctx, sizeof(*eth) + outer, is_ip4,
					 endpoint_chain(ep));
	} else if (way.path) {
		required.action = WS_MATCH_PATH;
		required.target = way.path;
	} else {
		required = inner_guard(&inner);
	}
	/* Redirects of XDP meet no program at the edge's
	 * egress, which would find an SRH.
	 */
	if (inner_check(ep, &inner, required) ||
	    (!is_ip4 && ip6_has_extension(inner.hdr)) || ip_hops(&inner) <= 1)
		return CTX_PASS;
	/* From here on no packet may be left to TC, which
	 * would find its number used.
	 */
	r = egress_window(ep, e, 1);
	if (r && report)
		return CTX_PASS;
	if (r)
		return ws_refuse(ctx, r, 0);
	egress_trace(ctx, ep);
	/* Moves the packet: every pointer taken before is gone. */
	rc = bpf_xdp_adjust_head(ctx, outer);
	if (rc)
		return ws_refuse(ctx, REASON(STRIP_FAILED), rc);

	c = ctx_cursor(ctx);
	eth = cursor_take(&c, struct eth_hdr);
	if (!eth || !ip_take(&c, is_ip4, &inner))
		return ws_refuse(ctx, REASON(BOUNDS_BUG), 0);
	ip_decrement(&inner);
	ip_set_ecn(&inner, ecn);
	stats_add(stats, 1, len);
	return nexthop_take(eth, &way, ip_proto(is_ip4));
}

static __always_inline int dt46_xdp(ctx_t *ctx, const struct endpoint *ep,
				    const struct ws_node *node)
{
	const struct ws_egress *e;
	reason_t r;
	bool report;

	if (outer_segments_remain(&ep->outer, ep->hop))
		return CTX_PASS;
	e = egress_find(ep);
	if (!e)
		return CTX_PASS;
	/* Read together with the keys: the entry may be given to another path later. */
	report = e->on_violation == WS_ON_VIOLATION_REPORT;
	r = egress_judge(ep, e);
	if (r && report)
		return CTX_PASS;
	if (r)
		return ws_refuse(ctx, r, 0);
	if (endpoint_has_ip4(ep))
		return deliver_xdp(ctx, ep, e, report, node, true);
	return deliver_xdp(ctx, ep, e, report, node, false);
}
