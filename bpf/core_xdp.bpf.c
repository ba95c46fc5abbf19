/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* XDP on an interface inside the domain. Takes a packet only if it can finish
 * it; whatever is out of the ordinary goes on, unchanged, to core_tc.bpf.c, which
 * does the whole job and names the reason of a refusal. Only a proof that fails,
 * or that was here before, is refused here too, so that a flood of them costs
 * little.
 */
#define WS_XDP
#include "lib/hook.h"
#include "lib/detour/in_xdp.h"
#include "lib/node/boundary.h"
#include "lib/sr/dt46_xdp.h"
#include "lib/sr/end_xdp.h"
#include "lib/sr/endpoint_xdp.h"

SEC("xdp.frags")
int ws_core_xdp(struct xdp_md *ctx)
{
	const struct ws_node *node;
	struct endpoint ep = {};

	if (!endpoint_parse_xdp(ctx, &ep) || !endpoint_bind(&ep))
		return CTX_PASS;
	node = node_armed();
	if (!node)
		return CTX_PASS;
	switch (ep.hop->behaviour) {
	case WS_BEHAVIOUR_END:
		return end_xdp(ctx, &ep, node);
	case WS_BEHAVIOUR_END_DT46:
		return dt46_xdp(ctx, &ep, node);
	case WS_BEHAVIOUR_END_AD:
		return ad_xdp(ctx, &ep, node);
	}
	return CTX_PASS;
}

char _license[] SEC("license") = "Dual BSD/GPL";
