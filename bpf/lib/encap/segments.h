/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Compares the segment list in a packet with the plan's. */
#pragma once

#include <waystamp/abi.h>
#include "lib/wire/net.h"

static __always_inline __u64 sid_diff(const struct sid *a, const struct sid *b)
{
	return (a->hi ^ b->hi) | (a->lo ^ b->lo);
}

/* carried: the segment list in the packet, n entries; end: of the packet.
 * Compares two entries at a time: the proof behind the last entry is
 * longer than an entry. Without a loop, whose counters the compiler would
 * keep in memory. A function of its own, to free registers.
 */
static __noinline bool segments_equal(const struct sid *carried, __u32 n,
				      const void *end,
				      const struct ws_egress *e)
{
	const struct sid *want = (const struct sid *)e->list;
	__u64 diff = n ^ e->segments;

#pragma unroll
	for (__u32 i = 0; i < WS_SEGS_MAX; i += 2) {
		if (i < n) {
			if ((void *)(carried + i + 2) > end)
				diff = 1;
			else
				diff |= sid_diff(carried + i, want + i);
			if (i + 1 < n && (void *)(carried + i + 2) <= end)
				diff |= sid_diff(carried + i + 1, want + i + 1);
		}
	}
	return diff == 0;
}
