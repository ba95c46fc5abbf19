/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* A packet for a SID of this node with options before its SRH, handed
 * over by the program of any TC hook (lib/encap/ext_tc.h). Compiled
 * from the sources of that program, with a variable offset of the SRH.
 */
#define WS_EXT
#include "lib/hook.h"
#include "lib/sr/endpoint_tc.h"
#include "lib/encap/ext_tc.h"
#include "lib/out/forward_tc.h"

SEC("tc")
int ws_ext_tc(struct __sk_buff *skb)
{
	__u32 todo = skb->cb[0], exit = skb->cb[1];

	if (todo == EXT_LEAVES)
		return ws_forward(skb, exit, WAY_UNKNOWN);
	if (todo == EXT_LEAVES_OUT)
		return forward_out(skb, EXIT_NONE, false);
	return endpoint_tc(skb, todo == EXT_ARRIVES);
}

char _license[] SEC("license") = "Dual BSD/GPL";
