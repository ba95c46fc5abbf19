/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* A packet that is addressed to a SID of this node: what it must be like, and
 * what is done to it. Nothing here changes the packet but endpoint_advance.
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
#include "lib/proof/verify.h"
#include "lib/reason.h"
#include "lib/wire/ip.h"
#include "lib/wire/net.h"

/* The proof and what the plan says of it, and the outer header that carries it. */
struct endpoint {
	struct outer outer;
	struct eth_hdr *eth;
	struct proof_tlv *tlv;
	const struct ws_hop *hop;
	__u32 len; /* of the packet from its outer header on; XDP only */
	__be64 sid; /* that it came for, upper 64 bits */
	__u64 binding; /* of the inner packet, where the scheme wants it */
	__u32 egress; /* where its verifier probably is */
};

/* Sets ep->binding, which the stamp and the verdict need. */
static __always_inline bool endpoint_bind(struct endpoint *ep)
{
	return binding_find(outer_inner(&ep->outer), outer_inner_is(&ep->outer),
			    &ep->hop->share, ep->hop->scheme, &ep->binding);
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

/* From the outer header and the proof to the entry of SID, path and epoch. The plan's scheme counts; a packet that
 * names another is refused.
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
	/* Else a list made up by somebody would let a packet out of the domain,
	 * or past the guard of the egress that this node may be too.
	 */
	if (!in_block(next->sid.hi))
		return REASON(SEGMENT_OUTSIDE);
	return WS_REASON_NONE;
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
	if (!outer_list_is_planned(&ep->outer, e))
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

/* What the outer header says is behind it. */
static __always_inline bool endpoint_has_ip4(const struct endpoint *ep)
{
	return outer_inner_is(&ep->outer) == NEXTHDR_IPV4;
}

/* in->hdr is in bounds where this succeeds. */
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

/* Does the inner packet end within what carries it? all: bytes from its header to
 * the end of the frame; exact: none of them is behind the packet.
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

/* Addresses that no headend takes packets from or to, so that none has sent this. */
static __always_inline bool inner_is_strange(const struct ip *in)
{
	const struct ip6_hdr *ip6 = in->hdr;

	return ip_is_unsteered(in) || (!in->is_ip4 && (in_block(ip6->dst[0]) ||
						       in_block(ip6->src[0])));
}

/* The path that guards name for packets with this proof, at an egress. */
static __always_inline __be32 endpoint_chain(const struct endpoint *ep)
{
	return ep->hop->argument;
}

/* What is inside must be what the proof is for: a proof for one chain opens no
 * other. required: the path that the inner packet requires.
 */
static __always_inline reason_t inner_check(const struct endpoint *ep,
					    const struct ip *in,
					    struct ws_match required)
{
	if (required.action == WS_MATCH_MISSING)
		return REASON(RULES_MISSING_BUG);
	/* What no headend steers is no chain's either. */
	if (required.action != WS_MATCH_PATH ||
	    required.target != endpoint_chain(ep) || inner_is_strange(in))
		return REASON(WRONG_CHAIN);
	/* RFC 6040 4.2: a mark that the inner packet cannot carry drops it. */
	if (outer_ecn(&ep->outer) == ECN_CE && ip_ecn(in) == ECN_NOT_ECT)
		return REASON(ECN);
	return WS_REASON_NONE;
}
