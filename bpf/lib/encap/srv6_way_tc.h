/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The route to the next segment, from the kernel's tables. TC only. */
#pragma once

#include "lib/encap/srv6.h"
#include "lib/hook.h"
#include "lib/out/route_tc.h"
#include "lib/wire/net.h"

/* The outer header of a packet, which was pulled before;
 * NULL is a bug, and the packet is dropped.
 */
static __always_inline const struct outer_head *
outer_head(struct __sk_buff *skb)
{
	return (const struct outer_head *)forward_ip6(skb);
}

/* The route of the packet as it is; see route_find. */
static __always_inline long outer_route_find(struct __sk_buff *skb,
					     const struct outer_head *h,
					     struct bpf_fib_lookup *p)
{
	return route_find(skb, &h->ip6, p);
}

/* The route of a packet that will have this header, and then len bytes; see route_ask. */
static __always_inline long outer_route_ask(struct __sk_buff *skb,
					    const struct outer_head *h,
					    struct outer_marks marks, __u32 len,
					    struct bpf_fib_lookup *p)
{
	__builtin_memset(p, 0, sizeof(*p));
	p->flowinfo = marks.vtc_flow & ~IP6_VERSION_MASK;
	return route_ask(skb, &h->ip6, len, p);
}
