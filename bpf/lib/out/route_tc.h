/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The kernel's routes, its neighbour table and its MTUs, as TC asks for them. */
#pragma once

#include "lib/hook.h"
#include "lib/skb/gso.h"
#include "lib/wire/cursor.h"
#include "lib/wire/ip.h"
#include "lib/wire/net.h"

#define AF_INET 2
#define AF_INET6 10

/* Not what bpf_fib_lookup returns. */
#define WAY_UNKNOWN (-4096)
#define WAY_KNOWN (-4097) /* remembered from another packet, a moment ago */

/* The IPv6 header, which was pulled before; NULL is a bug that drops. */
static __always_inline struct ip6_hdr *forward_ip6(struct __sk_buff *skb)
{
	struct cursor c = ctx_cursor(skb);

	if (!cursor_take(&c, struct eth_hdr))
		return NULL;
	return cursor_take(&c, struct ip6_hdr);
}

/* Asks the kernel's tables for the way of a packet of len bytes with these
 * addresses, 1 at least: for 0 the kernel would tell the device's MTU instead of
 * the route's. p is zero but for flowinfo. Returns what the helper does; where it
 * names an interface, that and the next hop are in p.
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

/* Bytes of the IP packet; of a super-packet's longest frame on a wire. */
static __always_inline __u32 frame_longest(struct __sk_buff *skb)
{
	return skb->gso_size ? gso_longest(skb) :
			       skb->len - sizeof(struct eth_hdr);
}

/* The way of the packet as it is. */
static __always_inline long route_find(struct __sk_buff *skb,
				       const struct ip6_hdr *ip6,
				       struct bpf_fib_lookup *p)
{
	__builtin_memset(p, 0, sizeof(*p));
	p->flowinfo = ip6->vtc_flow & ~IP6_VERSION_MASK;
	return route_ask(skb, ip6, frame_longest(skb), p);
}

/* The same for IPv4. The next hop's address may be one of IPv6 (RFC 8950); then
 * p->family says so.
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

/* Of which version the packet is, the kernel knows. */
static __always_inline bool skb_is_ip4(const struct __sk_buff *skb)
{
	return skb->protocol == bpf_htons(ETH_P_IP);
}

/* The packet of that version, whose header was pulled before; c is left behind
 * the header. False is a bug that drops.
 */
static __always_inline bool forward_ip(struct __sk_buff *skb, bool is_ip4,
				       struct cursor *c, struct ip *in)
{
	*c = ctx_cursor(skb);
	return cursor_take(c, struct eth_hdr) && ip_take(c, is_ip4, in);
}

/* Found, though the neighbour may have to be resolved or the packet be too big:
 * anything else is a route that refuses, an own address, or no route.
 */
static __always_inline bool route_is_way(long rc)
{
	return rc == BPF_FIB_LKUP_RET_SUCCESS ||
	       rc == BPF_FIB_LKUP_RET_NO_NEIGH ||
	       rc == BPF_FIB_LKUP_RET_FRAG_NEEDED;
}
