/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* From a frame to the entry of its SID, on XDP: for packets
 * as our own headends send them. TC handles all others.
 */
#pragma once

#include "lib/encap/outer_xdp.h"
#include "lib/hook.h"
#include "lib/reason.h"
#include "lib/sr/endpoint.h"
#include "lib/wire/cursor.h"
#include "lib/wire/net.h"

/* From the frame to the entry for its SID, path and epoch; false: not for XDP. */
static __always_inline bool endpoint_parse_xdp(ctx_t *ctx, struct endpoint *ep)
{
	struct cursor c = ctx_cursor(ctx);

	ep->eth = cursor_take(&c, struct eth_hdr);
	if (!ep->eth ||
	    !outer_parse_xdp(ctx, ep->eth, c, &ep->outer, &ep->tlv, &ep->len))
		return false;
	return endpoint_find_hop(ep) == WS_REASON_NONE;
}
