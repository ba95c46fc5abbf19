/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Arithmetic modulo a prime below 2^63, without a 128-bit multiply. */
#pragma once

#include <linux/types.h>
#include <bpf/bpf_helpers.h>

/* Upper 64 bits of a * b. */
static __always_inline __u64 mul_high(__u64 a, __u64 b)
{
	__u64 a0 = (__u32)a, a1 = a >> 32;
	__u64 b0 = (__u32)b, b1 = b >> 32;
	__u64 mid = a1 * b0 + (a0 * b0 >> 32);
	__u64 mid2 = a0 * b1 + (__u32)mid;

	return a1 * b1 + (mid >> 32) + (mid2 >> 32);
}

/* r * w mod p for any r, w < p < 2^63, w_shoup = floor(w * 2^64 / p) (Shoup;
 * see Harvey, arXiv:1205.2926, section 3): the difference is below 2p, which
 * 64 bits hold.
 */
static __always_inline __u64 mod_mul_shoup(__u64 r, __u64 w, __u64 w_shoup,
					   __u64 p)
{
	__u64 t = r * w - mul_high(r, w_shoup) * p;

	return t >= p ? t - p : t;
}

/* a + b mod p for a, b < p < 2^63. */
static __always_inline __u64 mod_add(__u64 a, __u64 b, __u64 p)
{
	__u64 t = a + b;

	return t >= p ? t - p : t;
}

/* a mod p. The value of a correct hop is less than p already. */
static __always_inline __u64 mod_reduce(__u64 a, __u64 p)
{
	return a < p ? a : a % p;
}
