/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* TC ingress of the interfaces of a function: packets that come back from it get
 * their outer headers again. A packet that the function made itself, or that was
 * not sent to it, has none, on whichever of these interfaces it arrives.
 */
#include "lib/hook.h"
#include "lib/detour/back_tc.h"
#include "lib/detour/detour.h"
#include "lib/skb/segmenter.h"
#include "lib/skb/vlan.h"
#include "lib/sr/guard_tc.h"

SEC("tc")
int ws_function_tc(struct __sk_buff *skb)
{
	__u32 ifindex = skb->ifindex, index = skb->tc_index, id;
	const struct ws_port *port;
	const struct ws_proxy *p;
	struct eth_hdr *eth;
	struct back back = {};
	struct ip in;
	struct addrs a;
	struct ws_match m;
	struct cursor c;
	bool is_ip4, forged = index >= WS_INDEX_LET_GO;
	int verdict;
	long rc;

	/* root in the function's namespace can set tc_index to any value. */
	if (forged)
		skb->tc_index = index = 0;
	if (!frame_is_ours(skb, &verdict))
		return verdict;
	port = bpf_map_lookup_elem(&ws_ports, &ifindex);
	id = port ? port->proxy : 0;
	barrier_var(index); /* else the compiler computes on the context */
	if (port && port->cutter)
		id = index;
	p = proxy_find(id);
	if (p && p->stream == WS_BYTES_GATEWAY) {
		bpf_tail_call(skb, &ws_programs, WS_PROGRAM_GATEWAY);
		return ws_refuse(skb, REASON(PROXY_MISSING_BUG), 0);
	}
	if (p && p->stream) {
		skb->cb[1] = 0; /* it is the function's */
		bpf_tail_call(skb, &ws_programs, WS_PROGRAM_STREAM);
		return ws_refuse(skb, REASON(PROXY_MISSING_BUG), 0);
	}
	rc = rules_pull(skb, sizeof(struct eth_hdr),
			sizeof(struct eth_hdr) + sizeof(struct ip6_hdr));
	c = ctx_cursor(skb);
	eth = cursor_take(&c, struct eth_hdr);
	if (!eth || !eth_is_ip(eth))
		return CTX_PASS;
	if (!ip_take(&c, eth_is_ip4(eth), &in))
		return ws_refuse(skb, REASON(FUNCTION_TRUNCATED), rc);
	if (!in.is_ip4 && is_mapped(in.hdr))
		return refuse_mapped(skb);
	if (!ip_is_its_version(&in) || ip_to_is_never_forwarded(&in)) {
		if (p)
			proxy_count(p, tx_ignored);
		return CTX_PASS;
	}
	is_ip4 = in.is_ip4;
	a = ip_addrs(&in);
	/* Only a packet without a kept header can be for this node:
	 * the tables of own addresses are not read for other packets.
	 */
	if (p && index && p->recognise == WS_RECOGNISE_METADATA &&
	    !port->cutter && !(skb->gso_size && p->cut)) {
		ws_back(skb, p, id, index, &back);
		if (back.found)
			return back_next(skb, &back);
	}
	m = guard(&a);
	if (is_local(skb, &m, is_ip4)) {
		if (p)
			proxy_count(p, tx_ignored);
		return CTX_PASS;
	}
	if (!p)
		return ws_refuse(skb, REASON(PROXY_MISSING_BUG), 0);
	/* The function has merged frames: each of them has a header of its own. */
	if (skb->gso_size && p->cut && !port->cutter) {
		/* All frames share one index, that of one frame. */
		if (p->recognise == WS_RECOGNISE_METADATA) {
			proxy_count(p, tx_not_cached);
			return ws_refuse(skb, REASON(NOT_CACHED), 0);
		}
		proxy_count(p, tx_cut);
		/* Some verifiers forget pointers taken before ws_back. */
		c = ctx_cursor(skb);
		eth = cursor_take(&c, struct eth_hdr);
		return eth ? segment_back(skb, eth, id) :
			     ws_refuse(skb, REASON(BOUNDS_BUG), 0);
	}
	return from_function(skb, p, id, index, forged);
}

char _license[] SEC("license") = "Dual BSD/GPL";
