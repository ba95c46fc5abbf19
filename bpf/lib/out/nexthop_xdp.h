/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The way out of a node on XDP: only by a next hop that TC has found. */
#pragma once

#include "lib/hook.h"
#include "lib/node/boundary.h"
#include "lib/node/maps.h"
#include "lib/out/nexthop.h"
#include "lib/wire/net.h"

/* May a packet use n, which may be NULL? len: of the IP
 * packet as it will leave. False: not for XDP.
 */
static __always_inline bool nexthop_takes(const struct ws_nexthop *n, __u32 len)
{
	return n && n->xdp && len <= n->mtu;
}

/* Bytes of the IP packet in a frame, with the bytes behind its
 * end. No helper, which takes as long as two look-ups, is called
 * if the first buffer ends exactly where the header's length says.
 */
static __always_inline __u32 xdp_packet_len(ctx_t *ctx,
					    const struct ip6_hdr *ip6,
					    const void *end)
{
	__u32 payload = bpf_ntohs(ip6->payload_len);

	if (end - (const void *)(ip6 + 1) == payload)
		return sizeof(*ip6) + payload;
	return ctx_len(ctx) - sizeof(struct eth_hdr);
}
