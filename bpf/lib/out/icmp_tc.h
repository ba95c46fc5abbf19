/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* A refused packet becomes the ICMP error that tells its sender why. TC only; XDP
 * leaves such packets to it.
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
	/* An IPv4 packet that was a tunnel's may be shorter still. */
	return bpf_skb_adjust_room(skb, (__s32)(len - skb->len),
				   BPF_ADJ_ROOM_MAC, BPF_F_ADJ_ROOM_FIXED_GSO);
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

/* May the packet's sender be this node? What came in by an interface is somebody
 * else's, whatever its source says. TC egress has the node's own.
 */
static __always_inline bool icmp_may_be_own(const struct __sk_buff *skb)
{
	return !skb->ingress_ifindex;
}

/* The message, which is whole, goes up this node's stack: it comes in by the
 * interface that the packet would have left by, whose address it comes from.
 * Returns the verdict.
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

/* All but the checksum's own header, over the whole of the buffer: what is behind
 * the message is zero. Turns the pseudo-header into the header. The addresses are
 * there.
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
	/* RFC 8200 8.1: addresses, length and next header; here the latter is
	 * where its 16-bit word ends.
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

/* Bytes of the IPv6 packet at off, without what is behind it; 0: it has no header.
 * A super-packet that is too long for its header says that it has no payload; it may
 * have stopped being one by now.
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

/* The message's buffer with as much of the packet of n bytes at off as fits; 0: it
 * cannot be had.
 */
static __always_inline __u32 icmp6_quote(struct __sk_buff *skb,
					 struct icmp6_message *m, __u32 off,
					 __u32 n)
{
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

/* Headers that are looked through for the upper layer: one less than this. */
#define ICMP6_EXTENSIONS_MAX 5

/* Is the packet at off an ICMPv6 error or a redirect, so that no error may answer
 * it (RFC 4443 2.4 e)? What is not whole, or has more headers than we look
 * through, counts as if it were.
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
	/* Behind all fragments but the first is no header. */
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

/* RFC 4443 2.4 e: not to many, not to nobody, not about an error. Nor to a SID. */
static __always_inline bool icmp6_has_answer(struct __sk_buff *skb,
					     const struct icmp6_message *m,
					     __u32 off, __u32 len)
{
	const struct ip6_hdr *about = (const struct ip6_hdr *)m->quote;

	return ip6_is_ip6(about) && !ip6_is_unsteered(about->src) &&
	       !ip6_is_unsteered(about->dst) && !in_block(about->src[0]) &&
	       !icmp6_is_error(skb, off, len, about->nexthdr);
}

/* What icmp6_send and icmp4_send return for a message to this node itself. */
#define ICMP_TO_SELF 100

/* By the way that the kernel's table has to its receiver. Writes the addresses. */
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
		/* Filters of reverse paths take nothing from the node's own
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

/* Makes the packet, which has been refused, the error of that kind about itself,
 * and sends it. off: where the IPv6 header is that it is about, from the frame's
 * start. Returns the verdict, which drops where there is none to be sent.
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
	/* It is ours, and no function's; nobody has marked it. */
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

/* Who answers for a node without an IPv4 address (RFC 7600 4.8). */
#define IP4_DUMMY bpf_htonl(0xc0000008)

static __always_inline bool icmp4_has_answer(const struct icmp4_message *m)
{
	const struct ip4_hdr *about = (const struct ip4_hdr *)m->quote;
	__u32 options = ip4_header_len(about) - sizeof(*about);

	/* RFC 1122 3.2.2: not about a fragment but the first. */
	if (!ip4_is_ip4(about) || ip4_is_never_forwarded(about->src) ||
	    ip4_is_never_forwarded(about->dst) ||
	    about->fragment & IP4_OFFSET_MASK)
		return false;
	return about->protocol != NEXTHDR_ICMP ||
	       !icmp4_is_error(((const __u8 *)(about + 1))[options & 63]);
}

/* To the packet's sender, by the way and from the address that the kernel would
 * take (the latter since Linux 6.7); to this node itself as icmp6_send does.
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

/* Behind what is quoted the buffer is zero. */
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

/* Bytes of the packet, without what Ethernet has padded it with; 0: a bug. */
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
	/* A super-packet may be longer than its header can tell. */
	return skb->gso_size || len > all ? all : len;
}

#define ICMP4_TOO_BIG                                                          \
	ICMP6_ERROR(ICMP4_UNREACHABLE, ICMP4_FRAGMENTATION_NEEDED, 0)

/* The same for a plain IPv4 packet, whose header was pulled before. */
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

/* mtu: of the way out; outer: bytes of it that are not the packet's at off, which
 * is plain where it is one of IPv4.
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
	/* An IPv6 sender sends packets of this size whatever it is told. */
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

/* For a packet whose way the kernel's table does not have; rc: what it said. Its
 * sender is told what the kernel's own forwarding would tell of such a route, and
 * nothing of one that is a black hole.
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

/* The same for the packet at off that this node has encapsulated, or would have:
 * what its sender knows nothing of is the link to the destination (RFC 2473 8.3).
 * One of IPv4 is plain.
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
