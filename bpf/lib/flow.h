/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* One number per inner flow, the same on both hooks. */
#pragma once

#include "cursor.h"
#include "net.h"

/* Not cryptographic: spreads flows over equal-cost paths. c stands behind ip6.
 * Fragments and unknown protocols count by address alone, so that all of a
 * datagram goes one way.
 */
static __always_inline __u32 flow_hash(struct cursor c,
				       const struct ip6_hdr *ip6)
{
	__u64 h = ip6->src[0] ^ ip6->dst[0] * 0x9e3779b97f4a7c15ULL;
	const __u32 *ports;

	h ^= (ip6->src[1] * 0xbf58476d1ce4e5b9ULL) ^ ip6->dst[1];
	h ^= ip6->nexthdr;
	if (ip6->nexthdr == NEXTHDR_TCP || ip6->nexthdr == NEXTHDR_UDP) {
		ports = cursor_take(&c, __u32);
		if (ports)
			h ^= (__u64)*ports << 16;
	}
	h = (h ^ h >> 30) * 0xbf58476d1ce4e5b9ULL;
	h = (h ^ h >> 27) * 0x94d049bb133111ebULL;
	return h >> 32;
}

/* RFC 8754 5.1 has the source set the flow label; 0 would mean none. */
static __always_inline __be32 flow_label(__u32 hash)
{
	__u32 label = hash & 0xfffff;

	return bpf_htonl(label ? label : 1);
}
