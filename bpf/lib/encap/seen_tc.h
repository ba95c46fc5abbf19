/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Whether a packet is segment-routed, whoever made it so: what the boundary of the
 * domain lets neither in nor out. TC only.
 */
#pragma once

#include "lib/hook.h"
#include "lib/out/route_tc.h"
#include "lib/wire/ip6_walk.h"
#include "lib/wire/net.h"

/* Extension headers that are looked through for an SRH. */
#define EXTENSIONS_MAX 4

/* Is there an SRH among the headers before the upper layer? What has more of
 * them than we look through, or is not whole, counts as if there were. Of a
 * fragmented packet the first fragment has it, without which the others are
 * nothing.
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
