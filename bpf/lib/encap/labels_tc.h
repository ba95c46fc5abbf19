/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* One program processes packets with labels and packets that take a
 * path over labels, so that all other packets avoid the cost. TC only.
 */
#pragma once

#include <waystamp/abi.h>
#include "lib/hook.h"
#include "lib/node/maps.h"
#include "lib/node/refuse.h"
#include "lib/reason.h"

/* In skb->cb[0]: the remaining work for a packet that is handed over. */
#define LABELS_ARRIVE 0 /* the packet has labels */
/* The packet takes a path: cb[1] is the index of its headend. */
#define LABELS_ENTER 1
#define LABELS_AGAIN 2 /* as LABELS_ARRIVE; the TTL is decremented */
/* The packet comes back from a function: cb[1] is its header's entry in ws_cache, plus 1. */
#define LABELS_BACK 3
/* It takes a path as it leaves: cb[1] is the index of its headend. */
#define LABELS_LEAVE 4
#define LABELS_CUT 5 /* the same, in frames out of the segmenter */
/* As LABELS_BACK: cb[1] is the slot of its header in ws_slots, and labels_expires its expiry. */
#define LABELS_BACK_SLOT 6
/* The same, as it leaves by an interface inside the domain, or to the outside. */
#define LABELS_BACK_CORE 7
#define LABELS_BACK_EDGE 8

/* Notes when the kept header of a packet expires, whose slot is taken already: for
 * labels_expires, in the program that the packet is handed to.
 */
static __always_inline void labels_expire(struct __sk_buff *skb, __u64 expires)
{
	skb->cb[2] = expires;
	skb->cb[3] = expires >> 32;
}

static __always_inline __u64 labels_expires(const struct __sk_buff *skb)
{
	__u64 low = skb->cb[2], high = skb->cb[3];

	return high << 32 | low;
}

/* Does the work belong to the program for packets that leave? */
static __always_inline bool labels_leave(__u32 todo)
{
	return todo == LABELS_LEAVE || todo == LABELS_CUT ||
	       todo == LABELS_BACK_CORE || todo == LABELS_BACK_EDGE;
}

/* Hands a packet over by a tail call; returns only if that fails. */
static __always_inline void labels_jump(struct __sk_buff *skb, __u32 todo,
					__u32 index)
{
	skb->cb[0] = todo;
	skb->cb[1] = index;
	bpf_tail_call(skb, &ws_programs,
		      labels_leave(todo) ? WS_PROGRAM_MPLS_OUT :
					   WS_PROGRAM_MPLS);
}

/* The verdict for a packet that could not be handed over. */
static __always_inline int labels_refuse(struct __sk_buff *skb)
{
	return ws_refuse(skb, REASON(LABELS_PROGRAM_BUG), 0);
}

/* Hands a packet over by a tail call. Returns the verdict if that fails. */
static __always_inline int labels_program(struct __sk_buff *skb, __u32 todo,
					  __u32 index)
{
	labels_jump(skb, todo, index);
	return labels_refuse(skb);
}
