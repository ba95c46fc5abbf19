/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Hop-by-hop and destination options between an outer IPv6 header and its
 * SRH (RFC 8200 4.1), which another node has inserted. Only one program
 * looks for an SRH behind them; the others hand such packets over to it.
 */
#pragma once

#include <waystamp/abi.h>
#include "lib/hook.h"
#include "lib/wire/ip6_walk.h"
#include "lib/wire/net.h"

/* Hop-by-hop options, which come first, and destination options. */
#define EXT_HEADERS_MAX 2

/* Bytes of such headers behind the IPv6 header at off, whose next
 * header is next; negative: this node has not passed such a packet,
 * since no routing header follows. The options themselves are not read.
 */
__noinline int ws_ext_skip(ctx_t *ctx, __u32 off, __u32 next)
{
	__u32 first = off + sizeof(struct ip6_hdr);
	struct ip6_walk w = { .off = first, .next = next };

	ip6_walk(ctx, &w, EXT_OPTIONS, EXT_HEADERS_MAX, IP6_WALK_FRAME);
	return w.next == NEXTHDR_ROUTING && w.off - first <= WS_EXT_MAX ?
		       (int)(w.off - first) :
		       -1;
}
