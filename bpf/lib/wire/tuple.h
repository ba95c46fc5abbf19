/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* A packet's flow: addresses, protocol, ports. The same on
 * both hooks and for both versions of IP.
 */
#pragma once

#include "lib/wire/cursor.h"
#include "lib/wire/net.h"

/* The most extension headers that are skipped, and their
 * length together: a packet with more counts as truncated.
 */
#define TUPLE_EXTENSIONS 4
#define TUPLE_EXTENSIONS_LEN 256
/* Bytes from the IP header on that tuple_read reads; an
 * IPv4 header with options is shorter.
 */
#define TUPLE_LEN (40 + TUPLE_EXTENSIONS_LEN + 4)

/* The fields of a packet's upper layer that can be read as its receiver reads them. */
enum tuple_known {
	TUPLE_CUT, /* none: it is truncated, or has too many headers */
	/* none: the next header may be followed by another one, and cannot
	 * be skipped: its type is unknown, or other fragments contain it.
	 */
	TUPLE_HIDDEN,
	/* A later fragment of IPv6. It names a protocol, but its receiver
	 * uses the protocol of the first fragment (RFC 8200 4.5).
	 */
	TUPLE_LATER,
	TUPLE_PROTOCOL, /* the protocol: this is a fragment, and at most one fragment has the ports */
	TUPLE_PORTS, /* all, if the protocol has ports */
};

struct tuple {
	__be64 src[2]; /* IPv4: ::ffff:a.b.c.d */
	__be64 dst[2];
	/* The first header that is not skipped; in fragments of IPv6 the
	 * Next Header of the Fragment header. 0 if the packet is truncated.
	 */
	__u8 protocol;
	__u8 known; /* enum tuple_known */
	/* 0 for every fragment, and for protocols without ports. */
	__be16 sport;
	__be16 dport;
};

struct ip6_extension {
	__u8 nexthdr;
	__u8 len; /* 8-octet units, not counting the first; but see AH */
	__be16 offset; /* of the Fragment header only: units of 8 bytes, 3 bits of flags */
	__u8 pad[4];
};

struct ports {
	__be16 src;
	__be16 dst;
};

static __always_inline bool has_ports(__u32 protocol)
{
	return protocol == NEXTHDR_TCP || protocol == NEXTHDR_UDP ||
	       protocol == NEXTHDR_SCTP || protocol == NEXTHDR_DCCP ||
	       protocol == NEXTHDR_UDPLITE;
}

/* May another header follow, with ports that a receiver would use? */
static __always_inline bool may_hide_ports(__u32 nexthdr)
{
	return nexthdr_kind(nexthdr);
}

/* c: behind all headers before the upper layer; left: bytes
 * of the IP packet from there on.
 */
static __always_inline enum tuple_known tuple_ports(struct cursor c, __u32 left,
						    struct tuple *t)
{
	const struct ports *p;

	if (c.pos > c.end)
		return TUPLE_CUT;
	if (may_hide_ports(t->protocol))
		return TUPLE_HIDDEN;
	if (!has_ports(t->protocol))
		return TUPLE_PORTS;
	p = cursor_take(&c, struct ports);
	if (!p || left < sizeof(*p))
		return TUPLE_CUT;
	t->sport = p->src;
	t->dport = p->dst;
	return TUPLE_PORTS;
}

static __always_inline enum tuple_known tuple_read_ip4(struct cursor c,
						       struct tuple *t)
{
	const struct ip4_hdr *ip4 = cursor_take(&c, struct ip4_hdr);
	__u32 header, len;

	if (!ip4)
		return TUPLE_CUT;
	t->src[1] = ip4_mapped(ip4->src);
	t->dst[1] = ip4_mapped(ip4->dst);
	header = ip4_header_len(ip4);
	len = bpf_ntohs(ip4->len);
	if (header < sizeof(*ip4) || len < header)
		return TUPLE_CUT;
	t->protocol = ip4->protocol;
	c.pos += header - sizeof(*ip4);
	if (c.pos > c.end)
		return TUPLE_CUT;
	if (!ip4_is_fragment(ip4))
		return tuple_ports(c, len - header, t);
	/* The protocol is also part of a fragment's identity (RFC 791 3.2). */
	return may_hide_ports(t->protocol) ? TUPLE_HIDDEN : TUPLE_PROTOCOL;
}

static __always_inline enum tuple_known tuple_fragment(const struct tuple *t,
						       __be16 offset)
{
	if (offset & IP6_OFFSET_MASK)
		return TUPLE_LATER;
	return may_hide_ports(t->protocol) ? TUPLE_HIDDEN : TUPLE_PROTOCOL;
}

static __always_inline enum tuple_known tuple_read_ip6(struct cursor c,
						       struct tuple *t)
{
	const struct ip6_hdr *ip6 = cursor_take(&c, struct ip6_hdr);
	const struct ip6_extension *x;
	__u32 left, len, room = TUPLE_EXTENSIONS_LEN;
	bool fragment;

	if (!ip6)
		return TUPLE_CUT;
	left = bpf_ntohs(ip6->payload_len);
	t->src[0] = ip6->src[0];
	t->src[1] = ip6->src[1];
	t->dst[0] = ip6->dst[0];
	t->dst[1] = ip6->dst[1];
	t->protocol = ip6->nexthdr;

	for (__u32 i = 0; i < TUPLE_EXTENSIONS; i++) {
		if (!nexthdr_is(t->protocol, EXT_KNOWN))
			break;
		x = cursor_take(&c, struct ip6_extension);
		if (!x)
			return TUPLE_CUT;
		/* RFC 4302 2.2: AH counts in units of 4 and not the first two.
		 * RFC 8200 4.5: the Fragment header has 8 bytes.
		 */
		len = (x->len + 1) * 8;
		if (t->protocol == NEXTHDR_AUTH)
			len = (x->len + 2) * 4;
		fragment = t->protocol == NEXTHDR_FRAGMENT;
		if (fragment)
			len = sizeof(*x);
		if (len > room || len > left)
			return TUPLE_CUT;
		room -= len;
		left -= len;
		t->protocol = x->nexthdr;
		if (fragment)
			return tuple_fragment(t, x->offset);
		c.pos += len - sizeof(*x);
	}
	/* If the last header can be skipped, there are too many. */
	return nexthdr_is(t->protocol, EXT_KNOWN) ? TUPLE_CUT :
						    tuple_ports(c, left, t);
}

/* c: at the IP header. Sets the addresses as soon as that header is complete. */
static __always_inline enum tuple_known tuple_read(struct cursor c, bool is_ip4,
						   struct tuple *t)
{
	enum tuple_known known;

	*t = (struct tuple){};
	known = is_ip4 ? tuple_read_ip4(c, t) : tuple_read_ip6(c, t);
	if (known == TUPLE_CUT)
		t->protocol = 0;
	t->known = known;
	return known;
}
