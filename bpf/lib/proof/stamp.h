/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The stamp that a hop writes into the proof. A hop does not check earlier stamps. */
#pragma once

#include <waystamp/abi.h>
#include "lib/proof/modmul.h"
#include "lib/proof/siphash.h"
#include "lib/wire/net.h"

#define KEYED_LEN 23ULL /* RND, T, Scheme, Epoch, Path, position */
#define KEYED_FLOW_LEN 31ULL /* and B */

/* T_j = SipHash-2-4(K_j, RND | T_{j-1} | Scheme | Epoch | Path | j). rnd,
 * prev and the result are the bytes of the fields as they are in the packet.
 */
static __always_inline __u64 keyed_tag(const __u64 key[2],
				       const struct proof_tlv *tlv, __u64 prev,
				       __u64 position)
{
	/* Scheme, Epoch and Path are bytes 2 to 7 of the TLV. */
	__u64 head = *(const __u64 *)tlv >> 16;
	struct siphash s = siphash_begin(key);

	siphash_word(&s, tlv->rnd);
	siphash_word(&s, prev);
	return siphash_end(&s, head | position << 48 | KEYED_LEN << 56);
}

/* The tag of keyed-flow: as keyed_tag, with B_j between T_{j-1} and Scheme. */
static __always_inline __u64 keyed_flow_tag(const __u64 key[2],
					    const struct proof_tlv *tlv,
					    __u64 prev, __u64 binding,
					    __u64 position)
{
	__u64 head = *(const __u64 *)tlv >> 16;
	struct siphash s = siphash_begin(key);

	siphash_word(&s, tlv->rnd);
	siphash_word(&s, prev);
	siphash_word(&s, binding);
	return siphash_end(&s, head | position << 48 | KEYED_FLOW_LEN << 56);
}

/* CML + (f1(x) + f2(x)) * LPC mod p, with f2(x) = r + rest:
 * one multiplication for r; alpha contains all else.
 */
static __always_inline __u64 opot_add(const struct ws_share *s, __u64 rnd,
				      __u64 cml)
{
	__u64 p = s->prime;

	cml = mod_add(mod_reduce(cml, p), s->alpha, p);
	return mod_add(cml, mod_mul_shoup(rnd, s->lpc, s->lpc_shoup, p), p);
}

/* binding: see binding.h */
static __always_inline void stamp(struct proof_tlv *tlv,
				  const struct ws_share *s, __u32 scheme,
				  __u32 position, __u64 binding)
{
	__u64 rnd, cml;

	if (scheme == WS_SCHEME_KEYED) {
		tlv->cml = keyed_tag(s->key, tlv, tlv->cml, position);
		return;
	}
	if (scheme == WS_SCHEME_KEYED_FLOW) {
		tlv->cml = keyed_flow_tag(s->key, tlv, tlv->cml, binding,
					  position);
		return;
	}
	rnd = bpf_be64_to_cpu(tlv->rnd) ^ s->up_rnd;
	cml = bpf_be64_to_cpu(tlv->cml) ^ s->up_cml;
	cml = opot_add(s, rnd, cml);
	tlv->rnd = bpf_cpu_to_be64(rnd ^ s->down_rnd);
	tlv->cml = bpf_cpu_to_be64(cml ^ s->down_cml);
}
