/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The next hops that TC found, for XDP and TC to use for a short
 * time. They expire, so that packets regularly go through the
 * kernel's neighbour handling, which refreshes its table; user space
 * makes all of them void when routes, links or neighbours change.
 */
#pragma once

#include "lib/hook.h"
#include "lib/node/maps.h"
#include "lib/wire/ip.h"
#include "lib/wire/net.h"

/* For packets without a remembered next hop. */
#define EXIT_NONE (~0U)

/* The remembered next hop of a hop's, a headend's or an egress's
 * packets: exit is the index of its ws_stats. NULL: there is none.
 */
static __always_inline struct ws_nexthop *exit_of(__u32 exit, __u32 flow)
{
	struct ws_exit *e = bpf_map_lookup_elem(&ws_exits, &exit);

	return e ? &e->flow[flow % WS_FLOWS] : NULL;
}

/* The key of an inner packet has the whole destination address. */
static __always_inline struct ws_nexthop_key
nexthop_key_inner(const struct ip *in, __u32 flow)
{
	struct ws_nexthop_key k = { .flow = flow % WS_FLOWS };
	struct addrs a = ip_addrs(in);

	k.addr[0] = a.dst[0];
	k.addr[1] = a.dst[1];
	return k;
}

/* The key of a function that routes. No flow of inner packets has such a number. */
static __always_inline struct ws_nexthop_key via_key(const struct ws_proxy *p,
						     __u32 id)
{
	struct ws_nexthop_key k = { .flow = WS_FLOWS + id };

	__builtin_memcpy(k.addr, p->via, sizeof(k.addr));
	return k;
}

/* Is this a next hop to that destination, and still valid? */
static __always_inline bool nexthop_counts(const struct ws_nexthop *n,
					   __be64 hi, __be64 lo, __u32 ways)
{
	return !((n->to[0] ^ hi) | (n->to[1] ^ lo)) && n->ways == ways &&
	       n->expires > bpf_jiffies64();
}

/* The next hop of packets to a SID; NULL: TC must ask the kernel. */
static __always_inline const struct ws_nexthop *
nexthop_to_sid(__u32 exit, __u32 flow, __be64 sid, __u32 ways)
{
	const struct ws_nexthop *n = exit_of(exit, flow);

	return n && nexthop_counts(n, sid, 0, ways) ? n : NULL;
}

/* The next hop of a key's packets, from the hash. */
static __always_inline const struct ws_nexthop *
nexthop_find(const struct ws_nexthop_key *k, __u32 ways)
{
	const struct ws_nexthop *n = bpf_map_lookup_elem(&ws_nexthops, k);

	return n && nexthop_counts(n, k->addr[0], k->addr[1], ways) ? n : NULL;
}

/* The next hop of inner packets behind their egress. If several
 * destinations share one bucket, the hash has all of them.
 */
static __always_inline const struct ws_nexthop *
nexthop_inner(__u32 exit, const struct ws_nexthop_key *k, __u32 ways)
{
	const struct ws_nexthop *n = exit_of(exit, k->flow);

	if (n && nexthop_counts(n, k->addr[0], k->addr[1], ways))
		return n;
	return nexthop_find(k, ways);
}

/* Writes the Ethernet header of frames to that next hop;
 * eth is in bounds. proto: its type, in the host's order.
 */
static __always_inline void
nexthop_write(struct eth_hdr *eth, const struct ws_nexthop *n, __u32 proto)
{
	/* Both addresses at once: they are adjacent in both structs. */
	*(__u64 *)eth->dst = *(const __u64 *)n->dmac;
	*(__u32 *)(eth->src + 2) = *(const __u32 *)(n->smac + 2);
	eth->proto = bpf_htons(proto);
}

/* Sends the packet to that next hop; eth is in bounds. Returns the verdict. */
static __always_inline int nexthop_take(struct eth_hdr *eth,
					const struct ws_nexthop *n, __u32 proto)
{
	nexthop_write(eth, n, proto);
	return bpf_redirect(n->ifindex, 0);
}
