/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Fragments through a function that is recognised by metadata. Connection tracking
 * reassembles a datagram and makes new fragments, all with the index of the first
 * one. So the indexes of a datagram's fragments are also queued, first in, first
 * out. If the index of a returning fragment is used up, the fragment gets the next
 * header of the queue. All these headers have the same destination and proof, so
 * they are interchangeable. No more fragments pass than arrived. New IPv6 fragments
 * have another identification: their datagram is found by the index. A function that
 * rewrites changes the addresses, too: there the first fragment, which still has the
 * header of its own index, shows which addresses and identification the others must
 * have. TC only.
 */
#pragma once

#include "lib/detour/fingerprint.h"
#include "lib/detour/slots.h"
#include "lib/hook.h"
#include "lib/node/maps.h"
#include "lib/out/route_tc.h"
#include "lib/proof/siphash.h"
#include "lib/wire/ip.h"
#include "lib/wire/net.h"
#include "lib/wire/tuple.h"

/* Indexes that are tried for one fragment, its own among them. */
#define FRAGMENT_TRIES 4

/* May the packet be a fragment, by its IP header? */
static __always_inline bool ip_may_be_fragment(const struct ip *in)
{
	const struct ip6_hdr *ip6 = in->hdr;

	return in->is_ip4 ? ip4_is_fragment(in->hdr) :
			    nexthdr_is(ip6->nexthdr, EXT_KNOWN);
}

/* Finds the Fragment header of an IPv6 packet at off from the start of the
 * frame: its identification, and in *next its Next Header. False: there is none.
 */
static __always_inline bool ip6_fragment_find(struct __sk_buff *skb, __u32 off,
					      __be32 *id, __u8 *next)
{
	struct ip6_extension head;
	__u8 kind;

	if (bpf_skb_load_bytes(skb, off + 6, &kind, sizeof(kind)))
		return false;
	off += sizeof(struct ip6_hdr);
	for (__u32 i = 0; i <= FINGERPRINT_HEADERS; i++) {
		if (!nexthdr_is(kind,
				EXT_OPTIONS | EXT_ROUTING | EXT_FRAGMENT) ||
		    bpf_skb_load_bytes(skb, off, &head, sizeof(head)))
			return false;
		if (nexthdr_is(kind, EXT_FRAGMENT)) {
			__builtin_memcpy(id, head.pad, sizeof(*id));
			*next = head.nexthdr;
			return true;
		}
		kind = head.nexthdr;
		off += (head.len + 1) * 8;
	}
	return false;
}

/* Writes the datagram of the packet at off, from the start of the
 * frame, into the scratch memory; false: the packet is no fragment. A
 * function of its own, to bound the stack, like all functions below.
 */
__noinline int ws_fragment_read(struct __sk_buff *skb, __u32 off, int is_ip4,
				__u32 proxy)
{
	__u64 key[2] = { cfg.fingerprint_key[0], cfg.fingerprint_key[1] };
	struct scratch *sc = scratch();
	struct siphash s;
	__be32 id = 0;
	__u8 next = 0;

	if (!sc)
		return 0;
	if (is_ip4) {
		struct ip4_hdr ip4;

		if (bpf_skb_load_bytes(skb, off, &ip4, sizeof(ip4)) ||
		    !ip4_is_fragment(&ip4))
			return 0;
		sc->fragment.addr[0] = 0;
		sc->fragment.addr[1] = ip4.src;
		sc->fragment.addr[2] = 0;
		sc->fragment.addr[3] = ip4.dst;
		id = ip4.id;
		next = ip4.protocol;
	} else if (!ip6_fragment_find(skb, off, &id, &next) ||
		   bpf_skb_load_bytes(skb, off + 8, sc->fragment.addr,
				      sizeof(sc->fragment.addr))) {
		return 0;
	}
	s = siphash_begin(key);
	siphash13_word(&s, sc->fragment.addr[0]);
	siphash13_word(&s, sc->fragment.addr[1]);
	siphash13_word(&s, sc->fragment.addr[2]);
	siphash13_word(&s, sc->fragment.addr[3]);
	sc->fragment.ends = siphash13_end(&s, (__u64)proxy << 8 | next);
	sc->fragment.datagram = sc->fragment.ends ^
				(id + 1ULL) * 0x9e3779b97f4a7c15ULL;
	return 1;
}

/* The id of a datagram in a slot; never 0. */
static __always_inline __u32 fragment_of(__u64 datagram)
{
	return datagram >> 32 | 1;
}

/* Queues the header of a fragment, which this CPU has kept under index, for
 * all fragments of the datagram. ws_fragment_read has read the fragment.
 */
__noinline int ws_fragment_keep(__u32 index)
{
	struct slot_block *b = slot_block(index);
	struct scratch *s = scratch();
	struct ws_cached *c;
	struct fragments *q;
	__u64 datagram;
	__u32 at, slot;
	bool far;

	if (!s || !b)
		return 0;
	slot = slot_of(b, index, &far);
	c = bpf_map_lookup_elem(&ws_slots, &slot);
	if (!c || !slot_is_for(c, index, 0))
		return 0;
	datagram = s->fragment.datagram;
	WRITE_ONCE(c->fingerprint, (__u64)fragment_of(datagram) << 32 | index);
	q = bpf_map_lookup_elem(&ws_fragments, &datagram);
	if (!q) {
		__builtin_memset(&s->fragments, 0, sizeof(s->fragments));
		s->fragments.ends = s->fragment.ends;
		bpf_map_update_elem(&ws_fragments, &datagram, &s->fragments,
				    BPF_NOEXIST);
		q = bpf_map_lookup_elem(&ws_fragments, &datagram);
		if (!q)
			return 0;
	}
	/* All queued headers have expired: they belong to
	 * an earlier datagram with the same identification.
	 */
	if (READ_ONCE(q->expires) <= bpf_ktime_get_coarse_ns()) {
		WRITE_ONCE(q->out, READ_ONCE(q->in));
		WRITE_ONCE(q->rewritten, 0);
	}
	WRITE_ONCE(q->expires, READ_ONCE(c->expires));
	bpf_map_update_elem(&ws_fragment_of, &index, &datagram, BPF_ANY);
	at = __sync_fetch_and_add(&q->in, 1) % FRAGMENTS_MAX;
	q->index[at] = index;
	return 0;
}

/* The queue of the datagram whose fragment got index last; NULL: there is none. */
static __always_inline struct fragments *fragments_by(__u32 index,
						      __u64 *datagram)
{
	__u64 *of = bpf_map_lookup_elem(&ws_fragment_of, &index);

	if (!of)
		return NULL;
	*datagram = *of; /* Linux 6.1 requires a key on the stack */
	return bpf_map_lookup_elem(&ws_fragments, datagram);
}

/* A fragment has come back from a function that rewrites, with the index of its own
 * header: the others of its datagram must have the same addresses, protocol and
 * identification. ws_fragment_read has read the fragment.
 */
__noinline int ws_fragment_rewritten(__u32 index)
{
	const struct scratch *s = scratch();
	__u64 datagram = 0;
	struct fragments *q = fragments_by(index, &datagram);

	if (q && s)
		WRITE_ONCE(q->rewritten, s->fragment.datagram);
	return 0;
}

/* Finds a header for a fragment that has come back with an index without a header: the
 * next in its datagram's queue. ws_fragment_read has read the fragment. Returns a slot,
 * which the caller uses and then frees; 0: there is none. *expires: see slot_claim.
 */
__noinline __u32 ws_fragment_claim(__u32 proxy, __u32 index, int rewrites,
				   __u64 *expires)
{
	__u64 now = bpf_ktime_get_coarse_ns(), datagram = 0;
	struct fragments *q = fragments_by(index, &datagram);
	const struct scratch *s = scratch();
	__u32 out, next;

	if (!expires || !s || !q)
		return 0;
	if (rewrites ? READ_ONCE(q->rewritten) != s->fragment.datagram :
		       q->ends != s->fragment.ends)
		return 0;
	/* Skip indexes that later fragments have overwritten. */
	out = READ_ONCE(q->out);
	if (q->in - out > FRAGMENTS_MAX)
		__sync_val_compare_and_swap(&q->out, out,
					    q->in - FRAGMENTS_MAX);
	for (__u32 i = 0; i < FRAGMENT_TRIES; i++) {
		out = READ_ONCE(q->out);
		if (out == READ_ONCE(q->in))
			return 0;
		next = READ_ONCE(q->index[out % FRAGMENTS_MAX]);
		if (__sync_val_compare_and_swap(&q->out, out, out + 1) != out)
			continue;
		next = slot_claim(next, proxy, fragment_of(datagram), now,
				  expires);
		if (next)
			return next;
	}
	return 0;
}

/* The slot with the kept header of a packet that has come back; see slot_claim. */
static __always_inline __u32 slot_back(struct __sk_buff *skb,
				       const struct ws_proxy *p, __u32 proxy,
				       __u32 index, __u64 now, __u64 *expires)
{
	__u32 slot = slot_claim(index, proxy, 0, now, expires);
	__u32 off = sizeof(struct eth_hdr);
	struct ws_cached *c;

	if (slot) {
		c = bpf_map_lookup_elem(&ws_slots, &slot);
		if (c && slot_is_of_fragment(c) && p->rewrites &&
		    ws_fragment_read(skb, off, skb_is_ip4(skb), proxy))
			ws_fragment_rewritten(index);
		return slot;
	}
	if (!index || !ws_fragment_read(skb, off, skb_is_ip4(skb), proxy))
		return 0;
	return ws_fragment_claim(proxy, index, p->rewrites, expires);
}
