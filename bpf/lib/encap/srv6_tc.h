/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Parses from the outer header of a packet for a SID to its proof, on TC. */
#pragma once

#include "lib/encap/ext.h"
#include "lib/encap/ext_tc.h"
#include "lib/encap/srh.h"
#include "lib/encap/srv6.h"
#include "lib/encap/tlv_tc.h"
#include "lib/hook.h"
#include "lib/match/rules_tc.h"
#include "lib/reason.h"
#include "lib/skb/pull.h"
#include "lib/wire/cursor.h"
#include "lib/wire/net.h"

/* Makes all headers linear that are read, up to the inner
 * one, and no more: pulling payload would copy it. Finds
 * the headers before the SRH, which outer_parse checks.
 */
static __always_inline long outer_pull(struct __sk_buff *skb,
				       struct ext_found *found)
{
	__u32 ext = ext_find(skb, found);
	__u32 len = sizeof(struct eth_hdr) + sizeof(struct ip6_hdr) + ext +
		    sizeof(struct srh);
	const struct srh *srh;
	struct cursor c;
	long rc;

	rc = pull(skb, len);
	if (rc)
		return rc;
	c = ctx_cursor(skb);
	cursor_take(&c, struct eth_hdr);
	cursor_take(&c, struct ip6_hdr);
	if (EXT_LEN_MAX) {
		barrier_var(ext);
		c.pos += ext & (2 * EXT_LEN_MAX - 1);
	}
	srh = cursor_take(&c, struct srh);
	if (!srh)
		return 0; /* too short; outer_parse finds the reason */
	len += srh->hdrlen * 8;
	return rules_pull(skb, len, len + sizeof(struct ip6_hdr));
}

/* Finds the proof, wherever it is among the TLVs. */
static __always_inline reason_t tlv_locate(struct __sk_buff *skb,
					   const struct outer *o,
					   struct proof_tlv **proof)
{
	__u32 list_len = 16 * o->segments;
	void *tlvs = (void *)o->list + list_len;
	reason_t bad;
	int off = 0;

	*proof = tlvs;
	if ((void *)(*proof + 1) <= o->end &&
	    tlv_at_once(o->srh, o->segments, *proof))
		return WS_REASON_NONE;

	off = ws_tlv_find(skb,
			  sizeof(struct eth_hdr) + sizeof(struct ip6_hdr) +
				  outer_ext(o) + sizeof(struct srh) + list_len,
			  o->srh->hdrlen * 8 - list_len);
	if (off < 0) {
		bad = -off;
		barrier_var(bad);
		/* The verifier does not know that bad is not 0. */
		return bad ? bad : REASON(BOUNDS_BUG);
	}
	*proof = tlvs + (off & (2 * WS_TLVS_LEN_MAX - 1));
	return (void *)(*proof + 1) <= o->end ? WS_REASON_NONE :
						REASON(BOUNDS_BUG);
}

/* Parses from the outer header, at c, to the proof. EXT_DECIDES: see found for the next step.
 */
static __always_inline reason_t outer_parse(struct __sk_buff *skb,
					    struct cursor c, struct outer *o,
					    struct proof_tlv **proof,
					    const struct ext_found *found)
{
	reason_t r;
	__u32 ext;

	o->end = c.end;
	o->ip6 = cursor_take(&c, struct ip6_hdr);
	/* The caller has checked that the headers themselves are there. */
	if (!o->ip6 || sizeof(struct eth_hdr) + sizeof(*o->ip6) +
				       bpf_ntohs(o->ip6->payload_len) >
			       skb->len)
		return REASON(PAYLOAD_LENGTH);
	if (EXT_LEN_MAX) {
		if (found->bad)
			return EXT_DECIDES;
		ext = found->len;
		barrier_var(ext); /* clang would read it again, unbounded */
		if (ext > EXT_LEN_MAX)
			return REASON(BOUNDS_BUG);
		o->ext = ext;
		c.pos += ext;
	} else {
		if (o->ip6->nexthdr == NEXTHDR_FRAGMENT)
			return REASON(OUTER_FRAGMENT);
		if (nexthdr_is(o->ip6->nexthdr, EXT_OPTIONS))
			return EXT_DECIDES;
		if (o->ip6->nexthdr != NEXTHDR_ROUTING)
			return REASON(NO_SRH);
	}
	r = srh_check(&c, &o->srh, &o->segments);
	if (r)
		return r;
	o->list = c.pos;
	return tlv_locate(skb, o, proof);
}
