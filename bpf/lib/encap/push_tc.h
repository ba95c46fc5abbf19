/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Room for an outer header, on TC. */
#pragma once

#include "lib/hook.h"
#include "lib/node/maps.h"
#include "lib/wire/net.h"

#define EALREADY 114

/* linux/bpf.h since 6.3: the remaining packet is IPv6. */
#define BPF_F_ADJ_ROOM_DECAP_L3_IPV6 (1ULL << 8)

/* The packet is or was encapsulated by a tunnel: the kernel keeps one pair
 * of inner offsets, and they are in use. Without the flag that sets them
 * the kernel also keeps the type IPv4 for a packet that becomes IPv6.
 */
static __always_inline long push_again(struct __sk_buff *skb, __u32 len,
				       bool is_ip4)
{
	const __u32 grown = sizeof(struct ip6_hdr) - sizeof(struct ip4_hdr);
	long rc;

	if (!is_ip4)
		return bpf_skb_adjust_room(skb, len, BPF_ADJ_ROOM_MAC,
					   BPF_F_ADJ_ROOM_FIXED_GSO);
	if (!cfg.decap_l3) {
		/* For a super-packet the helper would also change the inner packet's type. */
		if (skb->gso_size)
			return -EALREADY;
		rc = bpf_skb_change_proto(skb, bpf_htons(ETH_P_IPV6), 0);
		return rc ? rc :
			    bpf_skb_adjust_room(skb, len - grown,
						BPF_ADJ_ROOM_MAC,
						BPF_F_ADJ_ROOM_FIXED_GSO);
	}
	rc = bpf_skb_adjust_room(skb, len + grown, BPF_ADJ_ROOM_MAC,
				 BPF_F_ADJ_ROOM_FIXED_GSO);
	return rc ? rc :
		    bpf_skb_adjust_room(skb, -(__s32)grown, BPF_ADJ_ROOM_MAC,
					BPF_F_ADJ_ROOM_DECAP_L3_IPV6 |
						BPF_F_ADJ_ROOM_FIXED_GSO);
}

/* Inserts len bytes before a packet of this version, and makes it an
 * IPv6 packet. Moves the packet: every pointer taken before is gone.
 */
static __always_inline long push(struct __sk_buff *skb, __u32 len, bool is_ip4)
{
	long rc = bpf_skb_adjust_room(skb, len, BPF_ADJ_ROOM_MAC,
				      BPF_F_ADJ_ROOM_ENCAP_L3_IPV6 |
					      BPF_F_ADJ_ROOM_FIXED_GSO);

	return rc == -EALREADY ? push_again(skb, len, is_ip4) : rc;
}
