/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Counters of stamped and verified packets. Per CPU, hence plain additions. */
#pragma once

#include "lib/node/maps.h"

static __always_inline void stats_add(__u32 index, __u32 frames, __u32 bytes)
{
	struct ws_stats *s = bpf_map_lookup_elem(&ws_stats, &index);

	if (s) {
		s->packets++;
		s->frames += frames;
		s->bytes += bytes;
	}
}
