/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* A plain packet enters the path that takes it. TC ingress only. */
#pragma once

#include "lib/hook.h"
#include "lib/node/refuse.h"
#include "lib/out/forward_tc.h"
#include "lib/reason.h"
#include "lib/skb/socket.h"
#include "lib/sr/edge_tc.h"
#include "lib/sr/headend_tc.h"
#include "lib/wire/ip.h"
#include "lib/wire/net.h"

/* Bytes of an IPv6 packet in a frame with room for so many
 * bytes; 0: its length is wrong.
 */
static __always_inline __u32 enter_ip6_len(const struct __sk_buff *skb,
					   const struct ip6_hdr *ip6,
					   __u32 room)
{
	__u32 len = ip6_len(ip6);

	if (!skb->gso_size)
		return len <= room ? len : 0;
	/* A super-packet too long for its length field has 0 there. */
	return len == room || !ip6->payload_len ? room : 0;
}

/* A packet that a path takes, at an ingress. Its length gets the checks
 * that the kernel would make, which inside a tunnel it would bypass.
 * IPv4 has more checks, after which the headers must be found again.
 */
static __always_inline int enter(struct __sk_buff *skb, struct cursor c,
				 struct ip *in, __u32 index)
{
	struct scratch *s = scratch();
	__u32 len;
	reason_t r;

	if (socket_is_tcp(skb)) {
		if (socket_detach(skb))
			return CTX_COPIED;
		if (!forward_ip(skb, in->is_ip4, &c, in))
			return ws_refuse(skb, REASON(BOUNDS_BUG), 0);
	}
	if (!in->is_ip4) {
		len = enter_ip6_len(skb, in->hdr,
				    skb->len - sizeof(struct eth_hdr));
		if (!len)
			return ws_refuse(skb, REASON(IP6_LENGTH), 0);
	} else {
		/* s->entered instead of the stack, which is full. */
		if (!s)
			return ws_refuse(skb, REASON(BOUNDS_BUG), 0);
		r = ws_edge_ip4(skb, &s->entered);
		if (r)
			return ws_refuse(skb, r, 0);
		len = s->entered;
		if (!forward_ip(skb, true, &c, in))
			return ws_refuse(skb, REASON(BOUNDS_BUG), 0);
	}
	return headend_tc(skb, c, in, len, index, false);
}
