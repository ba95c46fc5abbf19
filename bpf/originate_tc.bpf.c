/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* A packet that a function has made, such as the answer of a reject rule. The rest of its
 * chain behind the function is a path with an id of its own, and this node is that path's
 * headend. function_tc.bpf.c hands over packets without an index: these have never been in a
 * tunnel here. A function's interfaces are a boundary of the domain, like edge interfaces.
 */
#include "lib/hook.h"
#include "lib/detour/detour.h"
#include "lib/match/classify.h"
#include "lib/match/rules_tc.h"
#include "lib/node/maps.h"
#include "lib/sr/edge_tc.h"
#include "lib/sr/enter_tc.h"
#include "lib/sr/guard_tc.h"
#include "lib/wire/icmp.h"

/* An ICMP error from the function's own address. A function
 * of its own, to bound the stack. p is never NULL.
 */
__noinline int ws_is_own_error(struct __sk_buff *skb, const struct ws_proxy *p)
{
	const struct icmp6_hdr *icmp;
	const struct ip4_hdr *ip4;
	const struct ip6_hdr *ip6;
	struct addrs a;
	struct cursor c;
	struct ip in;
	bool own = false;

	if (!p || !forward_ip(skb, skb_is_ip4(skb), &c, &in))
		return false;
	a = ip_addrs(&in);
	for (__u32 i = 0; i < 2; i++) {
		const __be64 *of = p->address[i];

		if (of[0] | of[1])
			own |= of[0] == a.src[0] && of[1] == a.src[1];
	}
	icmp = cursor_take(&c, struct icmp6_hdr);
	if (!own || !icmp)
		return false;
	ip6 = in.hdr;
	ip4 = in.hdr;
	if (!in.is_ip4)
		return ip6->nexthdr == NEXTHDR_ICMP6 &&
		       icmp->type < ICMP6_INFORMATIONAL;
	return ip4->protocol == NEXTHDR_ICMP &&
	       ip4_header_len(ip4) == sizeof(*ip4) && !ip4_is_fragment(ip4) &&
	       icmp4_is_error(icmp->type);
}

/* The function behind the interface on which the packet arrived; NULL is a bug. */
static __always_inline const struct ws_proxy *
origin_proxy(const struct __sk_buff *skb)
{
	__u32 ifindex = skb->ifindex;
	const struct ws_port *port = bpf_map_lookup_elem(&ws_ports, &ifindex);

	return proxy_find(port ? port->proxy : 0);
}

/* The path of a chain through the function that takes the packet. */
static __always_inline struct ws_match
origin_find(struct __sk_buff *skb, const struct ip *in, __u32 origin)
{
	struct addrs a = ip_addrs(in);
	struct ws_match m = {};

	if (!origin || origin > WS_ORIGINS_MAX || ip_is_unsteered(in))
		return m;
	m = classify_origin(&a, origin);
	/* The function has no rules by prefix, or user space is about to write them. */
	if (m.action == WS_MATCH_MISSING)
		m.action = WS_MATCH_NONE;
	return ruled(skb, sizeof(struct eth_hdr), in->is_ip4,
		     WS_RULE_ORIGIN - 1 + origin, m);
}

/* A packet that no chain takes. A function of its own, to bound the stack. */
__noinline int ws_not_taken(struct __sk_buff *skb)
{
	const struct ws_proxy *p = origin_proxy(skb);
	struct cursor c;
	struct ip in;

	if (!p || !ws_is_own_error(skb, p) ||
	    !forward_ip(skb, skb_is_ip4(skb), &c, &in))
		return ws_refuse(skb, REASON(ORIGIN_UNMATCHED), 0);
	proxy_count(p, tx_plain);
	return guard_plain(skb, &in);
}

SEC("tc")
int ws_originate_tc(struct __sk_buff *skb)
{
	const struct ws_proxy *p = origin_proxy(skb);
	const struct eth_hdr *eth;
	struct ws_match m;
	struct cursor c;
	struct ip in;
	__u32 origin;
	int verdict;

	if (!p)
		return ws_refuse(skb, REASON(PROXY_MISSING_BUG), 0);
	origin = p->origin;
	/* The packet comes in again, and is counted then. */
	if (socket_is_tcp(skb) && socket_detach(skb)) {
		proxy_uncount(p, tx_not_cached);
		return CTX_COPIED;
	}
	rules_pull(skb, sizeof(struct eth_hdr),
		   sizeof(struct eth_hdr) + sizeof(struct ip6_hdr) +
			   EDGE_L4_MAX);
	c = ctx_cursor(skb);
	eth = cursor_take(&c, struct eth_hdr);
	if (!eth || !ip_take(&c, eth_is_ip4(eth), &in))
		return ws_refuse(skb, REASON(BOUNDS_BUG), 0);
	verdict = edge_boundary(skb, &in);
	if (verdict != CTX_PASS)
		return verdict;
	m = origin_find(skb, &in, origin);
	if (m.action == WS_MATCH_MISSING)
		return ws_refuse(skb, REASON(RULES_MISSING_BUG), 0);
	if (m.action == WS_MATCH_UNREAD)
		return ws_refuse(skb, REASON(PORTS_UNREAD), 0);
	if (m.action != WS_MATCH_PATH)
		return ws_not_taken(skb);
	p = origin_proxy(skb);
	if (p)
		proxy_count(p, tx_originated);
	return enter(skb, c, &in, m.target);
}

char _license[] SEC("license") = "Dual BSD/GPL";
