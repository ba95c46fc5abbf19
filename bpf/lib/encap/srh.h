/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The segment routing header (RFC 8754). */
#pragma once

#include <waystamp/abi.h>
#include "lib/hook.h"
#include "lib/reason.h"
#include "lib/wire/cursor.h"
#include "lib/wire/ip6_walk.h"
#include "lib/wire/net.h"

/* RFC 8754 2; then come the segment list, last segment first, and the TLVs. */
struct srh {
	__u8 nexthdr;
	__u8 hdrlen; /* 8-octet units, not counting the first */
	__u8 type;
	__u8 segments_left;
	__u8 last_entry;
	__u8 flags;
	__be16 tag;
};
_Static_assert(sizeof(struct srh) == 8, "SRH");

/* Offsets of fields, for ICMP errors. */
#define SRH_HDRLEN_OFF 1
#define SRH_SEGMENTS_LEFT_OFF 3

/* In flags: the O-flag (RFC 9259 2.1). */
#define SRH_FLAG_OAM 0x20

/* Checks the SRH of a packet for a SID of this node: RFC 8754 4.3.1.1, S03
 * to S12, and our bounds. c is at the SRH, and moves to the segment list.
 * *n: entries in the list. All entries, and the whole header, are in bounds.
 */
static __always_inline reason_t srh_check(struct cursor *c, struct srh **out,
					  __u32 *n)
{
	struct srh *srh = cursor_take(c, struct srh);

	if (!srh || (srh->type == ROUTING_TYPE_SRH &&
		     (void *)srh + (srh->hdrlen + 1) * 8 > c->end))
		return REASON(SRH_TRUNCATED);
	if (srh->type != ROUTING_TYPE_SRH)
		return REASON(ROUTING_TYPE);

	*out = srh;
	*n = srh->last_entry + 1;
	if (2 * *n > srh->hdrlen)
		return REASON(SRH_LAST_ENTRY);
	/* Last Entry + 1 is legal: a reduced SRH does not
	 * contain its first segment.
	 */
	if (srh->segments_left > *n)
		return REASON(SRH_SEGMENTS_LEFT);
	if (*n > WS_SEGS_MAX || 8 * (srh->hdrlen - 2 * *n) > WS_TLVS_LEN_MAX)
		return REASON(SRH_TOO_LONG);
	if (srh->nexthdr == NEXTHDR_FRAGMENT)
		return REASON(OUTER_FRAGMENT);
	return WS_REASON_NONE;
}

/* Is the proof TLV the only TLV, directly behind the
 * segment list? Our own headends send it there.
 */
static __always_inline bool tlv_at_once(const struct srh *srh, __u32 n,
					const struct proof_tlv *tlv)
{
	return srh->hdrlen == 2 * n + 3 &&
	       *(const __u16 *)tlv == (WS_TLV_LEN << 8 | WS_TLV_TYPE);
}
