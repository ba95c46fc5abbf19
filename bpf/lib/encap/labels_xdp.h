/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* labels_tc.h on XDP: packets with labels, and packets that take a path over labels,
 * go on in programs of their own. If there is no such program, TC does the work.
 */
#pragma once

#include <waystamp/abi.h>
#include "lib/hook.h"
#include "lib/node/boundary.h"
#include "lib/node/maps.h"
#include "lib/wire/net.h"

/* A packet that may have labels; eth may be NULL. Returns the verdict. */
static __always_inline int labels_arrive_xdp(ctx_t *ctx,
					     const struct eth_hdr *eth)
{
	if (eth && has_labels(eth))
		bpf_tail_call(ctx, &ws_programs_xdp, WS_PROGRAM_XDP_CORE);
	return CTX_PASS;
}

/* A packet that takes a path over labels. index: of its headend. Returns the verdict. */
static __always_inline int labels_enter_xdp(ctx_t *ctx, __u32 index)
{
	struct scratch *s = scratch();

	if (!s)
		return CTX_PASS;
	s->headend = index;
	bpf_tail_call(ctx, &ws_programs_xdp, WS_PROGRAM_XDP_EDGE);
	return CTX_PASS;
}
