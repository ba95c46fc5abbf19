/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* A refused packet becomes the ICMP error that tells its sender why. TC only; XDP
 * leaves such packets to it.
 */
#pragma once

#include "boundary.h"
#include "hook.h"
#include "icmp.h"
#include "maps.h"
#include "net.h"
#include "route.h"

/* The outer headers of what we send leave with this. */
#define ICMP_HOP_LIMIT 64

/* Bytes of a frame that nothing but an IPv6 header is in: the kernel cuts an IPv6
 * packet no shorter.
 */
#define FRAME_LEAST (sizeof(struct eth_hdr) + sizeof(struct ip6_hdr))
/* The most that the kernel cuts or adds at once. */
#define ROOM_MAX 4095

/* Behind every header that a checksum can be left to the device in. */
#define FRAME_LONG 1600

static __always_inline __u32 csum_fold(__s64 sum)
{
	sum = (sum & 0xffff) + (sum >> 16 & 0xffff);
	sum = (sum & 0xffff) + (sum >> 16);
	return ~sum & 0xffff;
}

/* Makes the frame len bytes long, whatever it held and was: no super-packet, and
 * nothing left for a device to sum up. What is in it then means nothing. The
 * kernel forgets a checksum that a device is to compute once the place where it
 * begins is cut off; so the packet is cut at its front, and grows there.
 */
static __always_inline long frame_remake(struct __sk_buff *skb, __u32 len)
{
	/* Not possible where the packet is, or was, a tunnel's. Then the cut
	 * alone has to do, which leaves a super-packet one.
	 */
	long rc = bpf_skb_change_tail(skb, FRAME_LONG, 0);

	if (rc && skb->gso_size)
		return rc;
	for (__u32 i = 0; i < 65535 / ROOM_MAX + 1; i++) {
		__u32 more = skb->len - FRAME_LEAST;

		if (skb->len <= FRAME_LEAST)
			break;
		if (more > ROOM_MAX)
			more = ROOM_MAX;
		rc = bpf_skb_adjust_room(skb, -(__s32)more, BPF_ADJ_ROOM_MAC,
					 BPF_F_ADJ_ROOM_FIXED_GSO);
		if (rc)
			return rc;
	}
	return bpf_skb_adjust_room(skb, len - FRAME_LEAST, BPF_ADJ_ROOM_MAC,
				   BPF_F_ADJ_ROOM_FIXED_GSO);
}

/* Token bucket: may this CPU send one more? What tells of sizes has a bucket of
 * its own, so that nobody makes a black hole by asking for other errors.
 */
static __always_inline bool icmp_may_send(struct ws_errors *e, bool too_big)
{
	__u64 now = bpf_ktime_get_ns(), due;

	due = too_big ? e->due_too_big_ns : e->due_ns;
	if (due < now)
		due = now;
	due += cfg.icmp_interval_ns;
	if (due - now > cfg.icmp_burst_ns)
		return false;
	if (too_big)
		e->due_too_big_ns = due;
	else
		e->due_ns = due;
	return true;
}

/* All but the checksum's own header, over the whole of the buffer: what is behind
 * the message is zero. Turns the pseudo-header into the header.
 */
static __always_inline void icmp6_finish(struct icmp6_message *m, __u32 what,
					 __u32 data, __u32 quoted)
{
	__s64 sum = 0;

	m->ip6.payload_len = bpf_htons(sizeof(m->icmp) + quoted);
	__builtin_memcpy(m->ip6.dst, ((struct ip6_hdr *)m->quote)->src,
			 sizeof(m->ip6.dst));
	m->ip6.src[0] = cfg.address[0];
	m->ip6.src[1] = cfg.address[1];
	m->icmp.type = what >> 24;
	m->icmp.code = what >> 16;
	m->icmp.checksum = 0;
	m->icmp.data = bpf_htonl(data);
	/* RFC 8200 8.1: addresses, length and next header; here the latter is
	 * where its 16-bit word ends.
	 */
	m->ip6.vtc_flow = 0;
	m->ip6.nexthdr = 0;
	m->ip6.hop_limit = NEXTHDR_ICMP6;
	for (__u32 i = 0; i < sizeof(*m); i += 256)
		sum = bpf_csum_diff(NULL, 0, (void *)m + i, 256, sum);
	m->icmp.checksum = csum_fold(sum);
	m->ip6.vtc_flow = IP6_VERSION;
	m->ip6.nexthdr = NEXTHDR_ICMP6;
	m->ip6.hop_limit = ICMP_HOP_LIMIT;
}

/* The message's buffer with as much of the packet at off as fits; 0: it cannot be
 * had.
 */
static __always_inline __u32 icmp6_quote(struct __sk_buff *skb,
					 struct icmp6_message *m, __u32 off)
{
	__u32 n = skb->len - off;

	if (off > skb->len || n < sizeof(struct ip6_hdr))
		return 0;
	if (n > ICMP6_QUOTE_MAX)
		n = ICMP6_QUOTE_MAX;
	for (__u32 i = 0; i < sizeof(*m); i += 256) {
		void *piece = (void *)m + i;

		/* Else the pieces become one, which is a call to a library. */
		barrier_var(piece);
		__builtin_memset(piece, 0, 256);
	}
	barrier_var(n);
	if (n > ICMP6_QUOTE_MAX || n < sizeof(struct ip6_hdr))
		return 0; /* for the verifier */
	return bpf_skb_load_bytes(skb, off, m->quote, n) ? 0 : n;
}

/* RFC 4443 2.4 e: not to many, not to nobody, not about an error. Nor to a SID. */
static __always_inline bool icmp6_has_answer(struct __sk_buff *skb,
					     const struct icmp6_message *m,
					     __u32 off)
{
	const struct ip6_hdr *about = (const struct ip6_hdr *)m->quote;

	return ip6_is_ip6(about) && !ip6_is_unsteered(about->src) &&
	       !ip6_is_unsteered(about->dst) && !in_block(about->src[0]) &&
	       (about->src[0] || about->src[1]) &&
	       !icmp6_is_error(skb, off, about->nexthdr);
}

/* By the way that the kernel's table has to its receiver. */
static __always_inline int icmp6_send(struct __sk_buff *skb, struct bench *b)
{
	__builtin_memset(&b->way, 0, sizeof(b->way));
	__builtin_memset(&b->nh, 0, sizeof(b->nh));
	if (!route_is_way(route_ask(skb, &b->m.ip6, 1, &b->way)))
		return CTX_DROP;
	b->nh.nh_family = AF_INET6;
	__builtin_memcpy(b->nh.ipv6_nh, b->way.ipv6_dst, sizeof(b->nh.ipv6_nh));
	return bpf_redirect_neigh(b->way.ifindex, &b->nh, sizeof(b->nh), 0);
}

/* Makes the packet, which has been refused, the error of that kind about itself,
 * and sends it. off: where the IPv6 header is that it is about, from the frame's
 * start. Returns the verdict, which drops where there is none to be sent.
 */
__noinline int ws_icmp6(struct __sk_buff *skb, __u32 off, __u32 what,
			__u32 data)
{
	__u32 zero = 0, type = what >> 24, n;
	struct ws_errors *e = bpf_map_lookup_elem(&ws_errors, &zero);
	struct bench *b = bench();
	struct icmp6_message *m;
	int verdict;

	if (!e || !b)
		return CTX_DROP;
	m = &b->m;
	n = icmp6_quote(skb, m, off);
	if (!n || !icmp6_has_answer(skb, m, off)) {
		e->unanswerable++;
		return CTX_DROP;
	}
	if (!icmp_may_send(e, type == ICMP6_TOO_BIG)) {
		e->suppressed++;
		return CTX_DROP;
	}
	icmp6_finish(m, what, data, n);
	verdict = icmp6_send(skb, b);
	n += sizeof(struct ip6_hdr) + sizeof(struct icmp6_hdr);
	barrier_var(n);
	if (n > sizeof(*m) || n < FRAME_LEAST)
		return CTX_DROP; /* for the verifier */
	if (verdict != TC_ACT_REDIRECT ||
	    frame_remake(skb, sizeof(struct eth_hdr) + n) ||
	    bpf_skb_store_bytes(skb, sizeof(struct eth_hdr), m, n,
				BPF_F_RECOMPUTE_CSUM)) {
		e->unanswerable++;
		return CTX_DROP;
	}
	/* It is ours, and no function's. */
	skb->tc_index = WS_INDEX_PROVEN;
	if (type == ICMP6_TOO_BIG)
		e->too_big++;
	else if (type == ICMP6_TIME_EXCEEDED)
		e->time_exceeded++;
	else
		e->parameter++;
	return verdict;
}

/* mtu: of the way out; outer: bytes of it that are not the packet's at off. */
static __always_inline int icmp6_too_big(struct __sk_buff *skb, __u32 off,
					 __u32 mtu, __u32 outer)
{
	mtu = mtu > outer ? mtu - outer : 0;
	/* An IPv6 sender sends packets of this size whatever it is told. */
	if (mtu < IP6_MIN_MTU)
		mtu = IP6_MIN_MTU;
	return ws_icmp6(skb, off, ICMP6_ERROR(ICMP6_TOO_BIG, 0, 0), mtu);
}

static __always_inline int icmp6_time_exceeded(struct __sk_buff *skb)
{
	return ws_icmp6(skb, sizeof(struct eth_hdr),
			ICMP6_ERROR(ICMP6_TIME_EXCEEDED, 0, 0), 0);
}
