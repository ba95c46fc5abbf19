/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The numbers that a headend gives to packets: unique per path and epoch, since
 * a CPU counts in a lane of its own. See abi.h for the layout.
 */
#pragma once

#include "maps.h"

/* On success *rnd is the next number for a train of frames, else nothing has
 * changed.
 */
static __always_inline enum ws_reason rnd_take(const struct ws_headend *h,
					       __u32 frames, __u64 *rnd)
{
	__u32 cpu = bpf_get_smp_processor_id();
	__u32 index = h->counter;
	struct ws_counter *c;

	if (frames > WS_RND_FRAMES_MAX)
		return WS_REASON_TRAIN_TOO_LONG;
	if (cpu >= h->lanes)
		return WS_REASON_NO_LANE;
	c = bpf_map_lookup_elem(&ws_counters, &index);
	if (!c)
		return WS_REASON_COUNTER_MISSING_BUG;
	if (c->last >= c->ceiling || c->last >= WS_RND_COUNTER_MAX)
		return WS_REASON_RND_EXHAUSTED;
	*rnd = (__u64)(h->lane + cpu) << WS_RND_LANE_SHIFT |
	       (__u64)(frames - 1) << WS_RND_FRAMES_SHIFT | ++c->last;
	return WS_REASON_NONE;
}
