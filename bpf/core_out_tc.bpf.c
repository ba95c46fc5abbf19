/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* TC egress of an interface inside the domain, on a node that has
 * functions in its own kernel, or whose own or marked packets take chains.
 */
#include "lib/hook.h"
#include "lib/skb/vlan.h"
#include "lib/skb/tc_index.h"
#include "lib/detour/local_out_tc.h"
#include "lib/sr/headend_out_tc.h"
#include "lib/skb/pull.h"
#include "lib/wire/tuple.h"

static __always_inline bool headend_out_is_asked_for(void)
{
	const struct ws_node *n = node_armed();

	return n && n->own;
}

SEC("tc")
int ws_core_out_tc(struct __sk_buff *skb)
{
	__u32 index = tc_index_read(skb);
	const struct eth_hdr *eth;
	struct ip in;
	struct cursor c;
	bool whole, own;
	int verdict;

	if (index >= WS_INDEX_LET_GO) {
		skb->tc_index = 0;
		if (index == WS_INDEX_PROVEN)
			return CTX_PASS;
		index = 0;
	}
	own = headend_out_is_asked_for() && !frame_is_tagged(skb);
	if (pull(skb,
		 sizeof(*eth) + (own ? TUPLE_LEN : sizeof(struct ip6_hdr))))
		return ws_refuse(skb, REASON(NOT_CACHED), 0);
	c = ctx_cursor(skb);
	eth = cursor_take(&c, struct eth_hdr);
	whole = eth && eth_is_ip(eth) && ip_take(&c, eth_is_ip4(eth), &in);
	if (index)
		return local_out(skb, index, whole, true);
	if (!whole)
		return CTX_PASS;
	verdict = local_lost(skb, &in);
	if (verdict != CTX_PASS || !own)
		return verdict;
	return headend_out(skb, c, &in);
}

char _license[] SEC("license") = "Dual BSD/GPL";
