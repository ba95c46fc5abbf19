/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* A packet of a flow that may bypass its function (lib/detour/bypass.h),
 * handed over by the program of any TC hook. This program asks the kernel's
 * connection tracking, which some kernels do not offer to programs, and
 * then repeats the endpoint's work; it is compiled from the same sources.
 */
#include "lib/hook.h"
#include "lib/detour/bypass_ct_tc.h"

SEC("tc")
int ws_bypass_tc(struct __sk_buff *skb)
{
	return bypass_program(skb);
}

char _license[] SEC("license") = "Dual BSD/GPL";
