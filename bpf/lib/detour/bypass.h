/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Packets of flows that bypass a function: its rules have set the plan's mark on the
 * flow's entry in the kernel's connection tracking, and from then on packets of the
 * flow skip the function. Both hooks; bypass_tc.bpf.c reads connection tracking.
 *
 * Each CPU remembers the result for a short time. One packet per second, and one
 * packet in BYPASS_THROUGH_EVERY, still goes through the function, to refresh the
 * flow's timeout and the counters of rules.
 */
#pragma once

#include "lib/detour/detour.h"
#include "lib/encap/outer.h"
#include "lib/hook.h"
#include "lib/node/maps.h"
#include "lib/sr/endpoint.h"
#include "lib/wire/cursor.h"
#include "lib/wire/ip.h"
#include "lib/wire/net.h"

/* In ns. The clock is coarse, with ticks of up to 10 ms:
 * with two ticks a result lives for 50 ms.
 */
#define BYPASS_KNOWN_NS (30ULL * 1000 * 1000)
#define BYPASS_THROUGH_NS (1000ULL * 1000 * 1000)
#define BYPASS_THROUGH_EVERY 4096 /* packets */

enum bypass {
	BYPASS_NO, /* through the function */
	BYPASS_ASK, /* not known: bypass_tc.bpf.c reads it. TC only */
	BYPASS_PULL, /* not enough of the packet is linear. TC only */
	BYPASS_YES,
};

struct bypass_packet {
	struct addrs addrs;
	__be32 ports;
	__u8 protocol;
	__u8 ends; /* 1: it begins or ends a connection */
};

/* Is this a packet that connection tracking assigns to an existing connection? The function
 * gets all others. c: behind the IP header; left: bytes of the packet from there on.
 */
static __always_inline enum bypass bypass_read_l4(struct cursor c, __u32 left,
						  struct bypass_packet *b)
{
	const struct udp_hdr *udp;
	const struct tcp_hdr *tcp;
	__u32 len;

	if (b->protocol == NEXTHDR_UDP) {
		udp = cursor_take(&c, struct udp_hdr);
		if (!udp)
			return BYPASS_PULL;
		b->ports = *(const __be32 *)udp;
		len = bpf_ntohs(udp->len);
		return len >= sizeof(*udp) && len <= left ? BYPASS_YES :
							    BYPASS_NO;
	}
	if (b->protocol != NEXTHDR_TCP)
		return BYPASS_NO;
	tcp = cursor_take(&c, struct tcp_hdr);
	if (!tcp)
		return BYPASS_PULL;
	b->ports = *(const __be32 *)tcp;
	b->ends = !!(tcp->flags & (TCP_FIN | TCP_SYN | TCP_RST));
	len = (tcp->offset >> 4) * 4;
	return !b->ends && tcp->flags & TCP_ACK && len >= sizeof(*tcp) &&
			       len <= left ?
		       BYPASS_YES :
		       BYPASS_NO;
}

/* c: at the inner packet. A packet whose hop limit is used
 * up goes to the function, which may answer it.
 */
static __always_inline enum bypass bypass_read(struct cursor c, bool is_ip4,
					       struct bypass_packet *b)
{
	const struct ip4_hdr *ip4;
	const struct ip6_hdr *ip6;
	struct ip in;

	b->ends = 0;
	if (!ip_take(&c, is_ip4, &in))
		return BYPASS_PULL;
	b->addrs = ip_addrs(&in);
	if (is_ip4) {
		ip4 = in.hdr;
		if (ip4->version_ihl != 0x45 || ip4_is_fragment(ip4) ||
		    ip4->ttl <= 1 || bpf_ntohs(ip4->len) < sizeof(*ip4))
			return BYPASS_NO;
		b->protocol = ip4->protocol;
		return bypass_read_l4(c, bpf_ntohs(ip4->len) - sizeof(*ip4), b);
	}
	ip6 = in.hdr;
	if (ip6->hop_limit <= 1)
		return BYPASS_NO;
	b->protocol = ip6->nexthdr;
	return bypass_read_l4(c, bpf_ntohs(ip6->payload_len), b);
}

static __always_inline bool bypass_is_of(const struct bypass_flow *f,
					 const struct bypass_packet *b,
					 __u32 proxy, __u32 mark)
{
	const struct addrs *a = &b->addrs;

	return !((f->addr[0] ^ a->src[0]) | (f->addr[1] ^ a->src[1]) |
		 (f->addr[2] ^ a->dst[0]) | (f->addr[3] ^ a->dst[1])) &&
	       f->ports == b->ports && f->mark == mark && f->proxy == proxy &&
	       f->protocol == b->protocol;
}

/* Does a packet of the flow with this entry bypass the
 * function? Packets that XDP leaves to TC are counted on TC.
 */
static __always_inline enum bypass bypass_answer(struct bypass_flow *f)
{
	__u64 now = bpf_ktime_get_coarse_ns();

	if (now >= f->until)
		return BYPASS_ASK;
	if (!f->done)
		return BYPASS_NO;
	if (!f->left || now >= f->due) {
		if (WS_HOOK == WS_HOOK_TC) {
			f->left = BYPASS_THROUGH_EVERY;
			f->due = now + BYPASS_THROUGH_NS;
		}
		return BYPASS_NO;
	}
	f->left--;
	return BYPASS_YES;
}

#define BYPASS_NO_FLOW 0xffffffffU /* the index of no entry */

/* Does this program look for the flow? If not, the one behind the tail call does. */
#if defined(WS_MPLS) && !defined(WS_MPLS_BYPASS)
#define BYPASS_HERE false
#else
#define BYPASS_HERE true
#endif

#ifdef WS_MPLS
#define BYPASS_PROGRAM WS_PROGRAM_MPLS_BYPASS
#else
#define BYPASS_PROGRAM WS_PROGRAM_BYPASS
#endif

#define BYPASS_IP4 (1U << 31)

/* p has a bypass. who: its key, and BYPASS_IP4; at: the flow's entry;
 * c: at the inner packet. A function of its own, to bound the stack.
 */
static __noinline enum bypass
bypass_judge(struct cursor c, const struct ws_proxy *p, __u32 who, __u32 at)
{
	__u32 proxy = who & ~BYPASS_IP4, mark = p->bypass;
	struct bypass_packet b;
	struct bypass_flow *f;
	enum bypass r;

	r = bypass_read(c, who & BYPASS_IP4, &b);
	if (r != BYPASS_YES && !b.ends)
		return r;
	f = bpf_map_lookup_elem(&ws_bypass_flows, &at);
	if (!f)
		return BYPASS_NO;
	if (bypass_is_of(f, &b, proxy, mark)) {
		if (!b.ends)
			return bypass_answer(f);
		f->until = 0; /* for the packets after it */
		return BYPASS_NO;
	}
	if (b.ends)
		return BYPASS_NO;
	/* Flows that share an entry also share its times:
	 * no flow skips its function for longer.
	 */
	if (WS_HOOK == WS_HOOK_TC) {
		f->until = 0;
		f->addr[0] = b.addrs.src[0];
		f->addr[1] = b.addrs.src[1];
		f->addr[2] = b.addrs.dst[0];
		f->addr[3] = b.addrs.dst[1];
		f->ports = b.ports;
		f->mark = mark;
		f->proxy = proxy;
		f->protocol = b.protocol;
	}
	return BYPASS_ASK;
}

/* The index of a flow's entry. The headend computes the flow label from addresses and ports. */
static __always_inline __u32 bypass_at(const struct endpoint *ep)
{
	return (outer_flow(&ep->outer) ^ ep->hop->proxy) % WS_BYPASS_FLOWS;
}

/* in: the inner packet, in bounds. A truncated packet goes to the function. */
static __always_inline enum bypass bypass_ask(const struct endpoint *ep,
					      const struct ws_proxy *p,
					      const struct ip *in)
{
	__u32 who = ep->hop->proxy | (in->is_ip4 ? BYPASS_IP4 : 0);

	if (inner_fits(ep, in, 0, false))
		return BYPASS_NO;
	return bypass_judge(outer_inner(&ep->outer), p, who, bypass_at(ep));
}
