/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The route to the next node: ws_labels maps its label to its
 * address, and the kernel's routing table has the route. TC only.
 */
#pragma once

#include "lib/encap/mpls.h"
#include "lib/hook.h"
#include "lib/out/route_tc.h"
#include "lib/wire/net.h"

#define ENOENT 2

/* The outer header of a packet, which was pulled before;
 * NULL is a bug, and the packet is dropped.
 */
static __always_inline const struct outer_head *
outer_head(struct __sk_buff *skb)
{
	struct cursor c = ctx_cursor(skb);

	if (!cursor_take(&c, struct eth_hdr))
		return NULL;
	return cursor_take(&c, struct outer_head);
}

/* The route of a packet of len bytes with its labels; see route_ask. The entropy
 * label selects among equal-cost routes: as the flow label, or as ports.
 */
static __always_inline long label_route_ask(struct __sk_buff *skb, __u32 label,
					    __u32 entropy, __u32 len,
					    struct bpf_fib_lookup *p)
{
	const struct ws_label *to = bpf_map_lookup_elem(&ws_labels, &label);

	__builtin_memset(p, 0, sizeof(*p));
	if (!to)
		return -ENOENT;
	p->ifindex = skb->ifindex;
	p->tot_len = len > 65535 ? 65535 : len;
	if (ip6_is_mapped(to->addr)) {
		p->family = AF_INET;
		p->l4_protocol = NEXTHDR_UDP;
		p->sport = entropy;
		p->dport = entropy >> 16;
		p->ipv4_dst = bpf_htonl(bpf_be64_to_cpu(to->addr[1]));
	} else {
		p->family = AF_INET6;
		p->flowinfo = bpf_htonl(entropy);
		__builtin_memcpy(p->ipv6_dst, to->addr, sizeof(p->ipv6_dst));
	}
	return bpf_fib_lookup(skb, p, sizeof(*p), 0);
}

/* The route of the packet as it is; see route_find. */
static __always_inline long outer_route_find(struct __sk_buff *skb,
					     const struct outer_head *h,
					     struct bpf_fib_lookup *p)
{
	return label_route_ask(skb, outer_head_node(h), outer_head_flow(h),
			       frame_longest(skb), p);
}

/* The route of a packet that will have this header, and then len bytes; see route_ask. */
static __always_inline long outer_route_ask(struct __sk_buff *skb,
					    const struct outer_head *h,
					    struct outer_marks marks, __u32 len,
					    struct bpf_fib_lookup *p)
{
	return label_route_ask(skb, outer_head_node(h), marks.entropy, len, p);
}
