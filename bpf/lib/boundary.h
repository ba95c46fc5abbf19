/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Which packets concern the domain. */
#pragma once

#include "classify.h"
#include "cursor.h"
#include "hook.h"
#include "maps.h"
#include "net.h"
#include "refuse.h"

static __always_inline bool in_block(__be64 hi)
{
	return (hi & cfg.block_mask) == cfg.block;
}

/* A SID of this node, whether there is something at it or not. */
static __always_inline bool in_locator(__be64 hi)
{
	return (hi & cfg.locator_mask) == cfg.locator;
}

/* False until a whole plan is in the maps. */
static __always_inline bool node_is_armed(void)
{
	__u32 zero = 0;
	const struct ws_node *n = bpf_map_lookup_elem(&ws_node, &zero);

	return n && n->armed;
}

/* c stands behind an IPv6 header. A routing header that runs past the linear
 * part counts as one: refusing it is the safe side.
 */
static __always_inline bool has_srh(struct cursor c, const struct ip6_hdr *ip6)
{
	const struct srh *srh;

	if (ip6->nexthdr != NEXTHDR_ROUTING)
		return false;
	srh = cursor_take(&c, struct srh);
	return !srh || srh->type == ROUTING_TYPE_SRH;
}

/* Without a plan nothing that concerns a domain goes on. */
static __always_inline int unarmed(ctx_t *ctx, bool concerns)
{
	return concerns ? ws_refuse(ctx, WS_REASON_UNCONFIGURED, 0) : CTX_PASS;
}

/* A plain packet: refused where some chain that ends here requires it. */
static __always_inline int guard_plain(ctx_t *ctx, const struct ip6_hdr *ip6)
{
	struct ws_match m = guard(ip6);

	if (m.action == WS_MATCH_PATH && !m.local)
		return ws_refuse(ctx, WS_REASON_UNPROVEN, 0);
	return CTX_PASS;
}
