/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Rules and prefixes together, on TC. */
#pragma once

#include "lib/hook.h"
#include "lib/match/classify.h"
#include "lib/match/rules.h"
#include "lib/skb/pull.h"

/* Pulls the bytes that rules read, if there are rules, and at least len bytes. */
static __always_inline long rules_pull(struct __sk_buff *skb, __u32 off,
				       __u32 len)
{
	return pull(skb, rules_are_there() ? off + TUPLE_LEN : len);
}

/* The result of the ordered rules, or m if none of them matches. */
static __always_inline struct ws_match ruled(struct __sk_buff *skb, __u32 off,
					     bool is_ip4, __u32 use,
					     struct ws_match m)
{
	if (!rules_are_there())
		return m;
	switch (ws_rules_find(skb, off, use, is_ip4, 0)) {
	case RULES_NONE:
		return m;
	case RULES_MISSING:
		m.action = WS_MATCH_MISSING;
		return m;
	case RULES_UNKNOWN:
		m.action = WS_MATCH_UNREAD;
		return m;
	case RULES_UNREAD:
		if (m.action == WS_MATCH_PATH)
			m.action = WS_MATCH_UNREAD;
		return m;
	case RULES_TAKE_UNLESS_PREFIX:
		if (m.action == WS_MATCH_PATH)
			m.action = WS_MATCH_UNREAD;
		if (m.action == WS_MATCH_UNREAD || m.action == WS_MATCH_MISSING)
			return m;
		break;
	case RULES_TAKE:
		break;
	}
	m.action = WS_MATCH_PATH;
	m.target = rule_target();
	if (rules_steer(use))
		m.target--;
	return m;
}
