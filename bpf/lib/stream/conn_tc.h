/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Connections through functions on byte streams. Such a function
 * receives and sends only packets of these connections. TC only.
 */
#pragma once

#include "lib/hook.h"
#include "lib/node/maps.h"
#include "lib/skb/pull.h"
#include "lib/wire/icmp.h"
#include "lib/wire/ip.h"
#include "lib/wire/net.h"

#define SECOND_COARSE_NS 1000000000ULL

/* Bytes of a frame that are read: IPv4 may have options. */
#define CONN_PULL (sizeof(struct eth_hdr) + 60 + sizeof(struct tcp_hdr))

/* A TCP segment in a frame. */
struct segment {
	struct ws_conn_key key; /* as if its sender were the client */
	__u32 flags;
	bool has_payload; /* by the length in the IP header */
};

/* A SYN without ACK: it asks for a connection. */
static __always_inline bool segment_opens(const struct segment *s)
{
	return (s->flags & (TCP_SYN | TCP_ACK | TCP_RST)) == TCP_SYN;
}

/* Returns 0, or the helper's error. */
static __always_inline long eth_set_proto(struct __sk_buff *skb, __be16 proto)
{
	return bpf_skb_store_bytes(skb, offsetof(struct eth_hdr, proto), &proto,
				   sizeof(proto), 0);
}

/* Moves the packet. False: it is not TCP, or its TCP header is
 * not right behind the IP header. s->key.proxy stays unchanged.
 */
static __always_inline bool segment_read(struct __sk_buff *skb,
					 struct segment *s)
{
	const struct tcp_hdr *tcp;
	const struct ip4_hdr *ip4;
	const struct ip6_hdr *ip6;
	const struct eth_hdr *eth;
	struct cursor c;
	struct addrs a;
	struct ip in;

	pull(skb, CONN_PULL);
	c = ctx_cursor(skb);
	eth = cursor_take(&c, struct eth_hdr);
	if (!eth || !eth_is_ip(eth) || !ip_take(&c, eth_is_ip4(eth), &in) ||
	    !ip_is_its_version(&in))
		return false;
	ip4 = in.hdr;
	ip6 = in.hdr;
	if (in.is_ip4) {
		if (ip4->protocol != NEXTHDR_TCP || ip4_is_fragment(ip4))
			return false;
		c.pos += ip4_header_len(ip4) - sizeof(*ip4);
	} else if (ip6->nexthdr != NEXTHDR_TCP) {
		return false;
	}
	a = ip_addrs(&in);
	tcp = cursor_take(&c, struct tcp_hdr);
	if (!tcp)
		return false;
	s->key.client[0] = a.src[0];
	s->key.client[1] = a.src[1];
	s->key.server[0] = a.dst[0];
	s->key.server[1] = a.dst[1];
	s->key.client_port = tcp->sport;
	s->key.server_port = tcp->dport;
	s->flags = tcp->flags;
	s->has_payload = (in.is_ip4 ?
				  bpf_ntohs(ip4->len) :
				  sizeof(*ip6) + bpf_ntohs(ip6->payload_len)) >
			 (in.is_ip4 ? ip4_header_len(ip4) : sizeof(*ip6)) +
				 (tcp->offset >> 4) * 4;
	return true;
}

/* Exchanges client and server in a key. */
static __always_inline void conn_swap(struct ws_conn_key *k)
{
	__be64 hi = k->client[0], lo = k->client[1];
	__be16 port = k->client_port;

	k->client[0] = k->server[0];
	k->client[1] = k->server[1];
	k->client_port = k->server_port;
	k->server[0] = hi;
	k->server[1] = lo;
	k->server_port = port;
}

/* NULL: there is none. *is_new: the function has not continued it yet. */
static __always_inline struct ws_conn *conn_find(const struct ws_conn_key *k,
						 bool *is_new)
{
	struct ws_conn *c = bpf_map_lookup_elem(&ws_conns, k);

	*is_new = !c;
	return c ? c : bpf_map_lookup_elem(&ws_conns_new, k);
}

/* Notes a segment of the connection; fin, ack: the WS_CONN_* flag to set for
 * a FIN and for an ACK, or 0. Writes seldom, since all CPUs share the entry.
 */
static __always_inline void conn_note(struct ws_conn *c, __u32 flags, __u32 fin,
				      __u32 ack)
{
	__u64 now = bpf_ktime_get_coarse_ns();
	__u32 seen = c->seen;

	if (flags & TCP_FIN)
		seen |= fin;
	if (flags & TCP_ACK)
		seen |= ack;
	if (flags & TCP_RST)
		seen |= WS_CONN_RST;
	if (seen != c->seen)
		c->seen = seen;
	if (now - c->used > SECOND_COARSE_NS)
		c->used = now;
}

/* Moves a connection that function p continues to ws_conns, if p has fewer there than
 * its share. Several CPUs at the same time may exceed it by one entry each.
 */
static __always_inline reason_t conn_promote(const struct ws_conn_key *k,
					     const struct ws_conn *c,
					     const struct ws_proxy *p)
{
	struct ws_conn kept = { .used = c->used,
				.seen = c->seen,
				.part = c->part };
	__u32 stats = p->stats, share = p->conns;
	__u64 *added = bpf_map_lookup_elem(&ws_conns_added, &stats);
	const __u64 *removed = bpf_map_lookup_elem(&ws_conns_removed, &stats);

	if (!added || !removed)
		return REASON(PROXY_MISSING_BUG);
	if (*added - *removed >= share)
		return REASON(STREAM_QUOTA);
	/* If another CPU was first, its entry is as good. */
	if (!bpf_map_update_elem(&ws_conns, k, &kept, BPF_NOEXIST))
		__sync_fetch_and_add(added, 1);
	else if (!bpf_map_lookup_elem(&ws_conns, k))
		return REASON(STREAMS_FULL);
	bpf_map_delete_elem(&ws_conns_new, k);
	return WS_REASON_NONE;
}

/* Of ICMPv4 and ICMPv6 (RFC 792, RFC 4443 4). */
#define ICMP4_ECHO_REPLY 0
#define ICMP4_ECHO 8
#define ICMP6_ECHO 128
#define ICMP6_ECHO_REPLY 129

/* Whether a packet goes by a function; by: enum ws_by. An error about a segment of TCP never does:
 * it is for the function, or for nobody. Of other packets it is the protocol of the first header
 * that counts, or of the Fragment header: what is behind further headers could be TCP.
 */
__noinline int ws_goes_by(struct __sk_buff *skb, int by)
{
	__u32 at = sizeof(struct eth_hdr);
	struct icmp6_hdr icmp;
	union {
		struct ip4_hdr ip4;
		struct ip6_hdr ip6;
	} h;
	__u8 first, next;

	if (!by || bpf_skb_load_bytes(skb, at, &first, 1))
		return false;
	if (first >> 4 == 4) {
		if (bpf_skb_load_bytes(skb, at, &h.ip4, sizeof(h.ip4)) ||
		    h.ip4.protocol == NEXTHDR_TCP)
			return false;
		/* A later fragment is of a packet whose first one went by. */
		if (h.ip4.protocol != NEXTHDR_ICMP || ip4_is_fragment(&h.ip4))
			return by == WS_BY_RELAY;
		at += ip4_header_len(&h.ip4);
		if (bpf_skb_load_bytes(skb, at, &icmp, sizeof(icmp)))
			return false;
		if (!icmp4_is_error(icmp.type))
			return by == WS_BY_RELAY || icmp.type == ICMP4_ECHO ||
			       icmp.type == ICMP4_ECHO_REPLY;
		at += sizeof(icmp);
		return icmp.type != ICMP4_REDIRECT &&
		       icmp.type != ICMP4_SOURCE_QUENCH &&
		       !bpf_skb_load_bytes(skb, at, &h.ip4, sizeof(h.ip4)) &&
		       h.ip4.protocol != NEXTHDR_TCP;
	}
	if (bpf_skb_load_bytes(skb, at, &h.ip6, sizeof(h.ip6)))
		return false;
	at += sizeof(h.ip6);
	next = h.ip6.nexthdr;
	if (next == NEXTHDR_FRAGMENT) {
		if (by != WS_BY_RELAY || bpf_skb_load_bytes(skb, at, &next, 1))
			return false;
		return next != NEXTHDR_TCP &&
		       !nexthdr_is(next, EXT_KNOWN | EXT_OPAQUE);
	}
	if (next == NEXTHDR_TCP || nexthdr_is(next, EXT_KNOWN | EXT_OPAQUE))
		return false;
	if (next != NEXTHDR_ICMP6)
		return by == WS_BY_RELAY;
	if (bpf_skb_load_bytes(skb, at, &icmp, sizeof(icmp)))
		return false;
	if (icmp.type >= ICMP6_INFORMATIONAL)
		return by == WS_BY_RELAY ?
			       icmp.type < ICMP6_ROUTER_SOLICITATION ||
				       icmp.type > ICMP6_REDIRECT :
			       icmp.type == ICMP6_ECHO ||
				       icmp.type == ICMP6_ECHO_REPLY;
	at += sizeof(icmp);
	return icmp.type && icmp.type <= ICMP6_PARAMETER &&
	       !bpf_skb_load_bytes(skb, at, &h.ip6, sizeof(h.ip6)) &&
	       h.ip6.nexthdr != NEXTHDR_TCP;
}

/* What an ICMP error says, in one word: its type above its code. */
#define ERROR_OF(type, code) ((type) << 8 | (code))

/* The connection that an ICMP error is about, as if the sender of the segment that it quotes
 * were the client. The segment's sender is to receive the error, else it is none.
 * Returns ERROR_OF, or 0: it is no error about a segment of TCP. k is never NULL; the
 * verifier wants it asked. k->proxy is left as it is.
 */
__noinline int ws_error_read(struct __sk_buff *skb, struct ws_conn_key *k)
{
	__u32 at = sizeof(struct eth_hdr);
	struct icmp6_hdr icmp;
	union {
		struct ip4_hdr ip4;
		struct ip6_hdr ip6;
	} h;
	__be64 to[2] = {};
	__u8 first;

	if (!k || bpf_skb_load_bytes(skb, at, &first, 1))
		return 0;
	if (first >> 4 == 4) {
		if (bpf_skb_load_bytes(skb, at, &h.ip4, sizeof(h.ip4)) ||
		    h.ip4.protocol != NEXTHDR_ICMP || ip4_is_fragment(&h.ip4))
			return 0;
		to[1] = ip4_mapped(h.ip4.dst);
		at += ip4_header_len(&h.ip4);
		if (bpf_skb_load_bytes(skb, at, &icmp, sizeof(icmp)) ||
		    !icmp4_is_error(icmp.type) || icmp.type == ICMP4_REDIRECT ||
		    icmp.type == ICMP4_SOURCE_QUENCH)
			return 0;
		at += sizeof(icmp);
		if (bpf_skb_load_bytes(skb, at, &h.ip4, sizeof(h.ip4)) ||
		    h.ip4.version_ihl >> 4 != 4 ||
		    h.ip4.protocol != NEXTHDR_TCP || ip4_is_fragment(&h.ip4))
			return 0;
		k->client[0] = 0;
		k->client[1] = ip4_mapped(h.ip4.src);
		k->server[0] = 0;
		k->server[1] = ip4_mapped(h.ip4.dst);
		at += ip4_header_len(&h.ip4);
	} else {
		if (bpf_skb_load_bytes(skb, at, &h.ip6, sizeof(h.ip6)) ||
		    h.ip6.nexthdr != NEXTHDR_ICMP6)
			return 0;
		to[0] = h.ip6.dst[0];
		to[1] = h.ip6.dst[1];
		at += sizeof(h.ip6);
		if (bpf_skb_load_bytes(skb, at, &icmp, sizeof(icmp)) ||
		    !icmp.type || icmp.type > ICMP6_PARAMETER)
			return 0;
		at += sizeof(icmp);
		if (bpf_skb_load_bytes(skb, at, &h.ip6, sizeof(h.ip6)) ||
		    !ip6_is_ip6(&h.ip6) || h.ip6.nexthdr != NEXTHDR_TCP)
			return 0;
		k->client[0] = h.ip6.src[0];
		k->client[1] = h.ip6.src[1];
		k->server[0] = h.ip6.dst[0];
		k->server[1] = h.ip6.dst[1];
		at += sizeof(h.ip6);
	}
	if (to[0] != k->client[0] || to[1] != k->client[1] ||
	    bpf_skb_load_bytes(skb, at, &k->client_port,
			       sizeof(k->client_port)) ||
	    bpf_skb_load_bytes(skb, at + 2, &k->server_port,
			       sizeof(k->server_port)))
		return 0;
	return ERROR_OF(icmp.type, icmp.code);
}
