/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* SRv6: an IPv6 header, a segment routing header and, as a TLV of that, the proof.
 * All that the programs know of it is in this folder. Outside of it nobody reads a
 * field of struct outer or of struct outer_head; what is asked of them are the
 * functions of the files srv6*.h.
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

/* The kernel finds the way, and sends by it. */
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
	__u32 segments; /* in the list carried */
	__u32 ext; /* bytes between ip6 and srh; see outer_ext */
};

/* The beginning of an outer header, wherever it lies: before a packet, or among what
 * a map holds. It says where the packet goes next.
 */
struct outer_head {
	struct ip6_hdr ip6;
};

/* Bytes of the shortest outer header: one segment, and no TLV but the proof. */
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

/* What is inside, as a Next Header value. */
static __always_inline __u32 outer_inner_is(const struct outer *o)
{
	return o->srh->nexthdr;
}

/* Bytes from the outer header on, as it says; no frame is shorter. */
static __always_inline __u32 outer_says_len(const struct outer *o)
{
	return ip6_len(o->ip6);
}

/* Where the packet goes now: the upper 64 bits of a SID. */
static __always_inline __be64 outer_sid(const struct outer *o)
{
	return o->ip6->dst[0];
}

static __always_inline __u32 outer_ecn(const struct outer *o)
{
	return ip6_ecn(o->ip6);
}

/* Of the proof, in bytes from the outer header. */
static __always_inline __u32 outer_offset(const struct outer *o,
					  const struct proof_tlv *tlv)
{
	return (void *)tlv - (void *)o->ip6;
}

/* RFC 8754 5.1: a SID takes packets from sources of the domain only, and here
 * that means from the headends of the path. It tells strangers from insiders, as
 * far as routing lets nobody use another's address; it is no proof.
 */
static __always_inline bool outer_is_from_headend(const struct outer *o,
						  const struct ws_hop *hop,
						  __be32 path)
{
	const __be64 *src = o->ip6->src, *one = hop->source;
	struct ws_source_key k = { .path = path };

	/* :: stands for several, and is none of them. */
	if (one[0] | one[1])
		return !((src[0] ^ one[0]) | (src[1] ^ one[1]));
	k.addr[0] = src[0];
	k.addr[1] = src[1];
	return bpf_map_lookup_elem(&ws_sources, &k);
}

/* RFC 9800 4.1 N01: are there more C-SIDs in the destination? The plan says
 * whether the SID is of that flavour; to all others the argument says nothing.
 */
static __always_inline bool argument_is_csids(const struct outer *o,
					      const struct ws_hop *hop)
{
	return hop->form == WS_FORM_CSID && o->ip6->dst[1];
}

/* Is the argument of a function's SID the plan's? A field on the wire chooses no
 * state. A compressed list has no room for arguments: there the plan's counts alone.
 */
static __always_inline bool outer_argument_is_planned(const struct outer *o,
						      const struct ws_hop *hop)
{
	return hop->form == WS_FORM_CSID ||
	       o->ip6->dst[1] == bpf_cpu_to_be64(hop->argument);
}

/* Where a packet goes next. */
struct outer_next {
	struct sid sid;
	bool shifted; /* from the destination itself: Segments Left stays */
};

/* RFC 8986 4.1 and RFC 9800 4.1: has the packet a next segment, and may it go on?
 * Changes nothing. first: false where a function of this node has just let it go,
 * so that its hop limit has been counted.
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

/* Where an advanced packet goes: the upper 64 bits of a SID. */
static __always_inline __be64 outer_advanced_sid(const struct outer *o,
						 const struct outer_next *next)
{
	(void)next;
	return outer_sid(o);
}

/* At an egress: are there segments behind it, in the list or in the destination? */
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

/* What a map holds of an outer header, from its beginning. */
static __always_inline const struct outer_head *outer_head_of(const __u8 *outer)
{
	return (const struct outer_head *)outer;
}

/* Where a packet with this header goes next: the upper 64 bits of a SID. */
static __always_inline __be64 outer_head_sid(const struct outer_head *h)
{
	return h->ip6.dst[0];
}

/* The same as what a way is remembered by: all packets to there take it. */
static __always_inline __be64 outer_head_to(const struct outer_head *h)
{
	return outer_head_sid(h);
}

static __always_inline __be64 outer_next_to(const struct outer_next *next)
{
	return next->sid.hi;
}

/* What an outer header says of its packet: class, ECN and flow. */
struct outer_marks {
	__be32 vtc_flow;
};

/* Those of a packet that gets its outer header. c stands behind its IP header. RFC
 * 8754 5.1 has the source set the flow label.
 */
static __always_inline struct outer_marks outer_marks_of(struct cursor c,
							 const struct ip *in)
{
	return (struct outer_marks){ ip_vtc(in) |
				     flow_label(flow_hash(c, in)) };
}

/* The flow of a packet that has, or will have, its outer header: the flow label. */
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

/* Can a header of so many bytes say that so many are in it? */
static __always_inline bool outer_can_hold(__u32 outer_len, __u32 inner_len)
{
	return inner_len + outer_len - sizeof(struct ip6_hdr) <= 65535;
}

/* The headers at the beginning of a frame whose outer header has just been written,
 * and of which only the proof may lie elsewhere than the headers say.
 */
struct outer_written {
	struct eth_hdr *eth;
	struct ip6_hdr *ip6;
	struct srh *srh;
	struct proof_tlv *tlv;
};

/* c: the frame's start; tlv_off: of the proof, from the outer header. False: a bug. */
static __always_inline bool outer_find_written(struct cursor c, __u32 tlv_off,
					       struct outer_written *w)
{
	w->eth = cursor_take(&c, struct eth_hdr);
	if (!w->eth)
		return false;
	/* Else the compiler adds before it subtracts, and the verifier sees a
	 * pointer before the packet.
	 */
	barrier_var(tlv_off);
	w->tlv = c.pos + (tlv_off & 511);
	w->ip6 = cursor_take(&c, struct ip6_hdr);
	w->srh = c.pos;
	barrier_var(w->srh);
	return w->ip6 && (void *)(w->srh + 1) <= c.end &&
	       (void *)(w->tlv + 1) <= c.end;
}
