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

/* The node if XDP is in use and uses the next hops that TC finds; else NULL. */
static __always_inline const struct ws_node *xdp_node(void)
{
	const struct ws_node *node = node_armed();

	return node && node->xdp ? node : NULL;
}

/* Remembers a next hop for nexthop_ttl. Its entry in the kernel's neighbour
 * table is valid. outer: the packets have an outer header and must not
 * leave at an edge interface: redirects of XDP meet no program there.
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

/* Remembers the next hop of a packet with its outer header. */
static __always_inline void exit_learn(const struct bpf_fib_lookup *p,
				       __u32 exit, __be64 to, __u32 flow)
{
	const struct ws_node *node = node_armed();
	struct ws_nexthop *n = exit_of(exit, flow);

	if (n && node)
		nexthop_fill(n, p, to, 0, node, true);
}

/* The remembered next hop of a packet with its outer
 * header, if its MTU is at least len bytes; else NULL.
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

/* Is there a remembered next hop? A function of its own, to bound the stack. */
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

/* Remembers the next hop of an inner packet. exit: of its egress, or EXIT_NONE. */
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
	/* Read before the guard's rules: a later change of the rules makes this entry void. */
	ways = node->ways;
	/* The next hop to a function belongs to no egress. */
	n->path = exit == EXIT_NONE ? 0 : guard_by_destination(key->addr);
	nexthop_fill(n, p, key->addr[0], key->addr[1], node, false);
	n->ways = ways;
	bpf_map_update_elem(&ws_nexthops, key, n, BPF_ANY);
	if (own)
		*own = *n;
}

/* Passes the packet to the kernel's forwarding, which decrements the
 * hop limit again: adds what this node has subtracted. No refusal here.
 */
static __always_inline int to_kernel(struct __sk_buff *skb)
{
	struct ip6_hdr *ip6 = forward_ip6(skb);

	if (!ip6)
		return ws_refuse(skb, REASON(NO_ROUTE), 0);
	ip6->hop_limit++;
	return CTX_PASS;
}

/* The IPv6 packet has its final headers and is longer than mtu, the MTU of its route.
 * Sends an ICMP error to the node that made the headers (RFC 4443 3.2, RFC 8754 5.4).
 * If this node's own headend made them, the error goes to the inner packet's sender,
 * with the MTU less the outer header (RFC 2473 8.3). Returns the verdict.
 */
__noinline int ws_too_big(struct __sk_buff *skb, __u32 mtu)
{
	bool is_ip4;
	__u32 outer = outer_own(skb, &is_ip4);

	/* Programs cannot make an error of a super-packet that is or was encapsulated by
	 * a tunnel. The kernel can: it finds the same route, on which the packet is too
	 * long. If the route has changed, the kernel forwards the packet. If this node
	 * has encapsulated the packet, the kernel would send the error to this node.
	 */
	if (!outer && !skb_is_ip4(skb) && skb->gso_size &&
	    bpf_skb_change_tail(skb, skb->len, 0))
		return to_kernel(skb);
	ws_refuse(skb, REASON(TOO_BIG), mtu);
	/* ICMP (IPv4) needs the packet without its outer header. */
	if (is_ip4 && strip(skb, outer, true))
		return CTX_REFUSED;
	return icmp_too_big(skb, sizeof(struct eth_hdr) + outer, mtu, outer,
			    is_ip4);
}

/* Are the frames of a super-packet too long for the interface, with any
 * headers? The look-up in the kernel's table used an estimate of their length.
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

/* Sends a packet with its outer header by that route. The kernel sends no packet
 * with labels to a neighbour: the route must have its MAC address. A packet with
 * labels that is too long causes no ICMP error, since labels name no source.
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

/* The packet has its outer header, and the kernel's table has no
 * route to the next segment; rc: of the look-up. Sends an ICMP
 * error (RFC 8754 4.3.1.1 S15) to the same node as ws_too_big.
 */
__noinline int ws_no_way(struct __sk_buff *skb, int rc)
{
	bool is_ip4;
	__u32 outer = outer_own(skb, &is_ip4);

	ws_refuse(skb, REASON(NO_ROUTE), rc);
	if (!OUTER_IS_IP) /* labels name no source */
		return CTX_REFUSED;
	if (!outer)
		return icmp_no_way(skb, rc, false);
	/* ICMP (IPv4) needs the packet without its outer header. */
	if (is_ip4 && strip(skb, outer, true))
		return CTX_REFUSED;
	return icmp_no_tunnel(skb, sizeof(struct eth_hdr) + outer, rc, is_ip4);
}

/* Sends the packet to the next segment. exit: index to
 * remember the next hop, or EXIT_NONE. found: result of
 * route_ask for the route in ws_scratch, or WAY_UNKNOWN, or
 * WAY_KNOWN. Returns the verdict.
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

/* Sends the packet to the next segment from a TC egress of a core interface, if
 * the next hop is remembered. If the packet already leaves by its interface, the
 * frame gets its MAC addresses and continues. Returns the verdict, or WAY_UNKNOWN,
 * and then the packet is unchanged. A function of its own, to bound the stack.
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

/* Sends the packet to the next segment from a TC egress. exit: index to remember the
 * next hop. here: packets to a next segment may leave by this interface. The packet
 * is past the place where the kernel sends errors for packets that are too long.
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

/* Sends an inner packet by a remembered next hop. Returns the verdict, or
 * WAY_UNKNOWN: the kernel must be asked. is_ip4 is a constant at compile time.
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

/* An inner packet without its outer header: forwarded by ordinary routing,
 * or delivered to this node. exit: of its egress. Returns the verdict.
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
	/* Too long for the link behind the egress: the kernel fragments the
	 * packet if it may, like any router, or else sends an error. A fragment
	 * is refused here: connection tracking would reassemble it with others
	 * that are not verified, and the datagram would count as verified.
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
