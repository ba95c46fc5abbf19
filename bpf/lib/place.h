/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The entries of a SID, path and epoch. Where they are says an array by the SID's
 * place in the locator, which is read in a tenth of the time that a hash takes. It
 * only guesses: an entry counts if it says itself whose it is, and what the array
 * does not have is in the hashes.
 */
#pragma once

#include "hook.h"
#include "maps.h"

/* ws_config.locator_mask is of the upper half. Outside of the array there is no
 * place, and any other SID's is as good a guess as none.
 */
static __always_inline __u32 place_of(const struct ws_hop_key *k)
{
	return bpf_be64_to_cpu(k->sid & ~cfg.locator_mask) << 1 |
	       (k->epoch & 1);
}

static __always_inline const struct ws_hop *hop_at(__u32 index,
						   const struct ws_hop_key *k)
{
	const struct ws_hop *h = bpf_map_lookup_elem(&ws_hops, &index);

	return h && h->of.sid == k->sid && h->of.path == k->path &&
			       h->of.epoch == k->epoch ?
		       h :
		       NULL;
}

/* NULL: there is none. *egress: where to look for the path's verifier first. */
static __always_inline const struct ws_hop *hop_find(const struct ws_hop_key *k,
						     __u32 *egress)
{
	__u32 place = place_of(k), *index;
	const struct ws_place *p = bpf_map_lookup_elem(&ws_places, &place);
	const struct ws_hop *h;

	*egress = 0;
	if (p) {
		*egress = p->egress;
		h = hop_at(p->hop, k);
		if (h)
			return h;
	}
	index = bpf_map_lookup_elem(&ws_hop_index, k);
	return index ? hop_at(*index, k) : NULL;
}

static __always_inline const struct ws_egress *
egress_at(__u32 index, const struct ws_egress_key *k)
{
	const struct ws_egress *e = bpf_map_lookup_elem(&ws_egresses, &index);

	/* Nobody's has no list, and may be taken for path 0's. */
	return e && e->segments && e->of.path == k->path &&
			       e->of.epoch == k->epoch ?
		       e :
		       NULL;
}

/* guess: of hop_find. NULL: there is none. */
static __always_inline const struct ws_egress *
egress_of(const struct ws_egress_key *k, __u32 guess)
{
	const struct ws_egress *e = egress_at(guess, k);
	__u32 *index;

	if (e)
		return e;
	index = bpf_map_lookup_elem(&ws_egress_index, k);
	return index ? egress_at(*index, k) : NULL;
}
