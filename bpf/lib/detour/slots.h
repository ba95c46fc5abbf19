/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The outer headers of packets that are recognised by metadata: an index that
 * stays with the packet names a slot. Whoever turns its expires to SLOT_BUSY has
 * the slot, and no two have it at once. Nothing in the packet says which of the
 * slot's headers is its own: one that comes back when its slot has been given to
 * another takes that one's. So what has expired is given last. TC only.
 */
#pragma once

#include "lib/detour/detour.h"
#include "lib/hook.h"
#include "lib/node/maps.h"

/* Slots that are looked at for one packet before it is given up. */
#define SLOT_TRIES 8

#define SLOT_FREE 0ULL
#define SLOT_BUSY 1ULL

/* Gives a slot to a packet, until then; or to nobody: SLOT_FREE. */
static __always_inline void slot_give(struct ws_cached *c, __u64 expires)
{
	__sync_lock_test_and_set(&c->expires, expires);
}

/* A free slot of this CPU, the caller's to fill in and then to give to the packet,
 * as what goes into skb->tc_index; 0: there is none. Only this CPU takes from its
 * range. A function of its own, for its stack.
 */
__noinline __u32 ws_slot_take(const struct ws_proxy *p, __u64 now)
{
	__u32 base, stats, index, old = 0, *next;
	struct ws_cached *c;
	__u64 expires;

	if (!p)
		return 0;
	base = p->slot + bpf_get_smp_processor_id() * p->slots;
	stats = p->stats;
	next = bpf_map_lookup_elem(&ws_slot_next, &stats);
	if (!next || !p->slots)
		return 0;
	/* Packets that were in the function before these maps were come out with
	 * the indexes that were given first then.
	 */
	if (!*next)
		*next = bpf_get_prandom_u32();
	for (__u32 i = 0; i < SLOT_TRIES; i++) {
		index = base + (*next & (p->slots - 1));
		*next += 1;
		c = bpf_map_lookup_elem(&ws_slots, &index);
		if (!c || index >= WS_INDEX_LET_GO)
			return 0;
		expires = READ_ONCE(c->expires);
		if (expires == SLOT_FREE)
			return index;
		if (!old && expires != SLOT_BUSY && expires <= now)
			old = index;
	}
	/* None is free. This one's packet is late, or never comes; or it is coming
	 * back just now.
	 */
	index = old;
	c = old ? bpf_map_lookup_elem(&ws_slots, &index) : NULL;
	if (!c)
		return 0;
	expires = READ_ONCE(c->expires);
	if (expires == SLOT_BUSY || expires > now ||
	    __sync_val_compare_and_swap(&c->expires, expires, SLOT_BUSY) !=
		    expires)
		return 0;
	proxy_count(p, expired);
	return index;
}

static __always_inline struct ws_cached *slot_take(const struct ws_proxy *p,
						   __u64 now, __u32 *index)
{
	*index = ws_slot_take(p, now);
	return *index ? bpf_map_lookup_elem(&ws_slots, index) : NULL;
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
	*expires = READ_ONCE(c->expires);
	if (*expires <= now || c->proxy != proxy ||
	    __sync_val_compare_and_swap(&c->expires, *expires, SLOT_BUSY) !=
		    *expires)
		return NULL;
	return c;
}
