/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The cache of outer headers: one per packet that is in a function. Two ways to
 * find it again: by content, in ws_cache; or by an index that stays with the
 * packet, in ws_slots. TC only.
 */
#pragma once

#include "hook.h"
#include "maps.h"
#include "net.h"
#include "refuse.h"

/* Entries that are looked at for one packet before it is given up. */
#define CACHE_TRIES 8

static __always_inline const struct ws_proxy *proxy_find(__u32 id)
{
	return id ? bpf_map_lookup_elem(&ws_proxies, &id) : NULL;
}

static __always_inline enum ws_reason proxy_missing(void)
{
	return WS_REASON_PROXY_MISSING_BUG;
}

/* A packet that no header is kept for, or no longer. */
static __always_inline enum ws_reason not_cached(void)
{
	return WS_REASON_NOT_CACHED;
}

static __always_inline struct ws_proxy_stats *
proxy_stats(const struct ws_proxy *p)
{
	__u32 index = p->stats;

	return bpf_map_lookup_elem(&ws_proxy_stats, &index);
}

#define proxy_count(p, field)                                                  \
	do {                                                                   \
		struct ws_proxy_stats *stats_ = proxy_stats(p);                \
                                                                               \
		if (stats_)                                                    \
			stats_->field++;                                       \
	} while (0)

/* By content: puts c under the fingerprint, behind those of byte-identical
 * packets. False: there is no room.
 */
static __always_inline bool cache_put(const struct ws_proxy *p, __u32 id,
				      __u64 fingerprint,
				      const struct ws_cached *c)
{
	struct ws_cache_key k = { .fingerprint = fingerprint, .proxy = id };
	struct ws_copies *copies = bpf_map_lookup_elem(&ws_copies, &k);
	struct ws_copies none = {};

	if (!copies || copies->in == copies->out) {
		if (!bpf_map_update_elem(&ws_cache, &k, c, BPF_NOEXIST))
			return true;
		if (!copies) {
			bpf_map_update_elem(&ws_copies, &k, &none, BPF_NOEXIST);
			copies = bpf_map_lookup_elem(&ws_copies, &k);
		}
	}
	if (!copies)
		return false;
	proxy_count(p, rx_copies);
	k.copy = __sync_fetch_and_add(&copies->in, 1) + 1;
	return !bpf_map_update_elem(&ws_cache, &k, c, BPF_ANY);
}

/* Whoever turns taken to 1 has the entry. */
static __always_inline struct ws_cached *
cache_claim(const struct ws_proxy *p, const struct ws_cache_key *k, __u64 now)
{
	struct ws_cached *c = bpf_map_lookup_elem(&ws_cache, k);

	if (!c || __sync_val_compare_and_swap(&c->taken, 0, 1))
		return NULL;
	if (c->expires <= now) {
		proxy_count(p, expired);
		bpf_map_delete_elem(&ws_cache, k);
		return NULL;
	}
	return c;
}

/* The oldest entry of the fingerprint, the caller's to use, and then to delete
 * by *k; NULL: there is none.
 */
static __always_inline struct ws_cached *cache_take(const struct ws_proxy *p,
						    __u32 id, __u64 fingerprint,
						    struct ws_cache_key *k)
{
	__u64 now = bpf_ktime_get_ns();
	struct ws_copies *copies;
	struct ws_cached *c;

	*k = (struct ws_cache_key){ .fingerprint = fingerprint, .proxy = id };
	c = cache_claim(p, k, now);
	if (c)
		return c;
	copies = bpf_map_lookup_elem(&ws_copies, k);
	if (!copies)
		return NULL;
	for (__u32 i = 0; i < CACHE_TRIES; i++) {
		__u32 out = copies->out;

		if (out == copies->in)
			return NULL;
		/* Lost: another CPU took that one; the next is as good. */
		if (__sync_val_compare_and_swap(&copies->out, out, out + 1) !=
		    out)
			continue;
		k->copy = out + 1;
		c = cache_claim(p, k, now);
		if (c)
			return c;
	}
	return NULL;
}

/* The kernel gives the least recently used entry to somebody else, at any time
 * and while it is read. Has the claimed entry been the caller's until now?
 */
static __always_inline bool cache_is_still(const struct ws_cache_key *k,
					   const struct ws_cached *c)
{
	const struct ws_cached *now = bpf_map_lookup_elem(&ws_cache, k);

	return now && now == c && now->taken;
}

/* By metadata: a free slot of this CPU, or NULL. *index: what goes into
 * skb->tc_index. Only this CPU takes from its range, and whoever frees a slot
 * does so as the last thing.
 */
static __always_inline struct ws_cached *slot_take(const struct ws_proxy *p,
						   __u64 now, __u32 *index)
{
	__u32 base = p->slot + bpf_get_smp_processor_id() * p->slots;
	__u32 stats = p->stats, mask = p->slots - 1;
	__u32 *next = bpf_map_lookup_elem(&ws_slot_next, &stats);

	if (!next || !p->slots)
		return NULL;
	for (__u32 i = 0; i < CACHE_TRIES; i++) {
		struct ws_cached *c;

		*index = base + (*next & mask);
		*next += 1;
		c = bpf_map_lookup_elem(&ws_slots, index);
		if (!c || *index >= WS_INDEX_PROVEN)
			return NULL;
		if (c->expires && c->expires <= now)
			proxy_count(p, expired);
		if (c->expires <= now)
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

/* The slot that a packet's index names, the caller's to use and then to free by
 * setting expires to 0; NULL: it was not for this packet. A copy that the
 * function made of a packet finds its slot taken, and what comes from another
 * function than it was sent to finds it is not its own.
 */
static __always_inline struct ws_cached *slot_claim(__u32 index, __u32 proxy)
{
	struct ws_cached *c;

	if (!index)
		return NULL;
	c = bpf_map_lookup_elem(&ws_slots, &index);
	if (!c || c->proxy != proxy || c->expires <= bpf_ktime_get_ns() ||
	    __sync_val_compare_and_swap(&c->taken, 0, 1))
		return NULL;
	return c;
}

/* Sends a super-packet into a cutter. It comes back in frames, at an interface
 * with the MAC address dmac, unchanged but for that. Returns the verdict.
 */
static __always_inline int cut(struct __sk_buff *skb, struct eth_hdr *eth,
			       __u32 ifindex, const __u8 *dmac)
{
	if (!ifindex)
		return ws_refuse(skb, WS_REASON_CANNOT_CUT, 0);
	__builtin_memcpy(eth->dst, dmac, sizeof(eth->dst));
	return bpf_redirect(ifindex, 0);
}

static __always_inline const struct ws_node *node_find(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&ws_node, &zero);
}

/* To an ingress with the core program. */
static __always_inline int cut_in(struct __sk_buff *skb, struct eth_hdr *eth)
{
	const struct ws_node *n = node_find();

	return n ? cut(skb, eth, n->cut_ifindex, n->cut_dmac) : CTX_DROP;
}

/* To an ingress with the function program, where the index names the proxy. */
static __always_inline int cut_back(struct __sk_buff *skb, struct eth_hdr *eth,
				    __u32 proxy)
{
	const struct ws_node *n = node_find();

	skb->tc_index = proxy;
	return n ? cut(skb, eth, n->cut_back_ifindex, n->cut_back_dmac) :
		   CTX_DROP;
}
