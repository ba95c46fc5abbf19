/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Removes labels, on TC. */
#pragma once

#include "lib/encap/mpls_retype_tc.h"
#include "lib/hook.h"
#include "lib/wire/net.h"

/* Removes len bytes before an inner packet of this version. The kernel shortens
 * only IP packets. Moves the packet: every pointer taken before is gone.
 */
static __always_inline long strip(struct __sk_buff *skb, __u32 len, bool is_ip4)
{
	long rc = retype(skb, ip_proto(is_ip4));

	return rc ? rc :
		    bpf_skb_adjust_room(skb, -(__s32)len, BPF_ADJ_ROOM_MAC,
					BPF_F_ADJ_ROOM_FIXED_GSO);
}
