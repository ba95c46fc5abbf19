/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Removes an outer header, on TC. */
#pragma once

#include "lib/hook.h"
#include "lib/node/maps.h"
#include "lib/wire/net.h"

/* linux/bpf.h since 6.3: the remaining packet is IPv4. */
#define BPF_F_ADJ_ROOM_DECAP_L3_IPV4 (1ULL << 7)

/* Kernels before 6.3 have no flag for a remaining packet of
 * IPv4. Their bpf_skb_change_proto removes the last bytes
 * of the outer header, and makes the packet one of IPv4.
 */
static __always_inline long strip_ip4_slowly(struct __sk_buff *skb, __u32 len)
{
	const __u32 rest = sizeof(struct ip6_hdr) - sizeof(struct ip4_hdr);
	long rc = bpf_skb_adjust_room(skb, -(__s32)(len - rest),
				      BPF_ADJ_ROOM_MAC,
				      BPF_F_ADJ_ROOM_FIXED_GSO);

	return rc ? rc : bpf_skb_change_proto(skb, bpf_htons(ETH_P_IP), 0);
}

/* Sets the frame's type to skb->protocol. */
static __always_inline long strip_retype(struct __sk_buff *skb)
{
	const __be16 proto = bpf_htons(ETH_P_IP);

	return bpf_skb_store_bytes(skb, 12, &proto, sizeof(proto), 0);
}

/* Removes len bytes before an inner packet of this version.
 * Moves the packet: every pointer taken before is gone.
 */
static __always_inline long strip(struct __sk_buff *skb, __u32 len, bool is_ip4)
{
	long rc;

	if (!is_ip4)
		return bpf_skb_adjust_room(skb, -(__s32)len, BPF_ADJ_ROOM_MAC,
					   BPF_F_ADJ_ROOM_FIXED_GSO);
	if (!cfg.decap_l3)
		rc = strip_ip4_slowly(skb, len);
	else
		rc = bpf_skb_adjust_room(skb, -(__s32)len, BPF_ADJ_ROOM_MAC,
					 BPF_F_ADJ_ROOM_DECAP_L3_IPV4 |
						 BPF_F_ADJ_ROOM_FIXED_GSO);
	return rc ? rc : strip_retype(skb);
}
