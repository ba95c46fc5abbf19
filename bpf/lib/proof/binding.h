/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The binding of keyed-flow: a hash of the inner packet's flow, which
 * the stamps include. It covers no length, checksum or sequence
 * number, because segmenting and merging super-packets changes them.
 */
#pragma once

#include "lib/proof/siphash.h"
#include "lib/wire/tuple.h"
#include <waystamp/abi.h>

#define BINDING_LEN 37ULL /* src, dst, protocol, sport, dport */

/* B = SipHash-2-4(K_B, src | dst | protocol | sport | dport). */
static __always_inline __u64 tuple_binding(const __u64 key[2],
					   const struct tuple *t)
{
	struct siphash s = siphash_begin(key);

	siphash_word(&s, t->src[0]);
	siphash_word(&s, t->src[1]);
	siphash_word(&s, t->dst[0]);
	siphash_word(&s, t->dst[1]);
	return siphash_end(&s, t->protocol | (__u64)t->sport << 8 |
				       (__u64)t->dport << 24 |
				       BINDING_LEN << 56);
}

/* inner: at the inner packet's IP header; next: its type, as a Next Header
 * value. False: addresses or ports cannot be read. A function of its own,
 * so that schemes without a binding do not need its code and stack.
 */
static __noinline bool binding_read(struct cursor inner, __u32 next,
				    const struct ws_share *s, __u64 *binding)
{
	struct tuple t;

	if (next != NEXTHDR_IPV6 && next != NEXTHDR_IPV4)
		return false;
	if (tuple_read(inner, next == NEXTHDR_IPV4, &t) == TUPLE_CUT)
		return false;
	*binding = tuple_binding(s->bind_key, &t);
	return true;
}

/* The binding for a stamp. Schemes without a binding need none. */
static __always_inline bool binding_find(struct cursor inner, __u32 next,
					 const struct ws_share *s, __u32 scheme,
					 __u64 *binding)
{
	/* A variable, so that only it needs memory, not the caller's struct. */
	__u64 b = 0;
	bool ok = scheme != WS_SCHEME_KEYED_FLOW ||
		  binding_read(inner, next, s, &b);

	*binding = b;
	return ok;
}
