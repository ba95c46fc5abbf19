/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* TC egress of all interfaces of a node with functions in its own kernel: what
 * comes out of one gets its outer header back, whichever way the kernel wanted
 * to send it, and goes to its next segment.
 */
#include "lib/hook.h"
#include "lib/boundary.h"
#include "lib/proxy_in.h"
#include "lib/proxy_out.h"
#include "lib/pull.h"

/* A packet without an index: plain, or it has lost it in the function. */
static __always_inline int plain(struct __sk_buff *skb,
				 const struct ip6_hdr *ip6)
{
	const struct ws_proxy *p;
	struct ws_match m;

	if (ip6_is_unsteered(ip6->dst) || in_block(ip6->dst[0]))
		return CTX_PASS;
	m = local_guard(ip6);
	if (m.action != WS_MATCH_PATH)
		return CTX_PASS;
	p = proxy_find(m.target);
	if (!p)
		return ws_refuse(skb, proxy_missing(), 0);
	proxy_count(p, tx_not_cached);
	if (p->on_unknown != WS_ON_UNKNOWN_PLAIN)
		return ws_refuse(skb, not_cached(), 0);
	proxy_count(p, tx_plain);
	return CTX_PASS;
}

SEC("tc")
int ws_out_tc(struct __sk_buff *skb)
{
	__u32 slot = skb->tc_index, proxy;
	const struct ws_proxy *p;
	struct ip6_hdr *ip6;
	struct eth_hdr *eth;
	struct ws_cached *c;
	enum ws_reason r;
	struct cursor cur;
	__u64 now, expires = 0;
	long err = 0;

	if (pull(skb, sizeof(*eth) + sizeof(*ip6)))
		return ws_refuse(skb, not_cached(), 0);
	cur = ctx_cursor(skb);
	eth = cursor_take(&cur, struct eth_hdr);
	ip6 = cursor_take(&cur, struct ip6_hdr);
	if (!slot) {
		if (!eth || !ip6 || eth->proto != bpf_htons(ETH_P_IPV6))
			return CTX_PASS;
		return plain(skb, ip6);
	}
	if (slot == WS_INDEX_PROVEN) {
		skb->tc_index = 0;
		return CTX_PASS;
	}
	proxy = slot_proxy(slot);
	p = proxy_find(proxy);
	if (p && p->to && p->to == skb->ifindex)
		return CTX_PASS; /* on its way to a function */
	skb->tc_index = 0;
	now = bpf_ktime_get_coarse_ns();
	c = p && !p->to ? slot_claim(slot, proxy, now, &expires) : NULL;
	if (!c || !eth || !ip6 || eth->proto != bpf_htons(ETH_P_IPV6)) {
		if (p)
			proxy_count(p, tx_not_cached);
		return ws_refuse(skb, not_cached(), 0);
	}
	r = restore(skb, c, &err);
	slot_give(c, SLOT_FREE);
	if (r)
		return ws_refuse(skb, r, err);
	if (p)
		proxy_waited(p, now, expires);

	cur = ctx_cursor(skb);
	eth = cursor_take(&cur, struct eth_hdr);
	ip6 = cursor_take(&cur, struct ip6_hdr);
	/* A next segment on this node starts at an ingress again. */
	if (eth && ip6 && in_locator(ip6->dst[0]))
		return cut_in(skb, eth);
	return ws_forward(skb, EXIT_NONE, WAY_UNKNOWN);
}

char _license[] SEC("license") = "Dual BSD/GPL";
