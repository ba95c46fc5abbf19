/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Packets that a node originates. TC egress only. */
#pragma once

#include "lib/hook.h"
#include "lib/wire/ip.h"
#include "lib/wire/net.h"

/* Does the node originate this packet? New fragments that the kernel makes of
 * a forwarded packet have lost the ingress interface; a packet of a socket
 * still has the socket. A Fragment header may be behind other headers.
 */
static __always_inline bool is_from_this_node(const struct __sk_buff *skb,
					      const struct ip *in)
{
	const struct ip6_hdr *ip6 = in->hdr;
	bool fragment = in->is_ip4 ? ip4_is_fragment(in->hdr) :
				     ip6_has_extension(ip6);

	return !skb->ingress_ifindex && (!fragment || skb->sk);
}
