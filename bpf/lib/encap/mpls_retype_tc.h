/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Sets the type of a packet for the kernel, on TC. */
#pragma once

#include "lib/hook.h"
#include "lib/wire/net.h"

#define VLAN_BYTES 4

/* Sets the frame's type and skb->protocol to proto, in the host's order. No
 * helper sets MPLS. But removing a VLAN tag sets the type that follows the tag:
 * this pushes two tags, one of which lies in the frame, and overwrites the type
 * behind that one. Moves the packet: every pointer taken before is gone.
 */
static __always_inline long retype(struct __sk_buff *skb, __u32 proto)
{
	__be16 type = bpf_htons(proto);
	long rc = bpf_skb_vlan_push(skb, bpf_htons(ETH_P_8021Q), 1);

	if (!rc)
		rc = bpf_skb_vlan_push(skb, bpf_htons(ETH_P_8021Q), 1);
	if (!rc)
		rc = bpf_skb_store_bytes(
			skb,
			__builtin_offsetof(struct eth_hdr, proto) + VLAN_BYTES,
			&type, sizeof(type), 0);
	if (!rc)
		rc = bpf_skb_vlan_pop(skb);
	return rc ? rc : bpf_skb_vlan_pop(skb);
}
