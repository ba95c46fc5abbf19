/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* One number per inner flow, the same on both hooks. */
#pragma once

#include "lib/wire/cursor.h"
#include "lib/wire/ip.h"
#include "lib/wire/net.h"

/* Not cryptographic: spreads flows over equal-cost paths. */
static __always_inline __u32 flow_mix(__u64 h)
{
	h = (h ^ h >> 30) * 0xbf58476d1ce4e5b9ULL;
	h = (h ^ h >> 27) * 0x94d049bb133111ebULL;
	return h >> 32;
}

static __always_inline __u64 flow_ports(struct cursor c, __u32 protocol)
{
	const __u32 *ports;

	if (protocol != NEXTHDR_TCP && protocol != NEXTHDR_UDP)
		return 0;
	ports = cursor_take(&c, __u32);
	return ports ? (__u64)*ports << 16 : 0;
}

static __always_inline __u32 flow_hash_ip4(struct cursor c,
					   const struct ip4_hdr *ip4)
{
	__u64 h = ((__u64)ip4->src << 32 | ip4->dst) * 0x9e3779b97f4a7c15ULL;

	h ^= ip4->protocol;
	c.pos += (ip4_header_len(ip4) - sizeof(*ip4)) & 63;
	if (!ip4_is_fragment(ip4))
		h ^= flow_ports(c, ip4->protocol);
	return flow_mix(h);
}

/* c: behind the header, before an IPv4 header's options.
 * Fragments and unknown protocols are hashed by addresses
 * only, so that all of a datagram takes one path.
 */
static __always_inline __u32 flow_hash(struct cursor c, const struct ip *in)
{
	const struct ip6_hdr *ip6 = in->hdr;
	__u64 h;

	if (in->is_ip4)
		return flow_hash_ip4(c, in->hdr);
	h = ip6->src[0] ^ ip6->dst[0] * 0x9e3779b97f4a7c15ULL;
	h ^= (ip6->src[1] * 0xbf58476d1ce4e5b9ULL) ^ ip6->dst[1];
	h ^= ip6->nexthdr;
	h ^= flow_ports(c, ip6->nexthdr);
	return flow_mix(h);
}

/* By RFC 8754 5.1 the source sets the flow label; 0 would mean none. */
static __always_inline __be32 flow_label(__u32 hash)
{
	__u32 label = hash & 0xfffff;

	return bpf_htonl(label ? label : 1);
}
