/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Headers as they are on the wire, with all fields in
 * network order, and tests of addresses.
 */
#pragma once

#include <linux/types.h>
#include <bpf/bpf_endian.h>
#include <waystamp/abi.h>

#define ETH_P_IP 0x0800
#define ETH_P_IPV6 0x86DD
#define ETH_P_MPLS_UC 0x8847 /* RFC 5332 3 */
#define ETH_P_MPLS_MC 0x8848
#define ETH_P_8021Q 0x8100
#define ETH_P_8021AD 0x88A8
#define ETH_P_QINQ1 0x9100 /* tags from before IEEE 802.1ad */
#define ETH_P_QINQ2 0x9200
#define ETH_P_QINQ3 0x9300

#define NEXTHDR_HOP 0
#define NEXTHDR_ICMP 1
#define NEXTHDR_IPV4 4
#define NEXTHDR_TCP 6
#define NEXTHDR_UDP 17
#define NEXTHDR_DCCP 33
#define NEXTHDR_IPV6 41
#define NEXTHDR_ROUTING 43
#define NEXTHDR_FRAGMENT 44
#define NEXTHDR_AUTH 51
#define NEXTHDR_ICMP6 58
#define NEXTHDR_DEST 60
#define NEXTHDR_SCTP 132
#define NEXTHDR_MOBILITY 135
#define NEXTHDR_UDPLITE 136
#define NEXTHDR_HIP 139
#define NEXTHDR_SHIM6 140
#define NEXTHDR_UNASSIGNED 148 /* from here on; 253 and 254: experiments */

struct eth_hdr {
	__u8 dst[6];
	__u8 src[6];
	__be16 proto;
};
_Static_assert(sizeof(struct eth_hdr) == 14, "Ethernet header");

/* RFC 8200 3 */
struct ip6_hdr {
	__be32 vtc_flow; /* version 4, traffic class 8, flow label 20 bits */
	__be16 payload_len;
	__u8 nexthdr;
	__u8 hop_limit;
	__be64 src[2];
	__be64 dst[2];
};
_Static_assert(sizeof(struct ip6_hdr) == 40, "IPv6 header");

#define IP6_PAYLOAD_LEN_OFF 4
#define IP6_NEXTHDR_OFF 6
#define IP6_OFFSET_MASK bpf_htons(0xfff8) /* RFC 8200 4.5 */

/* RFC 791 3.1; options follow. */
struct ip4_hdr {
	__u8 version_ihl; /* version 4 bits, header length in words of 4 bytes */
	__u8 tos;
	__be16 len; /* of header and payload */
	__be16 id;
	__be16 fragment; /* flags 3 bits, offset in units of 8 bytes */
	__u8 ttl;
	__u8 protocol;
	__be16 checksum;
	__be32 src;
	__be32 dst;
};
_Static_assert(sizeof(struct ip4_hdr) == 20, "IPv4 header");

/* RFC 9293 3.1; options follow. */
struct tcp_hdr {
	__be16 sport;
	__be16 dport;
	__be32 seq;
	__be32 ack;
	__u8 offset; /* of the data, in words of 4 bytes: the upper 4 bits */
	__u8 flags;
	__be16 window;
	__be16 checksum;
	__be16 urgent;
};
_Static_assert(sizeof(struct tcp_hdr) == 20, "TCP header");

/* RFC 768 */
struct udp_hdr {
	__be16 sport;
	__be16 dport;
	__be16 len; /* of header and data */
	__be16 checksum;
};
_Static_assert(sizeof(struct udp_hdr) == 8, "UDP header");

#define TCP_FIN 0x01
#define TCP_SYN 0x02
#define TCP_RST 0x04
#define TCP_ACK 0x10

#define IP4_TOS_RT_MASK 0x1c /* the bits that the kernel routes by */
#define IP4_DONT_FRAGMENT bpf_htons(0x4000)
#define IP4_MORE_FRAGMENTS bpf_htons(0x2000)
#define IP4_OFFSET_MASK bpf_htons(0x1fff)

#define IP6_VERSION_MASK bpf_htonl(0xf0000000)
#define IP6_VERSION bpf_htonl(0x60000000)
#define IP6_TC_MASK bpf_htonl(0x0ff00000)
#define IP6_FLOW_MASK bpf_htonl(0x000fffff)
#define IP6_TC_SHIFT 20
#define IP6_ECN_SHIFT 20

/* RFC 3168 5 */
#define ECN_NOT_ECT 0
#define ECN_ECT1 1
#define ECN_ECT0 2
#define ECN_CE 3

struct sid {
	__be64 hi;
	__be64 lo;
};

/* The proof TLV; see docs/protocol/README.md. */
struct proof_tlv {
	__u8 type;
	__u8 len;
	__u8 scheme;
	__u8 epoch;
	__be32 path;
	__be64 rnd;
	__be64 cml;
};
_Static_assert(sizeof(struct proof_tlv) == 24, "proof TLV");

/* Kinds of headers behind an IPv6 header or an extension header, by their
 * Next Header value: one of these, or 0 for a header that no other header
 * follows (RFC 8200 4, and IANA's list of extension headers). ESP is not one
 * of them: only its receiver can read its contents, as in any other tunnel.
 */
#define EXT_OPTIONS 1 /* hop-by-hop or destination options */
#define EXT_ROUTING 2
#define EXT_FRAGMENT 4
#define EXT_AUTH 8
/* Has or may have other headers behind it, and cannot be skipped here. */
#define EXT_OPAQUE 16
/* Headers that can be skipped. */
#define EXT_KNOWN (EXT_OPTIONS | EXT_ROUTING | EXT_FRAGMENT | EXT_AUTH)

static __always_inline __u32 nexthdr_kind(__u32 nexthdr)
{
	if (nexthdr == NEXTHDR_HOP || nexthdr == NEXTHDR_DEST)
		return EXT_OPTIONS;
	if (nexthdr == NEXTHDR_ROUTING)
		return EXT_ROUTING;
	if (nexthdr == NEXTHDR_FRAGMENT)
		return EXT_FRAGMENT;
	if (nexthdr == NEXTHDR_AUTH)
		return EXT_AUTH;
	if (nexthdr == NEXTHDR_MOBILITY || nexthdr == NEXTHDR_HIP ||
	    nexthdr == NEXTHDR_SHIM6 || nexthdr >= NEXTHDR_UNASSIGNED)
		return EXT_OPAQUE;
	return 0;
}

/* kinds: a set of EXT_* bits. */
static __always_inline bool nexthdr_is(__u32 nexthdr, const __u32 kinds)
{
	return nexthdr_kind(nexthdr) & kinds;
}

/* The kernel forwards no such frame. */
static __always_inline bool eth_is_for_many(const struct eth_hdr *eth)
{
	return eth->dst[0] & 1;
}

static __always_inline bool eth_is_ip6_unicast(const struct eth_hdr *eth)
{
	return eth->proto == bpf_htons(ETH_P_IPV6) && !eth_is_for_many(eth);
}

static __always_inline bool eth_is_ip4(const struct eth_hdr *eth)
{
	return eth->proto == bpf_htons(ETH_P_IP);
}

static __always_inline bool eth_is_ip(const struct eth_hdr *eth)
{
	return eth->proto == bpf_htons(ETH_P_IPV6) || eth_is_ip4(eth);
}

/* Has the packet labels? */
static __always_inline bool eth_is_mpls(const struct eth_hdr *eth)
{
	return eth->proto == bpf_htons(ETH_P_MPLS_UC) ||
	       eth->proto == bpf_htons(ETH_P_MPLS_MC);
}

/* The type of a frame with an IP packet of this version, in the host's order. */
static __always_inline __u32 ip_proto(bool is_ip4)
{
	return is_ip4 ? ETH_P_IP : ETH_P_IPV6;
}

static __always_inline bool ip6_is_ip6(const struct ip6_hdr *ip6)
{
	return (ip6->vtc_flow & IP6_VERSION_MASK) == IP6_VERSION;
}

static __always_inline __u32 ip4_header_len(const struct ip4_hdr *ip4)
{
	return (ip4->version_ihl & 15) * 4;
}

static __always_inline bool ip4_is_fragment(const struct ip4_hdr *ip4)
{
	return ip4->fragment & (IP4_MORE_FRAGMENTS | IP4_OFFSET_MASK);
}

/* The lower half of ::ffff:a.b.c.d (RFC 4291 2.5.5.2); the upper one is 0. */
static __always_inline __be64 ip4_mapped(__be32 addr)
{
	return bpf_cpu_to_be64(0xffffULL << 32 | bpf_ntohl(addr));
}

/* Is the version 4, and the header length at least that of a header without options? */
static __always_inline bool ip4_is_ip4(const struct ip4_hdr *ip4)
{
	return ip4->version_ihl >= 0x45 && ip4->version_ihl <= 0x4f;
}

static __always_inline bool ip6_has_extension(const struct ip6_hdr *ip6)
{
	return nexthdr_is(ip6->nexthdr, EXT_KNOWN);
}

/* Bytes of the packet, by its header; 40 for a jumbogram, whose payload length is 0. */
static __always_inline __u32 ip6_len(const struct ip6_hdr *ip6)
{
	return sizeof(*ip6) + bpf_ntohs(ip6->payload_len);
}

static __always_inline __u32 ip6_ecn(const struct ip6_hdr *ip6)
{
	return bpf_ntohl(ip6->vtc_flow) >> IP6_ECN_SHIFT & 3;
}

static __always_inline bool ip6_is_unspecified(const __be64 *addr)
{
	return !(addr[0] | addr[1]);
}

/* Multicast ff00::/8 and link-local fe80::/10 are never steered,
 * and no chain can require them. The same holds for :: and ::1,
 * which no router may forward from or to (RFC 4291 2.5.2, 2.5.3).
 */
static __always_inline bool ip6_is_unsteered(const __be64 *addr)
{
	__u64 hi = bpf_be64_to_cpu(addr[0]);

	return hi >> 56 == 0xff || hi >> 54 == 0xfe80 >> 6 ||
	       (!hi && !(addr[1] & ~bpf_cpu_to_be64(1)));
}

/* ::ffff:0:0/96 stands for IPv4 in our tables; no such address may be on a wire
 * (RFC 6890 2.2.3, table 20).
 */
static __always_inline bool ip6_is_mapped(const __be64 *addr)
{
	return !addr[0] && bpf_be64_to_cpu(addr[1]) >> 32 == 0xffff;
}

/* Addresses that the kernel never forwards from or to: "this network"
 * 0.0.0.0/8, loopback 127.0.0.0/8, multicast 224.0.0.0/4, broadcast.
 */
static __always_inline bool ip4_is_never_forwarded(__be32 addr)
{
	__u32 a = bpf_ntohl(addr);

	return a >> 24 == 0 || a >> 24 == 127 || a >> 28 == 14 || a == ~0U;
}

/* 169.254.0.0/16, which no router may forward (RFC 3927 7); the kernel does. */
static __always_inline bool ip4_is_link_local(__be32 addr)
{
	return bpf_ntohl(addr) >> 16 == 0xa9fe;
}

/* Never steered, and no chain can require them. */
static __always_inline bool ip4_is_unsteered(__be32 addr)
{
	return ip4_is_never_forwarded(addr) || ip4_is_link_local(addr);
}
