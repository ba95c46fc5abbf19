/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* TC egress of an interface inside the domain, on a node with functions in its
 * own kernel.
 */
#include "lib/hook.h"
#include "lib/index.h"
#include "lib/local_out.h"
#include "lib/pull.h"

SEC("tc")
int ws_core_out_tc(struct __sk_buff *skb)
{
	__u32 index = index_of(skb);
	const struct ip6_hdr *ip6 = NULL;
	const struct eth_hdr *eth;
	struct cursor c;

	if (index == WS_INDEX_PROVEN) {
		skb->tc_index = 0;
		return CTX_PASS;
	}
	if (pull(skb, sizeof(*eth) + sizeof(*ip6)))
		return ws_refuse(skb, not_cached(), 0);
	c = ctx_cursor(skb);
	eth = cursor_take(&c, struct eth_hdr);
	if (eth && eth->proto == bpf_htons(ETH_P_IPV6))
		ip6 = cursor_take(&c, struct ip6_hdr);
	if (index)
		return local_out(skb, index, ip6);
	return ip6 ? local_lost(skb, ip6) : CTX_PASS;
}

char _license[] SEC("license") = "Dual BSD/GPL";
