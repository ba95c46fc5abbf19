/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The outer headers of packets that are recognised by metadata: an index that the
 * kernel keeps with the packet. Each CPU has a range of indexes for each function,
 * and assigns them in turn; an index is not assigned again while its header is in
 * use. A header is either near, in one of the first WS_SLOTS_NEAR slots of the
 * range, or far, in the slot with the number of the index, if the near one is in
 * use. A slot contains the index of its header (lower half of the fingerprint), so
 * that a packet whose header was overwritten finds none instead of another packet's;
 * and for a fragment its datagram (upper half, else 0). The CPU that sets a slot's
 * expires to SLOT_BUSY owns the slot; no two CPUs own one at the same time. TC only.
 */
#pragma once

#include "lib/detour/cache.h"
#include "lib/detour/detour.h"
#include "lib/hook.h"
#include "lib/node/maps.h"

/* Slots that are tried for one packet before the packet is refused. */
#define SLOT_TRIES 8

#define SLOT_FREE 0ULL
#define SLOT_BUSY 1ULL

/* Gives a slot to a packet until expires, or frees it: SLOT_FREE. */
static __always_inline void slot_give(struct ws_cached *c, __u64 expires)
{
	__sync_lock_test_and_set(&c->expires, expires);
}

/* NULL: there is no such slot. */
static __always_inline struct ws_cached *slot_find(__u32 slot)
{
	return slot ? bpf_map_lookup_elem(&ws_slots, &slot) : NULL;
}

/* NULL: there is no such index. */
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

/* Takes a slot of this CPU, which no other CPU gives to a
 * packet, if it is free or expired. NULL: it is in use.
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
	/* Its packet is still in the function, or is coming back at this moment. */
	if (expires == SLOT_BUSY || expires > now ||
	    __sync_val_compare_and_swap(&c->expires, expires, SLOT_BUSY) !=
		    expires)
		return NULL;
	proxy_count(p, expired);
	return c;
}

/* Does this near slot hold the header of index? */
static __always_inline bool slot_is_of(__u32 slot, __u32 index)
{
	const struct ws_cached *c = bpf_map_lookup_elem(&ws_slots, &slot);

	return c && (__u32)c->fingerprint == index;
}

/* Takes a slot of this CPU, which the caller fills in and then
 * gives to the packet. In the upper half the slot's number, in
 * the lower half the index for skb->tc_index; 0: there is none.
 * id: the proxy's. A function of its own, to bound the stack.
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
	/* Packets that were in the function when these maps were made come
	 * back with the indexes that were assigned first at that time.
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
			/* Near slots are the first of the range:
			 * indexes with their numbers have no far slots.
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

/* The proxy of an index; 0: none. */
static __always_inline __u32 slot_proxy(__u32 index)
{
	const struct slot_block *b = slot_block(index);
	const struct ws_cached *c;

	if (b && b->first)
		return b->proxy;
	c = bpf_map_lookup_elem(&ws_slots, &index);
	return c ? c->proxy : 0;
}

/* The slot of an index's header; *far: it is the far one. */
static __always_inline __u32 slot_of(const struct slot_block *b, __u32 index,
				     bool *far)
{
	*far = b->first && READ_ONCE(b->far) & slot_bit(index);
	return b->first && !*far ? slot_near(b->first, index) : index;
}

/* Is a slot's header for this index? of: also for a
 * fragment of this datagram; 0: for any packet.
 */
static __always_inline bool slot_is_for(const struct ws_cached *c, __u32 index,
					__u32 of)
{
	__u64 is = READ_ONCE(c->fingerprint);

	return (__u32)is == index && (!of || is >> 32 == of);
}

/* Is the header in the slot that of a fragment? */
static __always_inline bool slot_is_of_fragment(const struct ws_cached *c)
{
	return READ_ONCE(c->fingerprint) >> 32;
}

/* Takes the slot of a packet's index, which the caller uses and then
 * frees; 0: the index is not for this packet. of: see slot_is_for.
 * *expires: the slot's. If a function sends a copy of a packet, the
 * slot is taken or has another index; if a packet comes from another
 * function than it was sent to, the slot has another proxy.
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
	/* The clock is coarse: meanwhile the slot may have
	 * been given to the next packet with the same expiry.
	 */
	if (!slot_is_for(c, index, of)) {
		slot_give(c, *expires);
		return 0;
	}
	if (far)
		__sync_fetch_and_and(&b->far, ~slot_bit(index));
	return slot;
}
