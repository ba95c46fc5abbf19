/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Known bounds of a value, written so that the verifiers of
 * older kernels find them too.
 */
#pragma once

#include <linux/types.h>

/* v, which is not 0: verifiers before Linux 6.8 ignore a
 * comparison with 0.
 */
static __always_inline __u64 not_zero(__u64 v)
{
	asm volatile("if %0 > 0 goto +1\n\t%0 = 1" : "+r"(v));
	return v;
}

/* v, which is in min to max, both constants: verifiers
 * before Linux 6.3 forget the bounds of values on the stack.
 */
#define within(v, min, max)                                                    \
	({                                                                     \
		__u64 within_v = (v);                                          \
		asm volatile("if %0 < %1 goto +1\n\t"                          \
			     "if %0 <= %2 goto +1\n\t"                         \
			     "%0 = %1"                                         \
			     : "+r"(within_v)                                  \
			     : "i"(min), "i"(max));                            \
		within_v;                                                      \
	})

/* 0, but unknown to the verifier. Verifiers before Linux 6.7 check a callback of
 * bpf_loop once, with the stack as it is before the first turn, and remove branches
 * that only a later turn takes: values that a callback changes must begin unknown.
 */
#define unknown_zero(skb)                                                      \
	({                                                                     \
		__u32 zero_a = (skb)->len, zero_b = zero_a;                    \
                                                                               \
		barrier_var(zero_a);                                           \
		barrier_var(zero_b);                                           \
		zero_a - zero_b;                                               \
	})
