/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* End (RFC 8986 4.1) with a stamp, on TC. */
#pragma once

#include "lib/hook.h"
#include "lib/node/boundary.h"
#include "lib/node/stats.h"
#include "lib/reason.h"
#include "lib/skb/gso.h"
#include "lib/sr/endpoint.h"
#include "lib/sr/endpoint_refuse_tc.h"
#include "lib/sr/step.h"

/* For a packet that has passed end_check. */
static __always_inline int end_go(struct __sk_buff *skb,
				  const struct endpoint *ep,
				  const struct outer_next *next, bool first,
				  struct step *s)
{
	__u32 headers = sizeof(struct eth_hdr) + outer_len(&ep->outer);

	outer_advance(skb, &ep->outer, next, first);
	end_stamp(skb, ep);
	stats_add(ep->hop->stats,
		  gso_frames(skb, outer_inner(&ep->outer), headers),
		  skb->len - headers);
	if (in_locator(outer_advanced_sid(&ep->outer, next)))
		return step_on(s, STEP_AGAIN, 0);
	return step_on(s, STEP_FORWARD, ep->hop->stats);
}

static __always_inline int end_tc(struct __sk_buff *skb, struct endpoint *ep,
				  bool first, struct step *s)
{
	struct outer_next next;
	reason_t r;

	r = end_check(ep, first, &next);
	if (r)
		return endpoint_refuse(skb, ep, r);
	return end_go(skb, ep, &next, first, s);
}
