/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Which path a packet belongs to, by destination and source prefix: the longest
 * destination prefix, within it the longest source prefix. User space has
 * expanded the rules so that two look-ups give that answer; most rules name no
 * source and need one. IPv4 rules are below ::ffff:0:0/96.
 */
#pragma once

#include <bpf/bpf_endian.h>
#include "lib/match/prefix.h"
#include "lib/node/maps.h"
#include "lib/wire/ip.h"

/* In the place of a path: the tables that would name it are incomplete. */
#define PATH_UNKNOWN (~0U)
/* In ws_match.action, as no table has it: another chain would take such a packet. */
#define WS_MATCH_UNREAD 4

/* The path that m names, at the guard; 0: none. */
static __always_inline __be32 match_path(const struct ws_match *m)
{
	if (m->action == WS_MATCH_MISSING)
		return PATH_UNKNOWN;
	return m->action == WS_MATCH_PATH ? m->target : 0;
}

/* The headend's rules: target is an index into ws_headends. */
static __always_inline struct ws_match classify(const struct addrs *a)
{
	return prefix_find(WS_MATCH_STEER, a->dst, a->src);
}

/* What chains that end here require: target is the path, in network order. */
static __always_inline struct ws_match guard(const struct addrs *a)
{
	return prefix_find(WS_MATCH_REQUIRE, a->dst, a->src);
}

/* The path that all packets to a destination require, wherever they come from; 0:
 * there is none, or it is not for the destination alone to say.
 */
static __always_inline __be32 guard_by_destination(const __be64 *dst)
{
	struct ws_match m = prefix_find(
		WS_MATCH_REQUIRE | PREFIX_BY_DESTINATION, dst, dst);

	return m.action == WS_MATCH_PATH ? m.target : 0;
}

/* What chains that end here require of an inner packet, by prefixes. */
static __always_inline struct ws_match inner_guard(const struct ip *in)
{
	struct addrs a = ip_addrs(in);

	return guard(&a);
}

/* What chains through a function take of what it makes itself: target as classify's.
 * The function's origin is not 0.
 */
static __always_inline struct ws_match classify_origin(const struct addrs *a,
						       __u32 origin)
{
	return prefix_find(WS_MATCH_ORIGIN - 1 + origin, a->dst, a->src);
}

/* What must pass a local function of this node: target is its proxy. */
static __always_inline struct ws_match local_guard(const struct addrs *a)
{
	return prefix_find(WS_MATCH_LOCAL, a->dst, a->src);
}

/* Are there rules by more than prefixes? See rules.h. User space says so before it
 * writes the first, and takes it back after it removed the last.
 */
static __always_inline bool rules_are_there(void)
{
	__u32 zero = 0;
	const struct ws_node *n = bpf_map_lookup_elem(&ws_node, &zero);

	return n && n->rules;
}

/* The set is missed where there is none: what it would say nobody knows. */
static __always_inline bool rules_are_missed(void)
{
	__u32 zero = 0;
	const struct ws_node *n = bpf_map_lookup_elem(&ws_node, &zero);

	return n && n->rules == WS_RULES_THERE;
}
