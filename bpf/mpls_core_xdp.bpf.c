/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Packets with labels from an interface inside the domain, on XDP; core_xdp.bpf.c does this
 * for SRv6, and hands over packets with labels. Packets that XDP cannot finish go on to TC.
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
