/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The result of a visit of a SID of this node. */
#pragma once

#include "lib/hook.h"

/* The remaining work after one visit of a SID of this node. */
enum step_next {
	STEP_DONE, /* none: there is a verdict */
	STEP_AGAIN, /* the next segment is on this node too */
	STEP_PULLED, /* the visit again: more of the packet is linear now */
	STEP_EXT, /* the visit, by the program for options */
	STEP_BYPASS, /* the visit, by the program that reads the flow's bypass */
	STEP_FORWARD, /* forward to another node */
	STEP_DELIVER_IP6, /* verified, without its outer header */
	STEP_DELIVER_IP4,
	/* As DELIVER, to a function on byte streams; skb->cb[0]: the packet's path */
	STEP_STREAM,
};

/* Zero before a visit. */
struct step {
	__u32 next; /* enum step_next */
	/* FORWARD and DELIVER: index of the remembered next hop. BYPASS: the flow's entry. */
	__u32 exit;
};

/* Returns a value in place of a verdict, since there is none yet. */
static __always_inline int step_on(struct step *s, enum step_next next,
				   __u32 exit)
{
	s->next = next;
	s->exit = exit;
	return CTX_PASS;
}
