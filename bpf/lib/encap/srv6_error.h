/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The ICMP errors about outer headers. TC only. */
#pragma once

#include "lib/encap/ext_tc.h"
#include "lib/encap/srh.h"
#include "lib/encap/srv6.h"
#include "lib/hook.h"
#include "lib/node/refuse.h"
#include "lib/out/icmp_tc.h"
#include "lib/reason.h"
#include "lib/wire/icmp.h"
#include "lib/wire/net.h"

/* The ICMP error, as ICMP6_ERROR, for a packet that a SID refuses
 * with reason r; 0: none. Packets that may be attacks get no error.
 */
static __always_inline __u32 outer_error(reason_t r, const struct outer *o)
{
	__u32 srh = sizeof(struct ip6_hdr) + outer_ext(o);

	switch (reason_of(r)) {
	case WS_REASON_HOP_LIMIT:
		return ICMP6_ERROR(ICMP6_TIME_EXCEEDED, 0, 0);
	/* RFC 8754 4.3.1.1 and RFC 8986 4.8 S02 */
	case WS_REASON_SRH_LAST_ENTRY:
	case WS_REASON_SRH_SEGMENTS_LEFT:
	case WS_REASON_SEGMENTS_REMAIN:
		return ICMP6_ERROR(ICMP6_PARAMETER, ICMP6_PARAMETER_FIELD,
				   srh + SRH_SEGMENTS_LEFT_OFF);
	/* RFC 8754 2.1 */
	case WS_REASON_TLV_OVERRUN:
		return ICMP6_ERROR(ICMP6_PARAMETER, ICMP6_PARAMETER_FIELD,
				   srh + SRH_HDRLEN_OFF);
	/* RFC 8986 4.1.1: the upper layer is not for this SID. */
	case WS_REASON_NO_SRH:
		return ICMP6_ERROR(ICMP6_PARAMETER, ICMP6_PARAMETER_UPPER, srh);
	case WS_REASON_UPPER_LAYER:
	case WS_REASON_INNER_PROTOCOL:
		return ICMP6_ERROR(ICMP6_PARAMETER, ICMP6_PARAMETER_UPPER,
				   srh + (o->srh->hdrlen + 1) * 8);
	default:
		return 0;
	}
}
