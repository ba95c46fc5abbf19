/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Reads skb->tc_index of a packet that leaves. TC egress only. */
#pragma once

#include "lib/hook.h"
#include "lib/node/maps.h"

/* The index, or 0 if our programs did not set it. A packet keeps its tc_index
 * through a veth from another namespace, in which root can set any value:
 * only our own programs at the ingress of an interface reset it first.
 * ingress_ifindex is the last interface on which the packet arrived; tunnels
 * and veth set it again, and packets that the node originates have none.
 */
static __always_inline __u32 tc_index_read(const struct __sk_buff *skb)
{
	__u32 index = skb->tc_index, ifindex = skb->ingress_ifindex;

	if (!index || !bpf_map_lookup_elem(&ws_ports, &ifindex))
		return 0;
	return index;
}
