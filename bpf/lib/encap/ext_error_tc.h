/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The ICMP errors about options before an SRH. TC only. */
#pragma once

#include "lib/encap/ext_tc.h"
#include "lib/hook.h"
#include "lib/node/refuse.h"
#include "lib/out/icmp_tc.h"
#include "lib/reason.h"
#include "lib/wire/icmp.h"
#include "lib/wire/net.h"

/* Refuses a packet for the result of ws_ext_find. */
static __always_inline int ext_refuse(struct __sk_buff *skb,
				      const struct ext_found *f)
{
	int verdict = ws_refuse(skb, f->bad, 0);
	__u32 code;

	if (!f->pointer)
		return verdict;
	switch (reason_of(f->bad)) {
	/* RFC 8986 4.1.1 */
	case WS_REASON_NO_SRH:
		code = ICMP6_PARAMETER_UPPER;
		break;
	/* RFC 8200 4.2 */
	case WS_REASON_OPTION_UNKNOWN:
		code = ICMP6_PARAMETER_OPTION;
		break;
	default: /* RFC 8200 4: the Next Header is unrecognized at this place. */
		code = ICMP6_PARAMETER_NEXT;
	}
	return ws_icmp6(skb, sizeof(struct eth_hdr),
			ICMP6_ERROR(ICMP6_PARAMETER, code, 0), f->pointer);
}
