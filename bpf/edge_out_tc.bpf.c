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

/* Has the frame's first tag been put on by a VLAN's interface of the plan? c: behind
 * the Ethernet header.
 */
static __always_inline bool first_tag_is_planned(const struct __sk_buff *skb,
						 const struct eth_hdr *eth,
						 struct cursor c)
{
	const __be16 *tci = cursor_take(&c, __be16);

	if (skb->vlan_present)
		return vlan_is_planned(skb, skb->vlan_proto, skb->vlan_tci);
	return tci && vlan_is_planned(skb, eth->proto, bpf_ntohs(*tci));
}

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

	rc = rules_pull(skb, sizeof(*eth), sizeof(*eth) + sizeof(*ip6));
	c = ctx_cursor(skb);
	eth = cursor_take(&c, struct eth_hdr);
	in.hdr = NULL;
	/* Below a tag in the frame nothing is looked at, but by a VLAN's interface
	 * of the plan, if the frame came by that. One tag beside the frame is no
	 * matter: somebody in a bridge with this interface may have put on any.
	 */
	if (eth && eth_has_tag(eth))
		return first_tag_is_planned(skb, eth, c) ?
			       CTX_PASS :
			       ws_refuse(skb, vlan_tags(), 0);
	if (eth && eth_is_ip(eth)) {
		if (!inner_take(&c, eth_is_ip4(eth), &in))
			return ws_refuse(skb, WS_REASON_LEAVE_TRUNCATED, rc);
		if (!in.is_ip4)
			ip6 = in.hdr;
	}
	if (index && index != WS_INDEX_PROVEN)
		return local_out(skb, index, in.hdr);
	/* It stays: where this is a VLAN's interface, that below asks again. */
	if (!in.hdr || !inner_is_its_version(&in))
		return CTX_PASS;

	r = ip6 ? leak(skb, ip6) : WS_REASON_NONE;
	if (r)
		return ws_refuse(skb, r, 0);
	if (ip6 && is_mapped(ip6))
		return refuse_mapped(skb);
	if (index)
		return CTX_PASS; /* verified */
	/* A VLAN's own interface has counted it. */
	verdict = skb->vlan_present && first_tag_is_planned(skb, eth, c) ?
			  CTX_PASS :
			  local_lost(skb, &in);
	if (verdict != CTX_PASS || is_own(skb, &in))
		return verdict;
	return leave_plain(skb, &in);
}

char _license[] SEC("license") = "Dual BSD/GPL";
