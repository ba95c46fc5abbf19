/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Labels in a packet that is not parsed yet. TC only. */
#pragma once

#include "lib/hook.h"
#include "lib/wire/cursor.h"
#include "lib/wire/net.h"

/* Bytes of the outer header if this node's headend has made
 * it: always 0, since labels name no source.
 */
static __always_inline __u32 outer_own(struct __sk_buff *skb, bool *is_ip4)
{
	(void)skb;
	*is_ip4 = false;
	return 0;
}

/* Moves c to a super-packet's IP header: no super-packet has labels here. */
static __always_inline bool outer_pass(struct __sk_buff *skb, struct cursor *c,
				       __u32 *len)
{
	*len = 0;
	*c = ctx_cursor(skb);
	return cursor_take(c, struct eth_hdr);
}
