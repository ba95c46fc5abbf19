/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Packets with labels, and those that take a path over labels, are another program's,
 * so that all others do not pay for them. TC only.
 */
#pragma once

#include <waystamp/abi.h>
#include "lib/hook.h"
#include "lib/node/maps.h"
#include "lib/node/refuse.h"
#include "lib/reason.h"

/* What is left to be done to a packet that is handed over, in skb->cb[0]. */
#define LABELS_ARRIVE 0 /* it has labels */
/* It takes a path: cb[1] is the index of its headend. */
#define LABELS_ENTER 1
#define LABELS_AGAIN 2 /* it has labels, and its TTL has been counted */
/* It comes back from a function: cb[1] is the entry of its header in ws_cache plus 1. */
#define LABELS_BACK 3

/* Hands a packet over, for good; returns where that fails. */
static __always_inline void labels_jump(struct __sk_buff *skb, __u32 todo,
					__u32 index)
{
	skb->cb[0] = todo;
	skb->cb[1] = index;
	bpf_tail_call(skb, &ws_programs, WS_PROGRAM_MPLS);
}

/* Returns the verdict where that fails. */
static __always_inline int labels_program(struct __sk_buff *skb, __u32 todo,
					  __u32 index)
{
	labels_jump(skb, todo, index);
	return ws_refuse(skb, REASON(LABELS_PROGRAM_BUG), 0);
}
