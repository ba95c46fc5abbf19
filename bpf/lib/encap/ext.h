/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Hop-by-hop and destination options between an outer IPv6 header and its SRH
 * (RFC 8200 4.1), which somebody else has put there. One program alone looks for
 * an SRH behind them; the others hand it over such packets.
 */
#pragma once

#include <waystamp/abi.h>
#include "lib/hook.h"
#include "lib/wire/net.h"

/* Hop-by-hop options, which are the first, and destination options. */
#define EXT_HEADERS_MAX 2

static __always_inline bool nexthdr_is_options(__u32 nexthdr)
{
	return nexthdr == NEXTHDR_HOP || nexthdr == NEXTHDR_DEST;
}

/* Bytes of such headers behind the IPv6 header at off, whose next header is next;
 * negative: it is none that we have let pass, since no routing header is behind
 * them. Their options are not looked at.
 */
__noinline int ws_ext_skip(ctx_t *ctx, __u32 off, __u32 next)
{
	__u32 len = 0;
	__u8 head[2];

	off += sizeof(struct ip6_hdr);
	for (__u32 i = 0; i < EXT_HEADERS_MAX; i++) {
		if (!nexthdr_is_options(next))
			break;
		if (ctx_load_bytes(ctx, off + len, head, sizeof(head)))
			return -1;
		next = head[0];
		len += (head[1] + 1) * 8;
	}
	return next == NEXTHDR_ROUTING && len <= WS_EXT_MAX ? (int)len : -1;
}
