/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Room for an outer header, on TC. */
#pragma once

#include "hook.h"

#define EALREADY 114

/* Moves the packet: every pointer taken before is gone. */
static __always_inline long push(struct __sk_buff *skb, __u32 len)
{
	long rc = bpf_skb_adjust_room(skb, len, BPF_ADJ_ROOM_MAC,
				      BPF_F_ADJ_ROOM_ENCAP_L3_IPV6 |
					      BPF_F_ADJ_ROOM_FIXED_GSO);

	/* The packet is a tunnel's already, or once was: the kernel keeps one
	 * pair of inner offsets, and it is taken.
	 */
	if (rc == -EALREADY)
		rc = bpf_skb_adjust_room(skb, len, BPF_ADJ_ROOM_MAC,
					 BPF_F_ADJ_ROOM_FIXED_GSO);
	return rc;
}
