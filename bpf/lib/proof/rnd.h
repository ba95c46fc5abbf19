/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The numbers that a headend assigns to packets: unique per path and epoch,
 * since each CPU counts in a lane of its own. See abi.h for the layout.
 */
#pragma once

#include "lib/node/maps.h"
#include "lib/reason.h"

/* The counter of a CPU for a headend; NULL: there is none. */
static __always_inline struct ws_number *number_of(const struct ws_headend *h,
						   __u32 cpu)
{
	__u32 slab = h->counter / WS_NUMBER_SLOTS;
	__u32 at = (cpu + 1) * WS_NUMBER_SLOTS + h->counter % WS_NUMBER_SLOTS;
	void *numbers = bpf_map_lookup_elem(&ws_numbers, &slab);

	return numbers ? bpf_map_lookup_elem(numbers, &at) : NULL;
}

/* On success *rnd is the next number for a train of frames;
 * otherwise nothing has changed.
 */
static __always_inline reason_t rnd_take(const struct ws_headend *h,
					 __u32 frames, __u64 *rnd)
{
	__u32 cpu = bpf_get_smp_processor_id();
	struct ws_number *n;

	if (frames > WS_RND_FRAMES_MAX)
		return REASON(TRAIN_TOO_LONG);
	if (cpu >= h->lanes)
		return REASON(NO_LANE);
	n = number_of(h, cpu);
	if (!n)
		return REASON(COUNTER_MISSING_BUG);
	if (n->last >= n->ceiling || n->last >= WS_RND_COUNTER_MAX)
		return REASON(RND_EXHAUSTED);
	*rnd = (__u64)(h->lane + cpu) << WS_RND_LANE_SHIFT |
	       (__u64)(frames - 1) << WS_RND_FRAMES_SHIFT | ++n->last;
	return WS_REASON_NONE;
}
