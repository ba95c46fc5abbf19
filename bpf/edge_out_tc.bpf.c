/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* TC egress of an interface to the outside: the second guard, which lets out what
 * this node has verified, what it has sent itself, and what no chain requires.
 */
#include "lib/hook.h"
#include "lib/frame.h"
#include "lib/index.h"
#include "lib/leave.h"
#include "lib/local_out.h"
#include "lib/pull.h"

SEC("tc")
int ws_edge_out_tc(struct __sk_buff *skb)
{
	__u32 index = index_of(skb);
	const struct ip6_hdr *ip6 = NULL;
	const struct eth_hdr *eth;
	enum ws_reason r;
	struct inner in;
	struct cursor c;
	int verdict;
	long rc;

	if (frame_is_tagged(skb) && vlan_is_planned(skb))
		return CTX_PASS; /* its own interface's matter */
	rc = rules_pull(skb, sizeof(*eth), sizeof(*eth) + sizeof(*ip6));
	c = ctx_cursor(skb);
	eth = cursor_take(&c, struct eth_hdr);
	in.hdr = NULL;
	if (eth && frame_is_tagged(skb) && eth_has_tag(eth))
		return ws_refuse(skb, vlan_tags(), 0);
	if (eth && eth_is_ip(eth)) {
		if (!inner_take(&c, eth_is_ip4(eth), &in))
			return ws_refuse(skb, WS_REASON_LEAVE_TRUNCATED, rc);
		if (!in.is_ip4)
			ip6 = in.hdr;
	}
	if (index && index != WS_INDEX_PROVEN)
		return local_out(skb, index, in.hdr);
	if (index)
		skb->tc_index = 0;
	if (!in.hdr || !inner_is_its_version(&in))
		return CTX_PASS;

	r = ip6 ? leak(skb, ip6) : WS_REASON_NONE;
	if (r)
		return ws_refuse(skb, r, 0);
	if (ip6 && is_mapped(ip6))
		return refuse_mapped(skb);
	if (index)
		return CTX_PASS; /* verified */
	verdict = local_lost(skb, &in);
	if (verdict != CTX_PASS || is_own(skb, &in))
		return verdict;
	return leave_plain(skb, &in);
}

char _license[] SEC("license") = "Dual BSD/GPL";
