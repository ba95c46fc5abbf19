/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Rules beside what prefixes say, on XDP. */
#pragma once

#include "lib/hook.h"
#include "lib/match/classify.h"
#include "lib/match/rules.h"

/* The headend that takes the packet, in m->target; false: XDP finds none. */
static __always_inline bool ruled_xdp(ctx_t *ctx, const struct ws_node *node,
				      bool is_ip4, struct ws_match *m)
{
	__u32 target = 0;

	if (node->rules)
		target = ws_rules_find(ctx, sizeof(struct eth_hdr),
				       WS_RULE_STEER, is_ip4, 0);
	if (target >= MATCH_NO_SET)
		return false;
	if (target)
		m->target = target - 1;
	return target || m->action == WS_MATCH_PATH;
}
