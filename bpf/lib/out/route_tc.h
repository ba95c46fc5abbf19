/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Look-ups in the kernel's routes, its neighbour table and its MTUs, on TC. */
#pragma once

#include "lib/hook.h"
#include "lib/skb/gso.h"
#include "lib/wire/cursor.h"
#include "lib/wire/ip.h"
#include "lib/wire/net.h"

#define AF_INET 2
#define AF_INET6 10

/* Not results of bpf_fib_lookup. */
#define WAY_UNKNOWN (-4096)
#define WAY_KNOWN (-4097) /* remembered from another packet */

/* The IPv6 header, which was pulled before; NULL is a bug, and the packet is dropped. */
static __always_inline struct ip6_hdr *forward_ip6(struct __sk_buff *skb)
{
	struct cursor c = ctx_cursor(skb);

	if (!cursor_take(&c, struct eth_hdr))
		return NULL;
	return cursor_take(&c, struct ip6_hdr);
}

/* Looks up the route of a packet of len bytes with these addresses. len
 * is at least 1: for 0 the kernel would return the device's MTU instead
 * of the route's. p is zero except for flowinfo. Returns the helper's
 * result; if it finds an interface, p has it and the next hop.
 */
static __always_inline long route_ask(struct __sk_buff *skb,
				      const struct ip6_hdr *ip6, __u32 len,
				      struct bpf_fib_lookup *p)
{
	p->family = AF_INET6;
	p->ifindex = skb->ifindex;
	p->tot_len = len > 65535 ? 65535 : len;
	__builtin_memcpy(p->ipv6_src, ip6->src, sizeof(p->ipv6_src));
	__builtin_memcpy(p->ipv6_dst, ip6->dst, sizeof(p->ipv6_dst));
	return bpf_fib_lookup(skb, p, sizeof(*p), 0);
}

/* Bytes of the IP packet; for a super-packet, of its longest frame. */
static __always_inline __u32 frame_longest(struct __sk_buff *skb)
{
	return skb->gso_size ? gso_longest(skb) :
			       skb->len - sizeof(struct eth_hdr);
}

/* The route of the packet as it is. */
static __always_inline long route_find(struct __sk_buff *skb,
				       const struct ip6_hdr *ip6,
				       struct bpf_fib_lookup *p)
{
	__builtin_memset(p, 0, sizeof(*p));
	p->flowinfo = ip6->vtc_flow & ~IP6_VERSION_MASK;
	return route_ask(skb, ip6, frame_longest(skb), p);
}

/* The route of an IPv4 packet as it is. Its next hop may
 * have an IPv6 address (RFC 8950), as p->family shows.
 */
static __always_inline long route_find_ip4(struct __sk_buff *skb,
					   const struct ip4_hdr *ip4,
					   struct bpf_fib_lookup *p)
{
	__u32 len = skb->gso_size ? gso_longest(skb) :
				    skb->len - sizeof(struct eth_hdr);

	__builtin_memset(p, 0, sizeof(*p));
	p->family = AF_INET;
	p->tos = ip4->tos & IP4_TOS_RT_MASK;
	p->ifindex = skb->ifindex;
	p->tot_len = len > 65535 ? 65535 : len;
	p->ipv4_src = ip4->src;
	p->ipv4_dst = ip4->dst;
	return bpf_fib_lookup(skb, p, sizeof(*p), 0);
}

/* Does the kernel process the packet as IPv4? */
static __always_inline bool skb_is_ip4(const struct __sk_buff *skb)
{
	return skb->protocol == bpf_htons(ETH_P_IP);
}

/* The packet of this version, whose header was pulled before; moves
 * c behind the header. False is a bug, and the packet is dropped.
 */
static __always_inline bool forward_ip(struct __sk_buff *skb, bool is_ip4,
				       struct cursor *c, struct ip *in)
{
	*c = ctx_cursor(skb);
	return cursor_take(c, struct eth_hdr) && ip_take(c, is_ip4, in);
}

/* Is there a route? The neighbour may be unresolved, or the packet too long.
 * Other results are a route that refuses, an own address, or no route.
 */
static __always_inline bool route_is_way(long rc)
{
	return rc == BPF_FIB_LKUP_RET_SUCCESS ||
	       rc == BPF_FIB_LKUP_RET_NO_NEIGH ||
	       rc == BPF_FIB_LKUP_RET_FRAG_NEEDED;
}
