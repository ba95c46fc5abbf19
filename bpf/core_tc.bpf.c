/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* TC ingress of an interface inside the domain: endpoints, egress, guard. The
 * complete data path; core_xdp.bpf.c is its fast half.
 */
#include "lib/hook.h"
#include "lib/boundary.h"
#include "lib/endpoint_tc.h"
#include "lib/frame.h"
#include "lib/guard_tc.h"
#include "lib/path_mtu_tc.h"

SEC("tc")
int ws_core_tc(struct __sk_buff *skb)
{
	const struct eth_hdr *eth;
	const struct ip6_hdr *ip6;
	struct cursor c;
	bool to_sid;
	int verdict;
	long rc;

	/* What somebody else's namespace has left there names no slot of ours. */
	skb->tc_index = 0;
	if (!frame_is_ours(skb, &verdict))
		return verdict;
	rc = pull(skb, sizeof(struct eth_hdr) + sizeof(struct ip6_hdr));
	c = ctx_cursor(skb);
	eth = cursor_take(&c, struct eth_hdr);
	if (!eth || eth->proto != bpf_htons(ETH_P_IPV6))
		return CTX_PASS;
	ip6 = cursor_take(&c, struct ip6_hdr);
	if (!ip6)
		return ws_refuse(skb, WS_REASON_TRUNCATED, rc);
	/* The kernel drops what is not IPv6, and delivers what stays on the link
	 * or is for many.
	 */
	if (!ip6_is_ip6(ip6) || ip6_is_unsteered(ip6->dst))
		return CTX_PASS;

	to_sid = in_block(ip6->dst[0]);
	if (!node_is_armed())
		return unarmed(skb, to_sid || has_srh(skb, ip6));
	if (ip6->nexthdr == NEXTHDR_ICMP6 && ip6->dst[0] == cfg.address[0] &&
	    ip6->dst[1] == cfg.address[1])
		ws_path_mtu_learn(skb);
	if (!to_sid)
		return guard_plain(skb, ip6);
	if (!in_locator(ip6->dst[0]))
		return CTX_PASS; /* another node's: the kernel routes it */
	return endpoint_tc(skb, true);
}

char _license[] SEC("license") = "Dual BSD/GPL";
