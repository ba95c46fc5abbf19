/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* End (RFC 8986 4.1) with a stamp, on XDP. */
#pragma once

#include "lib/hook.h"
#include "lib/node/boundary.h"
#include "lib/node/stats.h"
#include "lib/out/nexthop_xdp.h"
#include "lib/sr/endpoint.h"

static __always_inline int end_xdp(ctx_t *ctx, const struct endpoint *ep,
				   const struct ws_node *node)
{
	const struct ws_nexthop *n;
	struct outer_next next;

	if (end_check(ep, true, &next) || in_locator(next.sid.hi))
		return CTX_PASS;
	n = nexthop_to_sid(ep->hop->stats, outer_flow(&ep->outer),
			   outer_next_to(&next), node->ways);
	if (!nexthop_takes(n, ep->len))
		return CTX_PASS;
	outer_advance(ctx, &ep->outer, &next, true);
	end_stamp(ctx, ep);
	stats_add(ep->hop->stats, 1, ep->len - outer_len(&ep->outer));
	return nexthop_take(ep->eth, n, OUTER_PROTO);
}
