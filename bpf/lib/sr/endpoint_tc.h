/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The endpoints of a node on TC, in the order of the packet. */
#pragma once

#include "lib/detour/in_tc.h"
#include "lib/encap/ext_error_tc.h"
#include "lib/encap/ext_tc.h"
#include "lib/encap/outer.h"
#include "lib/encap/outer_error.h"
#include "lib/encap/outer_tc.h"
#include "lib/encap/outer_strip_tc.h"
#include "lib/hook.h"
#include "lib/match/rules_tc.h"
#include "lib/node/maps.h"
#include "lib/node/refuse.h"
#include "lib/node/stats.h"
#include "lib/out/forward_tc.h"
#include "lib/reason.h"
#include "lib/skb/gso.h"
#include "lib/skb/pull.h"
#include "lib/sr/dt46_tc.h"
#include "lib/sr/end_tc.h"
#include "lib/sr/endpoint.h"
#include "lib/sr/endpoint_refuse_tc.h"
#include "lib/sr/step.h"
#include "lib/stream/stream_in_tc.h"
#include "lib/wire/net.h"

/* The next step for a packet whose flow could not be read: make
 * more of it linear, once, or refuse it. Moves the packet.
 */
static __always_inline int endpoint_pull_flow(struct __sk_buff *skb,
					      const struct endpoint *ep,
					      struct step *s)
{
	__u32 len = sizeof(struct eth_hdr) + outer_len(&ep->outer) + TUPLE_LEN;
	__u32 linear = skb->data_end - skb->data;
	long rc = 0;

	if (linear < len && linear < skb->len) {
		rc = pull(skb, len);
		if (!rc)
			return step_on(s, STEP_PULLED, 0);
	}
	return ws_refuse(skb, REASON(FLOW), rc);
}

/* From the frame to the entry for its SID, path and epoch.
 * Pointers in ep are valid until the packet is moved.
 */
static __always_inline reason_t endpoint_parse(struct __sk_buff *skb,
					       struct endpoint *ep,
					       const struct ext_found *found)
{
	struct cursor c = ctx_cursor(skb);
	reason_t r;

	ep->eth = cursor_take(&c, struct eth_hdr);
	if (!ep->eth)
		return REASON(BOUNDS_BUG);
	r = outer_parse(skb, c, &ep->outer, &ep->tlv, found);
	if (r)
		return r;
	return endpoint_find_hop(ep);
}

/* One visit. Returns the verdict, which is valid if s->next
 * is STEP_DONE. s is never NULL. A function of its own, so
 * that the verifier checks it once and not once per segment.
 */
__noinline int ws_endpoint_step(struct __sk_buff *skb, int first,
				struct step *s)
{
	struct ext_found ext = {};
	struct endpoint ep = {};
	reason_t r;
	long rc;

	if (!s)
		return ws_refuse(skb, REASON(BOUNDS_BUG), 0);
	rc = outer_pull(skb, &ext);
	if (rc)
		return ws_refuse(skb, REASON(PULL_FAILED), rc);
	r = endpoint_parse(skb, &ep, &ext);
	if (r == EXT_DECIDES)
		return EXT_LEN_MAX ? ext_refuse(skb, &ext) :
				     step_on(s, STEP_EXT, 0);
	if (r)
		return endpoint_refuse(skb, &ep, r);
	/* A function may change the flow; the stamp covers the packet that it sends. */
	if (ep.hop->behaviour == WS_BEHAVIOUR_END_AD)
		return ad_tc(skb, &ep, first, s);
	if (!endpoint_bind(&ep))
		return endpoint_pull_flow(skb, &ep, s);
	switch (ep.hop->behaviour) {
	case WS_BEHAVIOUR_END:
		return end_tc(skb, &ep, first, s);
	case WS_BEHAVIOUR_END_DT46:
	case WS_BEHAVIOUR_STREAM:
		return dt46_tc(skb, &ep, s);
	}
	return ws_refuse(skb, REASON(BEHAVIOUR_BUG), 0);
}

/* All positions except the headend, and one visit that finds no next segment. */
#define VISITS_MAX (WS_SEGS_MAX + 1)

/* A visit, and once more if it has made more of the packet linear. If it then
 * wants more again, the kernel cannot, and the packet is refused as LOOP. The
 * loop over visits counts no pulls: the verifier would go through each number
 * of them for each number of visits.
 */
static __always_inline int endpoint_visit(struct __sk_buff *skb, bool first,
					  struct step *s)
{
	int verdict;

	s->next = STEP_DONE;
	verdict = ws_endpoint_step(skb, first, s);
	if (s->next != STEP_PULLED)
		return verdict;
	s->next = STEP_DONE;
	return ws_endpoint_step(skb, first, s);
}

/* All consecutive visits on this node. With plain SIDs each visit
 * decrements Segments Left, and with C-SIDs no path of a plan has more
 * than the bound: only a forged list reaches it. Returns the verdict.
 */
static __always_inline int endpoint_tc(struct __sk_buff *skb, bool first)
{
	int verdict = CTX_PASS;
	struct step s = {};

	for (__u32 i = 0; i < VISITS_MAX; i++) {
		verdict = endpoint_visit(skb, first, &s);
		if (s.next != STEP_AGAIN)
			break;
		first = false;
	}
	switch (s.next) {
	case STEP_DONE:
		return verdict;
	case STEP_EXT: /* of all programs except the one for options */
		if (EXT_LEN_MAX)
			break;
		return ext_program(skb, first ? EXT_ARRIVES : EXT_AGAIN, 0);
	case STEP_BYPASS:
		skb->cb[0] = first;
		skb->cb[1] = s.exit;
		bpf_tail_call(skb, &ws_programs, BYPASS_PROGRAM);
		return ws_refuse(skb, REASON(PROXY_MISSING_BUG), 0);
	case STEP_FORWARD:
		return ws_forward(skb, s.exit, WAY_UNKNOWN);
	case STEP_DELIVER_IP6:
		return ws_deliver(skb, s.exit, false);
	case STEP_DELIVER_IP4:
		return ws_deliver(skb, s.exit, true);
	case STEP_STREAM:
		verdict = ws_stream_in(skb);
		if (verdict != STREAM_GOES_BY)
			return verdict;
		skb->cb[1] = STREAM_GOES_BY;
		bpf_tail_call(skb, &ws_programs, WS_PROGRAM_STREAM);
		return ws_refuse(skb, REASON(PROXY_MISSING_BUG), 0);
	}
	return ws_refuse(skb, REASON(LOOP), 0);
}
