/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Room for labels, on TC. */
#pragma once

#include "lib/encap/mpls_retype_tc.h"
#include "lib/hook.h"
#include "lib/wire/net.h"

/* Inserts len bytes before a packet and makes it one of type MPLS, also
 * for a device that computes checksums: with the type IP it would write
 * wrong ones. Moves the packet: every pointer taken before is gone.
 */
static __always_inline long push(struct __sk_buff *skb, __u32 len, bool is_ip4)
{
	long rc = bpf_skb_adjust_room(skb, len, BPF_ADJ_ROOM_MAC,
				      BPF_F_ADJ_ROOM_FIXED_GSO);

	(void)is_ip4;
	return rc ? rc : retype(skb, ETH_P_MPLS_UC);
}
