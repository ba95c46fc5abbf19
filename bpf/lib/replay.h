/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The verifier's window: how often each of the last numbers of a headend's CPU
 * (a lane) has been seen. A number stands for a train of frames, which links on
 * the way may have cut: it is good for as many as the train has.
 *
 * A window is an array of words per path and epoch, W / 4 for each lane:
 *
 *   63          24 23    18 17    12 11     6 5      0
 *  +--------------+--------+--------+--------+--------+
 *  | counter >> w | uses 3 | uses 2 | uses 1 | uses 0 |   W = 2^w
 *  +--------------+--------+--------+--------+--------+
 *
 * Number c is uses c mod 4 of word (c >> 2) mod W/4. What the word's tag says of
 * older numbers is forgotten when a newer one comes, so a packet may be late by
 * up to W - 4 numbers.
 */
#pragma once

#include "hook.h"
#include "maps.h"

#define WINDOW_USES_BITS 6
#define WINDOW_USES_MASK 63ULL
#define WINDOW_TAG_SHIFT 24
#define WINDOW_ALL_USES ((1ULL << WINDOW_TAG_SHIFT) - 1)
/* A try is lost only to a frame of the same word that was accepted meanwhile: of
 * the word's numbers there are 252, and no more of older ones.
 */
#define WINDOW_TRIES 504

/* Spends frames of the number rnd, or says why not: then nothing has changed.
 * Only for a packet whose proof has verified. A function of its own, so that the
 * verifier of the kernel looks at the loop once.
 */
__noinline int ws_window_take(__u32 window, __u32 log2, __u64 rnd, __u32 frames)
{
	__u32 train = (rnd >> WS_RND_FRAMES_SHIFT & WINDOW_USES_MASK) + 1;
	__u64 counter = rnd & WS_RND_COUNTER_MAX;
	__u32 at = counter % 4 * WINDOW_USES_BITS;
	__u32 words = 1U << ((log2 - 2) & 15);
	__u64 tag = counter >> (log2 & 31);
	__u64 old, uses, next, *word;
	void *lanes;
	__u32 index;

	lanes = bpf_map_lookup_elem(&ws_windows, &window);
	if (!lanes)
		return WS_REASON_WINDOW_MISSING_BUG;
	/* The bits above the lane make it one that no path has. */
	index = (__u32)(rnd >> WS_RND_LANE_SHIFT) * words +
		((counter >> 2) & (words - 1));
	word = bpf_map_lookup_elem(lanes, &index);
	if (!word || !counter || train > WS_RND_FRAMES_MAX)
		return WS_REASON_NUMBER;

	old = *(volatile __u64 *)word;
	for (__u32 i = 0; i < WINDOW_TRIES; i++) {
		if (old >> WINDOW_TAG_SHIFT > tag)
			return WS_REASON_STALE;
		uses = old >> WINDOW_TAG_SHIFT == tag ? old & WINDOW_ALL_USES :
							0;
		if ((uses >> at & WINDOW_USES_MASK) + frames > train)
			return WS_REASON_REPLAY;
		next = tag << WINDOW_TAG_SHIFT | (uses + ((__u64)frames << at));
		next = __sync_val_compare_and_swap(word, old, next);
		if (next == old)
			return WS_REASON_NONE;
		old = next;
	}
	return WS_REASON_WINDOW_BUSY_BUG;
}
