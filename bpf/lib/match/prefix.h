/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The longest prefix of an address in one of the tables of ws_match: a binary
 * search over the lengths that are in it (Waldvogel et al., 1997), each step one
 * line of a hash table. See struct ws_match_line.
 */
#pragma once

#include <bpf/bpf_endian.h>
#include "lib/node/maps.h"

#define PREFIX_ACTION ((__u64)WS_MATCH_KIND_ACTION << 32)
#define PREFIX_LOCAL ((__u64)WS_MATCH_KIND_LOCAL << 32)

/* A part of a table is missing. PREFIX_LOCAL makes the caller
 * ask the kernel whether the address is the node's own.
 */
#define PREFIX_MISSING ((__u64)WS_MATCH_MISSING << 32 | PREFIX_LOCAL)

static __always_inline const struct ws_match_line *prefix_line(void *table,
							       __u32 at)
{
	return bpf_map_lookup_elem(table, &at);
}

static __always_inline __u32 prefix_hash(__u64 hi, __u64 lo)
{
	__u64 h = hi * WS_MATCH_HASH_HI ^ lo * WS_MATCH_HASH_LO;

	h ^= h >> 32;
	return h * WS_MATCH_HASH_MIX >> 32;
}

/* A step's entry as a number: target, and kind from bit 32 on; 0: there is none. */
static __always_inline __u64 prefix_in_line(const struct ws_match_line *l,
					    __u64 hi, __u64 lo)
{
	for (__u32 i = 0; i < WS_MATCH_WAYS; i++) {
		if (!((l->addr[i][0] ^ hi) | (l->addr[i][1] ^ lo)) &&
		    l->kind[i])
			return l->target[i] | (__u64)l->kind[i] << 32;
	}
	return 0;
}

static __always_inline __u64 prefix_step(void *table,
					 const struct ws_match_step *s,
					 __u64 hi, __u64 lo)
{
	__u32 length = s->length;
	const struct ws_match_line *l;
	__u64 found;
	__u32 at;

	if (length < 64)
		hi &= ~(~0ULL >> length);
	if (length <= 64)
		lo = 0;
	else
		lo &= ~(~0ULL >> 1 >> ((length - 65) & 63));
	at = s->base + (prefix_hash(hi, lo) & ((1U << (s->log2 & 31)) - 1));
	for (__u32 run = 0; run < WS_MATCH_RUN; run++) {
		l = prefix_line(table, at + run);
		if (!l)
			return PREFIX_MISSING;
		found = prefix_in_line(l, hi, lo);
		if (found || !l->more)
			return found;
	}
	return 0;
}

/* The entry of the longest prefix, as a number; see
 * prefix_in_line. head: the first line of its head.
 */
static __always_inline __u64 prefix_search(void *table, __u32 head, __u64 hi,
					   __u64 lo)
{
	const struct ws_match_head *first, *h;
	const struct ws_match_step *s;
	__u64 best = 0, found;
	__u32 next;

	first = (const void *)prefix_line(table, head);
	if (!first)
		return PREFIX_MISSING;
	next = first->step[0].hit;
	for (__u32 i = 0; i < WS_MATCH_DEPTH && next; i++) {
		h = first;
		if (next >= WS_MATCH_HEAD_STEPS)
			h = (const void *)prefix_line(
				table, head + next / WS_MATCH_HEAD_STEPS);
		if (!h)
			return PREFIX_MISSING;
		s = &h->step[next % WS_MATCH_HEAD_STEPS];
		found = prefix_step(table, s, hi, lo);
		if (!found) {
			next = s->miss;
			continue;
		}
		best = found;
		next = found >> 32 & WS_MATCH_KIND_LONGER ? s->hit : 0;
	}
	return best;
}

/* A node without a plan has no rules; one with a plan has a table for each use. */
static __always_inline __u64 prefix_no_table(void)
{
	__u32 zero = 0;
	const struct ws_node *n = bpf_map_lookup_elem(&ws_node, &zero);

	return n && n->armed ? PREFIX_MISSING : 0;
}

/* Flag beside a use: look-up by destination only. */
#define PREFIX_BY_DESTINATION 256

/* The entry for a destination and, where the rules of the use require it,
 * for a source. Both look-ups are in the same table: a change may replace
 * the table in between, and the new one has other heads. As a number; see
 * prefix_in_line. Addresses are in the host's order. A function of its
 * own, so that the kernel's verifier checks its loops once.
 */
__noinline __u64 ws_prefix_find(__u32 use, __u64 dst_hi, __u64 dst_lo,
				__u64 src_hi, __u64 src_lo)
{
	bool by_source = !(use & PREFIX_BY_DESTINATION);
	__u64 found, by_src;
	void *table;

	use &= PREFIX_BY_DESTINATION - 1;
	table = bpf_map_lookup_elem(&ws_match, &use);
	if (!table)
		return prefix_no_table();
	found = prefix_search(table, 0, dst_hi, dst_lo);
	if (!by_source || (found & PREFIX_ACTION) != (__u64)WS_MATCH_SOURCE
							     << 32)
		return found;
	by_src = prefix_search(table, found, src_hi, src_lo);
	return (by_src & ~PREFIX_LOCAL) | (found & PREFIX_LOCAL);
}

/* Addresses are in network order. */
static __always_inline struct ws_match prefix_find(__u32 use, const __be64 *dst,
						   const __be64 *src)
{
	__u64 found = ws_prefix_find(
		use, bpf_be64_to_cpu(dst[0]), bpf_be64_to_cpu(dst[1]),
		bpf_be64_to_cpu(src[0]), bpf_be64_to_cpu(src[1]));

	return (struct ws_match){
		.target = found,
		.action = found >> 32 & WS_MATCH_KIND_ACTION,
		.local = found >> 32 & WS_MATCH_KIND_LOCAL ? 1 : 0,
	};
}
