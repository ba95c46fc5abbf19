/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* From a frame to the entry of its SID, on XDP: for packets as our own headends
 * send them. All others are left to TC.
 */
#pragma once

#include "lib/encap/srh.h"
#include "lib/hook.h"
#include "lib/out/nexthop_xdp.h"
#include "lib/reason.h"
#include "lib/sr/endpoint.h"
#include "lib/wire/cursor.h"
#include "lib/wire/net.h"

/* From the frame to the entry for its SID, path and epoch; false: not for XDP. */
static __always_inline bool endpoint_parse_xdp(ctx_t *ctx, struct endpoint *ep)
{
	struct cursor c = ctx_cursor(ctx);

	ep->end = c.end;
	ep->eth = cursor_take(&c, struct eth_hdr);
	if (!ep->eth || !eth_is_ip6_unicast(ep->eth))
		return false;
	ep->ip6 = cursor_take(&c, struct ip6_hdr);
	if (!ep->ip6 || !ip6_is_ip6(ep->ip6) || !in_locator(ep->ip6->dst[0]) ||
	    ep->ip6->nexthdr != NEXTHDR_ROUTING)
		return false;
	ep->len = xdp_packet_len(ctx, ep->ip6, ep->end);
	if (sizeof(*ep->ip6) + bpf_ntohs(ep->ip6->payload_len) > ep->len)
		return false;
	if (srh_check(&c, &ep->srh, &ep->segments))
		return false;
	ep->list = c.pos;
	ep->tlv = c.pos + 16 * ep->segments;
	if ((void *)(ep->tlv + 1) > ep->end ||
	    !tlv_at_once(ep->srh, ep->segments, ep->tlv))
		return false;
	return endpoint_find_hop(ep) == WS_REASON_NONE;
}
