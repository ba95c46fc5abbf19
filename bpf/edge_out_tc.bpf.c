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
	struct cursor c;
	int verdict;
	long rc;

	if (frame_is_tagged(skb))
		return CTX_PASS; /* its own interface's matter */
	rc = pull(skb, sizeof(*eth) + sizeof(*ip6));
	c = ctx_cursor(skb);
	eth = cursor_take(&c, struct eth_hdr);
	if (eth && eth->proto == bpf_htons(ETH_P_IPV6)) {
		ip6 = cursor_take(&c, struct ip6_hdr);
		if (!ip6)
			return ws_refuse(skb, WS_REASON_LEAVE_TRUNCATED, rc);
	}
	if (index && index != WS_INDEX_PROVEN)
		return local_out(skb, index, ip6);
	if (index)
		skb->tc_index = 0;
	if (!ip6 || !ip6_is_ip6(ip6))
		return CTX_PASS;

	r = leak(skb, ip6);
	if (r)
		return ws_refuse(skb, r, 0);
	if (index)
		return CTX_PASS; /* verified */
	verdict = local_lost(skb, ip6);
	if (verdict != CTX_PASS || is_own(skb, ip6))
		return verdict;
	return leave_plain(skb, ip6);
}

char _license[] SEC("license") = "Dual BSD/GPL";
