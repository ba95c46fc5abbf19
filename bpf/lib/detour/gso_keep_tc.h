/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* A super-packet goes to a function whose device will cut it. All of its frames'
 * headers are kept at once, each under the fingerprint that its frame will have.
 * They are alike, since a super-packet is stamped whole and its number says how
 * many frames it stands for; only the payload length differs, which is written
 * when a frame comes back.
 *
 * TCP alone, whose cutting is the same on every kernel but for what a fingerprint
 * leaves out. What the function should merge again, or get whole, is cut on its
 * way back and found by the same fingerprints. TC only.
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

/* A train has no more. */
#define FRAMES_MAX 64
#define TCP_HEADER_MAX 60

/* Notes what all frames have in common. Returns how many there are; 0: it is not
 * known how the kernel cuts this one.
 */
static __always_inline bool frames_note(struct __sk_buff *skb, struct frames *f,
					__u32 off, bool is_ip4)
{
	struct print_ip p = { .off = off };
	union print_body *head = (void *)f->head;
	__u32 len;

	if (!print_headers(skb, &p, is_ip4))
		return false;
	if (p.next != NEXTHDR_TCP || p.off + p.left != skb->len ||
	    p.id != (is_ip4 ? IP4_DONT_FRAGMENT : 0))
		return false;
	if (!words_load(skb, p.off, head->word, FINGERPRINT_WORDS))
		return false;
	len = (head->byte[12] >> 4) * 4;
	if (len < 20 || len >= p.left)
		return false;
	print_mask(head, NEXTHDR_TCP);
	f->begun = print_begin(&p);
	f->off = p.off;
	f->head_len = len;
	f->payload = p.left - len;
	f->first = p.first;
	return true;
}

/* A function of its own, for its stack. */
__noinline __u32 ws_frames_note(struct __sk_buff *skb, __u32 off, int is_ip4)
{
	struct bench *b = bench();
	struct frames *f;
	__u32 count;

	if (!b)
		return 0;
	f = &b->frames;
	f->size = skb->gso_size;
	if (!f->size || !frames_note(skb, f, off, is_ip4))
		return 0;
	count = (f->payload + f->size - 1) / f->size;
	f->count = count;
	return count <= FRAMES_MAX ? count : 0;
}

/* Makes ready for ws_frames_keep. Returns how many frames there are; 0: it is not
 * known how the kernel cuts them.
 */
static __always_inline __u32 frames_begin(struct __sk_buff *skb,
					  const struct endpoint *ep,
					  const struct ws_proxy *p, __u32 outer)
{
	struct bench *b = bench();
	__u32 count;

	if (!b)
		return 0;
	b->frames.kept = kept_of(ep, outer);
	b->frames.ask = cache_ask(p, ep->hop->proxy, 0,
				  bpf_ktime_get_coarse_ns());
	count = ws_frames_note(skb, sizeof(struct eth_hdr) + outer,
			       endpoint_has_ip4(ep));
	return count;
}

/* The fingerprint of frame number i, without its proxy; 0: a bug. */
__noinline __u64 ws_frame_print(struct __sk_buff *skb, __u32 i)
{
	struct bench *b = bench();
	union print_body body = {};
	struct frames *f;
	__u32 at, left;
	__u64 rest;

	if (!b)
		return 0;
	f = &b->frames;
	at = i * f->size;
	if (at >= f->payload)
		return 0;
	left = f->payload - at;
	if (left > f->size)
		left = f->size;
	left += f->head_len;
	/* With as many bytes before its payload as its header has. */
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
	return print_end(f->begun, &body, left, NEXTHDR_TCP, f->first);
}

/* Keeps the header of frame number i. */
__noinline int ws_frame_keep(struct __sk_buff *skb, __u32 i)
{
	struct bench *b = bench();
	__u64 print = ws_frame_print(skb, i);
	struct cache_ask *ask;
	__u32 entry;
	bool ok;

	if (!b || !print)
		return false;
	ask = &b->frames.ask;
	ask->print = print_of_proxy(print, b->frames.kept.proxy);
	entry = ws_cache_reserve(ask);
	if (!entry)
		return false;
	ok = content_fill(skb, &b->frames.kept, ask, entry);
	cache_give(entry, ok ? tag_of(ask) : TAG_FREE);
	return ok;
}

/* The outer header has been advanced. False: not all of them could be kept; those
 * that were are waited for in vain.
 */
__noinline int ws_frames_keep(struct __sk_buff *skb)
{
	struct bench *b = bench();

	if (!b)
		return false;
	for (__u32 i = 0; i < FRAMES_MAX; i++) {
		if (i >= b->frames.count)
			break;
		if (!ws_frame_keep(skb, i))
			return false;
	}
	return true;
}
