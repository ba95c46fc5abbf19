/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* What a function that forwards a packet leaves as it is, in 64 bits. Hop limit,
 * traffic class and checksums may change and do not count. Packets of one flow
 * that agree in all of it and in their length are taken for copies of one
 * another, and may get each other's header. Both hooks.
 */
#pragma once

#include "hook.h"
#include "maps.h"
#include "net.h"
#include "siphash.h"

#define NEXTHDR_ICMPV6 58

#define FINGERPRINT_HEADERS 4 /* extension headers that are passed over */
#define FINGERPRINT_WORDS (WS_FINGERPRINT_LEN / 8)

/* Where the checksum of an upper-layer header is, or -1 (RFC 9293 3.1, RFC 768,
 * RFC 4443 2.1).
 */
static __always_inline __s32 checksum_offset(__u32 protocol)
{
	switch (protocol) {
	case NEXTHDR_TCP:
		return 16;
	case NEXTHDR_UDP:
		return 6;
	case NEXTHDR_ICMPV6:
		return 2;
	}
	return -1;
}

/* Offsets of an inner packet's headers are below this. */
#define FINGERPRINT_OFF_MAX 2048

/* Copies words of the packet, without a helper where they are in the linear
 * part. words: a constant. False: they are not all there.
 */
static __always_inline bool words_load(ctx_t *ctx, __u32 off, __u64 *to,
				       const __u32 words)
{
	void *end = (void *)(long)ctx->data_end;
	const __u64 *from;

	barrier_var(off);
	if (off >= FINGERPRINT_OFF_MAX)
		return false;
	from = (void *)(long)ctx->data + off;
	if ((void *)(from + words) > end)
		return !ctx_load_bytes(ctx, off, to, 8 * words);
	for (__u32 i = 0; i < words; i++)
		to[i] = from[i];
	return true;
}

/* off: of the IPv6 header, in bytes from the start of the frame. 0: the packet
 * is not whole. A function of its own, for its stack.
 */
__noinline __u64 ws_fingerprint(ctx_t *ctx, __u32 off)
{
	union {
		__u64 word[FINGERPRINT_WORDS];
		__be16 half[4 * FINGERPRINT_WORDS];
	} body = {};
	__u32 next, left, len, fragment[2] = {};
	__u64 key[2] = { cfg.fingerprint_key[0], cfg.fingerprint_key[1] };
	struct siphash s = siphash_begin(key);
	struct ip6_hdr ip6;
	__s32 checksum;

	if (!words_load(ctx, off, (__u64 *)&ip6, sizeof(ip6) / 8))
		return 0;
	off += sizeof(ip6);
	next = ip6.nexthdr;
	left = bpf_ntohs(ip6.payload_len);

	for (__u32 i = 0; i < FINGERPRINT_HEADERS; i++) {
		__u8 head[2];
		__u32 skip;

		if (next == NEXTHDR_FRAGMENT) {
			if (ctx_load_bytes(ctx, off, fragment, 8))
				return 0;
			next = fragment[0] & 0xff;
			skip = 8;
		} else if (next == NEXTHDR_HOP || next == NEXTHDR_DEST ||
			   next == NEXTHDR_ROUTING) {
			if (ctx_load_bytes(ctx, off, head, 2))
				return 0;
			next = head[0];
			skip = (head[1] + 1) * 8;
		} else {
			break;
		}
		if (skip > left)
			return 0;
		off += skip;
		left -= skip;
		/* Only a first fragment has an upper-layer header. */
		if (fragment[0] & bpf_htonl(0xfff8))
			break;
	}

	/* A super-packet's payload length may be 0 (RFC 2675) and then does not
	 * bound what follows; it is still the same on the way back.
	 */
	len = left;
	barrier_var(len);
	if (len >= WS_FINGERPRINT_LEN) {
		if (!words_load(ctx, off, body.word, FINGERPRINT_WORDS))
			return 0;
	} else if (len && ctx_load_bytes(ctx, off, &body, len)) {
		return 0;
	}
	checksum = checksum_offset(next);
	if (checksum >= 0 && !(fragment[0] & bpf_htonl(0xfff8)))
		body.half[(checksum / 2) & 31] = 0;

	siphash13_word(&s, ip6.src[0]);
	siphash13_word(&s, ip6.src[1]);
	siphash13_word(&s, ip6.dst[0]);
	siphash13_word(&s, ip6.dst[1]);
	siphash13_word(&s, (__u64)fragment[1] << 32 | fragment[0]);
	for (__u32 i = 0; i < FINGERPRINT_WORDS; i++)
		siphash13_word(&s, body.word[i]);
	return siphash13_end(&s, (__u64)left << 16 | next << 8 | ip6.nexthdr) |
	       1;
}
