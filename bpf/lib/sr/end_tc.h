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

static __always_inline int end_tc(struct __sk_buff *skb, struct endpoint *ep,
				  bool first, struct step *s)
{
	__u32 headers = sizeof(struct eth_hdr) + endpoint_outer_len(ep);
	struct end_next next;
	reason_t r;

	r = end_check(ep, first, &next);
	if (r)
		return endpoint_refuse(skb, ep, r);
	end_advance(ep, &next, first);
	end_stamp(ep);
	stats_add(ep->hop->stats, gso_frames(skb, inner_cursor(ep), headers),
		  skb->len - headers);
	if (in_locator(ep->ip6->dst[0]))
		return step_on(s, STEP_AGAIN, 0);
	return step_on(s, STEP_FORWARD, ep->hop->stats);
}
