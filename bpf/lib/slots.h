/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The outer headers of packets that are recognised by metadata: an index that
 * stays with the packet names a slot. Whoever turns its expires to SLOT_BUSY has
 * the slot; and since no two headers of one slot expire at the same time, nobody
 * takes a later one for his own. TC only.
 */
#pragma once

#include "hook.h"
#include "maps.h"
#include "proxy.h"

/* Slots that are looked at for one packet before it is given up. */
#define SLOT_TRIES 8

#define SLOT_FREE 0ULL
#define SLOT_BUSY 1ULL

/* Gives a slot to a packet, until then; or to nobody: SLOT_FREE. */
static __always_inline void slot_give(struct ws_cached *c, __u64 expires)
{
	__sync_lock_test_and_set(&c->expires, expires);
}

/* A free slot of this CPU, the caller's to fill in and then to give to the
 * packet; or NULL. *index: what goes into skb->tc_index. Only this CPU takes from
 * its range.
 */
static __always_inline struct ws_cached *slot_take(const struct ws_proxy *p,
						   __u64 now, __u32 *index)
{
	__u32 base = p->slot + bpf_get_smp_processor_id() * p->slots;
	__u32 stats = p->stats, mask = p->slots - 1;
	__u32 *next = bpf_map_lookup_elem(&ws_slot_next, &stats);

	if (!next || !p->slots)
		return NULL;
	for (__u32 i = 0; i < SLOT_TRIES; i++) {
		struct ws_cached *c;
		__u64 expires;

		*index = base + (*next & mask);
		*next += 1;
		c = bpf_map_lookup_elem(&ws_slots, index);
		if (!c || *index >= WS_INDEX_PROVEN)
			return NULL;
		expires = once(c->expires);
		if (expires == SLOT_FREE)
			return c;
		if (expires == SLOT_BUSY || expires > now)
			continue;
		/* Its packet may be coming back just now. */
		if (__sync_val_compare_and_swap(&c->expires, expires,
						SLOT_BUSY) != expires)
			continue;
		proxy_count(p, expired);
		return c;
	}
	return NULL;
}

/* Whose slot it is; 0: nobody's. */
static __always_inline __u32 slot_proxy(__u32 index)
{
	const struct ws_cached *c = bpf_map_lookup_elem(&ws_slots, &index);

	return c ? c->proxy : 0;
}

/* The slot that a packet's index names, the caller's to use and then to give to
 * nobody; NULL: it was not for this packet. *expires: when it would have been
 * too late. A copy that the function made of a packet finds its slot taken, and
 * what comes from another function than it was sent to finds it is not its own.
 */
static __always_inline struct ws_cached *slot_claim(__u32 index, __u32 proxy,
						    __u64 now, __u64 *expires)
{
	struct ws_cached *c;

	if (!index)
		return NULL;
	c = bpf_map_lookup_elem(&ws_slots, &index);
	if (!c)
		return NULL;
	*expires = once(c->expires);
	if (*expires <= now || c->proxy != proxy ||
	    __sync_val_compare_and_swap(&c->expires, *expires, SLOT_BUSY) !=
		    *expires)
		return NULL;
	return c;
}
