/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* TC ingress of an interface to the outside: the domain's boundary, and the
 * headend of chains. The complete data path; edge_xdp.bpf.c is its fast half.
 */
#include "lib/hook.h"
#include "lib/boundary.h"
#include "lib/edge_tc.h"
#include "lib/frame.h"
#include "lib/headend_tc.h"
#include "lib/owner.h"

static __always_inline enum ws_reason edge_truncated(void)
{
	return WS_REASON_EDGE_TRUNCATED;
}

SEC("tc")
int ws_edge_tc(struct __sk_buff *skb)
{
	const struct eth_hdr *eth;
	struct ip6_hdr *ip6;
	struct ws_match m;
	struct cursor c;
	int verdict;
	long rc;

	/* What somebody else's namespace has left there names no slot of ours. */
	skb->tc_index = 0;
	if (!frame_is_ours(skb, &verdict))
		return verdict;
	rc = pull(skb, sizeof(struct eth_hdr) + sizeof(struct ip6_hdr) +
			       EDGE_L4_MAX);
	c = ctx_cursor(skb);
	eth = cursor_take(&c, struct eth_hdr);
	if (!eth)
		return CTX_PASS;
	if (eth->proto != bpf_htons(ETH_P_IPV6))
		return edge_other(skb, eth->proto);
	ip6 = cursor_take(&c, struct ip6_hdr);
	if (!ip6)
		return ws_refuse(skb, edge_truncated(), rc);
	/* The kernel forwards nothing from or to these. */
	if (!ip6_is_ip6(ip6) || ip6_is_unsteered(ip6->dst) ||
	    ip6_is_unsteered(ip6->src))
		return CTX_PASS;

	/* RFC 8754 5.1: nothing of segment routing comes in. */
	if (in_block(ip6->dst[0]))
		return ws_refuse(skb, WS_REASON_OUTSIDE_SID, 0);
	if (in_block(ip6->src[0]))
		return ws_refuse(skb, WS_REASON_OUTSIDE_SOURCE, 0);
	if (has_srh(skb, ip6))
		return ws_refuse(skb, WS_REASON_OUTSIDE_SRH, 0);
	if (ip6->nexthdr == NEXTHDR_ICMP6 && ws_quotes_sid(skb))
		return ws_refuse(skb, WS_REASON_OUTSIDE_ERROR, 0);
	if (!node_is_armed())
		return unarmed(skb, !edge_is_local(skb, eth->proto));

	m = classify(ip6);
	if (is_local(skb, &m))
		return CTX_PASS;
	if (m.action == WS_MATCH_PATH && owner_is_tcp(skb)) {
		if (owner_left(skb))
			return CTX_DROP; /* nothing is lost */
		c = ctx_cursor(skb);
		cursor_take(&c, struct eth_hdr);
		ip6 = cursor_take(&c, struct ip6_hdr);
		if (!ip6)
			return ws_refuse(skb, edge_truncated(), 0);
	}
	if (m.action == WS_MATCH_PATH)
		return headend_tc(skb, c, ip6, m.target);
	return edge_unmatched(skb, ip6);
}

char _license[] SEC("license") = "Dual BSD/GPL";
