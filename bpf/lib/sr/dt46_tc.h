/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* End.DT46 (RFC 8986 4.8) behind the verdict, on TC. */
#pragma once

#include "lib/encap/outer_strip_tc.h"
#include "lib/hook.h"
#include "lib/match/rules.h"
#include "lib/node/refuse.h"
#include "lib/node/stats.h"
#include "lib/reason.h"
#include "lib/skb/gso.h"
#include "lib/sr/endpoint.h"
#include "lib/sr/endpoint_refuse_tc.h"
#include "lib/sr/step.h"
#include "lib/wire/ip.h"

static __always_inline int dt46_tc(struct __sk_buff *skb, struct endpoint *ep,
				   struct step *s)
{
	const struct ws_egress *e;
	struct ip inner;
	__u32 outer, headers, frames, bytes, stats;
	bool report, is_ip4;
	reason_t r, judged;
	long rc;

	if (outer_segments_remain(&ep->outer, ep->hop))
		return endpoint_refuse(skb, ep, REASON(SEGMENTS_REMAIN));
	e = egress_find(ep);
	if (!e)
		return ws_refuse(skb, REASON(EGRESS_MISSING_BUG), 0);
	/* Read together with the keys: the entry may be given to another path later. */
	report = e->on_violation == WS_ON_VIOLATION_REPORT &&
		 ep->hop->behaviour == WS_BEHAVIOUR_END_DT46;
	outer = outer_len(&ep->outer);
	headers = sizeof(struct eth_hdr) + outer;
	judged = egress_judge(ep, e);
	if (judged && !report)
		return ws_refuse(skb, judged, 0);
	if (judged)
		ws_report(skb, judged);
	/* A super-packet's end cannot be removed, and each of its
	 * frames would carry a part of the bytes behind the packet.
	 */
	r = inner_find(ep, endpoint_has_ip4(ep), &inner);
	if (!r)
		r = inner_fits(ep, &inner, skb->len - headers, skb->gso_size);
	if (r)
		return endpoint_refuse(skb, ep, r);
	/* A packet with a forged number, or a changed
	 * packet, must not use up a valid number.
	 */
	if (!judged) {
		r = egress_window(ep, e,
				  gso_frames_at_least(skb,
						      outer_inner(&ep->outer),
						      headers));
		if (r && !report)
			return ws_refuse(skb, r, 0);
		if (r)
			ws_report(skb, r);
		else
			egress_trace(skb, ep);
	}
	r = inner_check(
		ep, &inner,
		required_find(skb, headers, inner.is_ip4, endpoint_chain(ep)));
	if (r)
		return ws_refuse(skb, r, 0);

	ip_set_ecn(&inner, outer_ecn(&ep->outer));
	is_ip4 = inner.is_ip4;
	/* Computed again: the stack has no room to keep it. */
	frames = gso_frames_at_least(skb, outer_inner(&ep->outer), headers);
	bytes = ip_len(&inner);
	stats = ep->hop->stats;
	skb->cb[0] = ep->tlv->path;
	/* Moves the packet: every pointer taken before is gone. */
	rc = strip(skb, outer, is_ip4);
	if (rc)
		return ws_refuse(skb, REASON(STRIP_FAILED), rc);
	/* Removes the bytes behind the packet. If this
	 * fails, the receiver removes them.
	 */
	if (skb->len > sizeof(struct eth_hdr) + bytes)
		bpf_skb_change_tail(skb, sizeof(struct eth_hdr) + bytes, 0);
	stats_add(stats, frames, bytes);
	if (ep->hop->behaviour == WS_BEHAVIOUR_STREAM)
		return step_on(s, STEP_STREAM, 0);
	skb->tc_index = WS_INDEX_PROVEN;
	return step_on(s, is_ip4 ? STEP_DELIVER_IP4 : STEP_DELIVER_IP6, stats);
}
