/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* TC ingress of an interface inside the domain: endpoints, egress, guard. The
 * complete data path; core_xdp.bpf.c is its fast half.
 */
#include "lib/encap/labels_tc.h"
#include "lib/encap/seen_tc.h"
#include "lib/hook.h"
#include "lib/node/boundary.h"
#include "lib/sr/endpoint_tc.h"
#include "lib/skb/vlan.h"
#include "lib/sr/guard_tc.h"
#include "lib/encap/path_mtu_tc.h"

/* An IPv6 packet: addressed to a SID, or plain. */
static __always_inline int core_ip6(struct __sk_buff *skb, const struct ip *in)
{
	const struct ip6_hdr *ip6 = in->hdr;
	bool to_sid = in_block(ip6->dst[0]);

	if (!node_is_armed())
		return unarmed(skb, to_sid || has_srh(skb, ip6));
	if (is_mapped(ip6))
		return refuse_mapped(skb);
	if (ip6->nexthdr == NEXTHDR_ICMP6 && ip6->dst[0] == cfg.address[0] &&
	    ip6->dst[1] == cfg.address[1])
		ws_path_mtu_learn(skb);
	if (!to_sid)
		return guard_plain(skb, in);
	if (!in_locator(ip6->dst[0]))
		return CTX_PASS; /* another node's: the kernel routes it */
	return endpoint_tc(skb, true);
}

SEC("tc")
int ws_core_tc(struct __sk_buff *skb)
{
	const struct eth_hdr *eth;
	struct ip in;
	struct cursor c;
	int verdict;
	long rc;

	/* Another namespace may have set tc_index: it is no index of a slot here. */
	skb->tc_index = 0;
	if (!frame_is_ours(skb, &verdict))
		return verdict;
	rc = rules_pull(skb, sizeof(struct eth_hdr),
			sizeof(struct eth_hdr) + sizeof(struct ip6_hdr));
	c = ctx_cursor(skb);
	eth = cursor_take(&c, struct eth_hdr);
	if (eth && cfg.services && eth->proto == bpf_htons(ETH_P_MPLS_UC))
		return labels_program(skb, LABELS_ARRIVE, 0);
	if (!eth || !eth_is_ip(eth))
		return CTX_PASS;
	if (!ip_take(&c, eth_is_ip4(eth), &in))
		return ws_refuse(skb, REASON(TRUNCATED), rc);
	/* The kernel drops a packet whose version differs from the frame's type. It
	 * delivers link-local and multicast packets locally, and does not forward them.
	 */
	if (!ip_is_its_version(&in) || ip_to_is_never_forwarded(&in))
		return CTX_PASS;
	if (!in.is_ip4)
		return core_ip6(skb, &in);
	/* The domain itself uses no IPv4 addresses. */
	return node_is_armed() ? guard_plain(skb, &in) : CTX_PASS;
}

char _license[] SEC("license") = "Dual BSD/GPL";
