/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The answer to a packet with labels that a SID refuses:
 * none, since labels name no source. TC only.
 */
#pragma once

#include "lib/encap/mpls.h"
#include "lib/reason.h"

static __always_inline __u32 outer_error(reason_t r, const struct outer *o)
{
	(void)r;
	(void)o;
	return 0;
}
