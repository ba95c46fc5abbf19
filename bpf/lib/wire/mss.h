/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The MSS option of TCP in a SYN (RFC 9293 3.7.1). Both hooks. */
#pragma once

#include "lib/wire/cursor.h"
#include "lib/wire/ip.h"
#include "lib/wire/net.h"

/* Is this a SYN, or may it be one? c: behind an IP header
 * without options.
 */
static __always_inline bool mss_may_be_said(struct cursor c,
					    const struct ip *in)
{
	const struct ip4_hdr *ip4 = in->hdr;
	const struct ip6_hdr *ip6 = in->hdr;
	const struct tcp_hdr *tcp;

	if ((in->is_ip4 ? ip4->protocol : ip6->nexthdr) != NEXTHDR_TCP)
		return false;
	tcp = cursor_take(&c, struct tcp_hdr);
	return !tcp || tcp->flags & TCP_SYN;
}
