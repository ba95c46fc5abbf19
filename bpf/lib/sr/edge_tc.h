/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Packets from outside that take no chain. TC only. */
#pragma once

#include "lib/encap/seen_tc.h"
#include "lib/hook.h"
#include "lib/node/boundary.h"
#include "lib/node/maps.h"
#include "lib/node/refuse.h"
#include "lib/reason.h"
#include "lib/skb/pull.h"
#include "lib/skb/vlan.h"
#include "lib/sr/guard_tc.h"
#include "lib/wire/icmp.h"
#include "lib/wire/ip.h"
#include "lib/wire/net.h"

/* The bytes that a headend reads behind the IPv6 header: a TCP header. */
#define EDGE_L4_MAX 20

/* Is this an ICMPv6 error about a packet to a SID? Such packets never
 * leave the domain, so an error about one from outside is forged.
 */
__noinline int ws_quotes_sid(struct __sk_buff *skb)
{
	struct {
		struct icmp6_hdr icmp;
		struct ip6_hdr about;
	} e;

	return !bpf_skb_load_bytes(
		       skb, sizeof(struct eth_hdr) + sizeof(struct ip6_hdr), &e,
		       sizeof(e)) &&
	       e.icmp.type < ICMP6_INFORMATIONAL && in_block(e.about.dst[0]);
}

static __always_inline bool unmatched_is_dropped(const struct __sk_buff *skb)
{
	__u32 ifindex = skb->ifindex;
	const struct ws_port *port = bpf_map_lookup_elem(&ws_ports, &ifindex);

	return port && port->unmatched_drop;
}

/* The setting of the interface for a packet that no chain takes: route or refuse it. */
static __always_inline int edge_plain(struct __sk_buff *skb)
{
	return unmatched_is_dropped(skb) ?
		       ws_refuse(skb, REASON(UNMATCHED), 0) :
		       CTX_PASS;
}

/* A packet that a chain requires must not come in beside the chain: if this
 * node is the chain's egress, it would leave without having visited a function.
 */
static __always_inline int edge_unmatched(struct __sk_buff *skb,
					  const struct ip *in)
{
	int verdict = guard_plain(skb, in);

	return verdict == CTX_PASS ? edge_plain(skb) : verdict;
}

/* RFC 8754 5.1: segment-routed packets do not come in. Only IPv6 packets can be. */
static __always_inline int edge_boundary(struct __sk_buff *skb,
					 const struct ip *in)
{
	const struct ip6_hdr *ip6 = in->hdr;

	if (in->is_ip4)
		return CTX_PASS;
	if (in_block(ip6->dst[0]))
		return ws_refuse(skb, REASON(OUTSIDE_SID), 0);
	if (in_block(ip6->src[0]))
		return ws_refuse(skb, REASON(OUTSIDE_SOURCE), 0);
	if (has_srh(skb, ip6))
		return ws_refuse(skb, REASON(OUTSIDE_SRH), 0);
	if (ip6->nexthdr == NEXTHDR_ICMP6 && ws_quotes_sid(skb))
		return ws_refuse(skb, REASON(OUTSIDE_ERROR), 0);
	return is_mapped(ip6) ? refuse_mapped(skb) : CTX_PASS;
}

/* A frame with a VLAN tag, or with a priority tag and another tag below,
 * which the kernel also reads. Its MAC address may be any, since a VLAN's
 * interface may have one of its own. If that interface is in the plan, its
 * program sees the frame next. Any other interface forwards the frame, and
 * so segment-routed packets are refused here too. Chains are not checked.
 */
__noinline int ws_edge_vlan(struct __sk_buff *skb)
{
	const struct eth_hdr *eth;
	struct ip in;
	struct cursor c;
	long rc;

	if (vlan_planned(skb))
		return CTX_PASS;
	rc = pull(skb, sizeof(*eth) + sizeof(struct ip6_hdr));
	c = ctx_cursor(skb);
	eth = cursor_take(&c, struct eth_hdr);
	if (!eth || (!eth_is_ip(eth) && !eth_has_tag(eth) && !has_labels(eth)))
		return CTX_PASS;
	if (eth_has_tag(eth))
		return ws_refuse(skb, REASON(VLAN_TAGS), 0);
	if (!frame_is_tagged(skb))
		return CTX_PASS; /* for another interface */
	if (has_labels(eth))
		return ws_refuse(skb, REASON(OUTSIDE_MPLS), 0);
	if (!ip_take(&c, eth_is_ip4(eth), &in))
		return ws_refuse(skb, REASON(EDGE_TRUNCATED), rc);
	return ip_is_its_version(&in) ? edge_boundary(skb, &in) : CTX_PASS;
}

/* An IPv4 packet that enters a chain: it gets the checks that the kernel
 * would make, which inside a tunnel the packet would bypass. Moves the
 * packet. Returns a reason_t; *packet_len: in bytes, without Ethernet's
 * padding. packet_len is never NULL; the verifier requires the test.
 */
__noinline int ws_edge_ip4(struct __sk_buff *skb, __u32 *packet_len)
{
	__u32 room = skb->len - sizeof(struct eth_hdr), header, len;
	struct cursor c = ctx_cursor(skb);
	const struct ip4_hdr *ip4;

	if (!packet_len)
		return REASON(IP4_LENGTH);
	cursor_take(&c, struct eth_hdr);
	ip4 = cursor_take(&c, struct ip4_hdr);
	if (!ip4)
		return REASON(IP4_LENGTH);
	header = ip4_header_len(ip4);
	len = bpf_ntohs(ip4->len);
	/* A super-packet too long for its length field. */
	if (!len && skb->gso_size)
		len = room;
	if (len < header || len > room || (skb->gso_size && len != room))
		return REASON(IP4_LENGTH);
	if (header > sizeof(*ip4)) {
		if (pull(skb, sizeof(struct eth_hdr) + header + EDGE_L4_MAX))
			return REASON(IP4_LENGTH);
		c = ctx_cursor(skb);
		cursor_take(&c, struct eth_hdr);
		ip4 = cursor_take(&c, struct ip4_hdr);
		if (!ip4)
			return REASON(IP4_LENGTH);
	}
	if (!ip4_sum_is_right(ip4, c))
		return REASON(IP4_CHECKSUM);
	*packet_len = len;
	return WS_REASON_NONE;
}
