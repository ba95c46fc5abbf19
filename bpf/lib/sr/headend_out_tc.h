/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* What a headend takes beside what comes in from outside: packets of the node's
 * own, and those that somebody on the node has marked. Marks of nftables are not
 * there before. TC egress of interfaces inside the domain only.
 */
#pragma once

#include "lib/encap/seen_tc.h"
#include "lib/hook.h"
#include "lib/match/classify.h"
#include "lib/match/rules.h"
#include "lib/node/boundary.h"
#include "lib/reason.h"
#include "lib/sr/guard_tc.h"
#include "lib/sr/headend_tc.h"
#include "lib/sr/origin_tc.h"
#include "lib/wire/icmp.h"
#include "lib/wire/ip.h"
#include "lib/wire/net.h"

/* RFC 4594 3.1: network control, CS6 and what is above it. */
#define DSCP_CONTROL 48
#define DSCP_CONTROL_ABOVE 56

/* What routing daemons and the like send, as they mark it unasked. */
static __always_inline bool is_control(const struct ip *in)
{
	__u32 dscp = bpf_ntohl(ip_vtc(in)) >> 22 & 63;

	return dscp == DSCP_CONTROL || dscp == DSCP_CONTROL_ABOVE;
}

/* Router and neighbour discovery (RFC 4861 4), which may go between addresses of
 * any kind. c: behind the IPv6 header.
 */
static __always_inline bool is_discovery(const struct ip6_hdr *ip6,
					 struct cursor c)
{
	const struct icmp6_hdr *icmp = c.pos;

	/* The checksum may not be there. */
	if (ip6->nexthdr != NEXTHDR_ICMP6 || c.pos + sizeof(icmp->type) > c.end)
		return false;
	return icmp->type >= ICMP6_ROUTER_SOLICITATION &&
	       icmp->type <= ICMP6_REDIRECT;
}

/* What no rule takes: what stays on the link, and what has a segment list, of the
 * domain or of the kernel's own. c: behind the IP header.
 */
static __always_inline bool out_is_exempt(struct __sk_buff *skb,
					  struct cursor c, const struct ip *in)
{
	const struct ip6_hdr *ip6 = in->hdr;

	if (!ip_is_its_version(in) || ip_is_unsteered(in))
		return true;
	return !in->is_ip4 && (in_block(ip6->dst[0]) || in_block(ip6->src[0]) ||
			       is_discovery(ip6, c) || has_srh(skb, ip6));
}

/* The marks under one mask, which is the n-th: the packet's, if it is one of them. */
static __noinline void fit_masked(const struct ws_ruleset *set,
				  struct scratch *s, __u32 n, __u32 mark)
{
	const struct ws_rule_mask *m = &set->mask[n & (WS_RULES_MAX - 1)];
	__u32 want = mark & m->mask, low = m->first, left = m->count;

	/* The last that is not above. */
	for (__u32 i = 0; i < CUT_STEPS && left > 1; i++) {
		__u32 half = left / 2;

		if (set->marks[(low + half) & (WS_RULES_MAX - 1)] <= want) {
			low += half;
			left -= half;
		} else {
			left = half;
		}
	}
	low &= WS_RULES_MAX - 1;
	if (set->marks[low] == want)
		fit_or(&s->marked, set->marked[low]);
}

struct mark_walk {
	const struct ws_ruleset *set;
	__u32 mark;
};

static long mark_step(__u64 n, struct mark_walk *w)
{
	struct scratch *s = scratch();

	if (s)
		fit_masked(w->set, s, n, w->mark);
	return 0;
}

/* ws_ruleset.steer of the first rule that fits a packet that leaves, with the mark
 * that it has now; 0: none does. MATCH_UNKNOWN: the set is missing.
 */
__noinline __u32 ws_rules_leave(struct __sk_buff *skb, int is_ip4)
{
	struct mark_walk w = { .set = rules_set(), .mark = skb->mark };
	struct scratch *s = scratch();

	if (!w.set || !s)
		return rules_are_missed() ? MATCH_UNKNOWN : 0;
	if (rules_fit(skb, s, w.set, sizeof(struct eth_hdr), WS_RULE_LEAVE,
		      is_ip4, 0) != 1)
		return 0;
	__builtin_memcpy(&s->marked, w.set->any_mark, sizeof(s->marked));
	bpf_loop(w.set->masks, mark_step, &w, 0);
	fit_and(&s->fit, s->marked.word);
	if (fit_is_empty(&s->fit))
		return 0;
	return w.set->steer[fit_first(&s->fit) & (WS_RULES_MAX - 1)];
}

/* ws_ruleset.steer of the path that takes the packet; 0: none does, and the kernel
 * sends it as it is. MATCH_UNKNOWN: what rules say is missing.
 */
static __always_inline __u32 out_path(struct __sk_buff *skb,
				      const struct ip *in)
{
	struct addrs a = ip_addrs(in);
	struct ws_match m = classify(&a);
	const struct ws_headend *h;
	__u32 found = 0;

	if (m.action != WS_MATCH_MISSING && is_local(skb, &m, in->is_ip4))
		return 0;
	if (rules_are_there())
		found = ws_rules_leave(skb, in->is_ip4);
	if (found == MATCH_UNKNOWN) /* who knows what has a mark */
		return is_from_this_node(skb, in) && is_control(in) ? 0 : found;
	if (found & WS_RULE_BY_MARK)
		return found & WS_RULE_TARGET;
	if (!is_from_this_node(skb, in) ||
	    (is_control(in) && !(found & WS_RULE_BY_DSCP)))
		return 0;
	found &= WS_RULE_TARGET;
	if (!found && m.action == WS_MATCH_MISSING)
		return MATCH_UNKNOWN;
	if (!found && m.action == WS_MATCH_PATH)
		found = m.target + 1;
	h = found ? headend_find(found - 1) : NULL;
	/* That one is missing is for the headend to say. */
	return h && !h->own ? 0 : found;
}

/* c stands behind the packet's header. Returns the verdict. */
static __always_inline int headend_out(struct __sk_buff *skb, struct cursor c,
				       struct ip *in)
{
	__u32 found;

	if (out_is_exempt(skb, c, in))
		return CTX_PASS;
	found = out_path(skb, in);
	if (!found)
		return CTX_PASS;
	if (found == MATCH_UNKNOWN)
		return ws_refuse(skb, REASON(RULES_MISSING_BUG), 0);
	return headend_tc(skb, c, in, skb->len - sizeof(struct eth_hdr),
			  found - 1, true);
}
