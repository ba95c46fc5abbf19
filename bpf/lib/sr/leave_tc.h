/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The second guard: packets that may leave the domain. TC egress of interfaces
 * to the outside. Every packet that leaves passes here, also one that no program
 * of ours has seen before: from interfaces that are not in the plan or were made
 * again, from tunnels that end on the node, from the kernel's own SRv6.
 */
#pragma once

#include "lib/encap/seen_tc.h"
#include "lib/hook.h"
#include "lib/match/classify.h"
#include "lib/match/rules_tc.h"
#include "lib/node/boundary.h"
#include "lib/node/refuse.h"
#include "lib/reason.h"
#include "lib/sr/guard_tc.h"
#include "lib/sr/origin_tc.h"
#include "lib/wire/ip.h"
#include "lib/wire/net.h"

/* Encapsulated packets do not leave, nor does a packet for
 * a SID of the domain (RFC 8754 5.1 and 7.2).
 */
static __always_inline reason_t leak(struct __sk_buff *skb,
				     const struct ip6_hdr *ip6)
{
	if (in_block(ip6->dst[0]))
		return REASON(LEAK_SID);
	if (has_srh(skb, ip6))
		return REASON(LEAK_SRH);
	return WS_REASON_NONE;
}

/* A packet that was neither verified nor originated here: ws_guard decides
 * about it if a chain that ends here requires it. Own addresses are no
 * exception here, unlike at an ingress: packets to them do not leave.
 */
static __always_inline int leave_plain(struct __sk_buff *skb,
				       const struct ip *in, bool let_go)
{
	struct addrs a = ip_addrs(in);
	struct ws_match prefix, m;

	if (ip_to_is_never_forwarded(in))
		return CTX_PASS;
	prefix = guard(&a);
	m = ruled(skb, sizeof(struct eth_hdr), in->is_ip4, WS_RULE_SUSPECT,
		  prefix);
	if (m.action == WS_MATCH_NONE)
		return CTX_PASS;
	if (m.action == WS_MATCH_MISSING)
		return ws_refuse(skb, REASON(RULES_MISSING_BUG), 0);
	return ws_guard(skb, m.target, match_path(&prefix), REASON(UNVERIFIED),
			let_go);
}
