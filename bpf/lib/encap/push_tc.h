/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Room for an outer header, on TC. */
#pragma once

#include "lib/hook.h"
#include "lib/node/maps.h"
#include "lib/wire/net.h"

#define EALREADY 114

/* linux/bpf.h since 6.3: the remaining packet is IPv6. */
#define BPF_F_ADJ_ROOM_DECAP_L3_IPV6 (1ULL << 8)

/* Sets skb->protocol to the frame's type. Of all helpers only the one that
 * takes a VLAN tag out of the frame does, so the frame gets one: the first
 * tag is beside the packet until the second moves it into the frame, and
 * each pop takes one away. A tag that was there is there again.
 */
static __always_inline long protocol_from_frame(struct __sk_buff *skb)
{
	long rc = bpf_skb_vlan_push(skb, bpf_htons(ETH_P_8021Q), 0);

	if (!rc)
		rc = bpf_skb_vlan_push(skb, bpf_htons(ETH_P_8021Q), 0);
	if (!rc)
		rc = bpf_skb_vlan_pop(skb);
	return rc ? rc : bpf_skb_vlan_pop(skb);
}

/* The same for a packet of IPv4 where the kernel has no flag that says what it
 * becomes. bpf_skb_change_proto says so, but makes a super-packet's segments
 * ones of TCP over IPv6, which the inner packet's are not.
 */
static __always_inline long push_again_slowly(struct __sk_buff *skb, __u32 len)
{
	const __u32 grown = sizeof(struct ip6_hdr) - sizeof(struct ip4_hdr);
	const __be16 ip6 = bpf_htons(ETH_P_IPV6), ip4 = bpf_htons(ETH_P_IP);
	long rc;

	if (!skb->gso_size) {
		rc = bpf_skb_change_proto(skb, ip6, 0);
		return rc ? rc :
			    bpf_skb_adjust_room(skb, len - grown,
						BPF_ADJ_ROOM_MAC,
						BPF_F_ADJ_ROOM_FIXED_GSO);
	}
	rc = bpf_skb_adjust_room(skb, len, BPF_ADJ_ROOM_MAC,
				 BPF_F_ADJ_ROOM_FIXED_GSO);
	if (!rc)
		rc = bpf_skb_store_bytes(skb, 12, &ip6, sizeof(ip6), 0);
	if (!rc)
		rc = protocol_from_frame(skb);
	/* The caller sets the type, as behind the other ways. */
	return rc ? rc : bpf_skb_store_bytes(skb, 12, &ip4, sizeof(ip4), 0);
}

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
	if (!cfg.decap_l3)
		return push_again_slowly(skb, len);
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
