/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The way out of a node on TC, for a packet that has its final headers. */
#pragma once

#include "lib/encap/outer.h"
#include "lib/encap/outer_frame_tc.h"
#include "lib/encap/outer_way_tc.h"
#include "lib/encap/outer_strip_tc.h"
#include "lib/hook.h"
#include "lib/node/boundary.h"
#include "lib/node/maps.h"
#include "lib/node/refuse.h"
#include "lib/out/icmp_tc.h"
#include "lib/out/nexthop.h"
#include "lib/out/route_tc.h"
#include "lib/reason.h"
#include "lib/wire/flow.h"
#include "lib/wire/ip.h"
#include "lib/wire/net.h"

/* The node, if XDP is there to use what TC finds out; else NULL. */
static __always_inline const struct ws_node *xdp_node(void)
{
	const struct ws_node *node = node_armed();

	return node && node->xdp ? node : NULL;
}

/* A way out, for as long as cfg says. Only what the kernel's neighbour table holds
 * as valid comes here. outer: of packets that have an outer header, which must
 * not leave at an edge: XDP's would meet no program there.
 */
static __always_inline void nexthop_fill(struct ws_nexthop *n,
					 const struct bpf_fib_lookup *p,
					 __be64 hi, __be64 lo,
					 const struct ws_node *node, bool outer)
{
	__u32 ifindex = p->ifindex;
	const struct ws_port *port = bpf_map_lookup_elem(&ws_ports, &ifindex);

	n->to[0] = hi;
	n->to[1] = lo;
	n->ifindex = ifindex;
	n->xdp = port && port->xdp_target && !(outer && port->edge);
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
	const struct ws_node *node = node_armed();
	struct ws_nexthop *n = exit_of(exit, flow);

	if (n && node)
		nexthop_fill(n, p, to, 0, node, true);
}

/* The way of a packet that has its outer header, if it is remembered and takes
 * len bytes; else NULL.
 */
static __always_inline const struct ws_nexthop *
exit_known(__u32 exit, __be64 to, __u32 flow, __u32 len)
{
	const struct ws_node *node = node_armed();
	const struct ws_nexthop *n;

	if (!node)
		return NULL;
	n = nexthop_to_sid(exit, flow, to, node->ways);
	return n && len <= n->mtu ? n : NULL;
}

/* Is there one? A function of its own, for its stack. */
__noinline int ws_exit_is_known(__u32 exit, __u64 to, __u32 flow, __u32 len)
{
	return exit_known(exit, to, flow, len) != NULL;
}

static __always_inline int exit_take(struct __sk_buff *skb,
				     const struct ws_nexthop *n, __u32 proto)
{
	struct cursor c = ctx_cursor(skb);
	struct eth_hdr *eth = cursor_take(&c, struct eth_hdr);

	if (!eth)
		return ws_refuse(skb, REASON(NO_ROUTE), 0);
	return nexthop_take(eth, n, proto);
}

/* Of an inner packet. exit: that of its egress, or EXIT_NONE. */
static __always_inline void nexthop_learn(const struct bpf_fib_lookup *p,
					  __u32 exit,
					  const struct ws_nexthop_key *key)
{
	const struct ws_node *node = node_armed();
	struct ws_nexthop *own = exit_of(exit, key->flow);
	struct scratch *s = scratch();
	struct ws_nexthop *n;
	__u32 ways;

	if (!node || !s)
		return;
	n = &s->learned;
	/* Before the guard is asked: should that change meanwhile, this is void. */
	ways = node->ways;
	/* The way to a function is no egress's. */
	n->path = exit == EXIT_NONE ? 0 : guard_by_destination(key->addr);
	nexthop_fill(n, p, key->addr[0], key->addr[1], node, false);
	n->ways = ways;
	bpf_map_update_elem(&ws_nexthops, key, n, BPF_ANY);
	if (own)
		*own = *n;
}

/* To the kernel's forwarding, which takes one off the hop limit again: it gets back
 * what this node has taken. Nothing is refused here.
 */
static __always_inline int to_kernel(struct __sk_buff *skb)
{
	struct ip6_hdr *ip6 = forward_ip6(skb);

	if (!ip6)
		return ws_refuse(skb, REASON(NO_ROUTE), 0);
	ip6->hop_limit++;
	return CTX_PASS;
}

/* The IPv6 packet has its final headers and is longer than mtu, which is the most
 * that goes by its way. Whoever made the headers is told (RFC 4443 3.2, RFC 8754
 * 5.4); where that was this node's own headend, the inner packet's sender is, of
 * what is left beside them (RFC 2473 8.3). Returns the verdict.
 */
__noinline int ws_too_big(struct __sk_buff *skb, __u32 mtu)
{
	bool is_ip4;
	__u32 outer = outer_own(skb, &is_ip4);

	/* Programs cannot make a message of a super-packet that is, or was, a
	 * tunnel's. The kernel can: it finds the same way, and the packet too
	 * long for it. Should the way be another one by now, the packet goes it.
	 * Of what this node has encapsulated it would tell this node.
	 */
	if (!outer && !skb_is_ip4(skb) && skb->gso_size &&
	    bpf_skb_change_tail(skb, skb->len, 0))
		return to_kernel(skb);
	ws_refuse(skb, REASON(TOO_BIG), mtu);
	/* ICMP is about a plain packet. */
	if (is_ip4 && strip(skb, outer, true))
		return CTX_REFUSED;
	return icmp_too_big(skb, sizeof(struct eth_hdr) + outer, mtu, outer,
			    is_ip4);
}

/* A super-packet whose frames are too long for the interface, whatever their
 * headers are. What the kernel's table said took these as they seemed to be.
 */
static __always_inline bool gso_is_too_long(struct __sk_buff *skb,
					    __u32 ifindex, __u32 *mtu)
{
	*mtu = 0;
	return skb->gso_size &&
	       bpf_check_mtu(skb, ifindex, mtu, 0, BPF_MTU_CHK_SEGS);
}

/* Sends the packet out by the route that route_find found. */
static __always_inline int route_take(struct __sk_buff *skb,
				      const struct bpf_fib_lookup *p, long rc)
{
	struct bpf_redir_neigh nh = { .nh_family = p->family };
	__u32 mtu = 0;

	if (rc == BPF_FIB_LKUP_RET_FRAG_NEEDED)
		return ws_too_big(skb, p->mtu_result);
	if (gso_is_too_long(skb, p->ifindex, &mtu))
		return ws_too_big(skb, mtu);
	/* An IPv4 address lies in the first four bytes of both. */
	__builtin_memcpy(nh.ipv6_nh, p->ipv6_dst, sizeof(nh.ipv6_nh));
	return bpf_redirect_neigh(p->ifindex, &nh, sizeof(nh), 0);
}

/* The same, where the packet has its outer header. The kernel sends no packet with
 * labels to a neighbour: this has its address already, or goes nowhere. Nobody is told
 * of one that is too long, since labels name no source.
 */
static __always_inline int outer_take(struct __sk_buff *skb,
				      const struct bpf_fib_lookup *p, long rc)
{
	struct cursor c = ctx_cursor(skb);
	struct eth_hdr *eth;

	if (OUTER_IS_IP)
		return route_take(skb, p, rc);
	if (rc == BPF_FIB_LKUP_RET_FRAG_NEEDED)
		return ws_refuse(skb, REASON(TOO_BIG), p->mtu_result);
	if (rc == BPF_FIB_LKUP_RET_NO_NEIGH)
		return ws_refuse(skb, REASON(NO_NEIGHBOUR), 0);
	eth = cursor_take(&c, struct eth_hdr);
	if (!eth)
		return ws_refuse(skb, REASON(NO_ROUTE), 0);
	__builtin_memcpy(eth->dst, p->dmac, sizeof(eth->dst));
	__builtin_memcpy(eth->src, p->smac, sizeof(eth->src));
	eth->proto = bpf_htons(OUTER_PROTO);
	return bpf_redirect(p->ifindex, 0);
}

/* The packet has its outer header, and the kernel's table has no way to the next
 * segment; rc: what it said. Whoever made the header is told (RFC 8754 4.3.1.1
 * S15), as in ws_too_big.
 */
__noinline int ws_no_way(struct __sk_buff *skb, int rc)
{
	bool is_ip4;
	__u32 outer = outer_own(skb, &is_ip4);

	ws_refuse(skb, REASON(NO_ROUTE), rc);
	if (!OUTER_IS_IP) /* names nobody to tell */
		return CTX_REFUSED;
	if (!outer)
		return icmp_no_way(skb, rc, false);
	/* ICMP is about a plain packet. */
	if (is_ip4 && strip(skb, outer, true))
		return CTX_REFUSED;
	return icmp_no_tunnel(skb, sizeof(struct eth_hdr) + outer, rc, is_ip4);
}

/* Towards the next segment. exit: where to remember the way, or EXIT_NONE.
 * found: what route_ask returned of the way that is in ws_scratch, or WAY_UNKNOWN,
 * or WAY_KNOWN.
 * Returns the verdict.
 */
__noinline int ws_forward(struct __sk_buff *skb, __u32 exit, int found)
{
	__u32 len = frame_longest(skb);
	const struct ws_nexthop *known;
	struct scratch *s = scratch();
	const struct outer_head *h;

	if (!s)
		return ws_refuse(skb, REASON(NO_ROUTE), 0);
	h = outer_head(skb);
	if (!h)
		return ws_refuse(skb, REASON(NO_ROUTE), 0);
	if ((found == WAY_UNKNOWN || found == WAY_KNOWN) && exit != EXIT_NONE) {
		known = exit_known(exit, outer_head_to(h), outer_head_flow(h),
				   len);
		if (known)
			return exit_take(skb, known, OUTER_PROTO);
	}
	if (found == WAY_UNKNOWN || found == WAY_KNOWN)
		found = outer_route_find(skb, h, &s->way);
	if (!route_is_way(found))
		return ws_no_way(skb, found);
	if (found == BPF_FIB_LKUP_RET_SUCCESS && exit != EXIT_NONE)
		exit_learn(&s->way, exit, outer_head_to(h), outer_head_flow(h));
	return outer_take(skb, &s->way, found);
}

/* Towards the next segment at a TC egress of a core interface, if the way of such
 * packets is remembered. Where the packet leaves by this interface anyway, the frame
 * gets its MAC addresses and stays on its way. Returns the verdict, or WAY_UNKNOWN,
 * and the packet is as it was. A function of its own, for its stack.
 */
__noinline int ws_leave_known(struct __sk_buff *skb, __u32 exit)
{
	const struct outer_head *h = outer_head(skb);
	const struct ws_nexthop *known;
	struct eth_hdr *eth;
	struct cursor c;

	if (!h)
		return ws_refuse(skb, REASON(NO_ROUTE), 0);
	known = exit_known(exit, outer_head_to(h), outer_head_flow(h),
			   frame_longest(skb));
	if (!known)
		return WAY_UNKNOWN;
	if (known->ifindex != skb->ifindex)
		return exit_take(skb, known, OUTER_PROTO);
	c = ctx_cursor(skb);
	eth = cursor_take(&c, struct eth_hdr);
	if (!eth)
		return ws_refuse(skb, REASON(NO_ROUTE), 0);
	nexthop_write(eth, known, OUTER_PROTO);
	return CTX_PASS;
}

/* Towards the next segment at a TC egress. exit: where to remember the way. here:
 * packets for a next segment may leave by this interface. What the kernel's
 * forwarding would answer as too long has left that behind.
 */
static __always_inline int forward_out(struct __sk_buff *skb, __u32 exit,
				       bool here)
{
	int verdict = here ? ws_leave_known(skb, exit) : WAY_UNKNOWN;

	if (verdict != WAY_UNKNOWN)
		return verdict;
	verdict = ws_forward(skb, exit, WAY_UNKNOWN);
	return verdict == CTX_PASS ? ws_refuse(skb, REASON(TOO_BIG), 0) :
				     verdict;
}

/* An inner packet whose way is remembered, and takes it. Returns the verdict, or
 * WAY_UNKNOWN, and the kernel must be asked. is_ip4 is known when it is compiled.
 */
static __always_inline int deliver_known(struct __sk_buff *skb, __u32 exit,
					 bool is_ip4)
{
	const struct ws_node *node = node_armed();
	const struct ws_nexthop *n;
	struct ws_nexthop_key key;
	struct ip in;
	struct cursor c;

	if (!node || !forward_ip(skb, is_ip4, &c, &in))
		return WAY_UNKNOWN;
	key = nexthop_key_inner(&in, flow_hash(c, &in));
	n = nexthop_inner(exit, &key, node->ways);
	if (!n || ip_hops(&in) <= 1 || frame_longest(skb) > n->mtu)
		return WAY_UNKNOWN;
	ip_decrement(&in);
	return exit_take(skb, n, ip_proto(is_ip4));
}

__noinline int ws_deliver_known(struct __sk_buff *skb, __u32 exit, int is_ip4)
{
	return is_ip4 ? deliver_known(skb, exit, true) :
			deliver_known(skb, exit, false);
}

/* An inner packet without its outer header: on by ordinary routing, or up where
 * it is for this node. exit: that of its egress. Returns the verdict.
 */
__noinline int ws_deliver(struct __sk_buff *skb, __u32 exit, int is_ip4)
{
	int known = ws_deliver_known(skb, exit, is_ip4);
	struct scratch *s = scratch();
	struct ws_nexthop_key key;
	struct ip in;
	struct cursor c;
	__u32 mtu;
	long rc;

	if (known != WAY_UNKNOWN)
		return known;
	if (!s)
		return ws_refuse(skb, REASON(INNER_NO_ROUTE), 0);
	if (!forward_ip(skb, is_ip4, &c, &in))
		return ws_refuse(skb, REASON(INNER_NO_ROUTE), 0);
	key = nexthop_key_inner(&in, flow_hash(c, &in));
	rc = is_ip4 ? route_find_ip4(skb, in.hdr, &s->way) :
		      route_find(skb, in.hdr, &s->way);
	if (rc == BPF_FIB_LKUP_RET_NOT_FWDED)
		return CTX_PASS;
	if (!route_is_way(rc)) {
		ws_refuse(skb, REASON(INNER_NO_ROUTE), rc);
		return icmp_no_way(skb, rc, is_ip4);
	}
	if (ip_hops(&in) <= 1) {
		ws_refuse(skb, REASON(INNER_HOP_LIMIT), 0);
		return icmp_time_exceeded(skb, is_ip4);
	}
	/* Too long for the link behind the egress: the kernel cuts what may be
	 * cut, as any router, and tells the sender of the rest. Not so a fragment:
	 * connection tracking would put it together with others that nobody has
	 * verified, and the whole would count as verified.
	 */
	if (is_ip4 && (rc == BPF_FIB_LKUP_RET_FRAG_NEEDED ||
		       gso_is_too_long(skb, s->way.ifindex, &mtu))) {
		if (!ip4_is_fragment(in.hdr))
			return CTX_PASS;
		mtu = s->way.mtu_result;
		ws_refuse(skb, REASON(TOO_BIG), mtu);
		return icmp_too_big(skb, sizeof(struct eth_hdr), mtu, 0, true);
	}
	ip_decrement(&in);
	if (rc == BPF_FIB_LKUP_RET_SUCCESS)
		nexthop_learn(&s->way, exit, &key);
	return route_take(skb, &s->way, rc);
}
