/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* A SID's answer to the source of a packet that it refuses. TC only. */
#pragma once

#include "lib/encap/outer_error.h"
#include "lib/hook.h"
#include "lib/node/refuse.h"
#include "lib/out/icmp_tc.h"
#include "lib/reason.h"
#include "lib/sr/endpoint.h"
#include "lib/wire/net.h"

/* Refuses a packet at a SID, and sends its source the ICMP error of the standards, if any. */
static __always_inline int
endpoint_refuse(struct __sk_buff *skb, const struct endpoint *ep, reason_t r)
{
	__u32 error = outer_error(r, &ep->outer);
	int verdict = ws_refuse(skb, r, 0);

	if (!error)
		return verdict;
	return ws_icmp6(skb, sizeof(struct eth_hdr), error, error & 0xffff);
}
