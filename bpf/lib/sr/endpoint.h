/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* A packet that is addressed to a SID of this node: what it must be like, and
 * what is done to it. Nothing here changes the packet but endpoint_advance.
 */
#pragma once

#include "lib/encap/csid.h"
#include "lib/encap/segments.h"
#include "lib/encap/srh.h"
#include "lib/match/classify.h"
#include "lib/node/boundary.h"
#include "lib/node/lookup.h"
#include "lib/node/maps.h"
#include "lib/proof/binding.h"
#include "lib/proof/replay.h"
#include "lib/proof/stamp.h"
#include "lib/proof/verify.h"
#include "lib/reason.h"
#include "lib/wire/ip.h"
#include "lib/wire/net.h"

struct endpoint {
	void *end; /* of the packet */
	struct eth_hdr *eth;
	struct ip6_hdr *ip6;
	struct srh *srh;
	struct sid *list;
	struct proof_tlv *tlv;
	const struct ws_hop *hop;
	__u32 len; /* of the IP packet as it came; XDP only */
	__be64 sid; /* that it came for, upper 64 bits */
	__u64 binding; /* of the inner packet, where the scheme wants it */
	__u32 segments; /* in the list carried */
	__u32 egress; /* where its verifier probably is */
	__u32 ext; /* bytes between ip6 and srh; see endpoint_ext */
	__s32 tlv_bad; /* see tlv_locate */
};

/* Bytes of extension headers before the SRH. */
static __always_inline __u32 endpoint_ext(const struct endpoint *ep)
{
	return EXT_LEN_MAX ? ep->ext : 0;
}

/* Bytes from the IPv6 header to the inner packet. */
static __always_inline __u32 endpoint_outer_len(const struct endpoint *ep)
{
	return sizeof(struct ip6_hdr) + endpoint_ext(ep) +
	       (ep->srh->hdrlen + 1) * 8;
}

/* Where the inner packet begins. */
static __always_inline struct cursor inner_cursor(const struct endpoint *ep)
{
	return (struct cursor){
		.pos = (void *)ep->ip6 + endpoint_outer_len(ep),
		.end = ep->end,
	};
}

/* Sets ep->binding, which the stamp and the verdict need. */
static __always_inline bool endpoint_bind(struct endpoint *ep)
{
	return binding_find(inner_cursor(ep), ep->srh->nexthdr, &ep->hop->share,
			    ep->hop->scheme, &ep->binding);
}

/* Why there is no entry. The slow way: such a packet is refused anyway. */
static __always_inline reason_t hop_missing(const struct hop_id *w)
{
	struct ws_hop_key k = hop_id_key(w);

	k.epoch = 0;
	/* Path 0 is no path: in ws_sids it stands for the SID. */
	if (k.path && bpf_map_lookup_elem(&ws_sids, &k))
		return REASON(UNKNOWN_EPOCH);
	k.path = 0;
	if (bpf_map_lookup_elem(&ws_sids, &k))
		return REASON(UNKNOWN_PATH);
	return REASON(UNKNOWN_SID);
}

/* RFC 8754 5.1: a SID takes packets from sources of the domain only, and here
 * that means from the headends of the path. It tells strangers from insiders, as
 * far as routing lets nobody use another's address; it is no proof.
 */
static __always_inline bool source_is_headend(const struct endpoint *ep)
{
	const __be64 *src = ep->ip6->src, *one = ep->hop->source;
	struct ws_source_key k = { .path = ep->tlv->path };

	/* :: stands for several, and is none of them. */
	if (one[0] | one[1])
		return !((src[0] ^ one[0]) | (src[1] ^ one[1]));
	k.addr[0] = src[0];
	k.addr[1] = src[1];
	return bpf_map_lookup_elem(&ws_sources, &k);
}

/* From the IPv6 header to the entry of its SID, path and epoch; ep->srh,
 * ep->segments and ep->tlv are set. The plan's scheme counts; a packet that
 * names another is refused.
 */
static __always_inline reason_t endpoint_find_hop(struct endpoint *ep)
{
	struct hop_id w = hop_id(ep->ip6->dst[0], ep->tlv->path,
				 ep->tlv->epoch);

	ep->sid = w.sid;
	ep->hop = hop_find(&w, &ep->egress);
	if (!ep->hop)
		return hop_missing(&w);
	if (ep->tlv->scheme != ep->hop->scheme)
		return REASON(SCHEME);
	if (!source_is_headend(ep))
		return REASON(SOURCE);
	return WS_REASON_NONE;
}

/* RFC 9800 4.1 N01: are there more C-SIDs in the destination? The plan says
 * whether the SID is of that flavour; to all others the argument says nothing.
 */
static __always_inline bool argument_is_csids(const struct endpoint *ep)
{
	return ep->hop->next_csid && ep->ip6->dst[1];
}

/* Is the argument of a function's SID the plan's? A field on the wire chooses no
 * state. A compressed list has no room for arguments: there the plan's counts alone.
 */
static __always_inline bool argument_is_planned(const struct endpoint *ep)
{
	return ep->hop->next_csid ||
	       ep->ip6->dst[1] == bpf_cpu_to_be64(ep->hop->argument);
}

/* Where a packet goes next. */
struct end_next {
	struct sid sid;
	bool shifted; /* from the destination itself: Segments Left stays */
};

/* RFC 8986 4.1 and RFC 9800 4.1: may this packet go on to its next segment?
 * first: false where a function of this node has just let it go, so that its hop
 * limit has been counted.
 */
static __always_inline reason_t end_check(const struct endpoint *ep, bool first,
					  struct end_next *next)
{
	__u32 left = ep->srh->segments_left;
	const struct sid *entry;

	next->shifted = argument_is_csids(ep);
	if (left == 0 && !next->shifted)
		return REASON(UPPER_LAYER);
	if (first && ep->ip6->hop_limit <= 1)
		return REASON(HOP_LIMIT);
	if (next->shifted) {
		next->sid = csid_shift(ep->ip6->dst);
	} else {
		entry = ep->list + ((left - 1) % WS_SEGS_MAX);
		if ((void *)(entry + 1) > ep->end)
			return REASON(BOUNDS_BUG);
		next->sid = *entry;
	}
	/* Else a list made up by somebody would let a packet out of the domain,
	 * or past the guard of the egress that this node may be too.
	 */
	if (!in_block(next->sid.hi))
		return REASON(SEGMENT_OUTSIDE);
	return WS_REASON_NONE;
}

/* RFC 8986 4.1 S12 to S14, RFC 9800 4.1 N05 to N07. */
static __always_inline void end_advance(const struct endpoint *ep,
					const struct end_next *next, bool first)
{
	ep->ip6->dst[0] = next->sid.hi;
	ep->ip6->dst[1] = next->sid.lo;
	if (first)
		ep->ip6->hop_limit--;
	if (!next->shifted)
		ep->srh->segments_left--;
}

/* At an egress: are there segments behind it, in the list or in the destination? */
static __always_inline bool segments_remain(const struct endpoint *ep)
{
	return ep->srh->segments_left || argument_is_csids(ep);
}

static __always_inline void end_stamp(const struct endpoint *ep)
{
	stamp(ep->tlv, &ep->hop->share, ep->hop->scheme, ep->hop->position,
	      ep->binding);
}

static __always_inline const struct ws_egress *
egress_find(const struct endpoint *ep)
{
	struct hop_id w = hop_id(ep->sid, ep->tlv->path, ep->tlv->epoch);

	return egress_of(&w, ep->egress);
}

/* The verdict on the proof. The plan says whether it refuses. */
static __always_inline reason_t egress_judge(const struct endpoint *ep,
					     const struct ws_egress *e)
{
	if (!segments_equal(ep->list, ep->segments, ep->end, e))
		return REASON(SEGMENTS);
	return ws_proof_verify(ep->tlv, ep->hop, e, ep->binding);
}

/* Whether this packet is none that was here before. Spends its number: the last
 * check on a hook that can still leave the packet to the other one.
 */
static __always_inline reason_t egress_window(const struct endpoint *ep,
					      const struct ws_egress *e,
					      __u32 frames)
{
	return ws_window_take(
		e, bpf_be64_to_cpu(ep->tlv->rnd) ^ ep->hop->share.up_rnd,
		frames);
}

/* What the SRH says is behind it. */
static __always_inline bool endpoint_has_ip4(const struct endpoint *ep)
{
	return ep->srh->nexthdr == NEXTHDR_IPV4;
}

/* in->hdr is in bounds where this succeeds. */
static __always_inline reason_t inner_find(const struct endpoint *ep,
					   bool is_ip4, struct ip *in)
{
	struct cursor c = inner_cursor(ep);

	if (!is_ip4 && ep->srh->nexthdr != NEXTHDR_IPV6)
		return REASON(INNER_PROTOCOL);
	if (!ip_take(&c, is_ip4, in))
		return REASON(INNER_TRUNCATED);
	if (!ip_is_its_version(in))
		return REASON(INNER_VERSION);
	return WS_REASON_NONE;
}

/* Does the inner packet end within what carries it? all: bytes from its header to
 * the end of the frame; exact: none of them is behind the packet.
 */
static __always_inline reason_t inner_fits(const struct endpoint *ep,
					   const struct ip *in, __u32 all,
					   bool exact)
{
	__u32 len = ip_len(in);

	if (endpoint_outer_len(ep) + len > ip6_len(ep->ip6) ||
	    (exact && len != all))
		return in->is_ip4 ? REASON(IP4_LENGTH) : REASON(IP6_LENGTH);
	if (in->is_ip4 && len < ip4_header_len(in->hdr))
		return REASON(IP4_LENGTH);
	return WS_REASON_NONE;
}

/* Addresses that no headend takes packets from or to, so that none has sent this. */
static __always_inline bool inner_is_strange(const struct ip *in)
{
	const struct ip6_hdr *ip6 = in->hdr;

	return ip_is_unsteered(in) || (!in->is_ip4 && (in_block(ip6->dst[0]) ||
						       in_block(ip6->src[0])));
}

/* What is inside must be what the proof is for: a proof for one chain opens no
 * other. path: what the inner packet requires, or 0, or
 * MATCH_UNKNOWN.
 */
static __always_inline reason_t inner_check(const struct endpoint *ep,
					    const struct ip *in, __be32 path)
{
	if (path == MATCH_UNKNOWN)
		return REASON(RULES_MISSING_BUG);
	/* What no headend steers is no chain's either. */
	if (!path || path != ep->tlv->path || inner_is_strange(in))
		return REASON(WRONG_CHAIN);
	/* RFC 6040 4.2: a mark that the inner packet cannot carry drops it. */
	if (ip6_ecn(ep->ip6) == ECN_CE && ip_ecn(in) == ECN_NOT_ECT)
		return REASON(ECN);
	return WS_REASON_NONE;
}
