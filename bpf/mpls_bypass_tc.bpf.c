/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* A packet with labels for a function that flows may bypass, handed over by mpls_tc.bpf.c, which
 * has no stack left to look for the flow. This program does so, asks connection tracking in a
 * second run if it must, and repeats the endpoint's work; it is compiled from the same sources.
 */
#define WS_MPLS
#define WS_MPLS_BYPASS
#include "lib/hook.h"
#include "lib/detour/bypass_ct_tc.h"

SEC("tc")
int ws_mpls_bypass_tc(struct __sk_buff *skb)
{
	return bypass_program(skb);
}

char _license[] SEC("license") = "Dual BSD/GPL";
