/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* End.AD, from the function: a packet gets its own outer header back, is stamped
 * and goes to its next segment. TC only.
 */
#pragma once

#include "lib/detour/cache.h"
#include "lib/detour/detour.h"
#include "lib/detour/restore.h"
#include "lib/detour/slots.h"
#include "lib/encap/ext_tc.h"
#include "lib/encap/outer_push_tc.h"
#include "lib/encap/outer.h"
#include "lib/encap/outer_kept.h"
#include "lib/encap/outer_way_tc.h"
#include "lib/hook.h"
#include "lib/node/boundary.h"
#include "lib/node/maps.h"
#include "lib/node/refuse.h"
#include "lib/node/stats.h"
#include "lib/out/forward_tc.h"
#include "lib/proof/binding_tc.h"
#include "lib/proof/stamp.h"
#include "lib/reason.h"
#include "lib/skb/gso.h"
#include "lib/sr/endpoint_tc.h"
#include "lib/wire/net.h"

/* The result for a packet that has come back. */
struct back {
	bool found; /* a header was kept for it */
	bool by_index; /* kept is a slot */
	reason_t bad; /* why the packet is refused */
	__s32 err; /* of a helper */
	__u32 exit; /* index of the remembered next hop */
	/* If bad is KEPT_OTHER: the slot of its header in
	 * ws_slots, or the entry in ws_cache, plus 1.
	 */
	__u32 kept;
};

/* Greater than every reason: the packet is unchanged, and its header is of
 * the other kind. Not 0, so that a verifier can tell it from WS_REASON_NONE.
 */
#define KEPT_OTHER 0xffff

/* Puts the kept header back. Returns a reason, or
 * KEPT_OTHER. *exit: the index of the remembered next hop.
 */
static __always_inline reason_t restore(struct __sk_buff *skb,
					const struct ws_cached *c, __u32 *exit,
					long *err)
{
	__u32 inner_len = skb->len - sizeof(struct eth_hdr);
	__u32 frames;
	__u64 outer_len = c->outer_len;
	struct cursor inner;
	__u64 binding = 0;
	struct hop_id w = hop_id(c->hop.sid, c->hop.path, c->hop.epoch);
	__u32 unused;
	const struct ws_hop *hop = hop_find(&w, &unused);

	if (!hop)
		return REASON(SHARE_GONE);
	if (!form_is_outer(hop->form))
		return KEPT_OTHER;
	barrier_var(outer_len);
	if (outer_len > WS_CACHED_MAX)
		return REASON(BOUNDS_BUG);
	barrier_var(outer_len); /* clang would merge the comparisons */
	if (outer_len < sizeof(struct outer_head))
		return REASON(BOUNDS_BUG);
	/* The binding of the packet as the function sent it: the stamp covers that. */
	if (hop->scheme == WS_SCHEME_KEYED_FLOW &&
	    !binding_pull_plain(skb, &hop->share, &binding))
		return REASON(FLOW);
	inner = ctx_cursor(skb);
	cursor_take(&inner, struct eth_hdr);
	frames = gso_frames(skb, inner, sizeof(struct eth_hdr));
	*err = push(skb, outer_len, skb_is_ip4(skb));
	if (!*err)
		*err = bpf_skb_store_bytes(skb, sizeof(struct eth_hdr),
					   c->outer, outer_len, 0);
	if (*err || !restore_finish(skb, c, hop, binding, outer_len, inner_len))
		return REASON(RESTORE_FAILED);
	*exit = hop->stats;
	stats_add(hop->stats, frames, inner_len);
	return WS_REASON_NONE;
}

/* Forwards to the next segment, which may be on this node. */
static __always_inline int restored_next(struct __sk_buff *skb, __u32 exit)
{
	const struct outer_head *h = outer_head(skb);

	if (h && in_locator(outer_head_sid(h)))
		return endpoint_tc(skb, false);
	if (OUTER_IS_IP && h && outer_head_has_options(h))
		return ext_program(skb, EXT_LEAVES, exit);
	return ws_forward(skb, exit, WAY_UNKNOWN);
}
