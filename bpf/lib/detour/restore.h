/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* A packet that has its outer header back, before it goes on. Both hooks. */
#pragma once

#include "lib/encap/outer_kept.h"
#include "lib/hook.h"
#include "lib/node/maps.h"
#include "lib/proof/trace.h"
#include "lib/wire/net.h"

/* Adapts the header to the packet that the function has sent,
 * and stamps it. False: the header was not kept for this packet.
 */
static __always_inline bool
restore_finish(ctx_t *ctx, const struct ws_cached *c, const struct ws_hop *hop,
	       __u64 binding, __u32 outer_len, __u32 inner_len)
{
	bool traced;
	struct proof_tlv *tlv = outer_finish_kept(ctx, c->tlv_off, outer_len,
						  inner_len, &traced);

	if (!tlv)
		return false;
	stamp_traced(ctx, tlv, hop, binding, traced);
	return true;
}
