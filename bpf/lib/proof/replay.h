/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The verifier's replay window: for each of the last numbers of a headend's CPU
 * (a lane), how often it was used. A number is for a train of frames, which a device
 * on the way may segment: it may be used once for each frame of the train.
 *
 * A window is a run of words per path and epoch, W / 4 for each lane:
 *
 *   63          24 23    18 17    12 11     6 5      0
 *  +--------------+--------+--------+--------+--------+
 *  | counter >> w | uses 3 | uses 2 | uses 1 | uses 0 |   W = 2^w
 *  +--------------+--------+--------+--------+--------+
 *
 * Number c is uses c mod 4 of word (c >> 2) mod W/4. A number with a newer tag
 * resets the uses of the word's older numbers, so a packet may be late by
 * up to W - 4 numbers.
 */
#pragma once

#include "lib/hook.h"
#include "lib/node/maps.h"
#include "lib/reason.h"

#define WINDOW_USES_BITS 6
#define WINDOW_USES_MASK 63ULL
#define WINDOW_TAG_SHIFT 24
#define WINDOW_ALL_USES ((1ULL << WINDOW_TAG_SHIFT) - 1)
/* An attempt fails only if another frame of the same word is accepted
 * meanwhile: the word's numbers allow 252 frames, and older numbers no more.
 */
#define WINDOW_TRIES 504

/* A frame's request to its word. */
struct window_claim {
	__u64 *word;
	__u64 found; /* the word, when it was last read */
	__u64 tag; /* of the frame's number */
	__u32 at; /* bit offset of the number's uses in the word */
	__u32 frames;
	__u32 train;
	int reason;
};

/* Tries once. Returns whether claim->reason is the result;
 * false: another frame has changed the word meanwhile.
 */
static __always_inline bool window_try(struct window_claim *claim)
{
	__u64 old = claim->found, tag = claim->tag, uses = 0, next;

	if (old >> WINDOW_TAG_SHIFT > tag) {
		claim->reason = REASON(STALE);
		return true;
	}
	if (old >> WINDOW_TAG_SHIFT == tag)
		uses = old & WINDOW_ALL_USES;
	if ((uses >> claim->at & WINDOW_USES_MASK) + claim->frames >
	    claim->train) {
		claim->reason = REASON(REPLAY);
		return true;
	}
	next = tag << WINDOW_TAG_SHIFT |
	       (uses + ((__u64)claim->frames << claim->at));
	claim->found = __sync_val_compare_and_swap(claim->word, old, next);
	if (claim->found != old)
		return false;
	claim->reason = WS_REASON_NONE;
	return true;
}

static long window_again(__attribute__((unused)) __u64 i,
			 struct window_claim *claim)
{
	return window_try(claim);
}

/* The word of a window for a number; NULL: there is no such window. */
static __always_inline __u64 *window_word(const struct ws_egress *e, __u32 lane,
					  __u64 counter)
{
	__u32 words = 1U << ((e->window_log2 - 2) & 15);
	__u32 at = e->window + lane * words + ((counter >> 2) & (words - 1));
	__u32 slab = at / WS_WINDOW_SLAB;
	void *all = bpf_map_lookup_elem(&ws_windows, &slab);

	at %= WS_WINDOW_SLAB;
	return all ? bpf_map_lookup_elem(all, &at) : NULL;
}

/* Uses frames of the number rnd, or returns why not: then nothing has changed.
 * Only for a packet whose proof is verified. A function of its own, so that
 * the kernel's verifier checks it once; bpf_loop for further attempts, because
 * the verifier checks every turn of a loop. e is never NULL.
 */
__noinline int ws_window_take(const struct ws_egress *e, __u64 rnd,
			      __u32 frames)
{
	__u64 counter = rnd & WS_RND_COUNTER_MAX;
	__u32 lane = rnd >> WS_RND_LANE_SHIFT;
	struct window_claim claim = {
		.at = counter % 4 * WINDOW_USES_BITS,
		.frames = frames,
		.train = (rnd >> WS_RND_FRAMES_SHIFT & WINDOW_USES_MASK) + 1,
		.reason = REASON(WINDOW_BUSY_BUG),
	};
	struct window_claim again;

	if (!e)
		goto missing;
	/* With the bits above the lane set, the lane is not less than e->lanes. */
	if (lane >= e->lanes || !counter || claim.train > WS_RND_FRAMES_MAX)
		return REASON(NUMBER);
	claim.tag = counter >> (e->window_log2 & 31);
	claim.word = window_word(e, lane, counter);
	if (!claim.word)
		goto missing;

	claim.found = *(volatile __u64 *)claim.word;
	if (window_try(&claim))
		return claim.reason;
	/* Only this struct needs an address: the one above stays in registers. */
	again = claim;
	bpf_loop(WINDOW_TRIES - 1, window_again, &again, 0);
	return again.reason;
missing:
	return REASON(WINDOW_MISSING_BUG);
}
