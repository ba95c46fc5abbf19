/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Is a packet segment-routed, by this domain or by another one? The
 * boundary of the domain lets such packets neither in nor out. TC only.
 */
#pragma once

#include "lib/hook.h"
#include "lib/out/route_tc.h"
#include "lib/wire/ip6_walk.h"
#include "lib/wire/net.h"

/* Extension headers in which an SRH is searched. */
#define EXTENSIONS_MAX 4

/* Is there an SRH among the headers before the upper layer? A
 * packet with more headers, or a truncated one, counts as if
 * it had an SRH. In a fragmented packet the first fragment
 * has it; without the first the other fragments are useless.
 */
__noinline int ws_has_srh(struct __sk_buff *skb)
{
	const struct ip6_hdr *ip6 = forward_ip6(skb);
	struct ip6_walk w = { .off = sizeof(struct eth_hdr) + sizeof(*ip6) };

	if (!ip6)
		return true;
	w.next = ip6->nexthdr;
	ip6_walk(skb, &w, EXT_KNOWN, EXTENSIONS_MAX, IP6_WALK_FRAME);
	if (w.srh || w.cut)
		return true;
	return !w.later && nexthdr_is(w.next, EXT_KNOWN);
}

static __always_inline bool has_srh(struct __sk_buff *skb,
				    const struct ip6_hdr *ip6)
{
	return ip6_has_extension(ip6) && ws_has_srh(skb);
}
