/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* A packet from inside the domain, on XDP. */
#pragma once

#include "lib/detour/in_xdp.h"
#include "lib/encap/labels_xdp.h"
#include "lib/encap/outer.h"
#include "lib/hook.h"
#include "lib/node/boundary.h"
#include "lib/sr/dt46_xdp.h"
#include "lib/sr/end_xdp.h"
#include "lib/sr/endpoint_xdp.h"

static __always_inline int arrive_xdp(ctx_t *ctx)
{
	const struct ws_node *node;
	struct endpoint ep = {};

	if (!endpoint_parse_xdp(ctx, &ep))
		return OUTER_IS_IP ? labels_arrive_xdp(ctx, ep.eth) : CTX_PASS;
	if (!endpoint_bind(&ep))
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
		return OUTER_IS_IP ? ad_xdp(ctx, &ep, node) : CTX_PASS;
	}
	return CTX_PASS;
}
