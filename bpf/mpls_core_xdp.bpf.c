/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Packets with labels from an interface inside the domain, on XDP: what core_xdp.bpf.c
 * is for SRv6, which hands them over. All that it cannot finish goes on to TC.
 */
#define WS_XDP
#define WS_MPLS
#include "lib/hook.h"
#include "lib/sr/arrive_xdp.h"

SEC("xdp.frags")
int ws_mpls_core_xdp(struct xdp_md *ctx)
{
	return arrive_xdp(ctx);
}

char _license[] SEC("license") = "Dual BSD/GPL";
