/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The outer header, and its length, in a packet that is not
 * parsed yet. TC only.
 */
#pragma once

#include "lib/encap/ext_tc.h"
#include "lib/encap/srh.h"
#include "lib/hook.h"
#include "lib/node/maps.h"
#include "lib/wire/cursor.h"
#include "lib/wire/net.h"

/* Bytes of the outer header if this node's own headend has
 * made it; else 0. *is_ip4: the inner packet is IPv4.
 */
static __always_inline __u32 outer_own(struct __sk_buff *skb, bool *is_ip4)
{
	struct cursor c = ctx_cursor(skb);
	const struct ip6_hdr *ip6;
	const struct srh *srh;
	__u32 ext = ext_len(skb);

	*is_ip4 = false;
	cursor_take(&c, struct eth_hdr);
	ip6 = cursor_take(&c, struct ip6_hdr);
	c.pos += ext;
	srh = cursor_take(&c, struct srh);
	if (!ip6 || !srh || !ip6_is_ip6(ip6) ||
	    (!ext && ip6->nexthdr != NEXTHDR_ROUTING) ||
	    ip6->src[0] != cfg.address[0] || ip6->src[1] != cfg.address[1])
		return 0;
	*is_ip4 = srh->nexthdr == NEXTHDR_IPV4;
	return sizeof(*ip6) + ext + (srh->hdrlen + 1) * 8;
}

/* Moves c behind the outer header, of *len bytes, or to the packet's
 * IP header if it has no outer header. False: the packet is truncated.
 */
static __always_inline bool outer_pass(struct __sk_buff *skb, struct cursor *c,
				       __u32 *len)
{
	__u32 ext = ext_len(skb);
	const struct ip6_hdr *ip6;
	const struct srh *srh;

	*len = 0;
	*c = ctx_cursor(skb);
	cursor_take(c, struct eth_hdr);
	ip6 = c->pos;
	if ((void *)(ip6 + 1) > c->end)
		return false;
	if (ip6_is_ip6(ip6) && (ext || ip6->nexthdr == NEXTHDR_ROUTING)) {
		srh = (void *)(ip6 + 1) + ext;
		if ((void *)(srh + 1) > c->end)
			return false;
		*len = sizeof(*ip6) + ext + (srh->hdrlen + 1) * 8;
		c->pos += *len;
	}
	return true;
}
