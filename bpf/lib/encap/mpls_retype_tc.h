/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* What the kernel takes a packet for, on TC. */
#pragma once

#include "lib/hook.h"
#include "lib/wire/net.h"

#define VLAN_BYTES 4

/* Makes the frame's type, and what the kernel takes the packet for, one of proto, in the
 * host's order. No helper does that for labels. But a tag that is taken off names what was
 * behind it: of two tags one lies in the frame, and what is behind that is written over.
 * Moves the packet: every pointer taken before is gone.
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
