/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* What skb->tc_index says of a packet that leaves. TC egress only. */
#pragma once

#include "lib/hook.h"
#include "lib/node/maps.h"

/* The index, or 0 where it is nobody's of ours. It stays with a packet through a
 * veth from another namespace, whose root can write there what it likes: only our
 * own programs at the ingress of an interface zero it first. ingress_ifindex is
 * that of the last interface that the packet came in by; tunnels and veth set it
 * anew, and what the node sends itself has none.
 */
static __always_inline __u32 tc_index_read(const struct __sk_buff *skb)
{
	__u32 index = skb->tc_index, ifindex = skb->ingress_ifindex;

	if (!index || !bpf_map_lookup_elem(&ws_ports, &ifindex))
		return 0;
	return index;
}
