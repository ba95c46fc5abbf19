/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* SipHash-2-4 (Aumasson, Bernstein 2012) over messages of 8n+7 bytes, as words
 * in the order of the reference code: little-endian loads.
 */
#pragma once

#include <linux/types.h>
#include <bpf/bpf_helpers.h>

struct siphash {
	__u64 v0, v1, v2, v3;
};

static __always_inline __u64 rotl64(__u64 x, const __u32 bits)
{
	return x << bits | x >> (64 - bits);
}

static __always_inline void sip_round(struct siphash *s)
{
	s->v0 += s->v1;
	s->v1 = rotl64(s->v1, 13);
	s->v1 ^= s->v0;
	s->v0 = rotl64(s->v0, 32);
	s->v2 += s->v3;
	s->v3 = rotl64(s->v3, 16);
	s->v3 ^= s->v2;
	s->v0 += s->v3;
	s->v3 = rotl64(s->v3, 21);
	s->v3 ^= s->v0;
	s->v2 += s->v1;
	s->v1 = rotl64(s->v1, 17);
	s->v1 ^= s->v2;
	s->v2 = rotl64(s->v2, 32);
}

static __always_inline struct siphash siphash_begin(const __u64 key[2])
{
	return (struct siphash){
		.v0 = key[0] ^ 0x736f6d6570736575ULL,
		.v1 = key[1] ^ 0x646f72616e646f6dULL,
		.v2 = key[0] ^ 0x6c7967656e657261ULL,
		.v3 = key[1] ^ 0x7465646279746573ULL,
	};
}

static __always_inline void siphash_word(struct siphash *s, __u64 m)
{
	s->v3 ^= m;
	sip_round(s);
	sip_round(s);
	s->v0 ^= m;
}

/* One word for each of two independent states, in turns, for the CPU's parallel units. */
static __always_inline void siphash_word_beside(struct siphash *s, __u64 m,
						struct siphash *t, __u64 n)
{
	s->v3 ^= m;
	t->v3 ^= n;
	sip_round(s);
	sip_round(t);
	sip_round(s);
	sip_round(t);
	s->v0 ^= m;
	t->v0 ^= n;
}

/* last: the last seven bytes, and the message's length modulo 256 on top. */
static __always_inline __u64 siphash_end(struct siphash *s, __u64 last)
{
	siphash_word(s, last);
	s->v2 ^= 0xff;
	sip_round(s);
	sip_round(s);
	sip_round(s);
	sip_round(s);
	return s->v0 ^ s->v1 ^ s->v2 ^ s->v3;
}

/* SipHash-1-3: for hash tables, whose values stay in the kernel. */
static __always_inline void siphash13_word(struct siphash *s, __u64 m)
{
	s->v3 ^= m;
	sip_round(s);
	s->v0 ^= m;
}

static __always_inline __u64 siphash13_end(struct siphash *s, __u64 last)
{
	siphash13_word(s, last);
	s->v2 ^= 0xff;
	sip_round(s);
	sip_round(s);
	sip_round(s);
	return s->v0 ^ s->v1 ^ s->v2 ^ s->v3;
}
