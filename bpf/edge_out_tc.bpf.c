/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* TC egress of an interface to the outside: the second guard. It lets out packets that this
 * node has verified, packets that it has sent itself, and packets that no chain requires.
 */
#include "lib/hook.h"
#include "lib/skb/vlan.h"
#include "lib/skb/tc_index.h"
#include "lib/sr/leave_tc.h"
#include "lib/detour/local_out_tc.h"
#include "lib/skb/pull.h"

SEC("tc")
int ws_edge_out_tc(struct __sk_buff *skb)
{
	__u32 index = tc_index_read(skb);
	const struct ip6_hdr *ip6 = NULL;
	const struct eth_hdr *eth;
	reason_t r;
	struct ip in;
	struct cursor c;
	int verdict;
	long rc;

	rc = rules_pull(skb, sizeof(*eth), sizeof(*eth) + sizeof(*ip6));
	c = ctx_cursor(skb);
	eth = cursor_take(&c, struct eth_hdr);
	in.hdr = NULL;
	/* Nothing here reads below a tag inside the frame. A VLAN interface with other
	 * planned VLAN interfaces on top sends such frames; their programs have checked
	 * them. A bridge may forward a frame with any tag. So a planned VLAN alone is no
	 * reason to trust a frame: one with its only tag in skb->vlan_tci is checked here.
	 */
	if (eth && eth_has_tag(eth))
		return vlan_planned(skb) & WS_VLAN_STACKED ?
			       CTX_PASS :
			       ws_refuse(skb, REASON(VLAN_TAGS), 0);
	if (eth && has_labels(eth))
		return ws_refuse(skb, REASON(LEAK_MPLS), 0);
	if (eth && eth_is_ip(eth)) {
		if (!ip_take(&c, eth_is_ip4(eth), &in))
			return ws_refuse(skb, REASON(LEAVE_TRUNCATED), rc);
		if (!in.is_ip4)
			ip6 = in.hdr;
	}
	if (index && index < WS_INDEX_LET_GO)
		return local_out(skb, index, in.hdr, false);
	/* tc_index stays set: the program of a VLAN interface's parent reads it. */
	if (!in.hdr || !ip_is_its_version(&in))
		return CTX_PASS;

	r = ip6 ? leak(skb, ip6) : WS_REASON_NONE;
	if (r)
		return ws_refuse(skb, r, 0);
	if (ip6 && is_mapped(ip6))
		return refuse_mapped(skb);
	if (index == WS_INDEX_PROVEN)
		return CTX_PASS;
	/* The program of a planned VLAN interface has checked and counted the packet already. */
	verdict = vlan_planned(skb) ? CTX_PASS : local_lost(skb, &in);
	if (verdict != CTX_PASS || is_from_this_node(skb, &in))
		return verdict;
	return leave_plain(skb, &in, index == WS_INDEX_LET_GO);
}

char _license[] SEC("license") = "Dual BSD/GPL";
