/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The addresses on which clients connect to a gateway. TC only. */
#pragma once

#include "lib/hook.h"
#include "lib/node/maps.h"
#include "lib/wire/ip.h"
#include "lib/wire/net.h"

/* The key in ws_proxies of the gateway that a packet is addressed to; 0: none.
 * TCP not right behind the IP header, and fragments, are for no gateway: the
 * egress's guard refuses them for services. Does not move the packet.
 */
__noinline int ws_service_of(struct __sk_buff *skb, int is_ip4)
{
	struct ws_service_key k = {};
	__u32 at = sizeof(struct eth_hdr);
	union {
		struct ip4_hdr ip4;
		struct ip6_hdr ip6;
	} h;
	const __u32 *proxy;

	if (is_ip4) {
		if (bpf_skb_load_bytes(skb, at, &h.ip4, sizeof(h.ip4)) ||
		    h.ip4.protocol != NEXTHDR_TCP || ip4_is_fragment(&h.ip4))
			return 0;
		k.addr[1] = ip4_mapped(h.ip4.dst);
		at += ip4_header_len(&h.ip4);
	} else {
		if (bpf_skb_load_bytes(skb, at, &h.ip6, sizeof(h.ip6)) ||
		    h.ip6.nexthdr != NEXTHDR_TCP)
			return 0;
		k.addr[0] = h.ip6.dst[0];
		k.addr[1] = h.ip6.dst[1];
		at += sizeof(h.ip6);
	}
	if (bpf_skb_load_bytes(skb, at + offsetof(struct tcp_hdr, dport),
			       &k.port, sizeof(k.port)))
		return 0;
	proxy = bpf_map_lookup_elem(&ws_services, &k);
	return proxy ? *proxy : 0;
}
