/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Rules and prefixes together, on XDP. */
#pragma once

#include "lib/hook.h"
#include "lib/match/classify.h"
#include "lib/match/rules.h"

/* The headend that takes the packet, in m->target; false: not for XDP. */
static __always_inline bool ruled_xdp(ctx_t *ctx, const struct ws_node *node,
				      bool is_ip4, struct ws_match *m)
{
	enum rules_answer found = RULES_NONE;

	if (node->rules)
		found = ws_rules_find(ctx, sizeof(struct eth_hdr),
				      WS_RULE_STEER, is_ip4, 0);
	switch (found) {
	case RULES_NONE:
		return m->action == WS_MATCH_PATH;
	case RULES_TAKE:
		m->target = rule_target() - 1;
		return true;
	default:
		return false;
	}
}
