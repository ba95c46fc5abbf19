/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The segment routing header of a packet that is addressed to this node. */
#pragma once

#include <waystamp/abi.h>
#include "lib/hook.h"
#include "lib/wire/cursor.h"
#include "lib/wire/net.h"

/* Offsets of fields that ICMP errors point at. */
#define SRH_HDRLEN_OFF 1
#define SRH_SEGMENTS_LEFT_OFF 3

/* Before the SRH or behind it: nobody here puts fragments together, and a proof
 * is in one of them only.
 */
static __always_inline enum ws_reason outer_fragment(void)
{
	return WS_REASON_OUTER_FRAGMENT;
}

static __always_inline enum ws_reason no_srh(void)
{
	return WS_REASON_NO_SRH;
}

/* RFC 8754 4.3.1.1, S03 to S12, and our bounds. c stands at the SRH
 * and is moved to the segment list. *n: entries in the list, all in bounds, as
 * is the whole header.
 */
static __always_inline enum ws_reason srh_check(struct cursor *c,
						struct srh **out, __u32 *n)
{
	struct srh *srh = cursor_take(c, struct srh);

	if (!srh || (srh->type == ROUTING_TYPE_SRH &&
		     (void *)srh + (srh->hdrlen + 1) * 8 > c->end))
		return WS_REASON_SRH_TRUNCATED;
	if (srh->type != ROUTING_TYPE_SRH)
		return WS_REASON_ROUTING_TYPE;

	*out = srh;
	*n = srh->last_entry + 1;
	if (2 * *n > srh->hdrlen)
		return WS_REASON_SRH_LAST_ENTRY;
	/* One past the last entry is legal: a reduced SRH leaves its first
	 * segment out.
	 */
	if (srh->segments_left > *n)
		return WS_REASON_SRH_SEGMENTS_LEFT;
	if (*n > WS_SEGS_MAX || 8 * (srh->hdrlen - 2 * *n) > WS_TLVS_LEN_MAX)
		return WS_REASON_SRH_TOO_LONG;
	if (srh->nexthdr == NEXTHDR_FRAGMENT)
		return outer_fragment();
	return WS_REASON_NONE;
}

/* True where the proof TLV is the only one, right behind the segment list: what
 * our own headends send.
 */
static __always_inline bool tlv_at_once(const struct srh *srh, __u32 n,
					const struct proof_tlv *tlv)
{
	return srh->hdrlen == 2 * n + 3 &&
	       *(const __u16 *)tlv == (WS_TLV_LEN << 8 | WS_TLV_TYPE);
}
