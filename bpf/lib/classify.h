/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Which path a packet belongs to, by destination and source prefix: the longest
 * destination prefix, within it the longest source prefix. User space has
 * expanded the rules so that two look-ups give that answer; most rules name no
 * source and need one. IPv4 rules are below ::ffff:0:0/96.
 */
#pragma once

#include "inner.h"
#include "maps.h"

static __always_inline struct ws_match classify_in(void *dst_map, void *src_map,
						   const struct addrs *a)
{
	struct ws_dst_key dk = { .prefixlen = 128 };
	struct ws_src_key sk = { .prefixlen = 32 + 128 };
	struct ws_match none = {};
	const struct ws_match *m, *by_src;
	struct ws_match found;

	__builtin_memcpy(dk.addr, a->dst, sizeof(dk.addr));
	m = bpf_map_lookup_elem(dst_map, &dk);
	if (!m)
		return none;
	found = *m;
	if (found.action != WS_MATCH_SOURCE)
		return found;

	sk.class_id = bpf_htonl(found.target);
	__builtin_memcpy(sk.addr, a->src, sizeof(sk.addr));
	by_src = bpf_map_lookup_elem(src_map, &sk);
	found.action = by_src ? by_src->action : WS_MATCH_NONE;
	found.target = by_src ? by_src->target : 0;
	return found;
}

/* The headend's rules: target is an index into ws_headends. */
static __always_inline struct ws_match classify(const struct addrs *a)
{
	return classify_in(&ws_match_dst, &ws_match_src, a);
}

/* What chains that end here require: target is the path, in network order. */
static __always_inline struct ws_match guard(const struct addrs *a)
{
	return classify_in(&ws_guard_dst, &ws_guard_src, a);
}

/* The path that all packets to a destination require, wherever they come from; 0:
 * there is none, or it is not for the destination alone to say.
 */
static __always_inline __be32 guard_by_destination(const __be64 *dst)
{
	struct ws_dst_key k = { .prefixlen = 128 };
	const struct ws_match *m;

	__builtin_memcpy(k.addr, dst, sizeof(k.addr));
	m = bpf_map_lookup_elem(&ws_guard_dst, &k);
	return m && m->action == WS_MATCH_PATH ? m->target : 0;
}

/* The path that chains that end here require of an inner packet, by prefixes; 0:
 * none.
 */
static __always_inline __be32 inner_guard(const struct inner *in)
{
	struct addrs a = inner_addrs(in);
	struct ws_match m = guard(&a);

	return m.action == WS_MATCH_PATH ? m.target : 0;
}

/* What must pass a local function of this node: target is its proxy. */
static __always_inline struct ws_match local_guard(const struct addrs *a)
{
	return classify_in(&ws_local_dst, &ws_local_src, a);
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
