/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* A super-packet (GSO, GRO) is a train of frames: one stamp, many frames on a
 * wire. TC only.
 */
#pragma once

#include "cursor.h"
#include "hook.h"
#include "net.h"

/* Frames that the packet is on a wire. headers: bytes before the payload that
 * is cut, or fewer, which can only count a frame too many. The kernel knows
 * gso_segs but of packets from guests, and of those that we encapsulated.
 */
static __always_inline __u32 train_frames(const struct __sk_buff *skb,
					  __u32 headers)
{
	__u32 size = skb->gso_size;

	if (!size)
		return 1;
	if (skb->gso_segs)
		return skb->gso_segs;
	if (skb->len <= headers + size)
		return 1;
	return (skb->len - headers + size - 1) / size;
}

/* Bytes of the longest frame's IP packet; c stands behind ip6. */
static __always_inline __u32 train_packet_len(const struct __sk_buff *skb,
					      struct cursor c,
					      const struct ip6_hdr *ip6)
{
	const __u8 *tcp;
	__u32 l4 = 8; /* UDP */

	if (!skb->gso_size)
		return skb->len - sizeof(struct eth_hdr);
	if (ip6->nexthdr == NEXTHDR_TCP) {
		tcp = cursor_take_bytes(&c, 20);
		l4 = tcp ? (tcp[12] >> 4) * 4 : 20;
	}
	return sizeof(struct ip6_hdr) + l4 + skb->gso_size;
}
