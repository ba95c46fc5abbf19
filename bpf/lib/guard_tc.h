/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* What must not pass a node as a plain packet. TC only. */
#pragma once

#include "boundary.h"
#include "classify.h"
#include "forward.h"
#include "hook.h"
#include "net.h"
#include "refuse.h"

#define AF_INET 2

/* Offsets of the addresses in a frame with an IPv4 header (RFC 791 3.1). */
#define IP4_SRC_OFF 26
#define IP4_DST_OFF 30

/* Extension headers that are looked through for an SRH. */
#define EXTENSIONS_MAX 4

/* Will the kernel keep this IP packet to itself? It does where it is for one of
 * the node's own addresses, and everywhere if it does not forward at all. For
 * the slow paths: the kernel's tables are asked.
 */
__noinline int ws_is_local(struct __sk_buff *skb, int is_ip4)
{
	struct bpf_fib_lookup p = {};
	const struct ip6_hdr *ip6;
	long rc;

	if (is_ip4) {
		p.family = AF_INET;
		p.ifindex = skb->ifindex;
		if (bpf_skb_load_bytes(skb, IP4_SRC_OFF, &p.ipv4_src, 4) ||
		    bpf_skb_load_bytes(skb, IP4_DST_OFF, &p.ipv4_dst, 4))
			return false;
		rc = bpf_fib_lookup(skb, &p, sizeof(p), 0);
	} else {
		ip6 = forward_ip6(skb);
		if (!ip6)
			return false;
		rc = route_find(skb, ip6, &p);
	}
	return rc == BPF_FIB_LKUP_RET_NOT_FWDED ||
	       rc == BPF_FIB_LKUP_RET_FWD_DISABLED;
}

/* Is there an SRH among the headers before the upper layer? What has more of
 * them than we look through, or is not whole, counts as if there were.
 */
__noinline int ws_has_srh(struct __sk_buff *skb)
{
	const struct ip6_hdr *ip6 = forward_ip6(skb);
	__u32 off = sizeof(struct eth_hdr) + sizeof(*ip6);
	__u32 next;
	__u8 head[4];

	if (!ip6)
		return true;
	next = ip6->nexthdr;
	for (__u32 i = 0; i < EXTENSIONS_MAX; i++) {
		if (!nexthdr_may_route(next))
			return false;
		if (bpf_skb_load_bytes(skb, off, head, sizeof(head)))
			return true;
		if (next == NEXTHDR_ROUTING && head[2] == ROUTING_TYPE_SRH)
			return true;
		next = head[0];
		off += (head[1] + 1) * 8;
	}
	return nexthdr_may_route(next);
}

static __always_inline bool has_srh(struct __sk_buff *skb,
				    const struct ip6_hdr *ip6)
{
	return ip6_has_extension(ip6) && ws_has_srh(skb);
}

/* A rule's word that an address is the node's own is asked for again: it may
 * have moved while no agent was there to see.
 */
static __always_inline bool is_local(struct __sk_buff *skb,
				     const struct ws_match *m)
{
	return m->local && ws_is_local(skb, false);
}

/* A plain packet: refused where some chain that ends here requires it. */
static __always_inline int guard_plain(struct __sk_buff *skb,
				       const struct ip6_hdr *ip6)
{
	struct ws_match m = guard(ip6);

	if (m.action == WS_MATCH_PATH && !is_local(skb, &m))
		return ws_refuse(skb, WS_REASON_UNPROVEN, 0);
	return CTX_PASS;
}
