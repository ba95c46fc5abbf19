/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* What must not pass a node as a plain packet. TC only. */
#pragma once

#include "lib/hook.h"
#include "lib/match/classify.h"
#include "lib/match/rules_tc.h"
#include "lib/node/boundary.h"
#include "lib/node/refuse.h"
#include "lib/out/forward_tc.h"
#include "lib/reason.h"
#include "lib/wire/ip.h"
#include "lib/wire/net.h"

/* Will the kernel keep this IP packet to itself? It does where it is for one of
 * the node's own addresses, and everywhere if it does not forward at all. For
 * the slow paths: the kernel's tables are asked.
 */
__noinline int ws_is_local(struct __sk_buff *skb, int is_ip4)
{
	struct bpf_fib_lookup p = {};
	struct cursor c;
	struct ip in;
	long rc;

	if (!forward_ip(skb, is_ip4, &c, &in))
		return false;
	rc = is_ip4 ? route_find_ip4(skb, in.hdr, &p) :
		      route_find(skb, in.hdr, &p);
	/* The helper asks the interface. Of IPv6 the kernel asks the whole node, and
	 * the loopback device is as that is.
	 */
	if (rc == BPF_FIB_LKUP_RET_FWD_DISABLED && !is_ip4) {
		p.ifindex = 1;
		rc = bpf_fib_lookup(skb, &p, sizeof(p), 0);
	}
	return rc == BPF_FIB_LKUP_RET_NOT_FWDED ||
	       rc == BPF_FIB_LKUP_RET_FWD_DISABLED;
}

/* A rule's word that an address is the node's own is asked for again: it may
 * have moved while no agent was there to see.
 */
static __always_inline bool is_local(struct __sk_buff *skb,
				     const struct ws_match *m, bool is_ip4)
{
	return m->local && ws_is_local(skb, is_ip4);
}

/* The same addresses as IPv4 packets have, on IPv6 packets: none of ours, and no
 * rule may take one for the other.
 */
static __always_inline bool is_mapped(const struct ip6_hdr *ip6)
{
	return ip6_is_mapped(ip6->dst) || ip6_is_mapped(ip6->src);
}

static __always_inline int refuse_mapped(struct __sk_buff *skb)
{
	return ws_refuse(skb, REASON(MAPPED_ADDRESS), 0);
}

/* A plain packet: refused where some chain that ends here requires it. */
static __always_inline int guard_plain(struct __sk_buff *skb,
				       const struct ip *in)
{
	struct addrs a = ip_addrs(in);
	struct ws_match m = ruled(skb, sizeof(struct eth_hdr), in->is_ip4,
				  WS_RULE_SUSPECT, guard(&a));

	if (m.action == WS_MATCH_NONE || is_local(skb, &m, in->is_ip4))
		return CTX_PASS;
	return ws_refuse(skb,
			 m.action == WS_MATCH_MISSING ?
				 REASON(RULES_MISSING_BUG) :
				 REASON(UNPROVEN),
			 0);
}
