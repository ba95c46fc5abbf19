/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* A hash, in 64 bits, of the fields that a function which forwards a packet
 * does not change. Hop limit, traffic class, checksums and IPv4's options
 * may change and are left out. So are two fields that kernels set in
 * different ways when they segment a super-packet: TCP's CWR flag, and the
 * identification of TCP over IPv4 with Don't Fragment (RFC 6864 4.1 gives it
 * no meaning). Packets of one flow with equal fields and equal length count
 * as copies of one another, and may get each other's header. Both hooks.
 */
#pragma once

#include "lib/hook.h"
#include "lib/node/maps.h"
#include "lib/proof/siphash.h"
#include "lib/verifier.h"
#include "lib/wire/ip.h"
#include "lib/wire/net.h"

#define FINGERPRINT_HEADERS 4 /* extension headers that are skipped */
#define FINGERPRINT_WORDS (WS_FINGERPRINT_LEN / 8)

/* TCP's flags (RFC 9293 3.1), and their offset. */
#define TCP_FLAGS_AT 13
#define TCP_FIN 0x01
#define TCP_PSH 0x08
#define TCP_CWR 0x80

/* The bytes behind the IP headers. */
union fp_body {
	__u64 word[FINGERPRINT_WORDS];
	__be32 quad[2 * FINGERPRINT_WORDS];
	__be16 half[4 * FINGERPRINT_WORDS];
	__u8 byte[8 * FINGERPRINT_WORDS];
};

/* Offset of the checksum in an upper-layer header, or -1
 * (RFC 9293 3.1, RFC 768, RFC 792, RFC 4443 2.1).
 */
static __always_inline __s32 checksum_offset(__u32 protocol)
{
	switch (protocol) {
	case NEXTHDR_TCP:
		return 16;
	case NEXTHDR_UDP:
		return 6;
	case NEXTHDR_ICMP:
	case NEXTHDR_ICMP6:
		return 2;
	}
	return -1;
}

/* Offsets of an inner packet's headers are lower than this. */
#define FINGERPRINT_OFF_MAX 2048

/* Copies words of the packet, without a helper if they are in the
 * linear part. words: a constant. False: the packet ends before.
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

/* The offset of a packet's upper layer, and the IP fields of the fingerprint. */
struct fp_ip {
	struct addrs addrs;
	__u64 id; /* of the datagram, and the fragment's offset */
	__u32 off; /* from the start of the frame */
	__u32 left; /* bytes of the packet from there on */
	__u8 next; /* protocol */
	__u8 first; /* first header behind an IPv6 header; 4 for IPv4 */
	bool later; /* a fragment without an upper-layer header */
};

static __always_inline bool fp_ip4(ctx_t *ctx, struct fp_ip *p)
{
	struct ip4_hdr ip4;
	struct ip in = { .hdr = &ip4, .is_ip4 = true };
	__u32 header;

	if (ctx_load_bytes(ctx, p->off, &ip4, sizeof(ip4)))
		return false;
	header = ip4_header_len(&ip4);
	p->addrs = ip_addrs(&in);
	p->id = ip4.fragment;
	if (ip4.protocol != NEXTHDR_TCP || ip4.fragment != IP4_DONT_FRAGMENT)
		p->id |= (__u64)ip4.id << 16;
	p->next = ip4.protocol;
	p->first = NEXTHDR_IPV4;
	p->later = ip4.fragment & IP4_OFFSET_MASK;
	p->off += header;
	/* A super-packet's total length may be 0; it is also 0 on the way back. */
	p->left = bpf_ntohs(ip4.len) - header;
	return header >= sizeof(ip4);
}

static __always_inline bool fp_ip6(ctx_t *ctx, struct fp_ip *p)
{
	__u32 fragment[2] = {};
	struct ip6_hdr ip6;

	if (!words_load(ctx, p->off, (__u64 *)&ip6, sizeof(ip6) / 8))
		return false;
	__builtin_memcpy(&p->addrs, ip6.src, sizeof(p->addrs));
	p->off += sizeof(ip6);
	p->next = p->first = ip6.nexthdr;
	p->left = bpf_ntohs(ip6.payload_len);

	for (__u32 i = 0; i < FINGERPRINT_HEADERS; i++) {
		__u8 head[2];
		__u32 skip;

		if (p->next == NEXTHDR_FRAGMENT) {
			if (ctx_load_bytes(ctx, p->off, fragment, 8))
				return false;
			p->next = fragment[0] & 0xff;
			skip = 8;
		} else if (nexthdr_is(p->next, EXT_OPTIONS | EXT_ROUTING)) {
			if (ctx_load_bytes(ctx, p->off, head, 2))
				return false;
			p->next = head[0];
			skip = (head[1] + 1) * 8;
		} else {
			break;
		}
		if (skip > p->left)
			return false;
		p->off += skip;
		p->left -= skip;
		/* Only a first fragment has an upper-layer header. */
		p->later = fragment[0] & bpf_htonl(0xfff8);
		if (p->later)
			break;
	}
	p->id = (__u64)fragment[1] << 32 | fragment[0];
	return true;
}

static __always_inline bool fp_headers(ctx_t *ctx, struct fp_ip *p, bool is_ip4)
{
	return is_ip4 ? fp_ip4(ctx, p) : fp_ip6(ctx, p);
}

/* Clears the fields that are left out. */
static __always_inline void fp_mask(union fp_body *body, __u32 protocol)
{
	__s32 checksum = checksum_offset(protocol);

	if (checksum >= 0)
		body->half[(checksum / 2) & 31] = 0;
	if (protocol == NEXTHDR_TCP)
		body->byte[TCP_FLAGS_AT] &= ~TCP_CWR;
}

/* Hashes the fields that all frames of a super-packet share. */
static __always_inline struct siphash fp_begin(const struct fp_ip *p)
{
	__u64 key[2] = { cfg.fingerprint_key[0], cfg.fingerprint_key[1] };
	struct siphash s = siphash_begin(key);

	siphash13_word(&s, p->addrs.src[0]);
	siphash13_word(&s, p->addrs.src[1]);
	siphash13_word(&s, p->addrs.dst[0]);
	siphash13_word(&s, p->addrs.dst[1]);
	siphash13_word(&s, p->id);
	return s;
}

/* left: bytes behind the IP headers; not 0. */
static __always_inline __u64 fp_end(struct siphash s, const union fp_body *body,
				    __u32 left, __u32 next, __u32 first)
{
	for (__u32 i = 0; i < FINGERPRINT_WORDS; i++)
		siphash13_word(&s, body->word[i]);
	return siphash13_end(&s, (__u64)left << 16 | next << 8 | first) | 1;
}

/* off: of the IP header, in bytes from the start of the frame. 0: the
 * packet is truncated. A function of its own, to bound the stack.
 */
__noinline __u64 ws_fingerprint(ctx_t *ctx, __u32 off, int is_ip4)
{
	struct fp_ip p = { .off = off };
	union fp_body body = {};
	__u32 len;

	if (!fp_headers(ctx, &p, is_ip4))
		return 0;

	/* A super-packet's payload length may be 0 (RFC 2675), also on
	 * the way back; then it does not limit the bytes behind it.
	 */
	len = p.left;
	barrier_var(len);
	if (len >= WS_FINGERPRINT_LEN) {
		if (!words_load(ctx, p.off, body.word, FINGERPRINT_WORDS))
			return 0;
	} else if (len && ctx_load_bytes(ctx, p.off, &body, not_zero(len))) {
		return 0;
	}
	if (!p.later)
		fp_mask(&body, p.next);
	return fp_end(fp_begin(&p), &body, p.left, p.next, p.first);
}
