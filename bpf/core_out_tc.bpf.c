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
	const struct eth_hdr *eth;
	struct inner in;
	struct cursor c;
	bool whole;

	if (index == WS_INDEX_PROVEN) {
		skb->tc_index = 0;
		return CTX_PASS;
	}
	if (pull(skb, sizeof(*eth) + sizeof(struct ip6_hdr)))
		return ws_refuse(skb, not_cached(), 0);
	c = ctx_cursor(skb);
	eth = cursor_take(&c, struct eth_hdr);
	whole = eth && eth_is_ip(eth) && inner_take(&c, eth_is_ip4(eth), &in);
	if (index)
		return local_out(skb, index, whole);
	return whole ? local_lost(skb, &in) : CTX_PASS;
}

char _license[] SEC("license") = "Dual BSD/GPL";
