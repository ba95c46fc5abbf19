/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Who sends a packet to whom: addresses, protocol, ports. The same on both hooks
 * and for both versions of IP.
 */
#pragma once

#include "cursor.h"
#include "net.h"

/* Extension headers that are passed over, and how long they may be together:
 * beyond that a packet counts as not whole.
 */
#define TUPLE_EXTENSIONS 4
#define TUPLE_EXTENSIONS_LEN 256
/* Bytes from the IP header on that tuple_read looks at; an IPv4 header with
 * options is shorter.
 */
#define TUPLE_LEN (40 + TUPLE_EXTENSIONS_LEN + 4)

struct tuple {
	__be64 src[2]; /* IPv4: ::ffff:a.b.c.d */
	__be64 dst[2];
	/* IPv6: the first header that is no extension header; of a fragment what
	 * its Fragment header names, so that all fragments agree.
	 */
	__u8 protocol;
	__u8 fragment; /* 1: a part of a datagram, the first one too */
	/* 0 for every fragment, and for protocols without ports. */
	__be16 sport;
	__be16 dport;
};

struct ip6_extension {
	__u8 nexthdr;
	__u8 len; /* 8-octet units, not counting the first; but see AH */
	__u8 pad[6];
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

static __always_inline bool is_extension(__u32 nexthdr)
{
	return nexthdr == NEXTHDR_HOP || nexthdr == NEXTHDR_ROUTING ||
	       nexthdr == NEXTHDR_DEST || nexthdr == NEXTHDR_AUTH ||
	       nexthdr == NEXTHDR_FRAGMENT;
}

/* c: behind all headers but the upper layer's; left: bytes of the IP packet from
 * there on.
 */
static __always_inline bool tuple_ports(struct cursor c, __u32 left,
					struct tuple *t)
{
	const struct ports *p;

	if (c.pos > c.end)
		return false;
	if (t->fragment || !has_ports(t->protocol))
		return true;
	p = cursor_take(&c, struct ports);
	if (!p || left < sizeof(*p))
		return false;
	t->sport = p->src;
	t->dport = p->dst;
	return true;
}

static __always_inline bool tuple_read_ip4(struct cursor c, struct tuple *t)
{
	const struct ip4_hdr *ip4 = cursor_take(&c, struct ip4_hdr);
	__u32 header, len;

	if (!ip4)
		return false;
	header = ip4_header_len(ip4);
	len = bpf_ntohs(ip4->len);
	if (header < sizeof(*ip4) || len < header)
		return false;
	t->src[1] = ip4_mapped(ip4->src);
	t->dst[1] = ip4_mapped(ip4->dst);
	t->protocol = ip4->protocol;
	t->fragment = ip4_is_fragment(ip4);
	c.pos += header - sizeof(*ip4);
	return tuple_ports(c, len - header, t);
}

static __always_inline bool tuple_read_ip6(struct cursor c, struct tuple *t)
{
	const struct ip6_hdr *ip6 = cursor_take(&c, struct ip6_hdr);
	const struct ip6_extension *x;
	__u32 left, len, room = TUPLE_EXTENSIONS_LEN;

	if (!ip6)
		return false;
	left = bpf_ntohs(ip6->payload_len);
	t->src[0] = ip6->src[0];
	t->src[1] = ip6->src[1];
	t->dst[0] = ip6->dst[0];
	t->dst[1] = ip6->dst[1];
	t->protocol = ip6->nexthdr;

	for (__u32 i = 0; i < TUPLE_EXTENSIONS; i++) {
		if (!is_extension(t->protocol))
			break;
		x = cursor_take(&c, struct ip6_extension);
		if (!x)
			return false;
		/* RFC 4302 2.2: AH counts in units of 4 and not the first two.
		 * RFC 8200 4.5: the Fragment header has 8 bytes.
		 */
		len = (x->len + 1) * 8;
		if (t->protocol == NEXTHDR_AUTH)
			len = (x->len + 2) * 4;
		t->fragment = t->protocol == NEXTHDR_FRAGMENT;
		if (t->fragment)
			len = sizeof(*x);
		if (len > room || len > left)
			return false;
		room -= len;
		left -= len;
		t->protocol = x->nexthdr;
		if (t->fragment)
			return true;
		c.pos += len - sizeof(*x);
	}
	return !is_extension(t->protocol) && tuple_ports(c, left, t);
}

/* c: at the IP header. False: the packet is not whole as far as has to be read,
 * and *t is worth nothing.
 */
static __always_inline bool tuple_read(struct cursor c, bool is_ip4,
				       struct tuple *t)
{
	*t = (struct tuple){};
	return is_ip4 ? tuple_read_ip4(c, t) : tuple_read_ip6(c, t);
}
