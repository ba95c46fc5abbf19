/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The way out of a node on XDP: only by what TC learned a moment ago. */
#pragma once

#include "hook.h"
#include "maps.h"
#include "net.h"
#include "nexthop.h"

/* NULL: TC must look. len: of the IP packet as it will leave. */
static __always_inline const struct ws_nexthop *
nexthop_find(const struct ws_nexthop_key *key, __u32 len)
{
	const struct ws_nexthop *n = bpf_map_lookup_elem(&ws_nexthops, key);

	if (!n || n->expires <= bpf_ktime_get_coarse_ns() || len > n->mtu)
		return NULL;
	return n;
}

static __always_inline int nexthop_take(struct eth_hdr *eth,
					const struct ws_nexthop *n)
{
	__builtin_memcpy(eth->dst, n->dmac, sizeof(eth->dst));
	__builtin_memcpy(eth->src, n->smac, sizeof(eth->src));
	eth->proto = bpf_htons(ETH_P_IPV6);
	return bpf_redirect(n->ifindex, 0);
}
