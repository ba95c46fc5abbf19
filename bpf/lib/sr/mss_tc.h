/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* A headend lowers the MSS option of a SYN to the size that fits the chain.
 * TC only. A SYN without the option stands for an MSS that always fits.
 */
#pragma once

#include "lib/hook.h"
#include "lib/node/maps.h"
#include "lib/verifier.h"
#include "lib/wire/ip6_walk.h"
#include "lib/wire/net.h"
#include "lib/wire/tuple.h"

#define TCP_OPTION_END 0
#define TCP_OPTION_NOP 1
#define TCP_OPTION_MSS 2
#define TCP_OPTION_MSS_LEN 4
#define TCP_OPTIONS_MAX 40 /* bytes */

/* The place of a TCP header, in bytes from the frame's start. */
struct mss_at {
	__u32 off; /* 0: there is none */
	__u32 left; /* bytes of the IP packet from there on */
};

static __always_inline struct mss_at mss_at_ip4(struct __sk_buff *skb)
{
	struct mss_at at = {};
	struct ip4_hdr ip4;
	__u32 header, len;

	if (bpf_skb_load_bytes(skb, sizeof(struct eth_hdr), &ip4, sizeof(ip4)))
		return at;
	header = ip4_header_len(&ip4);
	len = bpf_ntohs(ip4.len);
	if (ip4.protocol != NEXTHDR_TCP || ip4_is_fragment(&ip4) ||
	    header > len)
		return at;
	at.off = sizeof(struct eth_hdr) + header;
	at.left = len - header;
	return at;
}

/* Skips as many extension headers as tuple_read. Not AH,
 * whose receiver would detect the change, and not fragments.
 */
static __always_inline struct mss_at mss_at_ip6(struct __sk_buff *skb)
{
	const __u32 first = sizeof(struct eth_hdr) + sizeof(struct ip6_hdr);
	struct ip6_walk w = { .off = first };
	struct mss_at at = {};
	__u32 left, len;
	struct {
		__be32 vtc_flow;
		__be16 payload_len;
		__u8 nexthdr;
		__u8 hop_limit;
	} ip6;

	if (bpf_skb_load_bytes(skb, sizeof(struct eth_hdr), &ip6, sizeof(ip6)))
		return at;
	w.next = ip6.nexthdr;
	ip6_walk(skb, &w, EXT_OPTIONS | EXT_ROUTING, TUPLE_EXTENSIONS,
		 IP6_WALK_FRAME);
	left = bpf_ntohs(ip6.payload_len);
	len = w.off - first;
	if (w.next != NEXTHDR_TCP || len > TUPLE_EXTENSIONS_LEN || len > left)
		return at;
	at.off = w.off;
	at.left = left - len;
	return at;
}

struct mss_walk {
	__u32 at;
	__u32 len; /* bytes of options */
	__u32 most;
	bool lowered;
};

/* Processes one option (RFC 9293 3.2). Returns 1 behind the
 * last one, and at a truncated one: receivers stop there too.
 */
static long mss_step(__attribute__((unused)) __u64 i, struct mss_walk *w)
{
	struct scratch *s = scratch();
	__u32 at = w->at, len = 1, said;
	__u8 *option;

	if (!s || at >= w->len || at >= TCP_OPTIONS_MAX)
		return 1;
	option = s->options.is + at;
	if (*option == TCP_OPTION_END)
		return 1;
	if (*option != TCP_OPTION_NOP) {
		if (at + 2 > w->len || at + 2 > TCP_OPTIONS_MAX)
			return 1;
		len = option[1];
		if (len < 2 || at + len > w->len)
			return 1;
	}
	w->at = at + len;
	if (*option != TCP_OPTION_MSS || len != TCP_OPTION_MSS_LEN ||
	    at > TCP_OPTIONS_MAX - TCP_OPTION_MSS_LEN)
		return 0;
	said = option[2] << 8 | option[3];
	if (said > w->most) {
		option[2] = w->most >> 8;
		option[3] = w->most;
		w->lowered = true;
	}
	return 0;
}

/* Lowers the MSS option of a packet without an outer header to most bytes,
 * if it is higher. Moves the packet: every pointer taken before is gone.
 * Returns the kernel's error if the option cannot be written; a packet
 * without the option, or in which it cannot be found, stays unchanged.
 */
__noinline int ws_mss_clamp(struct __sk_buff *skb, __u32 most, int is_ip4)
{
	struct mss_walk w = { .at = unknown_zero(skb), .most = most };
	struct scratch *s = scratch();
	struct tcp_hdr tcp;
	struct mss_at at;
	__u32 off, len;
	__s64 diff;
	long rc;

	at = is_ip4 ? mss_at_ip4(skb) : mss_at_ip6(skb);
	if (!s || !at.off ||
	    bpf_skb_load_bytes(skb, at.off, &tcp, sizeof(tcp)) ||
	    !(tcp.flags & TCP_SYN))
		return 0;
	len = (tcp.offset >> 4) * 4;
	if (len <= sizeof(tcp) || len > at.left)
		return 0;
	len -= sizeof(tcp);
	off = at.off + sizeof(tcp);
	barrier_var(len);
	if (len < 1 || len > TCP_OPTIONS_MAX)
		return 0; /* for the verifier */
	__builtin_memset(s->options.was, 0, sizeof(s->options.was));
	if (bpf_skb_load_bytes(skb, off, s->options.was, len))
		return 0;
	__builtin_memcpy(s->options.is, s->options.was, sizeof(s->options.is));
	w.len = len;
	bpf_loop(TCP_OPTIONS_MAX, mss_step, &w, 0);
	if (!w.lowered)
		return 0;
	/* RFC 1624. Options begin at a 16-bit word, so an odd offset needs no
	 * special case. The helper skips a checksum that the device computes.
	 */
	diff = bpf_csum_diff((void *)s->options.was, sizeof(s->options.was),
			     (void *)s->options.is, sizeof(s->options.is), 0);
	rc = bpf_l4_csum_replace(
		skb, at.off + __builtin_offsetof(struct tcp_hdr, checksum), 0,
		diff, 0);
	barrier_var(len);
	if (rc || len < 1 || len > TCP_OPTIONS_MAX)
		return rc;
	return bpf_skb_store_bytes(skb, off, s->options.is, len, 0);
}
