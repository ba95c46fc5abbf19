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
	/* Read with what is judged: the entry may be another path's later. */
	report = e->on_violation == WS_ON_VIOLATION_REPORT &&
		 ep->hop->behaviour == WS_BEHAVIOUR_END_DT46;
	outer = outer_len(&ep->outer);
	headers = sizeof(struct eth_hdr) + outer;
	judged = egress_judge(ep, e);
	if (judged && !report)
		return ws_refuse(skb, judged, 0);
	if (judged)
		ws_report(skb, judged);
	/* A super-packet cannot be cut, and each of its frames would have a part of
	 * what is behind it.
	 */
	r = inner_find(ep, endpoint_has_ip4(ep), &inner);
	if (!r)
		r = inner_fits(ep, &inner, skb->len - headers, skb->gso_size);
	if (r)
		return endpoint_refuse(skb, ep, r);
	/* Whoever made up a number, or changed a packet, must not use up one of
	 * ours.
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
	}
	r = inner_check(
		ep, &inner,
		required_find(skb, headers, inner.is_ip4, endpoint_chain(ep)));
	if (r)
		return ws_refuse(skb, r, 0);

	ip_set_ecn(&inner, outer_ecn(&ep->outer));
	is_ip4 = inner.is_ip4;
	/* Once more: kept so long it costs more of the stack than there is. */
	frames = gso_frames_at_least(skb, outer_inner(&ep->outer), headers);
	bytes = ip_len(&inner);
	stats = ep->hop->stats;
	skb->cb[0] = ep->tlv->path;
	/* Moves the packet: every pointer taken before is gone. */
	rc = strip(skb, outer, is_ip4);
	if (rc)
		return ws_refuse(skb, REASON(STRIP_FAILED), rc);
	/* What is behind the packet is nobody's. Where this fails its receiver cuts
	 * it off.
	 */
	if (skb->len > sizeof(struct eth_hdr) + bytes)
		bpf_skb_change_tail(skb, sizeof(struct eth_hdr) + bytes, 0);
	stats_add(stats, frames, bytes);
	if (ep->hop->behaviour == WS_BEHAVIOUR_STREAM)
		return step_on(s, STEP_STREAM, 0);
	skb->tc_index = WS_INDEX_PROVEN;
	return step_on(s, is_ip4 ? STEP_DELIVER_IP4 : STEP_DELIVER_IP6, stats);
}
