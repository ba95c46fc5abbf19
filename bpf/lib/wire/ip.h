/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* An inner packet, of either version of IP. If is_ip4 is a constant
 * at compile time, the code for the other version disappears.
 */
#pragma once

#include "lib/wire/cursor.h"
#include "lib/wire/ip4.h"
#include "lib/wire/net.h"

struct ip {
	void *hdr; /* a struct ip6_hdr or ip4_hdr, in bounds */
	bool is_ip4;
};

/* IPv4 addresses are ::ffff:a.b.c.d, as in our tables. */
struct addrs {
	__be64 src[2];
	__be64 dst[2];
};

/* Bytes of a header without options. */
static __always_inline __u32 ip_header_len(bool is_ip4)
{
	return is_ip4 ? sizeof(struct ip4_hdr) : sizeof(struct ip6_hdr);
}

/* c: at the header; moves behind it, before any options.
 * False: the header ends behind the packet's end.
 */
static __always_inline bool ip_take(struct cursor *c, bool is_ip4,
				    struct ip *in)
{
	in->is_ip4 = is_ip4;
	in->hdr = is_ip4 ? (void *)cursor_take(c, struct ip4_hdr) :
			   (void *)cursor_take(c, struct ip6_hdr);
	return in->hdr;
}

/* Bytes of the packet, by its header. */
static __always_inline __u32 ip_len(const struct ip *in)
{
	return in->is_ip4 ? bpf_ntohs(((const struct ip4_hdr *)in->hdr)->len) :
			    ip6_len(in->hdr);
}

/* Does the version field agree with the type in the header before? */
static __always_inline bool ip_is_its_version(const struct ip *in)
{
	return in->is_ip4 ? ip4_is_ip4(in->hdr) : ip6_is_ip6(in->hdr);
}

static __always_inline struct addrs ip_addrs(const struct ip *in)
{
	const struct ip4_hdr *ip4 = in->hdr;
	const struct ip6_hdr *ip6 = in->hdr;

	if (in->is_ip4)
		return (struct addrs){
			.src = { 0, ip4_mapped(ip4->src) },
			.dst = { 0, ip4_mapped(ip4->dst) },
		};
	return (struct addrs){
		.src = { ip6->src[0], ip6->src[1] },
		.dst = { ip6->dst[0], ip6->dst[1] },
	};
}

/* Addresses to and from which the kernel never forwards. It
 * would forward to ::, for example by a default route.
 */
static __always_inline bool ip_to_is_never_forwarded(const struct ip *in)
{
	const struct ip6_hdr *ip6 = in->hdr;

	return in->is_ip4 ? ip4_is_never_forwarded(
				    ((const struct ip4_hdr *)in->hdr)->dst) :
			    ip6_is_unsteered(ip6->dst) &&
				    !ip6_is_unspecified(ip6->dst);
}

static __always_inline bool ip_from_is_never_forwarded(const struct ip *in)
{
	return in->is_ip4 ?
		       ip4_is_never_forwarded(
			       ((const struct ip4_hdr *)in->hdr)->src) :
		       ip6_is_unsteered(((const struct ip6_hdr *)in->hdr)->src);
}

/* Packets that are never steered, by any rule. */
static __always_inline bool ip_is_unsteered(const struct ip *in)
{
	const struct ip4_hdr *ip4 = in->hdr;
	const struct ip6_hdr *ip6 = in->hdr;

	if (in->is_ip4)
		return ip4_is_unsteered(ip4->dst) || ip4_is_unsteered(ip4->src);
	return ip6_is_unsteered(ip6->dst) || ip6_is_unsteered(ip6->src) ||
	       ip6_is_mapped(ip6->dst) || ip6_is_mapped(ip6->src);
}

/* Hop limit or TTL. */
static __always_inline __u32 ip_hops(const struct ip *in)
{
	return in->is_ip4 ? ((const struct ip4_hdr *)in->hdr)->ttl :
			    ((const struct ip6_hdr *)in->hdr)->hop_limit;
}

static __always_inline void ip_decrement(const struct ip *in)
{
	if (in->is_ip4)
		ip4_decrement(in->hdr);
	else
		((struct ip6_hdr *)in->hdr)->hop_limit--;
}

static __always_inline __u32 ip_ecn(const struct ip *in)
{
	return in->is_ip4 ? ((const struct ip4_hdr *)in->hdr)->tos & 3 :
			    ip6_ecn(in->hdr);
}

/* The first word of its outer header, without the flow
 * label. By RFC 6040 4.1 ECN is copied too.
 */
static __always_inline __be32 ip_vtc(const struct ip *in)
{
	const struct ip4_hdr *ip4 = in->hdr;
	const struct ip6_hdr *ip6 = in->hdr;

	return in->is_ip4 ? IP6_VERSION |
				    bpf_htonl((__u32)ip4->tos << IP6_TC_SHIFT) :
			    ip6->vtc_flow & ~IP6_FLOW_MASK;
}

/* RFC 6040 4.2, for packets that the egress accepts: sets the outer header's mark. */
static __always_inline void ip_set_ecn(const struct ip *in, __u32 outer)
{
	__u32 now = ip_ecn(in), ecn = now;
	struct ip6_hdr *ip6 = in->hdr;
	struct ip4_hdr *ip4 = in->hdr;

	if (outer == ECN_CE)
		ecn = ECN_CE;
	else if (outer == ECN_ECT1 && now == ECN_ECT0)
		ecn = ECN_ECT1;
	if (ecn == now)
		return;
	if (in->is_ip4)
		ip4_set_tos(ip4, ip4->tos ^ now ^ ecn);
	else
		ip6->vtc_flow ^= bpf_htonl((now ^ ecn) << IP6_ECN_SHIFT);
}
