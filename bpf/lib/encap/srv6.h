/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* SRv6: an IPv6 header, a segment routing header and in it, as
 * a TLV, the proof. Only this folder contains code about these
 * headers. Code outside of it reads no field of struct outer
 * or struct outer_head; it uses the functions of srv6*.h.
 */
#pragma once

#include "lib/encap/csid.h"
#include "lib/encap/segments.h"
#include "lib/encap/srh.h"
#include "lib/hook.h"
#include "lib/node/maps.h"
#include "lib/reason.h"
#include "lib/wire/cursor.h"
#include "lib/wire/flow.h"
#include "lib/wire/ip.h"
#include "lib/wire/net.h"

/* The kernel routes and sends the packet by its outer header. */
#define OUTER_IS_IP true
#define OUTER_PROTO ETH_P_IPV6

static __always_inline bool form_is_outer(__u32 form)
{
	return form != WS_FORM_LABELS;
}

/* The outer header of a packet for a SID of this node. */
struct outer {
	void *end; /* of the packet */
	struct ip6_hdr *ip6;
	struct srh *srh;
	struct sid *list;
	__u32 segments; /* entries in the packet's list */
	__u32 ext; /* bytes between ip6 and srh; see outer_ext */
};

/* The beginning of an outer header, in a packet or in a
 * map. It contains the packet's next destination.
 */
struct outer_head {
	struct ip6_hdr ip6;
};

/* Bytes of the shortest outer header: one segment, and no TLV except the proof. */
#define OUTER_LEN_MIN (WS_OUTER_MAX - 16 * (WS_SEGS_MAX - 1))

/* Bytes of extension headers before the SRH. */
static __always_inline __u32 outer_ext(const struct outer *o)
{
	return EXT_LEN_MAX ? o->ext : 0;
}

/* Bytes from the outer header to the inner packet. */
static __always_inline __u32 outer_len(const struct outer *o)
{
	return sizeof(struct ip6_hdr) + outer_ext(o) + (o->srh->hdrlen + 1) * 8;
}

/* Where the inner packet begins. */
static __always_inline struct cursor outer_inner(const struct outer *o)
{
	return (struct cursor){
		.pos = (void *)o->ip6 + outer_len(o),
		.end = o->end,
	};
}

/* The inner packet's type, as a Next Header value. */
static __always_inline __u32 outer_inner_is(const struct outer *o)
{
	return o->srh->nexthdr;
}

/* Bytes from the outer header on, by its payload length; no frame is shorter. */
static __always_inline __u32 outer_says_len(const struct outer *o)
{
	return ip6_len(o->ip6);
}

/* The SID that the packet is addressed to, upper 64 bits. */
static __always_inline __be64 outer_sid(const struct outer *o)
{
	return o->ip6->dst[0];
}

static __always_inline __u32 outer_ecn(const struct outer *o)
{
	return ip6_ecn(o->ip6);
}

/* Does the packet have the O-flag (RFC 9259 2.1)? */
static __always_inline bool outer_is_traced(const struct outer *o)
{
	return o->srh->flags & SRH_FLAG_OAM;
}

/* Offset of the proof, in bytes from the outer header. */
static __always_inline __u32 outer_offset(const struct outer *o,
					  const struct proof_tlv *tlv)
{
	return (void *)tlv - (void *)o->ip6;
}

/* RFC 8754 5.1: a SID accepts packets only from sources in the domain, and
 * here only from headends of the path. This rejects outside senders only
 * as far as routing prevents forged source addresses; it is no proof.
 */
static __always_inline bool outer_is_from_headend(const struct outer *o,
						  const struct ws_hop *hop,
						  __be32 path)
{
	const __be64 *src = o->ip6->src, *one = hop->source;
	struct ws_source_key k = { .path = path };

	/* :: means several headends, and is the address of none. */
	if (one[0] | one[1])
		return !((src[0] ^ one[0]) | (src[1] ^ one[1]));
	k.addr[0] = src[0];
	k.addr[1] = src[1];
	return bpf_map_lookup_elem(&ws_sources, &k);
}

/* RFC 9800 4.1 N01: are there more C-SIDs in the destination? The plan has
 * the SID's flavour; for other flavours the argument has no meaning here.
 */
static __always_inline bool argument_is_csids(const struct outer *o,
					      const struct ws_hop *hop)
{
	return hop->form == WS_FORM_CSID && o->ip6->dst[1];
}

/* Is the argument of a function's SID the plan's? A field of the packet must not select
 * state. A compressed list has no room for arguments: there the plan's argument is used.
 */
static __always_inline bool outer_argument_is_planned(const struct outer *o,
						      const struct ws_hop *hop)
{
	return hop->form == WS_FORM_CSID ||
	       o->ip6->dst[1] == bpf_cpu_to_be64(hop->argument);
}

/* The packet's next destination. */
struct outer_next {
	struct sid sid;
	bool shifted; /* the segment comes from the destination: Segments Left stays */
};

/* RFC 8986 4.1 and RFC 9800 4.1: finds the next segment, and checks the
 * hop limit. Changes nothing. first: false if a function of this node has
 * just released the packet, so that its hop limit has been decremented.
 */
static __always_inline reason_t outer_find_next(const struct outer *o,
						const struct ws_hop *hop,
						bool first,
						struct outer_next *next)
{
	__u32 left = o->srh->segments_left;
	const struct sid *entry;

	next->shifted = argument_is_csids(o, hop);
	if (left == 0 && !next->shifted)
		return REASON(UPPER_LAYER);
	if (first && o->ip6->hop_limit <= 1)
		return REASON(HOP_LIMIT);
	if (next->shifted) {
		next->sid = csid_shift(o->ip6->dst);
	} else {
		entry = o->list + ((left - 1) % WS_SEGS_MAX);
		if ((void *)(entry + 1) > o->end)
			return REASON(BOUNDS_BUG);
		next->sid = *entry;
	}
	return WS_REASON_NONE;
}

/* RFC 8986 4.1 S12 to S14, RFC 9800 4.1 N05 to N07. */
static __always_inline void outer_advance(ctx_t *ctx, const struct outer *o,
					  const struct outer_next *next,
					  bool first)
{
	(void)ctx;
	o->ip6->dst[0] = next->sid.hi;
	o->ip6->dst[1] = next->sid.lo;
	if (first)
		o->ip6->hop_limit--;
	if (!next->shifted)
		o->srh->segments_left--;
}

/* The next SID of an advanced packet, upper 64 bits. */
static __always_inline __be64 outer_advanced_sid(const struct outer *o,
						 const struct outer_next *next)
{
	(void)next;
	return outer_sid(o);
}

/* At an egress: are more segments left, in the list or in the destination? */
static __always_inline bool outer_segments_remain(const struct outer *o,
						  const struct ws_hop *hop)
{
	return o->srh->segments_left || argument_is_csids(o, hop);
}

/* Is the segment list the plan's? */
static __always_inline bool outer_list_is_planned(const struct outer *o,
						  const struct ws_egress *e)
{
	return segments_equal(o->list, o->segments, o->end, e);
}

/* The beginning of an outer header in a map. */
static __always_inline const struct outer_head *outer_head_of(const __u8 *outer)
{
	return (const struct outer_head *)outer;
}

/* The next SID of a packet with this header, upper 64 bits. */
static __always_inline __be64 outer_head_sid(const struct outer_head *h)
{
	return h->ip6.dst[0];
}

/* The key of the remembered next hop: the next SID, upper 64 bits. */
static __always_inline __be64 outer_head_to(const struct outer_head *h)
{
	return outer_head_sid(h);
}

static __always_inline __be64 outer_next_to(const struct outer_next *next)
{
	return next->sid.hi;
}

/* The fields of an outer header that depend on the packet: class, ECN and flow. */
struct outer_marks {
	__be32 vtc_flow;
};

/* The fields for a packet that gets its outer header. c: behind
 * its IP header. By RFC 8754 5.1 the source sets the flow label.
 */
static __always_inline struct outer_marks outer_marks_of(struct cursor c,
							 const struct ip *in)
{
	return (struct outer_marks){ ip_vtc(in) |
				     flow_label(flow_hash(c, in)) };
}

/* The flow of a packet with an outer header, or before it: the flow label. */
static __always_inline __u32 outer_marks_flow(struct outer_marks m)
{
	return bpf_ntohl(m.vtc_flow & IP6_FLOW_MASK);
}

static __always_inline __u32 outer_head_flow(const struct outer_head *h)
{
	return bpf_ntohl(h->ip6.vtc_flow & IP6_FLOW_MASK);
}

static __always_inline __u32 outer_flow(const struct outer *o)
{
	return bpf_ntohl(o->ip6->vtc_flow & IP6_FLOW_MASK);
}

/* Does the sum of these lengths, in bytes, fit into the payload length? */
static __always_inline bool outer_can_hold(__u32 outer_len, __u32 inner_len)
{
	return inner_len + outer_len - sizeof(struct ip6_hdr) <= 65535;
}

/* The headers at the beginning of a frame whose outer header has just been
 * written. Only the proof may be at another place than behind the segment list.
 */
struct outer_written {
	struct eth_hdr *eth;
	struct ip6_hdr *ip6;
	struct srh *srh;
	struct proof_tlv *tlv;
};

/* c: the frame's start; tlv_off: offset of the proof in the outer header. False: a bug. */
static __always_inline bool outer_find_written(struct cursor c, __u32 tlv_off,
					       struct outer_written *w)
{
	w->eth = cursor_take(&c, struct eth_hdr);
	if (!w->eth)
		return false;
	/* Otherwise the compiler adds before it subtracts,
	 * and the verifier sees a pointer before the packet.
	 */
	barrier_var(tlv_off);
	w->tlv = c.pos + (tlv_off & 511);
	w->ip6 = cursor_take(&c, struct ip6_hdr);
	w->srh = c.pos;
	barrier_var(w->srh);
	return w->ip6 && (void *)(w->srh + 1) <= c.end &&
	       (void *)(w->tlv + 1) <= c.end;
}
