/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* What may leave the domain. TC egress of interfaces to the outside. Here the
 * packets of all ways through the node come together, also of those that no
 * program of ours has seen: interfaces that are not in the plan or were made
 * anew, tunnels that end on the node, the kernel's own SRv6.
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

/* Nothing encapsulated leaves; the SIDs of a domain are its own matter (RFC 8754
 * 5.1 and 7.2).
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

/* A packet that is neither verified here nor the node's own: refused where some
 * chain that ends here requires it, as ws_guard says. Unlike at an ingress no address is spared as
 * the node's own: what goes there does not leave.
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
