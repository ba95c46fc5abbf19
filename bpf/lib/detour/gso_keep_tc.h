/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* A super-packet goes to a function whose device segments it. The headers of all
 * frames are kept at once, each under the fingerprint that its frame will have. They
 * are equal, since a super-packet is stamped once and its number contains its frame
 * count; only the payload length differs, and it is written when a frame comes back.
 *
 * TCP only, since every kernel segments TCP in the same way but for fields that a
 * fingerprint leaves out. If the function merges the frames again, or gets them as
 * one packet, they are segmented when they come back, and found by the same
 * fingerprints. TC only.
 */
#pragma once

#include "lib/detour/cache.h"
#include "lib/detour/content.h"
#include "lib/detour/detour.h"
#include "lib/detour/fingerprint.h"
#include "lib/hook.h"
#include "lib/node/maps.h"
#include "lib/skb/gso.h"
#include "lib/sr/endpoint.h"
#include "lib/verifier.h"
#include "lib/wire/net.h"

/* The highest frame count of a train. */
#define GSO_FRAMES_MAX 64
#define TCP_HEADER_MAX 60

/* Notes the fields that all frames share. Returns the frame
 * count; 0: it is not known how the kernel segments this packet.
 */
static __always_inline bool gso_note(struct __sk_buff *skb, struct gso_keep *f,
				     __u32 off, bool is_ip4)
{
	struct fp_ip p = { .off = off };
	union fp_body *head = (void *)f->head;
	__u32 len;

	if (!fp_headers(skb, &p, is_ip4))
		return false;
	if (p.next != NEXTHDR_TCP || p.off + p.left != skb->len ||
	    p.id != (is_ip4 ? IP4_DONT_FRAGMENT : 0))
		return false;
	if (!words_load(skb, p.off, head->word, FINGERPRINT_WORDS))
		return false;
	len = (head->byte[12] >> 4) * 4;
	if (len < 20 || len >= p.left)
		return false;
	fp_mask(head, NEXTHDR_TCP);
	f->begun = fp_begin(&p);
	f->off = p.off;
	f->head_len = len;
	f->payload = p.left - len;
	f->first = p.first;
	return true;
}

/* A function of its own, to bound the stack. */
__noinline __u32 ws_gso_note(struct __sk_buff *skb, __u32 off, int is_ip4)
{
	struct scratch *s = scratch();
	struct gso_keep *f;
	__u32 count;

	if (!s)
		return 0;
	f = &s->gso;
	f->size = skb->gso_size;
	if (!f->size || !gso_note(skb, f, off, is_ip4))
		return 0;
	count = (f->payload + f->size - 1) / f->size;
	f->count = count;
	return count <= GSO_FRAMES_MAX ? count : 0;
}

/* Prepares for ws_gso_keep. Returns the frame count; 0: it
 * is not known how the kernel segments this packet.
 */
static __always_inline __u32 gso_keep_begin(struct __sk_buff *skb,
					    const struct endpoint *ep,
					    const struct ws_proxy *p,
					    __u32 outer)
{
	struct scratch *s = scratch();
	__u32 count;

	if (!s)
		return 0;
	s->gso.ref = header_ref_of(ep, outer);
	s->gso.query = cache_query(p, ep->hop->proxy, 0,
				   bpf_ktime_get_coarse_ns());
	count = ws_gso_note(skb, sizeof(struct eth_hdr) + outer,
			    endpoint_has_ip4(ep));
	return count;
}

/* The fingerprint of frame number i, without the proxy; 0: a bug. */
__noinline __u64 ws_gso_fingerprint(struct __sk_buff *skb, __u32 i)
{
	struct scratch *s = scratch();
	union fp_body body = {};
	struct gso_keep *f;
	__u32 at, left;
	__u64 rest;

	if (!s)
		return 0;
	f = &s->gso;
	at = i * f->size;
	if (at >= f->payload)
		return 0;
	left = f->payload - at;
	if (left > f->size)
		left = f->size;
	left += f->head_len;
	/* head_len bytes before the frame's payload are read too; its header replaces them. */
	if (left >= sizeof(body)) {
		if (bpf_skb_load_bytes(skb, f->off + at, &body, sizeof(body)))
			return 0;
	} else {
		rest = left;
		barrier_var(rest);
		rest &= sizeof(body) - 1;
		if (!rest ||
		    bpf_skb_load_bytes(skb, f->off + at, &body, not_zero(rest)))
			return 0;
	}
	for (__u32 w = 0; w < TCP_HEADER_MAX / 4; w++) {
		if (4 * w < f->head_len)
			body.quad[w] = f->head[w];
	}
	body.quad[1] = bpf_htonl(bpf_ntohl(body.quad[1]) + at);
	if (i + 1 < f->count)
		body.byte[TCP_FLAGS_AT] &= ~(TCP_FIN | TCP_PSH);
	return fp_end(f->begun, &body, left, NEXTHDR_TCP, f->first);
}

/* Keeps the header of frame number i. */
__noinline int ws_gso_keep_one(struct __sk_buff *skb, __u32 i)
{
	struct scratch *s = scratch();
	__u64 fp = ws_gso_fingerprint(skb, i);
	struct cache_query *query;
	__u32 entry;
	bool ok;

	if (!s || !fp)
		return false;
	query = &s->gso.query;
	query->fp = fp_of_proxy(fp, s->gso.ref.proxy);
	entry = ws_cache_reserve(query);
	if (!entry)
		return false;
	ok = content_fill(skb, &s->gso.ref, query, entry);
	cache_give(entry, ok ? tag_of(query) : TAG_FREE);
	return ok;
}

/* The outer header has been advanced. False: not all
 * headers could be kept; the kept ones expire unused.
 */
__noinline int ws_gso_keep(struct __sk_buff *skb)
{
	struct scratch *s = scratch();

	if (!s)
		return false;
	for (__u32 i = 0; i < GSO_FRAMES_MAX; i++) {
		if (i >= s->gso.count)
			break;
		if (!ws_gso_keep_one(skb, i))
			return false;
	}
	return true;
}
