/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* A super-packet (GSO, GRO) stands for a train of frames:
 * one stamp, many frames on the link. TC only.
 */
#pragma once

#include "lib/encap/outer_frame_tc.h"
#include "lib/hook.h"
#include "lib/wire/cursor.h"
#include "lib/wire/ip.h"
#include "lib/wire/net.h"

/* Bytes of the headers that each frame of the train has, from the inner
 * IP header, at c, on. known: the result is exact, not an estimate.
 */
static __always_inline __u32 gso_headers_known(struct cursor c, bool *known)
{
	struct ip in;
	const __u8 *first = c.pos, *tcp;
	__u32 protocol, l4 = 8; /* UDP */
	__u32 header = sizeof(struct ip6_hdr);

	*known = false;
	if ((void *)(first + 1) > c.end || !ip_take(&c, *first >> 4 == 4, &in))
		return 0;
	if (in.is_ip4) {
		header = ip4_header_len(in.hdr);
		if (header < sizeof(struct ip4_hdr))
			header = sizeof(struct ip4_hdr);
		protocol = ((const struct ip4_hdr *)in.hdr)->protocol;
		c.pos += (header - sizeof(struct ip4_hdr)) & 63;
	} else {
		protocol = ((const struct ip6_hdr *)in.hdr)->nexthdr;
	}
	*known = protocol == NEXTHDR_UDP;
	if (protocol == NEXTHDR_TCP) {
		tcp = cursor_take_bytes(&c, 20);
		l4 = tcp ? (tcp[12] >> 4) * 4 : 20;
		*known = tcp;
	}
	return header + l4;
}

static __always_inline __u32 gso_headers(struct cursor c)
{
	bool known;

	return gso_headers_known(c, &known);
}

/* Frames of the packet on the link. outer: bytes before the inner packet,
 * at c. The kernel sets gso_segs, but not for packets from guests, nor
 * for packets whose headers we have changed and that it has not sent yet.
 */
static __always_inline __u32 gso_frames(const struct __sk_buff *skb,
					struct cursor c, __u32 outer)
{
	__u32 size = skb->gso_size, headers;

	if (!size)
		return 1;
	if (skb->gso_segs)
		return skb->gso_segs;
	headers = outer + gso_headers(c);
	if (skb->len <= headers + size)
		return 1;
	return (skb->len - headers + size - 1) / size;
}

/* As gso_frames, but never more than there are, since a replay window
 * counts them: one, if the length of the frames' headers is unknown.
 */
static __always_inline __u32 gso_frames_at_least(const struct __sk_buff *skb,
						 struct cursor c, __u32 outer)
{
	bool known;

	if (!skb->gso_size)
		return 1;
	if (skb->gso_segs)
		return skb->gso_segs;
	gso_headers_known(c, &known);
	return known ? gso_frames(skb, c, outer) : 1;
}

/* Bytes of the longest frame's IP packet, for a packet of
 * all bytes. c: at its IP header.
 */
static __always_inline __u32 gso_packet_len(const struct __sk_buff *skb,
					    struct cursor c, __u32 all)
{
	__u32 longest;

	if (!skb->gso_size)
		return all;
	longest = gso_headers(c) + skb->gso_size;
	return longest < all ? longest : all;
}

/* As gso_packet_len, for a packet with or without an outer header. Not 0. */
static __always_inline __u32 gso_longest(struct __sk_buff *skb)
{
	__u32 all = skb->len - sizeof(struct eth_hdr), outer, longest;
	struct cursor c;

	if (!outer_pass(skb, &c, &outer))
		return all;
	longest = outer + gso_headers(c) + skb->gso_size;
	return longest < all ? longest : all;
}
