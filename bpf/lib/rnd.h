/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The numbers that a headend gives to packets: unique per path and epoch, since
 * a CPU counts in a lane of its own. See abi.h for the layout.
 */
#pragma once

#include "maps.h"

/* Where this CPU counts for a headend; false: nowhere. */
static __always_inline bool numbers_of(const struct ws_headend *h, __u64 **last,
				       const __u64 **ceiling)
{
	__u32 at_last = WS_NUMBER_LAST, at_ceiling = WS_NUMBER_CEILING;
	__u32 index = h->counter;
	void *numbers = bpf_map_lookup_elem(&ws_numbers, &index);

	if (!numbers)
		return false;
	*last = bpf_map_lookup_elem(numbers, &at_last);
	if (!*last)
		return false;
	*ceiling = bpf_map_lookup_elem(numbers, &at_ceiling);
	return *ceiling;
}

/* On success *rnd is the next number for a train of frames, else nothing has
 * changed.
 */
static __always_inline enum ws_reason rnd_take(const struct ws_headend *h,
					       __u32 frames, __u64 *rnd)
{
	__u32 cpu = bpf_get_smp_processor_id();
	const __u64 *ceiling = NULL;
	__u64 *last = NULL;

	if (frames > WS_RND_FRAMES_MAX)
		return WS_REASON_TRAIN_TOO_LONG;
	if (cpu >= h->lanes)
		return WS_REASON_NO_LANE;
	if (!numbers_of(h, &last, &ceiling))
		return WS_REASON_COUNTER_MISSING_BUG;
	if (*last >= *ceiling || *last >= WS_RND_COUNTER_MAX)
		return WS_REASON_RND_EXHAUSTED;
	*rnd = (__u64)(h->lane + cpu) << WS_RND_LANE_SHIFT |
	       (__u64)(frames - 1) << WS_RND_FRAMES_SHIFT | ++*last;
	return WS_REASON_NONE;
}
