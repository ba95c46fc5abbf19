/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The guard: packets that must not pass a node without a proof. TC only. */
#pragma once

#include "lib/hook.h"
#include "lib/match/classify.h"
#include "lib/match/rules_tc.h"
#include "lib/node/boundary.h"
#include "lib/node/refuse.h"
#include "lib/out/forward_tc.h"
#include "lib/reason.h"
#include "lib/wire/ip.h"
#include "lib/wire/net.h"

/* Does the kernel deliver this IP packet locally? It does so for the
 * node's own addresses, and drops all others if it does not forward
 * at all. For the slow paths: this looks up the kernel's tables.
 */
__noinline int ws_is_local(struct __sk_buff *skb, int is_ip4)
{
	struct bpf_fib_lookup p = {};
	struct cursor c;
	struct ip in;
	long rc;

	if (!forward_ip(skb, is_ip4, &c, &in))
		return false;
	rc = is_ip4 ? route_find_ip4(skb, in.hdr, &p) :
		      route_find(skb, in.hdr, &p);
	/* The helper reads the forwarding setting of the interface. For IPv6 the
	 * kernel uses the setting of the whole node, and the loopback device has that.
	 */
	if (rc == BPF_FIB_LKUP_RET_FWD_DISABLED && !is_ip4) {
		p.ifindex = 1;
		rc = bpf_fib_lookup(skb, &p, sizeof(p), 0);
	}
	return rc == BPF_FIB_LKUP_RET_NOT_FWDED ||
	       rc == BPF_FIB_LKUP_RET_FWD_DISABLED;
}

/* Is the packet for an own address? If the tables say so, the kernel is
 * asked again: the address may have moved while no agent was running.
 */
static __always_inline bool is_local(struct __sk_buff *skb,
				     const struct ws_match *m, bool is_ip4)
{
	return m->local && ws_is_local(skb, is_ip4);
}

/* Does an IPv6 packet have an address that stands for IPv4 in our tables?
 * No address of the domain is one, and a rule must not confuse the two.
 */
static __always_inline bool is_mapped(const struct ip6_hdr *ip6)
{
	return ip6_is_mapped(ip6->dst) || ip6_is_mapped(ip6->src);
}

static __always_inline int refuse_mapped(struct __sk_buff *skb)
{
	return ws_refuse(skb, REASON(MAPPED_ADDRESS), 0);
}

/* The action of a path's guard at an interface. unset: if neither has a setting. */
static __always_inline __u32 guard_at(__u32 port, __u32 chain, __u32 unset)
{
	__u32 says = port > chain ? port : chain;

	return says ? says : unset;
}

static __always_inline __u32 guard_of_path(__u32 port, __be32 path, __u32 unset)
{
	const __u32 *chain = bpf_map_lookup_elem(&ws_guards, &path);

	if (path == PATH_UNKNOWN)
		return WS_GUARD_ENFORCE;
	return guard_at(port, chain ? *chain : WS_GUARD_UNSET, unset);
}

/* For a packet with unreadable fields: the strictest guard
 * of the rules that could match it, which ruled has left in
 * the scratch memory. WS_GUARD_UNSET: all fields were read.
 */
static __always_inline __u32 guard_of_unread(__u32 port, __u32 unset)
{
	const struct ws_ruleset *set = rules_set();
	const struct scratch *s = scratch();
	__u32 strictest = WS_GUARD_UNSET;

	if (!set || !s)
		return WS_GUARD_ENFORCE;
	if (s->tuple.known == TUPLE_PORTS)
		return WS_GUARD_UNSET;
	for (__u32 chain = 0; chain < WS_GUARDS; chain++) {
		__u32 says = guard_at(port, chain, unset);

		if (says > strictest && fit_meets(&s->fit, set->guard[chain]))
			strictest = says;
	}
	return strictest;
}

/* A packet without a proof, which a chain that ends here requires. path: of the
 * chain that takes it; prefix: of the chain that would, without ordered rules, 0:
 * none. why: the reason, if it is refused. let_go: the first guard has let the
 * packet go; then it is refused only if the chain or this interface has a setting.
 */
__noinline int ws_guard(struct __sk_buff *skb, __be32 path, __be32 prefix,
			reason_t why, int let_go)
{
	__u32 unset = let_go ? WS_GUARD_OFF : WS_GUARD_ENFORCE;
	__u32 ifindex = skb->ifindex, port, does, other;
	const struct ws_port *p = bpf_map_lookup_elem(&ws_ports, &ifindex);

	port = p ? p->guard : WS_GUARD_UNSET;
	does = guard_of_path(port, path, unset);
	if (path != prefix) { /* by an ordered rule */
		other = guard_of_unread(port, unset);
		does = other > does ? other : does;
		if (other && prefix) {
			other = guard_of_path(port, prefix, unset);
			does = other > does ? other : does;
		}
	}
	if (does == WS_GUARD_ENFORCE)
		return ws_refuse(skb, why, 0);
	if (does == WS_GUARD_AUDIT && !let_go)
		ws_report(skb, why);
	skb->tc_index = WS_INDEX_LET_GO;
	return CTX_PASS;
}

/* A plain packet: ws_guard decides about it if a chain that
 * ends here requires it.
 */
static __always_inline int guard_plain(struct __sk_buff *skb,
				       const struct ip *in)
{
	struct addrs a = ip_addrs(in);
	struct ws_match prefix = guard(&a);
	struct ws_match m = ruled(skb, sizeof(struct eth_hdr), in->is_ip4,
				  WS_RULE_SUSPECT, prefix);

	if (m.action == WS_MATCH_NONE || is_local(skb, &m, in->is_ip4))
		return CTX_PASS;
	if (m.action == WS_MATCH_MISSING)
		return ws_refuse(skb, REASON(RULES_MISSING_BUG), 0);
	return ws_guard(skb, m.target, match_path(&prefix), REASON(UNPROVEN),
			false);
}
