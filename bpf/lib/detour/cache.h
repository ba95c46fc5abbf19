/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The outer headers of packets that are recognised by content: a hash table
 * of our own, in which an insertion sees the entry that it overwrites. A
 * fingerprint has two buckets of seven entries each. The CPU that sets an
 * entry's tag to TAG_BUSY owns the entry, to fill it in or to use it, until
 * it writes the tag again; no other CPU reads it meanwhile. Both hooks.
 */
#pragma once

#include "lib/hook.h"
#include "lib/node/maps.h"

#define TAG_FREE 0ULL
#define TAG_BUSY 1ULL
#define TAG_TIME 0xffffffULL
#define TAG_TIME_SHIFT 20

/* Bit 62 of a fingerprint is always set, so that no tag equals TAG_FREE or TAG_BUSY;
 * bit 63 is set only in copies, so that a copy never matches a first packet.
 */
#define FP_SET (1ULL << 62)
#define FP_COPY (1ULL << 63)

/* If the first bucket has more free entries than this, the second is not read. */
#define BUCKET_ROOMY 3
#define CACHE_TRIES 4 /* if other CPUs are faster */
#define COPIES_TRIES 32 /* copies that are skipped for one packet */

#define READ_ONCE(x) (*(const volatile typeof(x) *)&(x))
#define WRITE_ONCE(x, v) (*(volatile typeof(x) *)&(x) = (v))

/* Times in tags and buckets are in ticks of 2^20 ns. */
static __always_inline __u32 tick(__u64 ns)
{
	return ns >> TAG_TIME_SHIFT;
}

/* Ticks wrap, so they are compared by their difference. */
static __always_inline bool tick_is_later(__u32 t, __u32 now)
{
	return (__s32)(t - now) > 0;
}

/* The life of an entry, rounded up so that its tag expires after the entry. */
static __always_inline __u32 query_life(const struct cache_query *a)
{
	return tick(a->lifetime) + 2;
}

static __always_inline __u64 tag_of(const struct cache_query *a)
{
	return (a->fp & ~TAG_TIME) |
	       ((tick(a->now) + query_life(a)) & TAG_TIME);
}

static __always_inline bool tag_is_live(__u64 tag, __u32 now, __u32 life)
{
	return ((tag - now - 1) & TAG_TIME) < life;
}

static __always_inline __u32 bucket_one(const struct cache_query *a)
{
	return a->first + (__u32)((a->fp & 0xffffffff) * a->buckets >> 32);
}

static __always_inline __u32 bucket_two(const struct cache_query *a)
{
	__u64 other = a->fp * 0x9e3779b97f4a7c15ULL >> 32;

	return a->first + (__u32)(other * a->buckets >> 32);
}

static __always_inline __u64 fp_of_copy(__u64 fp, __u32 copy)
{
	__u64 h = (fp + copy) * 0xbf58476d1ce4e5b9ULL;

	return (h ^ h >> 31) | FP_SET | FP_COPY;
}

/* The result of reading a bucket, in one number: the higher the
 * number, the better the bucket's best entry for a new header.
 */
#define LOOK_WAY 7ULL
#define LOOK_AGE_SHIFT 3 /* of the way: free, expired, or since insertion */
#define LOOK_AGE_MAX ((1ULL << 26) - 1)
#define LOOK_ROOM_SHIFT 32 /* ways that are free or expired */
#define LOOK_SAME (1ULL << 48) /* the bucket has the fingerprint already */

static __always_inline __u32 look_room(__u64 look)
{
	return look >> LOOK_ROOM_SHIFT & 7;
}

static __always_inline __u64 look_place(__u64 look)
{
	return look & (LOOK_SAME - 1);
}

/* A function of its own, whose result is unknown to the verifier, and without
 * branches: otherwise the verifier would follow each path through the bucket.
 */
__noinline __u64 ws_bucket_look(__u32 bucket, __u64 fp, __u32 now, __u32 life)
{
	const struct ws_bucket *b = bpf_map_lookup_elem(&ws_buckets, &bucket);
	__u64 best = 0, room = 0, same = 0, any = 0;

	if (!b)
		return 0;
	for (__u32 w = 0; w < WS_WAYS; w++)
		any |= READ_ONCE(b->tag[w]);
	if (!any)
		return LOOK_AGE_MAX << LOOK_AGE_SHIFT |
		       (__u64)WS_WAYS << LOOK_ROOM_SHIFT;
	for (__u32 w = 0; w < WS_WAYS; w++) {
		__u64 tag = READ_ONCE(b->tag[w]);
		__u64 left = (tag - now - 1) & TAG_TIME;
		__u64 diff = (tag ^ fp) >> 24;
		/* 1 or 0, from the sign of a difference. */
		__u64 is_free = (tag - 1) >> 63 & ~(tag >> 63);
		__u64 is_entry = ((tag - 2) >> 63 & ~(tag >> 63)) ^ 1;
		__u64 is_live = (left - life) >> 63 & is_entry;
		__u64 age, place;

		barrier_var(is_free);
		barrier_var(is_entry);
		barrier_var(is_live);
		barrier_var(diff);
		same |= (diff - 1) >> 63 & is_live;
		room += is_free + is_entry - is_live;
		/* Busy: 0. Live: the age. Expired: more. Free: most. */
		age = is_live * (1 + TAG_TIME - left) +
		      (is_entry - is_live) * (LOOK_AGE_MAX - 1) +
		      is_free * LOOK_AGE_MAX;
		place = age << LOOK_AGE_SHIFT | w;
		/* best = the larger of best and place. */
		left = best - place;
		barrier_var(left);
		best -= left & (0 - (left >> 63));
	}
	return best | room << LOOK_ROOM_SHIFT | same * LOOK_SAME;
}

static __always_inline struct ws_proxy_stats *stats_of(__u32 index)
{
	return bpf_map_lookup_elem(&ws_proxy_stats, &index);
}

/* Counts an entry that is overwritten. */
static __always_inline void count_overwritten(const struct cache_query *a,
					      __u64 tag)
{
	struct ws_proxy_stats *s = tag == TAG_FREE ? NULL : stats_of(a->stats);

	if (!s)
		return;
	if (tag_is_live(tag, tick(a->now), query_life(a)))
		s->evicted++;
	else
		s->expired++;
}

/* Takes an entry of bucket. Returns its number plus 1; 0:
 * another CPU was faster.
 */
static __always_inline __u32 bucket_take(const struct cache_query *a,
					 __u32 bucket, __u64 look)
{
	struct ws_bucket *b = bpf_map_lookup_elem(&ws_buckets, &bucket);
	__u32 way = look & LOOK_WAY;
	__u64 tag;

	if (!b || way >= WS_WAYS || !(look >> LOOK_AGE_SHIFT & LOOK_AGE_MAX))
		return 0;
	tag = READ_ONCE(b->tag[way]);
	/* No live entry is evicted if the bucket still had room. */
	if (tag == TAG_BUSY || (look_room(look) && tag &&
				tag_is_live(tag, tick(a->now), query_life(a))))
		return 0;
	if (__sync_val_compare_and_swap(&b->tag[way], tag, TAG_BUSY) != tag)
		return 0;
	count_overwritten(a, tag);
	return bucket * WS_WAYS + way + 1;
}

/* A packet identical to others that are, or just were, in the
 * function: it is queued behind them. Returns its number among them;
 * 0: there are none after all, or there is no room to count them.
 */
static __always_inline __u32 copy_number(const struct cache_query *a, bool same)
{
	__u64 fp = a->fp; /* Linux 6.1 requires a key on the stack */
	struct ws_copies *c = bpf_map_lookup_elem(&ws_copies, &fp);
	struct ws_copies none = {};

	if (!c) {
		if (!same)
			return 0;
		bpf_map_update_elem(&ws_copies, &fp, &none, BPF_NOEXIST);
		c = bpf_map_lookup_elem(&ws_copies, &fp);
		if (!c)
			return 0;
	}
	if (c->until <= a->now)
		c->out = c->in;
	if (!same && c->in == c->out)
		return 0;
	c->until = a->now + a->lifetime;
	return __sync_fetch_and_add(&c->in, 1) + 1;
}

/* Finds out whether an identical packet is in the function;
 * if so, replaces the fingerprint by that of a copy.
 */
static __always_inline void query_copy(struct cache_query *a, __u64 look)
{
	__u32 one = bucket_one(a), now = tick(a->now), n;
	struct ws_bucket *b = bpf_map_lookup_elem(&ws_buckets, &one);
	bool same = look & LOOK_SAME;
	struct ws_proxy_stats *s;

	if (!b)
		return;
	if (!same && tick_is_later(READ_ONCE(b->spilled), now))
		same = ws_bucket_look(bucket_two(a), a->fp, now,
				      query_life(a)) &
		       LOOK_SAME;
	if (!same && !tick_is_later(READ_ONCE(b->copies), now))
		return;
	n = copy_number(a, same);
	if (!n)
		return;
	b->copies = now + query_life(a) + 1;
	a->fp = fp_of_copy(a->fp, n);
	s = stats_of(a->stats);
	if (s)
		s->rx_copies++;
}

/* Reserves an entry for a header, which the caller fills in
 * and then publishes: its number plus 1; 0: there is none.
 * Identical packets have different fingerprints from here on.
 */
__noinline __u32 ws_cache_reserve(struct cache_query *a)
{
	__u64 one, two;

	if (!a)
		return 0;
	one = ws_bucket_look(bucket_one(a), a->fp, tick(a->now), query_life(a));
	query_copy(a, one);
	for (__u32 i = 0; i < CACHE_TRIES; i++) {
		__u32 at = bucket_one(a), entry;
		struct ws_bucket *b = bpf_map_lookup_elem(&ws_buckets, &at);

		if (!b)
			return 0;
		if (i || (a->fp & FP_COPY))
			one = ws_bucket_look(at, a->fp, tick(a->now),
					     query_life(a));
		if (look_room(one) <= BUCKET_ROOMY) {
			two = ws_bucket_look(bucket_two(a), a->fp, tick(a->now),
					     query_life(a));
			if (look_place(two) > look_place(one)) {
				b->spilled = tick(a->now) + query_life(a) + 1;
				one = two;
				at = bucket_two(a);
			}
		}
		entry = bucket_take(a, at, one);
		if (entry)
			return entry;
	}
	return 0;
}

static __always_inline struct ws_cached *cache_entry(__u32 entry)
{
	__u32 index = entry - 1;

	return entry ? bpf_map_lookup_elem(&ws_cache, &index) : NULL;
}

/* The owner of an entry releases it: with a tag, or as free. */
static __always_inline void cache_give(__u32 entry, __u64 tag)
{
	__u32 bucket = (entry - 1) / WS_WAYS, way = (entry - 1) % WS_WAYS;
	struct ws_bucket *b = bpf_map_lookup_elem(&ws_buckets, &bucket);

	barrier_var(way);
	if (b && way < WS_WAYS)
		__sync_lock_test_and_set(&b->tag[way], tag);
}

/* Puts back an entry that was taken, unchanged. */
static __always_inline void cache_put_back(__u32 entry, __u64 fp, __u64 expires)
{
	cache_give(entry, (fp & ~TAG_TIME) | ((tick(expires) + 2) & TAG_TIME));
}

/* Looks for a fingerprint in one bucket and takes its
 * entry: its number plus 1, or 0.
 */
__noinline __u32 ws_bucket_find(__u32 bucket, __u64 fp, __u64 now, __u32 stats)
{
	struct ws_bucket *b = bpf_map_lookup_elem(&ws_buckets, &bucket);
	struct ws_proxy_stats *s;

	if (!b)
		return 0;
	for (__u32 w = 0; w < WS_WAYS; w++) {
		__u32 entry = bucket * WS_WAYS + w;
		__u64 tag = READ_ONCE(b->tag[w]);
		const struct ws_cached *c;

		if ((tag ^ fp) >> 24)
			continue;
		c = bpf_map_lookup_elem(&ws_cache, &entry);
		if (!c || __sync_val_compare_and_swap(&b->tag[w], tag,
						      TAG_BUSY) != tag)
			continue;
		if (c->fingerprint != fp) {
			__sync_lock_test_and_set(&b->tag[w], tag);
			continue;
		}
		if (c->expires > now)
			return entry + 1;
		__sync_lock_test_and_set(&b->tag[w], TAG_FREE);
		s = stats_of(stats);
		if (s)
			s->expired++;
	}
	return 0;
}

/* Looks in both buckets of the fingerprint. */
static __always_inline __u32 fp_find(const struct cache_query *a)
{
	__u32 one = bucket_one(a), entry;
	const struct ws_bucket *b;

	entry = ws_bucket_find(one, a->fp, a->now, a->stats);
	if (entry)
		return entry;
	b = bpf_map_lookup_elem(&ws_buckets, &one);
	if (!b || !tick_is_later(READ_ONCE(b->spilled), tick(a->now)))
		return 0;
	return ws_bucket_find(bucket_two(a), a->fp, a->now, a->stats);
}

/* The entry of a packet that has come back, for identical packets the oldest one:
 * its number plus 1, which the caller uses and then releases; 0: there is none.
 */
__noinline __u32 ws_cache_take(struct cache_query *a)
{
	__u32 one, entry;
	const struct ws_bucket *b;
	struct ws_copies *c;
	__u64 fp;

	if (!a)
		return 0;
	entry = fp_find(a);
	if (entry)
		return entry;
	one = bucket_one(a);
	b = bpf_map_lookup_elem(&ws_buckets, &one);
	if (!b || !tick_is_later(READ_ONCE(b->copies), tick(a->now)))
		return 0;
	fp = a->fp;
	c = bpf_map_lookup_elem(&ws_copies, &fp);
	if (!c || c->until <= a->now)
		return 0;
	for (__u32 i = 0; i < COPIES_TRIES; i++) {
		__u32 out = c->out;

		if (out == c->in)
			return 0;
		/* Another CPU took that copy; the next one is as good. */
		if (__sync_val_compare_and_swap(&c->out, out, out + 1) != out)
			continue;
		a->fp = fp_of_copy(fp, out + 1);
		entry = fp_find(a);
		if (entry)
			return entry;
	}
	return 0;
}
