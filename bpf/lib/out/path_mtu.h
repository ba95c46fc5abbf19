/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* What the links of a chain take, as a headend has been told (RFC 8201). The kernel
 * learns nothing from an error about a packet with an SRH: its destination when
 * it was too long is not the one that it was sent to.
 */
#pragma once

#include "lib/node/maps.h"
#include "lib/wire/icmp.h"

/* The most that the chain is known to carry where a packet of that length is
 * longer; 0: it is not. An IPv6 sender sends 1280 bytes whatever it is told (RFC
 * 8200 5): to refuse those on somebody's word would be the end of its traffic.
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
