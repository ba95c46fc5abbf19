/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The egress's verdict on a proof, from its plan, never
 * from fields of the packet.
 */
#pragma once

#include <waystamp/abi.h>
#include "lib/proof/stamp.h"
#include "lib/reason.h"
#include "lib/wire/net.h"

/* Compares whole words, so that no timing shows which byte was wrong. */
static __always_inline bool tag_equal(__u64 a, __u64 b)
{
	__u64 diff = a ^ b;

	barrier_var(diff);
	return diff == 0;
}

static __always_inline bool keyed_verify(const struct proof_tlv *tlv,
					 const struct ws_egress *e)
{
	__u64 head = *(const __u64 *)tlv >> 16;
	struct siphash next, s = siphash_begin(e->key[0]);
	__u64 tag = 0;

	siphash_word(&s, tlv->rnd);
	for (__u32 j = 0; j < WS_KEYS_MAX; j++) {
		if (j >= e->keys)
			break;
		/* The part of the next key and RND does not depend on this tag. */
		next = siphash_begin(e->key[(j + 1) % WS_KEYS_MAX]);
		siphash_word_beside(&s, tag, &next, tlv->rnd);
		tag = siphash_end(&s, head | (__u64)j << 48 | KEYED_LEN << 56);
		s = next;
	}
	return tag_equal(tag, tlv->cml);
}

static __always_inline bool keyed_flow_verify(const struct proof_tlv *tlv,
					      const struct ws_egress *e,
					      __u64 binding)
{
	__u64 tag = 0;

	for (__u32 j = 0; j < WS_KEYS_MAX; j++) {
		if (j >= e->keys)
			break;
		tag = keyed_flow_tag(e->key[j], tlv, tag, binding, j);
	}
	return tag_equal(tag, tlv->cml);
}

static __always_inline bool opot_verify(const struct proof_tlv *tlv,
					const struct ws_share *s, __u64 secret,
					bool *in_range)
{
	__u64 p = s->prime;
	__u64 rnd = bpf_be64_to_cpu(tlv->rnd) ^ s->up_rnd;
	__u64 cml = bpf_be64_to_cpu(tlv->cml) ^ s->up_cml;
	__u64 diff = opot_add(s, rnd, cml) ^
		     mod_add(mod_reduce(rnd, p), secret, p);

	barrier_var(diff);
	*in_range = rnd < p && cml < p;
	return diff == 0;
}

/* Values not less than the prime have a reason of their own, which is
 * returned only if the sum is right. Returns a reason_t.
 *
 * A function of its own, so that the kernel's verifier checks the loops
 * once, and not for each path of the caller: that took most of the time
 * of a load. No argument is ever NULL; the verifier requires the tests.
 */
__noinline int ws_proof_verify(const struct proof_tlv *tlv,
			       const struct ws_hop *hop,
			       const struct ws_egress *e, __u64 binding)
{
	bool in_range = true;
	bool ok = false;

	if (!tlv)
		goto judged;
	if (!hop)
		goto judged;
	if (!e)
		goto judged;
	/* There must be one key for each earlier position, otherwise the map's
	 * contents are no plan: without keys a tag of zero would be accepted.
	 */
	if (hop->scheme >= WS_SCHEME_KEYED &&
	    (!e->keys || e->keys != hop->position))
		goto judged;
	if (hop->scheme == WS_SCHEME_KEYED)
		ok = keyed_verify(tlv, e);
	else if (hop->scheme == WS_SCHEME_KEYED_FLOW)
		ok = keyed_flow_verify(tlv, e, binding);
	else
		ok = opot_verify(tlv, &hop->share, e->secret, &in_range);
judged:
	if (!ok)
		return REASON(PROOF);
	return in_range ? WS_REASON_NONE : REASON(RANGE);
}
