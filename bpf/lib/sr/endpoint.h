/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* A packet addressed to a SID of this node: its checks and its
 * processing. In this file only end_stamp changes the packet.
 */
#pragma once

#include "lib/encap/outer.h"
#include "lib/match/classify.h"
#include "lib/node/boundary.h"
#include "lib/node/lookup.h"
#include "lib/node/maps.h"
#include "lib/proof/binding.h"
#include "lib/proof/replay.h"
#include "lib/proof/stamp.h"
#include "lib/proof/trace.h"
#include "lib/proof/verify.h"
#include "lib/reason.h"
#include "lib/wire/ip.h"
#include "lib/wire/net.h"

/* The outer header, the proof in it, and their entry in the plan. */
struct endpoint {
	struct outer outer;
	struct eth_hdr *eth;
	struct proof_tlv *tlv;
	const struct ws_hop *hop;
	__u32 len; /* of the packet from its outer header on; XDP only */
	__be64 sid; /* the SID that the packet came for, upper 64 bits */
	__u64 binding; /* of the inner packet, if the scheme has one */
	__u32 egress; /* a hint for egress_of */
};

/* Sets ep->binding, which the stamp and the verdict need. */
static __always_inline bool endpoint_bind(struct endpoint *ep)
{
	return binding_find(outer_inner(&ep->outer), outer_inner_is(&ep->outer),
			    &ep->hop->share, ep->hop->scheme, &ep->binding);
}

/* The reason why there is no entry. Slow, but such a packet is refused anyway. */
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

/* From the outer header and the proof to the entry of SID, path and
 * epoch. A packet with another scheme than the plan's is refused.
 */
static __always_inline reason_t endpoint_find_hop(struct endpoint *ep)
{
	struct hop_id w = hop_id(outer_sid(&ep->outer), ep->tlv->path,
				 ep->tlv->epoch);

	ep->sid = w.sid;
	ep->hop = hop_find(&w, &ep->egress);
	if (!ep->hop)
		return hop_missing(&w);
	if (ep->tlv->scheme != ep->hop->scheme)
		return REASON(SCHEME);
	if (!outer_is_from_headend(&ep->outer, ep->hop, ep->tlv->path))
		return form_is_outer(ep->hop->form) ? REASON(SOURCE) :
						      REASON(ENCAPSULATION);
	return WS_REASON_NONE;
}

/* May this packet go on to its next segment? first: see outer_find_next. */
static __always_inline reason_t end_check(const struct endpoint *ep, bool first,
					  struct outer_next *next)
{
	reason_t r = outer_find_next(&ep->outer, ep->hop, first, next);

	if (r)
		return r;
	/* A forged list could otherwise send a packet out of the
	 * domain, or past the guard if this node is also an egress.
	 */
	if (!in_block(next->sid.hi))
		return REASON(SEGMENT_OUTSIDE);
	return WS_REASON_NONE;
}

static __always_inline void end_stamp(ctx_t *ctx, const struct endpoint *ep)
{
	stamp_traced(ctx, ep->tlv, ep->hop, ep->binding,
		     outer_is_traced(&ep->outer));
}

/* Sends the event of a packet whose proof and number the egress has verified. */
static __always_inline void egress_trace(ctx_t *ctx, const struct endpoint *ep)
{
	if (outer_is_traced(&ep->outer))
		ws_traced_send(
			ctx, ep->tlv,
			bpf_be64_to_cpu(ep->tlv->rnd) ^ ep->hop->share.up_rnd,
			ep->tlv->cml, ep->hop->position | TRACED_VERIFIED);
}

static __always_inline const struct ws_egress *
egress_find(const struct endpoint *ep)
{
	struct hop_id w = hop_id(ep->sid, ep->tlv->path, ep->tlv->epoch);

	return egress_of(&w, ep->egress);
}

/* The verdict on the proof. The caller applies on-violation. */
static __always_inline reason_t egress_judge(const struct endpoint *ep,
					     const struct ws_egress *e)
{
	if (!outer_list_is_planned(&ep->outer, e))
		return REASON(SEGMENTS);
	return ws_proof_verify(ep->tlv, ep->hop, e, ep->binding);
}

/* Refuses a packet that was here before. Uses up its number: on
 * XDP this is the last check that may still leave a packet to TC.
 */
static __always_inline reason_t egress_window(const struct endpoint *ep,
					      const struct ws_egress *e,
					      __u32 frames)
{
	return ws_window_take(
		e, bpf_be64_to_cpu(ep->tlv->rnd) ^ ep->hop->share.up_rnd,
		frames);
}

/* Is the inner packet IPv4, by the outer header? */
static __always_inline bool endpoint_has_ip4(const struct endpoint *ep)
{
	return outer_inner_is(&ep->outer) == NEXTHDR_IPV4;
}

/* On success in->hdr is in bounds. */
static __always_inline reason_t inner_find(const struct endpoint *ep,
					   bool is_ip4, struct ip *in)
{
	struct cursor c = outer_inner(&ep->outer);

	if (!is_ip4 && outer_inner_is(&ep->outer) != NEXTHDR_IPV6)
		return REASON(INNER_PROTOCOL);
	if (!ip_take(&c, is_ip4, in))
		return REASON(INNER_TRUNCATED);
	if (!ip_is_its_version(in))
		return REASON(INNER_VERSION);
	return WS_REASON_NONE;
}

/* Does the inner packet end within its outer header's length? all: bytes from
 * its header to the end of the frame; exact: no bytes may follow the packet.
 */
static __always_inline reason_t inner_fits(const struct endpoint *ep,
					   const struct ip *in, __u32 all,
					   bool exact)
{
	__u32 len = ip_len(in);

	if (outer_len(&ep->outer) + len > outer_says_len(&ep->outer) ||
	    (exact && len != all))
		return in->is_ip4 ? REASON(IP4_LENGTH) : REASON(IP6_LENGTH);
	if (in->is_ip4 && len < ip4_header_len(in->hdr))
		return REASON(IP4_LENGTH);
	return WS_REASON_NONE;
}

/* Addresses of packets that no headend takes: no headend has sent such a packet. */
static __always_inline bool inner_is_strange(const struct ip *in)
{
	const struct ip6_hdr *ip6 = in->hdr;

	return ip_is_unsteered(in) || (!in->is_ip4 && (in_block(ip6->dst[0]) ||
						       in_block(ip6->src[0])));
}

/* The path that guards require of packets with this proof, at an egress. */
static __always_inline __be32 endpoint_chain(const struct endpoint *ep)
{
	return ep->hop->argument;
}

/* The inner packet must belong to the proof's chain: a proof for one chain is
 * not valid for another. required: the path that the inner packet requires.
 */
static __always_inline reason_t inner_check(const struct endpoint *ep,
					    const struct ip *in,
					    struct ws_match required)
{
	if (required.action == WS_MATCH_MISSING)
		return REASON(RULES_MISSING_BUG);
	/* Packets that no headend takes belong to no chain. */
	if (required.action != WS_MATCH_PATH ||
	    required.target != endpoint_chain(ep) || inner_is_strange(in))
		return REASON(WRONG_CHAIN);
	/* RFC 6040 4.2: drop a packet with CE whose inner packet is Not-ECT. */
	if (outer_ecn(&ep->outer) == ECN_CE && ip_ecn(in) == ECN_NOT_ECT)
		return REASON(ECN);
	return WS_REASON_NONE;
}
