/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Whether a packet is segment-routed, whoever made it so: what the boundary of the
 * domain lets neither in nor out. TC only.
 */
#pragma once

#include "lib/encap/srh.h"
#include "lib/hook.h"
#include "lib/out/route_tc.h"
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
	__u32 off = sizeof(struct eth_hdr) + sizeof(*ip6);
	__u32 next;
	__u8 head[4];

	if (!ip6)
		return true;
	next = ip6->nexthdr;
	for (__u32 i = 0; i < EXTENSIONS_MAX; i++) {
		if (!nexthdr_may_hide(next))
			return false;
		if (bpf_skb_load_bytes(skb, off, head, sizeof(head)))
			return true;
		if (next == NEXTHDR_ROUTING && head[2] == ROUTING_TYPE_SRH)
			return true;
		if (next == NEXTHDR_AUTH)
			off += (head[1] + 2) * 4;
		else if (next != NEXTHDR_FRAGMENT)
			off += (head[1] + 1) * 8;
		else if (head[2] || head[3] & 0xf8)
			return false;
		else
			off += 8;
		next = head[0];
	}
	return nexthdr_may_hide(next);
}

static __always_inline bool has_srh(struct __sk_buff *skb,
				    const struct ip6_hdr *ip6)
{
	return ip6_has_extension(ip6) && ws_has_srh(skb);
}
