/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Turns a refused packet into the ICMP error for its
 * sender. TC only; XDP leaves such packets to TC.
 */
#pragma once

#include "lib/hook.h"
#include "lib/node/boundary.h"
#include "lib/node/maps.h"
#include "lib/out/route_tc.h"
#include "lib/wire/icmp.h"
#include "lib/wire/ip4.h"
#include "lib/wire/ip6_walk.h"
#include "lib/wire/net.h"

/* Hop limit of the errors. */
#define ICMP_HOP_LIMIT 64

/* Bytes of a frame with only an IPv6 header: the kernel
 * makes no IPv6 packet shorter.
 */
#define FRAME_LEAST (sizeof(struct eth_hdr) + sizeof(struct ip6_hdr))
/* The most bytes that the kernel removes or adds at once. */
#define ROOM_MAX 4095

/* Longer than all headers in which a device may have to fill in a checksum. */
#define FRAME_LONG 1600

/* Makes the frame len bytes long, with undefined contents. Afterwards it
 * is no super-packet, and no device has to compute a checksum in it. The
 * kernel cancels such a checksum when the place where its range begins
 * is removed; so the packet is shortened and extended at its front.
 */
static __always_inline long frame_remake(struct __sk_buff *skb, __u32 len)
{
	/* Fails if the packet is or was encapsulated by a tunnel. Then
	 * only the bytes are removed, and a super-packet would stay one.
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
	/* An IPv4 packet that was encapsulated by a tunnel may be even shorter. */
	return bpf_skb_adjust_room(skb, (__s32)(len - skb->len),
				   BPF_ADJ_ROOM_MAC, BPF_F_ADJ_ROOM_FIXED_GSO);
}

/* Token bucket: may this CPU send one more error? Errors with an MTU have a
 * bucket of their own: otherwise a flood of other errors would make a black hole.
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

/* May the packet's sender be this node? A packet that arrived on an interface is from
 * another node, whatever its source. Packets of the node itself are at TC egress.
 */
static __always_inline bool icmp_may_be_own(const struct __sk_buff *skb)
{
	return !skb->ingress_ifindex;
}

/* Delivers the complete message to this node's own stack, on
 * the interface by which the refused packet would have left,
 * from the packet's destination address. Returns the verdict.
 */
static __always_inline int icmp_to_self(struct __sk_buff *skb)
{
	struct cursor c = ctx_cursor(skb);
	struct eth_hdr *eth = cursor_take(&c, struct eth_hdr);

	if (!eth)
		return CTX_REFUSED; /* for the verifier */
	__builtin_memcpy(eth->dst, eth->src, sizeof(eth->dst));
	return bpf_redirect(skb->ifindex, BPF_F_INGRESS);
}

/* Fills in the headers, except the addresses, which are there
 * already. The checksum covers the whole buffer, as the bytes behind
 * the message are zero. The IPv6 header is first the pseudo-header.
 */
static __always_inline void icmp6_finish(struct icmp6_message *m, __u32 what,
					 __u32 data, __u32 quoted)
{
	__s64 sum = 0;

	m->ip6.payload_len = bpf_htons(sizeof(m->icmp) + quoted);
	m->icmp.type = what >> 24;
	m->icmp.code = what >> 16;
	m->icmp.checksum = 0;
	m->icmp.data = bpf_htonl(data);
	/* The pseudo-header (RFC 8200 8.1): addresses, length, and the next
	 * header in the place of the hop limit, the low byte of its 16-bit word.
	 */
	m->ip6.vtc_flow = 0;
	m->ip6.nexthdr = 0;
	m->ip6.hop_limit = NEXTHDR_ICMP6;
	for (__u32 i = 0; i < sizeof(*m); i += 256)
		sum = bpf_csum_diff(NULL, 0, (void *)m + i, 256, sum);
	m->icmp.checksum = ~ip4_fold(sum);
	m->ip6.vtc_flow = IP6_VERSION;
	m->ip6.nexthdr = NEXTHDR_ICMP6;
	m->ip6.hop_limit = ICMP_HOP_LIMIT;
}

/* Bytes of the IPv6 packet at off, without bytes behind it; 0: it has
 * no header. A super-packet that is too long for its payload length
 * field has 0 there, and keeps it when it is no longer a super-packet.
 */
static __always_inline __u32 icmp6_about(struct __sk_buff *skb, __u32 off)
{
	__u32 room = skb->len - off, len;
	__be16 payload;

	if (off > skb->len || room < sizeof(struct ip6_hdr) ||
	    bpf_skb_load_bytes(skb, off + IP6_PAYLOAD_LEN_OFF, &payload,
			       sizeof(payload)))
		return 0;
	len = sizeof(struct ip6_hdr) + bpf_ntohs(payload);
	return !payload || len > room ? room : len;
}

/* Quotes as much of the packet at off, of n bytes, as fits
 * into the message; returns the bytes, or 0 on an error.
 */
static __always_inline __u32 icmp6_quote(struct __sk_buff *skb,
					 struct icmp6_message *m, __u32 off,
					 __u32 n)
{
	if (n > ICMP6_QUOTE_MAX)
		n = ICMP6_QUOTE_MAX;
	for (__u32 i = 0; i < sizeof(*m); i += 256) {
		void *piece = (void *)m + i;

		/* Otherwise the compiler joins the pieces into one call of memset. */
		barrier_var(piece);
		__builtin_memset(piece, 0, 256);
	}
	barrier_var(n);
	if (n > ICMP6_QUOTE_MAX || n < sizeof(struct ip6_hdr))
		return 0; /* for the verifier */
	return bpf_skb_load_bytes(skb, off, m->quote, n) ? 0 : n;
}

/* Headers in which the upper layer is searched: one less than this. */
#define ICMP6_EXTENSIONS_MAX 5

/* Is the packet at off an ICMPv6 error or a redirect? No
 * error may answer it then (RFC 4443 2.4 e). A truncated
 * packet, or one with too many headers, counts as one.
 */
static __always_inline bool icmp6_is_error(struct __sk_buff *skb, __u32 off,
					   __u32 len, __u32 next)
{
	struct ip6_walk w = { .off = off + sizeof(struct ip6_hdr),
			      .next = next };
	__u32 end = off + len;
	__u8 head[4]; /* type, code, checksum */

	ip6_walk(skb, &w, EXT_OPTIONS | EXT_ROUTING | EXT_FRAGMENT,
		 ICMP6_EXTENSIONS_MAX, end);
	if (w.cut)
		return true;
	/* A fragment that is not the first has no further header. */
	if (w.later)
		return w.next == NEXTHDR_ICMP6;
	if (w.passed == ICMP6_EXTENSIONS_MAX)
		return true;
	if (w.next != NEXTHDR_ICMP6)
		return false;
	if (w.off + sizeof(head) > end ||
	    bpf_skb_load_bytes(skb, w.off, head, sizeof(head)))
		return true;
	return head[0] < ICMP6_INFORMATIONAL || head[0] == ICMP6_REDIRECT;
}

/* RFC 4443 2.4 e: no error about an error or multicast; and none to a SID. */
static __always_inline bool icmp6_has_answer(struct __sk_buff *skb,
					     const struct icmp6_message *m,
					     __u32 off, __u32 len)
{
	const struct ip6_hdr *about = (const struct ip6_hdr *)m->quote;

	return ip6_is_ip6(about) && !ip6_is_unsteered(about->src) &&
	       !ip6_is_unsteered(about->dst) && !in_block(about->src[0]) &&
	       !icmp6_is_error(skb, off, len, about->nexthdr);
}

/* Result of icmp6_send and icmp4_send for a message to this node itself. */
#define ICMP_TO_SELF 100

/* Sends the message by the kernel's route to its receiver. Writes the addresses. */
static __always_inline int icmp6_send(struct __sk_buff *skb, struct scratch *s)
{
	const struct ip6_hdr *about = (const struct ip6_hdr *)s->m.quote;
	long rc;

	__builtin_memcpy(s->m.ip6.dst, about->src, sizeof(s->m.ip6.dst));
	s->m.ip6.src[0] = cfg.address[0];
	s->m.ip6.src[1] = cfg.address[1];
	__builtin_memset(&s->way, 0, sizeof(s->way));
	__builtin_memset(&s->nh, 0, sizeof(s->nh));
	rc = route_ask(skb, &s->m.ip6, 1, &s->way);
	if (rc == BPF_FIB_LKUP_RET_NOT_FWDED && icmp_may_be_own(skb)) {
		/* Reverse path filters drop packets from the node's own
		 * address. The destination is behind this interface.
		 */
		__builtin_memcpy(s->m.ip6.src, about->dst,
				 sizeof(s->m.ip6.src));
		return ICMP_TO_SELF;
	}
	if (!route_is_way(rc))
		return CTX_REFUSED;
	s->nh.nh_family = AF_INET6;
	__builtin_memcpy(s->nh.ipv6_nh, s->way.ipv6_dst, sizeof(s->nh.ipv6_nh));
	return bpf_redirect_neigh(s->way.ifindex, &s->nh, sizeof(s->nh), 0);
}

/* Turns the refused packet into an error of this kind about itself,
 * and sends it. off: offset of the quoted IPv6 header from the frame's
 * start. Returns the verdict, which drops if no error may be sent.
 */
__noinline int ws_icmp6(struct __sk_buff *skb, __u32 off, __u32 what,
			__u32 data)
{
	__u32 zero = 0, type = what >> 24, len = icmp6_about(skb, off), n;
	struct ws_errors *e = bpf_map_lookup_elem(&ws_errors, &zero);
	struct scratch *s = scratch();
	struct icmp6_message *m;
	int verdict;

	if (!e || !s)
		return CTX_REFUSED;
	m = &s->m;
	n = icmp6_quote(skb, m, off, len);
	if (!n || !icmp6_has_answer(skb, m, off, len)) {
		e->unanswerable++;
		return CTX_REFUSED;
	}
	if (!icmp_may_send(e, type == ICMP6_TOO_BIG)) {
		e->suppressed++;
		return CTX_REFUSED;
	}
	verdict = icmp6_send(skb, s);
	icmp6_finish(m, what, data, n);
	n += sizeof(struct ip6_hdr) + sizeof(struct icmp6_hdr);
	barrier_var(n);
	if (n > sizeof(*m) || n < FRAME_LEAST)
		return CTX_REFUSED; /* for the verifier */
	if (verdict == CTX_REFUSED ||
	    frame_remake(skb, sizeof(struct eth_hdr) + n) ||
	    bpf_skb_store_bytes(skb, sizeof(struct eth_hdr), m, n,
				BPF_F_RECOMPUTE_CSUM)) {
		e->unanswerable++;
		return CTX_REFUSED;
	}
	/* The message is our own: no function's index, and no mark. */
	skb->tc_index = WS_INDEX_PROVEN;
	skb->mark = 0;
	if (type == ICMP6_TOO_BIG)
		e->too_big++;
	else if (type == ICMP6_TIME_EXCEEDED)
		e->time_exceeded++;
	else if (type == ICMP6_UNREACHABLE)
		e->unreachable++;
	else
		e->parameter++;
	return verdict == ICMP_TO_SELF ? icmp_to_self(skb) : verdict;
}

/* Source of errors of a node without an IPv4 address (RFC 7600 4.8). */
#define IP4_DUMMY bpf_htonl(0xc0000008)

static __always_inline bool icmp4_has_answer(const struct icmp4_message *m)
{
	const struct ip4_hdr *about = (const struct ip4_hdr *)m->quote;
	__u32 options = ip4_header_len(about) - sizeof(*about);

	/* RFC 1122 3.2.2: among fragments only for the first. */
	if (!ip4_is_ip4(about) || ip4_is_never_forwarded(about->src) ||
	    ip4_is_never_forwarded(about->dst) ||
	    about->fragment & IP4_OFFSET_MASK)
		return false;
	return about->protocol != NEXTHDR_ICMP ||
	       !icmp4_is_error(((const __u8 *)(about + 1))[options & 63]);
}

/* Sends the message to the packet's sender, by the route and from the address that the
 * kernel would use (the address since Linux 6.7); to this node itself as icmp6_send.
 */
static __always_inline int icmp4_send(struct __sk_buff *skb, struct scratch *s)
{
	struct ip4_hdr *about = (struct ip4_hdr *)s->m4.quote;
	__be32 to = about->src;
	long rc = -1;

	for (__u32 flags = BPF_FIB_LOOKUP_SRC;; flags = 0) {
		__builtin_memset(&s->way, 0, sizeof(s->way));
		s->way.family = AF_INET;
		s->way.ifindex = skb->ifindex;
		s->way.tot_len = 1;
		s->way.ipv4_dst = to;
		rc = bpf_fib_lookup(skb, &s->way, sizeof(s->way), flags);
		if (route_is_way(rc) || !flags)
			break;
	}
	s->m4.ip4.dst = to;
	if (rc == BPF_FIB_LKUP_RET_NOT_FWDED && icmp_may_be_own(skb)) {
		s->m4.ip4.src = about->dst;
		return ICMP_TO_SELF;
	}
	if (!route_is_way(rc))
		return CTX_REFUSED;
	__builtin_memset(&s->nh, 0, sizeof(s->nh));
	s->nh.nh_family = s->way.family;
	__builtin_memcpy(s->nh.ipv6_nh, s->way.ipv6_dst, sizeof(s->nh.ipv6_nh));
	s->m4.ip4.src = s->way.ipv4_src ? s->way.ipv4_src : IP4_DUMMY;
	return bpf_redirect_neigh(s->way.ifindex, &s->nh, sizeof(s->nh), 0);
}

/* The bytes of the buffer behind the quote are zero. */
static __always_inline void icmp4_finish(struct icmp4_message *m, __u32 what,
					 __u32 data, __u32 quoted)
{
	__s64 sum;

	m->ip4.version_ihl = 0x45;
	m->ip4.tos = 0;
	m->ip4.len = bpf_htons(sizeof(m->ip4) + sizeof(m->icmp) + quoted);
	m->ip4.id = 0;
	m->ip4.fragment = IP4_DONT_FRAGMENT;
	m->ip4.ttl = ICMP_HOP_LIMIT;
	m->ip4.protocol = NEXTHDR_ICMP;
	m->ip4.checksum = 0;
	m->ip4.checksum = ~ip4_fold(ip4_sum(&m->ip4));
	m->icmp.type = what >> 24;
	m->icmp.code = what >> 16;
	m->icmp.checksum = 0;
	m->icmp.data = bpf_htonl(data);
	sum = bpf_csum_diff(NULL, 0, (void *)&m->icmp, 256, 0);
	sum = bpf_csum_diff(NULL, 0, (void *)&m->icmp + 256,
			    sizeof(m->icmp) + sizeof(m->quote) - 256, sum);
	m->icmp.checksum = ~ip4_fold(sum);
}

/* Bytes of the packet, without Ethernet's padding; 0: a bug. */
static __always_inline __u32 ip4_quoted(struct __sk_buff *skb)
{
	__u32 all = skb->len - sizeof(struct eth_hdr), len;
	const struct ip4_hdr *ip4;
	struct cursor c = ctx_cursor(skb);

	if (!cursor_take(&c, struct eth_hdr))
		return 0;
	ip4 = cursor_take(&c, struct ip4_hdr);
	if (!ip4)
		return 0;
	len = bpf_ntohs(ip4->len);
	/* A super-packet may be longer than its length field can be. */
	return skb->gso_size || len > all ? all : len;
}

#define ICMP4_TOO_BIG                                                          \
	ICMP6_ERROR(ICMP4_UNREACHABLE, ICMP4_FRAGMENTATION_NEEDED, 0)

/* As ws_icmp6, for a plain IPv4 packet, whose header was pulled before. */
__noinline int ws_icmp4(struct __sk_buff *skb, __u32 what, __u32 data)
{
	__u32 zero = 0, n;
	bool too_big = what == ICMP4_TOO_BIG;
	struct ws_errors *e = bpf_map_lookup_elem(&ws_errors, &zero);
	struct scratch *s = scratch();
	int verdict;

	if (!e || !s)
		return CTX_REFUSED;
	n = ip4_quoted(skb);
	for (__u32 i = 0; i < ICMP4_LEN_MAX; i += 64) {
		void *piece = (void *)&s->m4 + i;

		barrier_var(piece);
		__builtin_memset(piece, 0, 64);
	}
	if (n > ICMP4_QUOTE_MAX)
		n = ICMP4_QUOTE_MAX;
	barrier_var(n);
	if (n < sizeof(struct ip4_hdr) || n > ICMP4_QUOTE_MAX ||
	    bpf_skb_load_bytes(skb, sizeof(struct eth_hdr), s->m4.quote, n) ||
	    !icmp4_has_answer(&s->m4)) {
		e->unanswerable++;
		return CTX_REFUSED;
	}
	if (!icmp_may_send(e, too_big)) {
		e->suppressed++;
		return CTX_REFUSED;
	}
	verdict = icmp4_send(skb, s);
	if (verdict == CTX_REFUSED) {
		e->unanswerable++;
		return CTX_REFUSED;
	}
	icmp4_finish(&s->m4, what, data, n);
	n += sizeof(struct ip4_hdr) + sizeof(struct icmp6_hdr);
	barrier_var(n);
	if (n > ICMP4_LEN_MAX || n < 48)
		return CTX_REFUSED; /* for the verifier */
	if (frame_remake(skb, sizeof(struct eth_hdr) + n) ||
	    bpf_skb_store_bytes(skb, sizeof(struct eth_hdr), &s->m4, n,
				BPF_F_RECOMPUTE_CSUM)) {
		e->unanswerable++;
		return CTX_REFUSED;
	}
	skb->tc_index = WS_INDEX_PROVEN;
	skb->mark = 0;
	if (too_big)
		e->too_big++;
	else if (what >> 24 == ICMP4_UNREACHABLE)
		e->unreachable++;
	else
		e->time_exceeded++;
	return verdict == ICMP_TO_SELF ? icmp_to_self(skb) : verdict;
}

/* mtu: of the route; outer: bytes of it that are not for the
 * packet at off. An IPv4 packet has no outer header any more.
 */
static __always_inline int icmp_too_big(struct __sk_buff *skb, __u32 off,
					__u32 mtu, __u32 outer, bool is_ip4)
{
	mtu = mtu > outer ? mtu - outer : 0;
	if (is_ip4) {
		if (mtu < IP4_MIN_MTU)
			mtu = IP4_MIN_MTU;
		return ws_icmp4(skb, ICMP4_TOO_BIG, mtu);
	}
	/* An IPv6 sender sends packets of this size, even for a lower MTU. */
	if (mtu < IP6_MIN_MTU)
		mtu = IP6_MIN_MTU;
	return ws_icmp6(skb, off, ICMP6_ERROR(ICMP6_TOO_BIG, 0, 0), mtu);
}

static __always_inline int icmp_time_exceeded(struct __sk_buff *skb,
					      bool is_ip4)
{
	if (is_ip4)
		return ws_icmp4(skb, ICMP6_ERROR(ICMP4_TIME_EXCEEDED, 0, 0), 0);
	return ws_icmp6(skb, sizeof(struct eth_hdr),
			ICMP6_ERROR(ICMP6_TIME_EXCEEDED, 0, 0), 0);
}

/* For a packet without a route in the kernel's table; rc: of the
 * look-up. Sends the error that the kernel's own forwarding would
 * send for such a route, and none for a route of type blackhole.
 */
static __always_inline int icmp_no_way(struct __sk_buff *skb, long rc,
				       bool is_ip4)
{
	__u32 code = is_ip4 ? ICMP4_HOST : ICMP6_NO_ROUTE;

	if (rc == BPF_FIB_LKUP_RET_BLACKHOLE)
		return CTX_REFUSED;
	if (rc == BPF_FIB_LKUP_RET_PROHIBIT)
		code = is_ip4 ? ICMP4_PROHIBITED : ICMP6_PROHIBITED;
	if (is_ip4)
		return ws_icmp4(skb, ICMP6_ERROR(ICMP4_UNREACHABLE, code, 0),
				0);
	return ws_icmp6(skb, sizeof(struct eth_hdr),
			ICMP6_ERROR(ICMP6_UNREACHABLE, code, 0), 0);
}

/* For the packet at off without a route, which this node has
 * encapsulated, or would have: its sender has no link to its destination
 * (RFC 2473 8.3). An IPv4 packet has no outer header any more.
 */
static __always_inline int icmp_no_tunnel(struct __sk_buff *skb, __u32 off,
					  long rc, bool is_ip4)
{
	if (rc == BPF_FIB_LKUP_RET_BLACKHOLE)
		return CTX_REFUSED;
	if (is_ip4)
		return ws_icmp4(
			skb, ICMP6_ERROR(ICMP4_UNREACHABLE, ICMP4_HOST, 0), 0);
	return ws_icmp6(skb, off,
			ICMP6_ERROR(ICMP6_UNREACHABLE, ICMP6_ADDRESS, 0), 0);
}
