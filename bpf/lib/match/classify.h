/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The path of a packet by destination and source prefix: the longest
 * destination prefix, within it the longest source prefix. User space
 * has expanded the rules so that two look-ups give this result; most
 * rules have no source and need one. IPv4 rules are below ::ffff:0:0/96.
 */
#pragma once

#include <bpf/bpf_endian.h>
#include "lib/match/prefix.h"
#include "lib/node/maps.h"
#include "lib/wire/ip.h"

/* In place of a path: its tables are incomplete. */
#define PATH_UNKNOWN (~0U)
/* In ws_match.action, but in no table: a packet that could belong to several chains. */
#define WS_MATCH_UNREAD 4

/* The path in m, at the guard; 0: none. */
static __always_inline __be32 match_path(const struct ws_match *m)
{
	if (m->action == WS_MATCH_MISSING)
		return PATH_UNKNOWN;
	return m->action == WS_MATCH_PATH ? m->target : 0;
}

/* Looks up the headend's rules: target is an index into ws_headends. */
static __always_inline struct ws_match classify(const struct addrs *a)
{
	return prefix_find(WS_MATCH_STEER, a->dst, a->src);
}

/* The chain that ends here and requires the packet: target is the path, in network order. */
static __always_inline struct ws_match guard(const struct addrs *a)
{
	return prefix_find(WS_MATCH_REQUIRE, a->dst, a->src);
}

/* The path that all packets to a destination require, from
 * any source; 0: there is none, or it depends on the source.
 */
static __always_inline __be32 guard_by_destination(const __be64 *dst)
{
	struct ws_match m = prefix_find(
		WS_MATCH_REQUIRE | PREFIX_BY_DESTINATION, dst, dst);

	return m.action == WS_MATCH_PATH ? m.target : 0;
}

/* The chain that ends here and requires an inner packet, by prefixes. */
static __always_inline struct ws_match inner_guard(const struct ip *in)
{
	struct addrs a = ip_addrs(in);

	return guard(&a);
}

/* The chain through a function that takes a packet which the function
 * made: target as in classify. The function's origin is not 0.
 */
static __always_inline struct ws_match classify_origin(const struct addrs *a,
						       __u32 origin)
{
	return prefix_find(WS_MATCH_ORIGIN - 1 + origin, a->dst, a->src);
}

/* The local function that traffic must pass: target is its proxy. */
static __always_inline struct ws_match local_guard(const struct addrs *a)
{
	return prefix_find(WS_MATCH_LOCAL, a->dst, a->src);
}

/* Are there rules by more than prefixes? See rules.h. User space sets this
 * before it writes the first rule, and clears it after it has removed the last.
 */
static __always_inline bool rules_are_there(void)
{
	__u32 zero = 0;
	const struct ws_node *n = bpf_map_lookup_elem(&ws_node, &zero);

	return n && n->rules;
}

/* Is a missing set an error? Its answers are unknown. */
static __always_inline bool rules_are_missed(void)
{
	__u32 zero = 0;
	const struct ws_node *n = bpf_map_lookup_elem(&ws_node, &zero);

	return n && n->rules == WS_RULES_THERE;
}
