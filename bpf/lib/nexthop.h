/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The ways out that TC found, for XDP and TC to use for a short while. One expires,
 * so that one packet goes through the kernel's neighbour handling, which keeps its
 * table alive; user space makes all of them void when routes, links or neighbours
 * change.
 */
#pragma once

#include "hook.h"
#include "inner.h"
#include "maps.h"
#include "net.h"

/* For packets whose way nobody remembers. */
#define EXIT_NONE (~0U)

/* Where the way of a hop's or a headend's packets is remembered: exit is the
 * index of its ws_stats. NULL: nowhere.
 */
static __always_inline struct ws_nexthop *exit_of(__u32 exit, __u32 flow)
{
	struct ws_exit *e = bpf_map_lookup_elem(&ws_exits, &exit);

	return e ? &e->flow[flow % WS_FLOWS] : NULL;
}

/* An inner packet's whole destination counts: ws_nexthop.to is not looked at. */
static __always_inline struct ws_nexthop_key
nexthop_key_inner(const struct inner *in, __u32 flow)
{
	struct ws_nexthop_key k = { .flow = flow % WS_FLOWS };
	const struct ip6_hdr *ip6 = in->hdr;
	__be64 dst[2] = {};

	if (in->is_ip4)
		dst[1] = ip4_mapped(((const struct ip4_hdr *)in->hdr)->dst);
	else
		__builtin_memcpy(dst, ip6->dst, sizeof(dst));
	__builtin_memcpy(k.addr, dst, sizeof(k.addr));
	return k;
}

/* The way to a function that routes. No flow of inner packets has its number. */
static __always_inline struct ws_nexthop_key via_key(const struct ws_proxy *p,
						     __u32 id)
{
	struct ws_nexthop_key k = { .flow = WS_FLOWS + id };

	__builtin_memcpy(k.addr, p->via, sizeof(k.addr));
	return k;
}

/* The flow of a packet that has its outer header: its label. */
static __always_inline __u32 nexthop_flow(const struct ip6_hdr *ip6)
{
	return bpf_ntohl(ip6->vtc_flow & IP6_FLOW_MASK);
}

/* Is this a way to the destination whose upper 64 bits are to, and not too old? */
static __always_inline bool nexthop_counts(const struct ws_nexthop *n,
					   __be64 to, __u32 ways)
{
	return n->to == to && n->ways == ways && n->expires > bpf_jiffies64();
}
