/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The work of a headend on a packet, on both hooks. */
#pragma once

#include "lib/encap/outer.h"
#include "lib/encap/outer_headend.h"
#include "lib/node/boundary.h"
#include "lib/node/maps.h"
#include "lib/out/path_mtu.h"
#include "lib/proof/binding.h"
#include "lib/proof/rnd.h"
#include "lib/proof/stamp.h"
#include "lib/proof/trace.h"
#include "lib/reason.h"
#include "lib/sr/headend_trace.h"
#include "lib/wire/cursor.h"
#include "lib/wire/ip.h"
#include "lib/wire/net.h"

/* State between the checks of the inner packet and the writing of its outer header. */
struct headend_packet {
	__u64 rnd;
	__u64 binding; /* if the scheme has one */
	struct outer_marks marks;
	__u32 inner_len; /* bytes, from the inner IP header on */
	__u32 outer_len; /* bytes; in the bounds of ws_headend.outer */
	bool is_ip4;
	bool routed; /* the kernel has routed it, and decremented the hop limit if it was forwarded */
};

/* The headend that a rule names; NULL: there is none, which is a bug. */
static __always_inline const struct ws_headend *headend_find(__u32 index)
{
	const struct ws_headend *h = bpf_map_lookup_elem(&ws_headends, &index);

	return h && h->outer_len ? h : NULL;
}

/* Checks whether the packet may enter. len: of the inner
 * packet; packet_len: of its longest frame. Changes nothing.
 */
static __always_inline reason_t headend_check(const struct ws_headend *h,
					      const struct ip *in, __u32 len,
					      __u32 packet_len,
					      struct headend_packet *pkt)
{
	__u32 outer_len = h->outer_len;

	if (outer_len > WS_OUTER_MAX)
		outer_len = 0;
	barrier_var(outer_len); /* clang would merge the comparisons */
	if (outer_len < OUTER_LEN_MIN)
		return REASON(HEADEND_LENGTH_BUG);
	pkt->inner_len = len;
	pkt->outer_len = outer_len;
	if (!pkt->routed && ip_hops(in) <= 1)
		return REASON(EDGE_HOP_LIMIT);
	if (h->mtu && packet_len > h->mtu)
		return REASON(CHAIN_MTU);
	if (path_mtu_exceeded(h, packet_len, in->is_ip4))
		return REASON(PATH_MTU);
	if (!outer_can_hold(pkt->outer_len, len))
		return REASON(TRAIN_TOO_BIG);
	pkt->is_ip4 = in->is_ip4;
	return WS_REASON_NONE;
}

/* Fills in the fields that are zero in the prebuilt header, and stamps.
 * The outer header has been written. False: a bug.
 */
static __always_inline bool headend_finish(ctx_t *ctx,
					   const struct ws_headend *h,
					   const struct headend_packet *pkt)
{
	bool traced = trace_takes(ctx, h, pkt->outer_len, pkt->is_ip4);
	struct proof_tlv *tlv = outer_finish(ctx_cursor(ctx), pkt->outer_len,
					     pkt->inner_len, pkt->is_ip4,
					     pkt->marks, traced);

	if (!tlv)
		return false;
	tlv->rnd = bpf_cpu_to_be64(pkt->rnd);
	stamp(tlv, &h->share, h->scheme, 0, pkt->binding);
	if (traced)
		ws_traced_send(ctx, tlv, pkt->rnd, 0, 0);
	return true;
}

/* The first segment, upper 64 bits. */
static __always_inline __be64 headend_first(const struct ws_headend *h)
{
	return outer_head_sid(outer_head_of(h->outer));
}

/* The key of the remembered next hop to the first segment. */
static __always_inline __be64 headend_to(const struct ws_headend *h)
{
	return outer_head_to(outer_head_of(h->outer));
}

static __always_inline bool headend_first_is_local(const struct ws_headend *h)
{
	return in_locator(headend_first(h));
}
