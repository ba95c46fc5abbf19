/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The entries of a SID, path and epoch. An array, indexed by the SID's
 * place in the locator, has their numbers; it is ten times faster than
 * a hash. Its numbers are only hints: an entry counts if its own key is
 * equal. If the array has no valid hint, the hashes have the number.
 */
#pragma once

#include "lib/hook.h"
#include "lib/node/maps.h"

/* The key of an entry, in words. It has the fields of the maps'
 * keys, but can stay in registers when entries are compared with it.
 */
struct hop_id {
	__be64 sid;
	__u64 path; /* with its epoch, as in struct ws_egress_key */
};

static __always_inline struct hop_id hop_id(__be64 sid, __be32 path, __u8 epoch)
{
	return (struct hop_id){ sid, path | (__u64)epoch << 32 };
}

static __always_inline struct ws_hop_key hop_id_key(const struct hop_id *w)
{
	return (struct ws_hop_key){
		.sid = w->sid,
		.path = w->path,
		.epoch = w->path >> 32,
	};
}

static __always_inline struct ws_egress_key
hop_id_egress_key(const struct hop_id *w)
{
	return (struct ws_egress_key){
		.path = w->path,
		.epoch = w->path >> 32,
	};
}

/* ws_config.locator_mask covers the upper half. An index outside of the array finds
 * no hint; an index of another SID finds a wrong one, which is as good as none.
 */
static __always_inline __u32 place_of(const struct hop_id *w)
{
	return bpf_be64_to_cpu(w->sid & ~cfg.locator_mask) << 1 |
	       (w->path >> 32 & 1);
}

static __always_inline const struct ws_hop *hop_at(__u32 index,
						   const struct hop_id *w)
{
	const struct ws_hop *h = bpf_map_lookup_elem(&ws_hops, &index);

	return h && h->of.sid == w->sid &&
			       *(const __u64 *)&h->of.path == w->path ?
		       h :
		       NULL;
}

/* NULL: there is none. *egress: a hint for egress_of. */
static __always_inline const struct ws_hop *hop_find(const struct hop_id *w,
						     __u32 *egress)
{
	__u32 place = place_of(w), *index;
	const struct ws_place *p = bpf_map_lookup_elem(&ws_places, &place);
	const struct ws_hop *h;
	struct ws_hop_key k;

	*egress = 0;
	if (p) {
		*egress = p->egress;
		h = hop_at(p->hop, w);
		if (h)
			return h;
	}
	k = hop_id_key(w);
	index = bpf_map_lookup_elem(&ws_hop_index, &k);
	return index ? hop_at(*index, w) : NULL;
}

static __always_inline const struct ws_egress *egress_at(__u32 index,
							 const struct hop_id *w)
{
	const struct ws_egress *e = bpf_map_lookup_elem(&ws_egresses, &index);

	/* A free entry has no segment list; its key could be taken for path 0. */
	return e && e->segments && *(const __u64 *)&e->of == w->path ? e : NULL;
}

/* guess: the hint of hop_find. NULL: there is none. */
static __always_inline const struct ws_egress *egress_of(const struct hop_id *w,
							 __u32 guess)
{
	const struct ws_egress *e = egress_at(guess, w);
	struct ws_egress_key k;
	__u32 *index;

	if (e)
		return e;
	k = hop_id_egress_key(w);
	index = bpf_map_lookup_elem(&ws_egress_index, &k);
	return index ? egress_at(*index, w) : NULL;
}
