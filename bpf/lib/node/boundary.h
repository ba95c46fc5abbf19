/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The packets that concern the domain. */
#pragma once

#include "lib/hook.h"
#include "lib/match/classify.h"
#include "lib/node/maps.h"
#include "lib/node/refuse.h"
#include "lib/reason.h"
#include "lib/wire/cursor.h"
#include "lib/wire/net.h"

static __always_inline bool in_block(__be64 hi)
{
	return (hi & cfg.block_mask) == cfg.block;
}

/* Is this a SID of this node, with or without an entry? */
static __always_inline bool in_locator(__be64 hi)
{
	return (hi & cfg.locator_mask) == cfg.locator;
}

/* Does a frame have labels, in a domain with labels? The boundary lets
 * none in or out: the kernel or another router could remove them there.
 */
static __always_inline bool has_labels(const struct eth_hdr *eth)
{
	return cfg.services && eth_is_mpls(eth);
}

/* NULL until the maps hold a complete plan. */
static __always_inline const struct ws_node *node_armed(void)
{
	__u32 zero = 0;
	const struct ws_node *n = bpf_map_lookup_elem(&ws_node, &zero);

	return n && n->armed ? n : NULL;
}

static __always_inline bool node_is_armed(void)
{
	return node_armed();
}

/* Without a plan, packets that concern a domain are refused. */
static __always_inline int unarmed(ctx_t *ctx, bool concerns)
{
	return concerns ? ws_refuse(ctx, REASON(UNCONFIGURED), 0) : CTX_PASS;
}
