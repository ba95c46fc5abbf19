/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* What comes from outside and takes no chain. TC only. */
#pragma once

#include "boundary.h"
#include "guard_tc.h"
#include "hook.h"
#include "icmp.h"
#include "maps.h"
#include "net.h"
#include "refuse.h"

/* What a headend reads behind the IPv6 header: a TCP header. */
#define EDGE_L4_MAX 20

/* An ICMPv6 error about a packet to a SID. Those never leave the domain, so that
 * nobody outside has anything to say of them.
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

static __always_inline bool edge_is_local(struct __sk_buff *skb, __be16 proto)
{
	return ws_is_local(skb, proto == bpf_htons(ETH_P_IP));
}

static __always_inline bool unmatched_is_dropped(const struct __sk_buff *skb)
{
	__u32 ifindex = skb->ifindex;
	const struct ws_port *port = bpf_map_lookup_elem(&ws_ports, &ifindex);

	return port && port->unmatched_drop;
}

/* Where the interface says so, what no chain takes is not routed either. */
static __always_inline int edge_plain(struct __sk_buff *skb)
{
	return unmatched_is_dropped(skb) ?
		       ws_refuse(skb, WS_REASON_UNMATCHED, 0) :
		       CTX_PASS;
}

/* What some chain requires may not come in beside it: it would leave at this
 * node, the chain's egress, without having been anywhere.
 */
static __always_inline int edge_unmatched(struct __sk_buff *skb,
					  const struct ip6_hdr *ip6)
{
	int verdict = guard_plain(skb, ip6);

	return verdict == CTX_PASS ? edge_plain(skb) : verdict;
}

/* Not IPv6. What is not IP at all, such as ARP, is not forwarded by the kernel
 * and passes.
 */
static __always_inline int edge_other(struct __sk_buff *skb, __be16 proto)
{
	bool stays;

	if (proto != bpf_htons(ETH_P_IP))
		return CTX_PASS;
	if (node_is_armed() && !unmatched_is_dropped(skb))
		return CTX_PASS;
	stays = edge_is_local(skb, proto);
	if (!node_is_armed())
		return unarmed(skb, !stays);
	return stays ? CTX_PASS : edge_plain(skb);
}
