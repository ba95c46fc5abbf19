/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The next hops that TC found, for XDP to use for a short while. An entry
 * expires, so that one packet goes through TC, whose neighbour handling keeps
 * the kernel's table alive; user space empties the cache when routes, links or
 * neighbours change.
 */
#pragma once

#include "boundary.h"
#include "hook.h"
#include "maps.h"
#include "net.h"

#define NEXTHOP_FLOWS 16

/* A SID is a /64: what follows is an argument. Any other address counts whole.
 */
static __always_inline struct ws_nexthop_key
nexthop_key_of(__be64 hi, __be64 lo, __u32 flow)
{
	struct ws_nexthop_key k = { .flow = flow % NEXTHOP_FLOWS };

	if (in_block(hi))
		lo = 0;
	__builtin_memcpy(k.addr, &hi, 8);
	__builtin_memcpy(k.addr + 8, &lo, 8);
	return k;
}

static __always_inline struct ws_nexthop_key
nexthop_key(const struct ip6_hdr *ip6, __u32 flow)
{
	return nexthop_key_of(ip6->dst[0], ip6->dst[1], flow);
}

/* The flow of a packet that has its outer header: its label. */
static __always_inline __u32 nexthop_flow(const struct ip6_hdr *ip6)
{
	return bpf_ntohl(ip6->vtc_flow & IP6_FLOW_MASK);
}
