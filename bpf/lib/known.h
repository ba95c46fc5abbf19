/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* What a program knows of a value, said so that the verifiers of older kernels see
 * it too.
 */
#pragma once

#include <linux/types.h>

/* v, which is not 0: verifiers before Linux 6.8 learn nothing from a comparison
 * with 0.
 */
static __always_inline __u64 not_zero(__u64 v)
{
	asm volatile("if %0 > 0 goto +1\n\t%0 = 1" : "+r"(v));
	return v;
}
