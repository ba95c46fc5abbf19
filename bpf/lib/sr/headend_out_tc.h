/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The headend for packets that did not come from outside: packets that the
 * node originates, and packets that were marked on the node. Marks of nftables
 * exist only here, at egress. TC egress of interfaces inside the domain only.
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

/* RFC 4594 3.1: network control, CS6 and CS7. */
#define DSCP_CONTROL 48
#define DSCP_CONTROL_ABOVE 56

/* Packets of routing daemons and similar programs, which mark them by default. */
static __always_inline bool is_control(const struct ip *in)
{
	__u32 dscp = bpf_ntohl(ip_vtc(in)) >> 22 & 63;

	return dscp == DSCP_CONTROL || dscp == DSCP_CONTROL_ABOVE;
}

/* Router and neighbour discovery (RFC 4861 4), which may
 * use addresses of any scope. c: behind the IPv6 header.
 */
static __always_inline bool is_discovery(const struct ip6_hdr *ip6,
					 struct cursor c)
{
	const struct icmp6_hdr *icmp = c.pos;

	/* The checksum may be missing. */
	if (ip6->nexthdr != NEXTHDR_ICMP6 || c.pos + sizeof(icmp->type) > c.end)
		return false;
	return icmp->type >= ICMP6_ROUTER_SOLICITATION &&
	       icmp->type <= ICMP6_REDIRECT;
}

/* Packets that no rule takes: link-local ones, and packets with a segment
 * list, of the domain or of the kernel's own SRv6. c: behind the IP header.
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

/* Adds the rules by the packet's mark under mask number n. */
static __noinline void fit_masked(const struct ws_ruleset *set,
				  struct scratch *s, __u32 n, __u32 mark)
{
	const struct ws_rule_mask *m = &set->mask[n & (WS_RULES_MAX - 1)];
	__u32 want = mark & m->mask, low = m->first, left = m->count;

	/* Finds the last mark that is not greater. */
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

/* The first rule that matches a packet that leaves, with its
 * present mark: RULES_NONE, RULES_MISSING, or RULES_TAKE,
 * with target and rule_by in the scratch memory.
 */
__noinline enum rules_answer ws_rules_leave(struct __sk_buff *skb, int is_ip4)
{
	struct mark_walk w = { .set = rules_set(), .mark = skb->mark };
	struct scratch *s = scratch();
	__u32 steer;

	if (!w.set || !s)
		return rules_are_missed() ? RULES_MISSING : RULES_NONE;
	if (rules_fit(skb, s, w.set, sizeof(struct eth_hdr), WS_RULE_LEAVE,
		      is_ip4, 0) != RULES_TAKE)
		return RULES_NONE;
	__builtin_memcpy(&s->marked, w.set->any_mark, sizeof(s->marked));
	bpf_loop(w.set->masks, mark_step, &w, 0);
	fit_and(&s->fit, s->marked.word);
	if (fit_is_empty(&s->fit))
		return RULES_NONE;
	steer = w.set->steer[fit_first(&s->fit) & (WS_RULES_MAX - 1)];
	s->rule_by = steer & ~WS_RULE_TARGET;
	s->rule_target = steer & WS_RULE_TARGET;
	return RULES_TAKE;
}

/* The rule that takes a packet that leaves. action is WS_MATCH_NONE, _PATH or _MISSING. */
struct rule_out {
	struct ws_match match;
	__u32 by; /* as scratch.rule_by */
};

static __always_inline struct rule_out rule_out(struct __sk_buff *skb,
						int is_ip4)
{
	const struct scratch *s = scratch();
	struct rule_out r = {};

	if (!rules_are_there())
		return r;
	switch (ws_rules_leave(skb, is_ip4)) {
	case RULES_NONE:
		break;
	case RULES_TAKE:
		if (s && s->rule_target) {
			r.match.action = WS_MATCH_PATH;
			r.match.target = s->rule_target - 1;
			r.by = s->rule_by;
		}
		break;
	default:
		r.match.action = WS_MATCH_MISSING;
	}
	return r;
}

/* The headend that takes the packet, in target. WS_MATCH_NONE: none does, and the
 * kernel sends the packet unchanged. WS_MATCH_MISSING: the rules are missing.
 */
static __always_inline struct ws_match out_path(struct __sk_buff *skb,
						const struct ip *in)
{
	const struct ws_match none = {};
	struct addrs a = ip_addrs(in);
	struct ws_match m = classify(&a);
	const struct ws_headend *h;
	struct rule_out rule;
	bool own;

	if (m.action != WS_MATCH_MISSING && is_local(skb, &m, in->is_ip4))
		return none;
	rule = rule_out(skb, in->is_ip4);
	if (rule.by & WS_RULE_BY_MARK)
		return rule.match;
	own = is_from_this_node(skb, in);
	/* A missing rule may be one for the packet's mark, so any packet is refused. */
	if (rule.match.action == WS_MATCH_MISSING)
		return own && is_control(in) ? none : rule.match;
	if (!own || (is_control(in) && !(rule.by & WS_RULE_BY_DSCP)))
		return none;
	if (rule.match.action == WS_MATCH_PATH)
		m = rule.match;
	if (m.action != WS_MATCH_PATH)
		return m;
	h = headend_find(m.target);
	/* A missing headend is refused by headend_tc. */
	return h && !h->own ? none : m;
}

/* c: behind the packet's header. Returns the verdict. */
static __always_inline int headend_out(struct __sk_buff *skb, struct cursor c,
				       struct ip *in)
{
	struct ws_match m;

	if (out_is_exempt(skb, c, in))
		return CTX_PASS;
	m = out_path(skb, in);
	if (m.action == WS_MATCH_MISSING)
		return ws_refuse(skb, REASON(RULES_MISSING_BUG), 0);
	if (m.action != WS_MATCH_PATH)
		return CTX_PASS;
	return headend_tc(skb, c, in, skb->len - sizeof(struct eth_hdr),
			  m.target, true);
}
