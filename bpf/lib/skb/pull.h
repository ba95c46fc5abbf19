/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Headers that TC reads must lie in the linear part of the skb. */
#pragma once

#include "lib/hook.h"

/* Makes the first len bytes linear. If they are not, this moves the
 * packet: every pointer taken before is gone. Fails only if the
 * kernel has no memory; a shorter packet is made linear as a whole.
 */
static __always_inline long pull(struct __sk_buff *skb, __u32 len)
{
	if (len > skb->len)
		len = skb->len;
	if ((void *)(long)skb->data + len <= (void *)(long)skb->data_end)
		return 0;
	return bpf_skb_pull_data(skb, len);
}
