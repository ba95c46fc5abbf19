/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The outer headers of packets that are recognised by metadata: an index that
 * stays with the packet names one. Each CPU has a range of indexes for each function
 * and gives them in turn; an index is not given again while its header waits. The
 * header is near, at one of the first WS_SLOTS_NEAR slots of the range, or far, at
 * the slot of the index itself, where the near one is in use. A slot says which
 * index its header is for (the lower half of its fingerprint), so that a packet whose
 * header has given way finds none, and not another's; and for a fragment, of which
 * datagram (the upper half, else 0). Whoever turns a slot's expires to SLOT_BUSY has the slot, and
 * no two have it at once. TC only.
 */
#pragma once

#include "lib/detour/cache.h"
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

/* NULL: the index is none. */
static __always_inline struct slot_block *slot_block(__u32 index)
{
	__u32 block = (index - 1) / WS_SLOTS_NEAR;

	return index ? bpf_map_lookup_elem(&ws_slot_blocks, &block) : NULL;
}

static __always_inline __u64 slot_bit(__u32 index)
{
	return 1ULL << (index - 1) % WS_SLOTS_NEAR;
}

/* The near slot of an index. */
static __always_inline __u32 slot_near(__u32 first, __u32 index)
{
	return first + (index - 1) % WS_SLOTS_NEAR;
}

/* Takes a slot of this CPU, which nobody else gives to a packet, if it is free or its
 * packet is too late. NULL: it is in use.
 */
static __always_inline struct ws_cached *slot_use(const struct ws_proxy *p,
						  __u32 slot, __u64 now)
{
	struct ws_cached *c = bpf_map_lookup_elem(&ws_slots, &slot);
	__u64 expires;

	if (!c)
		return NULL;
	expires = READ_ONCE(c->expires);
	if (expires == SLOT_FREE)
		return c;
	/* Its packet is late, or never comes; or it is coming back just now. */
	if (expires == SLOT_BUSY || expires > now ||
	    __sync_val_compare_and_swap(&c->expires, expires, SLOT_BUSY) !=
		    expires)
		return NULL;
	proxy_count(p, expired);
	return c;
}

/* Is this index in use near? */
static __always_inline bool slot_is_of(__u32 slot, __u32 index)
{
	const struct ws_cached *c = bpf_map_lookup_elem(&ws_slots, &slot);

	return c && (__u32)c->fingerprint == index;
}

/* A slot of this CPU, the caller's to fill in and then to give to the packet: in
 * the upper half its number, in the lower half the index that goes into
 * skb->tc_index; 0: there is none. id: the proxy's. A function of its own, for its
 * stack.
 */
__noinline __u64 ws_slot_take(const struct ws_proxy *p, __u32 id, __u64 now)
{
	__u32 base, stats, slots, index, slot, at, *next;
	struct slot_block *b;
	struct ws_cached *c;
	bool near;

	if (!p)
		return 0;
	slots = p->slots;
	base = p->slot + bpf_get_smp_processor_id() * slots;
	stats = p->stats;
	next = bpf_map_lookup_elem(&ws_slot_next, &stats);
	if (!next || !slots)
		return 0;
	near = slots >= WS_SLOTS_NEAR && (p->slot - 1) % WS_SLOTS_NEAR == 0;
	/* Packets that were in the function before these maps were come out with
	 * the indexes that were given first then.
	 */
	if (!*next)
		*next = bpf_get_prandom_u32();
	for (__u32 i = 0; i < SLOT_TRIES; i++) {
		at = *next & (slots - 1);
		index = base + at;
		*next += 1;
		b = slot_block(index);
		if (!b || index >= WS_INDEX_LET_GO)
			return 0;
		if (near && (b->first != base || b->proxy != id)) {
			b->proxy = id;
			b->first = base;
		} else if (!near && b->first) {
			b->first = 0;
		}
		slot = index;
		if (near && !(READ_ONCE(b->far) & slot_bit(index))) {
			slot = slot_near(base, index);
			c = slot_use(p, slot, now);
			if (c)
				goto found;
			if (slot_is_of(slot, index))
				continue;
			/* The near slots are the first of the range: their own
			 * indexes have no far ones.
			 */
			if (at < WS_SLOTS_NEAR) {
				if (slots > WS_SLOTS_NEAR)
					*next += WS_SLOTS_NEAR - 1 - at;
				continue;
			}
			slot = index;
		}
		c = slot_use(p, slot, now);
		if (!c)
			continue;
		if (near)
			__sync_fetch_and_or(&b->far, slot_bit(index));
found:
		c->fingerprint = index;
		return (__u64)slot << 32 | index;
	}
	return 0;
}

static __always_inline struct ws_cached *
slot_take(const struct ws_proxy *p, __u32 id, __u64 now, __u32 *index)
{
	__u64 taken = ws_slot_take(p, id, now);
	__u32 slot = taken >> 32;

	*index = taken;
	return taken ? bpf_map_lookup_elem(&ws_slots, &slot) : NULL;
}

/* Whose index it is; 0: nobody's. */
static __always_inline __u32 slot_proxy(__u32 index)
{
	const struct slot_block *b = slot_block(index);
	const struct ws_cached *c;

	if (b && b->first)
		return b->proxy;
	c = bpf_map_lookup_elem(&ws_slots, &index);
	return c ? c->proxy : 0;
}

/* Where the header of an index is, and in *far whether that is its far slot. */
static __always_inline __u32 slot_of(const struct slot_block *b, __u32 index,
				     bool *far)
{
	*far = b->first && READ_ONCE(b->far) & slot_bit(index);
	return b->first && !*far ? slot_near(b->first, index) : index;
}

/* Is a slot's header for this index? of: and for a fragment of this datagram; 0: of
 * any, or for none.
 */
static __always_inline bool slot_is_for(const struct ws_cached *c, __u32 index,
					__u32 of)
{
	__u64 is = READ_ONCE(c->fingerprint);

	return (__u32)is == index && (!of || is >> 32 == of);
}

/* The slot that a packet's index names, the caller's to use and then to give to
 * nobody; 0: it was not for this packet. of: as for slot_is_for. *expires: when it
 * would have been too late. A copy that the function made of a packet finds its slot
 * taken or another's, and what comes from another function than it was sent to finds
 * it is not its own.
 */
static __always_inline __u32 slot_claim(__u32 index, __u32 proxy, __u32 of,
					__u64 now, __u64 *expires)
{
	struct slot_block *b = slot_block(index);
	struct ws_cached *c;
	__u32 slot;
	bool far;

	if (!b)
		return 0;
	slot = slot_of(b, index, &far);
	c = bpf_map_lookup_elem(&ws_slots, &slot);
	if (!c)
		return 0;
	*expires = READ_ONCE(c->expires);
	if (*expires <= now || !slot_is_for(c, index, of) ||
	    c->proxy != proxy ||
	    __sync_val_compare_and_swap(&c->expires, *expires, SLOT_BUSY) !=
		    *expires)
		return 0;
	/* The clock ticks slowly: between the two it may have been given to the
	 * next packet, until the same time.
	 */
	if (!slot_is_for(c, index, of)) {
		slot_give(c, *expires);
		return 0;
	}
	if (far)
		__sync_fetch_and_and(&b->far, ~slot_bit(index));
	return slot;
}
