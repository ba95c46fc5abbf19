/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The binding of a packet without an outer header, on TC. */
#pragma once

#include "lib/hook.h"
#include "lib/proof/binding.h"
#include "lib/skb/pull.h"

static __always_inline bool binding_read_plain(struct __sk_buff *skb,
					       const struct ws_share *s,
					       __u64 *binding)
{
	struct cursor c = ctx_cursor(skb);
	const struct eth_hdr *eth = cursor_take(&c, struct eth_hdr);
	__u32 next = NEXTHDR_IPV6;

	if (!eth)
		return false;
	if (eth->proto == bpf_htons(ETH_P_IP))
		next = NEXTHDR_IPV4;
	return binding_read(c, next, s, binding);
}

/* Moves the packet: every pointer taken before is gone. A function of its own:
 * otherwise clang merges its reads of skb->data with the caller's, as 32-bit numbers.
 */
static __noinline bool binding_pull_plain(struct __sk_buff *skb,
					  const struct ws_share *s,
					  __u64 *binding)
{
	/* Usually the headers are linear. */
	if (binding_read_plain(skb, s, binding))
		return true;
	return !pull(skb, sizeof(struct eth_hdr) + TUPLE_LEN) &&
	       binding_read_plain(skb, s, binding);
}
