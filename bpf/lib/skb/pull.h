/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Headers that TC reads must lie in the linear part of the skb. */
#pragma once

#include "lib/hook.h"

/* Moves the packet where less than len of its bytes are linear: every pointer
 * taken before is gone. Fails only where the kernel has no memory; a packet that
 * is shorter is made linear as a whole.
 */
static __always_inline long pull(struct __sk_buff *skb, __u32 len)
{
	if (len > skb->len)
		len = skb->len;
	if ((void *)(long)skb->data + len <= (void *)(long)skb->data_end)
		return 0;
	return bpf_skb_pull_data(skb, len);
}
