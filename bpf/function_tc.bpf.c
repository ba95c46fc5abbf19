/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* TC ingress of the interfaces that a function is behind: what went to it comes
 * back and gets its outer header. What the function made itself, or nobody sent
 * it, has none, by whichever of them it comes.
 */
#include "lib/hook.h"
#include "lib/frame.h"
#include "lib/guard_tc.h"
#include "lib/proxy_out.h"
#include "lib/proxy.h"
#include "lib/pull.h"

/* A packet without a header kept for it. */
static __always_inline int unknown(struct __sk_buff *skb,
				   const struct ws_proxy *p,
				   const struct ip6_hdr *ip6)
{
	proxy_count(p, tx_not_cached);
	if (p->on_unknown != WS_ON_UNKNOWN_PLAIN)
		return ws_refuse(skb, not_cached(), 0);
	proxy_count(p, tx_plain);
	return ip6 ? guard_plain(skb, ip6) : CTX_PASS;
}

static __always_inline int from_function(struct __sk_buff *skb,
					 const struct ws_proxy *p, __u32 id,
					 const struct ip6_hdr *ip6)
{
	struct ws_cache_key k = {};
	__u32 slot = skb->tc_index;
	struct ws_cached *c = NULL;
	__u64 print = 0;
	enum ws_reason r;
	long err = 0;

	skb->tc_index = 0;
	if (p->recognise == WS_RECOGNISE_METADATA)
		c = slot_claim(slot, id);
	else
		print = ws_fingerprint(skb, sizeof(struct eth_hdr));
	if (print)
		c = cache_take(p, id, print, &k);
	if (!c)
		return unknown(skb, p, ip6);

	r = restore(skb, c, &err);
	if (p->recognise == WS_RECOGNISE_METADATA)
		c->expires = 0;
	else if (cache_is_still(&k, c))
		bpf_map_delete_elem(&ws_cache, &k);
	else if (!r)
		r = not_cached();
	if (r)
		return ws_refuse(skb, r, err);
	proxy_count(p, tx_success);
	return restored_next(skb);
}

SEC("tc")
int ws_function_tc(struct __sk_buff *skb)
{
	__u32 ifindex = skb->ifindex, index = skb->tc_index, id;
	const struct ws_port *port;
	const struct ws_proxy *p;
	struct eth_hdr *eth;
	const struct ip6_hdr *ip6;
	struct ws_match m;
	struct cursor c;
	int verdict;
	long rc;

	if (!frame_is_ours(skb, &verdict))
		return verdict;
	port = bpf_map_lookup_elem(&ws_ports, &ifindex);
	id = port ? port->proxy : 0;
	barrier_var(index); /* else the compiler computes on the context */
	if (port && port->cutter)
		id = index;
	p = proxy_find(id);
	rc = pull(skb, sizeof(struct eth_hdr) + sizeof(struct ip6_hdr));
	c = ctx_cursor(skb);
	eth = cursor_take(&c, struct eth_hdr);
	if (!eth)
		return CTX_PASS;
	if (eth->proto != bpf_htons(ETH_P_IPV6) &&
	    eth->proto != bpf_htons(ETH_P_IP))
		return CTX_PASS;
	ip6 = cursor_take(&c, struct ip6_hdr);
	if (eth->proto == bpf_htons(ETH_P_IPV6)) {
		if (!ip6)
			return ws_refuse(skb, WS_REASON_FUNCTION_TRUNCATED, rc);
		m = guard(ip6);
		if (!ip6_is_ip6(ip6) || ip6_is_unsteered(ip6->dst) ||
		    is_local(skb, &m)) {
			if (p)
				proxy_count(p, tx_ignored);
			return CTX_PASS;
		}
	}
	if (!p)
		return ws_refuse(skb, proxy_missing(), 0);
	if (eth->proto != bpf_htons(ETH_P_IPV6))
		return unknown(skb, p, NULL);
	/* The function has put frames together: each has a header of its own. */
	if (skb->gso_size && p->cut && !port->cutter) {
		/* One index for all of them, and that of one. */
		if (p->recognise == WS_RECOGNISE_METADATA) {
			proxy_count(p, tx_not_cached);
			return ws_refuse(skb, not_cached(), 0);
		}
		proxy_count(p, tx_cut);
		return cut_back(skb, eth, id);
	}
	return from_function(skb, p, id, ip6);
}

char _license[] SEC("license") = "Dual BSD/GPL";
