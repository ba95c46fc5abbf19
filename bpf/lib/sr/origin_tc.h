/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* What a node has sent itself. TC egress only. */
#pragma once

#include "lib/hook.h"
#include "lib/wire/ip.h"
#include "lib/wire/net.h"

/* Has the node sent this itself, and not for somebody else? Fragments that the
 * kernel makes anew of a forwarded packet have forgotten where it came in; what a
 * socket sends still has the socket. A Fragment header may stand behind others.
 */
static __always_inline bool is_from_this_node(const struct __sk_buff *skb,
					      const struct ip *in)
{
	const struct ip6_hdr *ip6 = in->hdr;
	bool fragment = in->is_ip4 ? ip4_is_fragment(in->hdr) :
				     ip6_has_extension(ip6);

	return !skb->ingress_ifindex && (!fragment || skb->sk);
}
