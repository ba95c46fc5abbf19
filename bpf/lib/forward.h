/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The way out of a node on TC: the kernel's routes, its neighbour table and its
 * MTU, for a packet that has its final headers.
 */
#pragma once

#include "boundary.h"
#include "flow.h"
#include "hook.h"
#include "maps.h"
#include "net.h"
#include "nexthop.h"
#include "refuse.h"

#define AF_INET6 10

/* The IPv6 header, which was pulled before; NULL is a bug that drops. */
static __always_inline struct ip6_hdr *forward_ip6(struct __sk_buff *skb)
{
	struct cursor c = ctx_cursor(skb);

	if (!cursor_take(&c, struct eth_hdr))
		return NULL;
	return cursor_take(&c, struct ip6_hdr);
}

/* Asks the kernel's tables for the way to ip6->dst. Returns what the helper
 * does; where it names an interface, that and the next hop are in p.
 */
static __always_inline long route_find(struct __sk_buff *skb,
				       const struct ip6_hdr *ip6,
				       struct bpf_fib_lookup *p)
{
	p->family = AF_INET6;
	p->flowinfo = ip6->vtc_flow & ~IP6_VERSION_MASK;
	p->ifindex = skb->ifindex;
	/* Super-packets are checked by their segments, later; not 0, for which
	 * the kernel would tell the device's MTU instead of the route's.
	 */
	p->tot_len = skb->gso_size ? 1 : skb->len - sizeof(struct eth_hdr);
	__builtin_memcpy(p->ipv6_src, ip6->src, sizeof(p->ipv6_src));
	__builtin_memcpy(p->ipv6_dst, ip6->dst, sizeof(p->ipv6_dst));
	return bpf_fib_lookup(skb, p, sizeof(*p), 0);
}

/* The node, if XDP is there to use what TC finds out; else NULL. */
static __always_inline const struct ws_node *xdp_node(void)
{
	const struct ws_node *node = node_armed();

	return node && node->xdp ? node : NULL;
}

/* A way out that XDP may take too, for as long as cfg says. Only what the
 * kernel's neighbour table holds as valid comes here.
 */
static __always_inline void nexthop_fill(struct ws_nexthop *n,
					 const struct bpf_fib_lookup *p,
					 __be64 to, const struct ws_node *node)
{
	__u32 ifindex = p->ifindex;
	const struct ws_port *port = bpf_map_lookup_elem(&ws_ports, &ifindex);

	n->to = to;
	n->ifindex = port && port->xdp_target ? ifindex : 0;
	n->ways = node->ways;
	n->mtu = p->mtu_result;
	__builtin_memcpy(n->dmac, p->dmac, sizeof(n->dmac));
	__builtin_memcpy(n->smac, p->smac, sizeof(n->smac));
	n->expires = bpf_jiffies64() + cfg.nexthop_ttl;
}

/* Of a packet that has its outer header. */
static __always_inline void exit_learn(const struct bpf_fib_lookup *p,
				       __u32 exit, __be64 to, __u32 flow)
{
	const struct ws_node *node = xdp_node();
	struct ws_nexthop *n;

	if (!node)
		return;
	n = exit_of(exit, flow);
	if (n && !nexthop_counts(n, to, node->ways))
		nexthop_fill(n, p, to, node);
}

/* Of an inner packet. */
static __always_inline void nexthop_learn(const struct bpf_fib_lookup *p,
					  const struct ws_nexthop_key *key)
{
	const struct ws_node *node = xdp_node();
	struct ws_nexthop n = {};

	if (!node)
		return;
	nexthop_fill(&n, p, 0, node);
	if (n.ifindex)
		bpf_map_update_elem(&ws_nexthops, key, &n, BPF_ANY);
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

/* Sends the packet out by the route that route_find found. */
static __always_inline int route_take(struct __sk_buff *skb,
				      const struct bpf_fib_lookup *p, long rc)
{
	struct bpf_redir_neigh nh = { .nh_family = AF_INET6 };
	__u32 mtu = 0;

	if (rc == BPF_FIB_LKUP_RET_FRAG_NEEDED ||
	    (skb->gso_size &&
	     bpf_check_mtu(skb, p->ifindex, &mtu, 0, BPF_MTU_CHK_SEGS)))
		return ws_refuse(skb, WS_REASON_TOO_BIG, rc);
	__builtin_memcpy(nh.ipv6_nh, p->ipv6_dst, sizeof(nh.ipv6_nh));
	return bpf_redirect_neigh(p->ifindex, &nh, sizeof(nh), 0);
}

/* Towards the next segment. exit: where to remember the way, or EXIT_NONE.
 * Returns the verdict.
 */
__noinline int ws_forward(struct __sk_buff *skb, __u32 exit)
{
	const struct ip6_hdr *ip6 = forward_ip6(skb);
	struct bpf_fib_lookup p = {};
	long rc = -1;

	if (ip6)
		rc = route_find(skb, ip6, &p);
	if (!ip6 || !route_is_way(rc))
		return ws_refuse(skb, WS_REASON_NO_ROUTE, rc);
	if (rc == BPF_FIB_LKUP_RET_SUCCESS && exit != EXIT_NONE)
		exit_learn(&p, exit, ip6->dst[0], nexthop_flow(ip6));
	return route_take(skb, &p, rc);
}

/* An inner packet without its outer header: on by ordinary routing, or up where
 * it is for this node. Returns the verdict.
 */
__noinline int ws_deliver(struct __sk_buff *skb)
{
	struct ip6_hdr *ip6 = forward_ip6(skb);
	struct bpf_fib_lookup p = {};
	struct ws_nexthop_key key;
	struct cursor c;
	long rc = -1;

	if (ip6) {
		c = (struct cursor){ ip6 + 1, ctx_cursor(skb).end };
		key = nexthop_key(ip6, flow_hash(c, ip6));
		rc = route_find(skb, ip6, &p);
	}
	if (rc == BPF_FIB_LKUP_RET_NOT_FWDED)
		return CTX_PASS;
	if (!ip6 || !route_is_way(rc))
		return ws_refuse(skb, WS_REASON_INNER_NO_ROUTE, rc);
	if (ip6->hop_limit <= 1)
		return ws_refuse(skb, WS_REASON_INNER_HOP_LIMIT, 0);
	ip6->hop_limit--;
	if (rc == BPF_FIB_LKUP_RET_SUCCESS)
		nexthop_learn(&p, &key);
	return route_take(skb, &p, rc);
}
