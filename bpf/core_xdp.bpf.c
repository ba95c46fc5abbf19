/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* XDP on an interface inside the domain. It takes a packet only
 * if it can finish the work; all other packets go on, unchanged,
 * to core_tc.bpf.c, which handles every case and decides the
 * reason of a refusal. XDP itself refuses only wrong proofs and
 * replayed packets, so that a flood of them costs little.
 */
#define WS_XDP
#include "lib/hook.h"
#include "lib/sr/arrive_xdp.h"

SEC("xdp.frags")
int ws_core_xdp(struct xdp_md *ctx)
{
	return arrive_xdp(ctx);
}

char _license[] SEC("license") = "Dual BSD/GPL";
