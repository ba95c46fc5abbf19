/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* XDP on an interface inside the domain. Takes a packet only if it can finish
 * it; whatever is out of the ordinary goes on, unchanged, to core_tc.bpf.c, which
 * does the whole job and names the reason of a refusal. Only a proof that fails,
 * or that was here before, is refused here too, so that a flood of them costs
 * little.
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
