/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Rules beside what prefixes say, on TC. */
#pragma once

#include "lib/hook.h"
#include "lib/match/classify.h"
#include "lib/match/rules.h"
#include "lib/skb/pull.h"

/* Pulls what rules look at, if there are any, and at least len bytes. */
static __always_inline long rules_pull(struct __sk_buff *skb, __u32 off,
				       __u32 len)
{
	return pull(skb, rules_are_there() ? off + TUPLE_LEN : len);
}

/* m, unless a rule knows better. */
static __always_inline struct ws_match ruled(struct __sk_buff *skb, __u32 off,
					     bool is_ip4, __u32 use,
					     struct ws_match m)
{
	__u32 target;

	if (!rules_are_there())
		return m;
	target = ws_rules_find(skb, off, use, is_ip4, 0);
	if (!target)
		return m;
	if (target == MATCH_NO_SET) {
		m.action = WS_MATCH_MISSING;
		return m;
	}
	if (rules_steer(use) && target >= MATCH_UNREAD) {
		if (target == MATCH_UNKNOWN || m.action == WS_MATCH_PATH)
			m.action = WS_MATCH_UNREAD;
		return m;
	}
	if (rules_steer(use) && target & MATCH_UNLESS_PREFIX) {
		if (m.action == WS_MATCH_MISSING)
			return m;
		if (m.action == WS_MATCH_PATH) {
			m.action = WS_MATCH_UNREAD;
			return m;
		}
		target &= ~MATCH_UNLESS_PREFIX;
	}
	m.action = WS_MATCH_PATH;
	m.target = rules_steer(use) ? target - 1 : target;
	return m;
}
