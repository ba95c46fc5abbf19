/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* XDP on an interface to the outside: the headend, for packets
 * that it can finish. All other packets, also those that the
 * boundary check is for, go on unchanged to edge_tc.bpf.c.
 */
#define WS_XDP
#include "lib/hook.h"
#include "lib/match/rules_xdp.h"
#include "lib/node/boundary.h"
#include "lib/sr/headend_xdp.h"
#include "lib/wire/icmp.h"
#include "lib/wire/ip.h"

/* c: behind the Ethernet header. is_ip4 is a constant at compile time. */
static __always_inline int enter_xdp(ctx_t *ctx, struct cursor c, bool is_ip4)
{
	const struct ip6_hdr *ip6;
	const struct ws_node *node;
	struct ws_match m;
	struct ip in;
	struct addrs a;

	if (!ip_take(&c, is_ip4, &in))
		return CTX_PASS;
	ip6 = in.hdr;
	if (!ip_is_its_version(&in) || ip_is_unsteered(&in) ||
	    (!is_ip4 && (in_block(ip6->dst[0]) || in_block(ip6->src[0]) ||
			 ip6_has_extension(ip6))))
		return CTX_PASS;
	/* ICMPv6 errors may be about the domain's own packets. */
	if (!is_ip4 && ip6->nexthdr == NEXTHDR_ICMP6 && !icmp6_informs(c))
		return CTX_PASS;
	node = node_armed();
	/* TC finds the packets for gateways. */
	if (!node || node->services)
		return CTX_PASS;
	a = ip_addrs(&in);
	m = classify(&a);
	if (m.local || !ruled_xdp(ctx, node, is_ip4, &m))
		return CTX_PASS;
	return headend_xdp(ctx, c, &in, m.target, node);
}

SEC("xdp.frags")
int ws_edge_xdp(struct xdp_md *ctx)
{
	struct cursor c = ctx_cursor(ctx);
	const struct eth_hdr *eth = cursor_take(&c, struct eth_hdr);

	if (!eth || eth_is_for_many(eth))
		return CTX_PASS;
	if (eth->proto == bpf_htons(ETH_P_IPV6))
		return enter_xdp(ctx, c, false);
	if (eth_is_ip4(eth))
		return enter_xdp(ctx, c, true);
	return CTX_PASS;
}

char _license[] SEC("license") = "Dual BSD/GPL";
