/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The MTU of a chain's links, from ICMP errors to the headend (RFC 8201).
 * The kernel does not learn it from an error about a packet with an SRH: the
 * packet's destination at that point was another segment than the first.
 */
#pragma once

#include "lib/node/maps.h"
#include "lib/wire/icmp.h"

/* The known MTU of the chain if a packet of this length is longer;
 * else 0. An IPv6 sender sends packets of 1280 bytes for any MTU (RFC
 * 8200 5): refusing those for an ICMP error would stop its traffic.
 */
static __always_inline __u32 path_mtu_exceeded(const struct ws_headend *h,
					       __u32 packet_len, bool is_ip4)
{
	__u32 index = h->stats;
	const struct ws_path_mtu *m = bpf_map_lookup_elem(&ws_path_mtus,
							  &index);

	if (!m || packet_len <= m->mtu ||
	    (!is_ip4 && packet_len <= IP6_MIN_MTU) || !m->mtu ||
	    m->path != h->path || m->expires <= bpf_ktime_get_coarse_ns())
		return 0;
	return m->mtu;
}
