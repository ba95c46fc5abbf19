/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* What a visit of a SID of this node comes to. */
#pragma once

#include "lib/hook.h"

/* What is left to be done after one visit of a SID of this node. */
enum step_next {
	STEP_DONE, /* nothing: there is a verdict */
	STEP_AGAIN, /* the next segment is on this node too */
	STEP_PULLED, /* the visit, since more of the packet is linear now */
	STEP_EXT, /* all of it, by the program for options */
	STEP_BYPASS, /* the visit, by the program that asks whether its function is done */
	STEP_FORWARD, /* on to another node */
	STEP_DELIVER_IP6, /* verified, and without its outer header */
	STEP_DELIVER_IP4,
	/* As DELIVER, to a function on byte streams; skb->cb[0]: the path that it came by */
	STEP_STREAM,
};

/* Zero before a visit. */
struct step {
	__u32 next; /* enum step_next */
	/* Of FORWARD and DELIVER: where the way is remembered. Of BYPASS: the flow's entry. */
	__u32 exit;
};

/* Returns what stands in for a verdict where there is none. */
static __always_inline int step_on(struct step *s, enum step_next next,
				   __u32 exit)
{
	s->next = next;
	s->exit = exit;
	return CTX_PASS;
}
