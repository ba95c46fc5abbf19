/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* TC ingress of an interface to the outside: the domain's boundary, and the
 * headend of chains. The complete data path; edge_xdp.bpf.c is its fast half.
 */
#include "lib/hook.h"
#include "lib/node/boundary.h"
#include "lib/sr/edge_tc.h"
#include "lib/skb/vlan.h"
#include "lib/sr/enter_tc.h"
#include "lib/stream/service_tc.h"
#include "lib/match/rules_tc.h"

SEC("tc")
int ws_edge_tc(struct __sk_buff *skb)
{
	const struct eth_hdr *eth;
	struct ws_match m;
	struct ip in;
	struct cursor c;
	const struct ws_node *node;
	struct addrs a;
	__u32 left = skb->tc_index;
	int verdict;
	long rc;

	/* Another namespace may have set tc_index: it is no index of a slot here. */
	skb->tc_index = 0;
	if (left && port_is_segmenter(skb))
		return labels_program(skb, LABELS_CUT, left - 1);
	if (skb->vlan_present &&
	    (frame_is_tagged(skb) || skb->pkt_type != PACKET_HOST))
		return ws_edge_vlan(skb);
	if (!frame_is_ours(skb, &verdict))
		return verdict;
	rc = rules_pull(skb, sizeof(struct eth_hdr),
			sizeof(struct eth_hdr) + sizeof(struct ip6_hdr) +
				EDGE_L4_MAX);
	c = ctx_cursor(skb);
	eth = cursor_take(&c, struct eth_hdr);
	if (eth && has_labels(eth))
		return ws_refuse(skb, REASON(OUTSIDE_MPLS), 0);
	/* The kernel does not forward other protocols, such as ARP. */
	if (!eth || !eth_is_ip(eth))
		return eth && eth_has_tag(eth) ?
			       ws_refuse(skb, REASON(VLAN_TAGS), 0) :
			       CTX_PASS;
	if (!ip_take(&c, eth_is_ip4(eth), &in))
		return ws_refuse(skb, REASON(EDGE_TRUNCATED), rc);
	/* The kernel does not forward these packets. */
	if (!ip_is_its_version(&in) || ip_to_is_never_forwarded(&in) ||
	    ip_from_is_never_forwarded(&in))
		return CTX_PASS;

	verdict = edge_boundary(skb, &in);
	if (verdict != CTX_PASS)
		return verdict;
	node = node_armed();
	if (!node)
		return unarmed(skb, !ws_is_local(skb, in.is_ip4));
	if (node->services && ws_service_of(skb, in.is_ip4)) {
		bpf_tail_call(skb, &ws_programs, WS_PROGRAM_GATEWAY);
		return ws_refuse(skb, REASON(PROXY_MISSING_BUG), 0);
	}

	a = ip_addrs(&in);
	m = ruled(skb, sizeof(*eth), in.is_ip4, WS_RULE_STEER, classify(&a));
	if (is_local(skb, &m, in.is_ip4))
		return CTX_PASS;
	if (m.action == WS_MATCH_MISSING)
		return ws_refuse(skb, REASON(RULES_MISSING_BUG), 0);
	if ((m.action != WS_MATCH_PATH && m.action != WS_MATCH_UNREAD) ||
	    ip_is_unsteered(&in))
		return edge_unmatched(skb, &in);
	if (m.action == WS_MATCH_UNREAD)
		return ws_refuse(skb, REASON(PORTS_UNREAD), 0);
	return enter(skb, c, &in, m.target);
}

char _license[] SEC("license") = "Dual BSD/GPL";
