/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* End.AD, towards the function: the outer header is kept, and
 * the inner packet goes to a function of kind unaware. TC only.
 */
#pragma once

#include "lib/detour/bypass.h"
#include "lib/detour/content.h"
#include "lib/detour/detour.h"
#include "lib/detour/fragments_tc.h"
#include "lib/detour/gso_keep_tc.h"
#include "lib/detour/slots.h"
#include "lib/encap/outer_strip_tc.h"
#include "lib/hook.h"
#include "lib/node/boundary.h"
#include "lib/node/maps.h"
#include "lib/node/refuse.h"
#include "lib/out/forward_tc.h"
#include "lib/reason.h"
#include "lib/skb/gso.h"
#include "lib/skb/pull.h"
#include "lib/skb/segmenter.h"
#include "lib/sr/end_tc.h"
#include "lib/sr/endpoint.h"
#include "lib/sr/endpoint_refuse_tc.h"
#include "lib/sr/step.h"
#include "lib/wire/net.h"

/* Remembers the next hop to a function that routes, for XDP. A function
 * of its own, to bound the stack; called only if there is XDP.
 */
__noinline int ws_via_learn(struct __sk_buff *skb, __u32 id)
{
	struct bpf_fib_lookup f = { .family = AF_INET6, .tot_len = 1 };
	const struct ws_proxy *p = proxy_find(id);
	const struct ws_node *node = xdp_node();
	struct ws_nexthop_key key;
	const struct ws_port *port;
	__u32 to;

	if (!p || !node || p->recognise == WS_RECOGNISE_METADATA)
		return 0;
	to = p->to;
	port = bpf_map_lookup_elem(&ws_ports, &to);
	if (!port || !port->xdp_target)
		return 0;
	key = via_key(p, id);
	if (nexthop_find(&key, node->ways))
		return 0;
	f.ifindex = to;
	__builtin_memcpy(f.ipv6_dst, p->via, sizeof(f.ipv6_dst));
	if (bpf_fib_lookup(skb, &f, sizeof(f), BPF_FIB_LOOKUP_OUTPUT) ==
		    BPF_FIB_LKUP_RET_SUCCESS &&
	    f.ifindex == to)
		nexthop_learn(&f, EXIT_NONE, &key);
	return 0;
}

/* Hands the packet to the function. A local function is this
 * node's own kernel, which processes the packet like a plain one.
 */
static __always_inline int hand_over(struct __sk_buff *skb,
				     const struct ws_proxy *p, __u32 id,
				     __u32 frames)
{
	struct bpf_redir_neigh nh = { .nh_family = AF_INET6 };
	struct cursor c = ctx_cursor(skb);
	struct eth_hdr *eth = cursor_take(&c, struct eth_hdr);

	if (!eth)
		return ws_refuse(skb, REASON(BOUNDS_BUG), 0);
	proxy_received(p, frames);
	if (!p->to)
		return CTX_PASS;
	if (p->peer)
		return bpf_redirect_peer(p->to, 0);
	if (p->has_via) {
		if (xdp_node())
			ws_via_learn(skb, id);
		__builtin_memcpy(nh.ipv6_nh, p->via, sizeof(nh.ipv6_nh));
		return bpf_redirect_neigh(p->to, &nh, sizeof(nh), 0);
	}
	__builtin_memcpy(eth->dst, p->dmac, sizeof(eth->dst));
	return bpf_redirect(p->to, 0);
}

/* Keeps the outer header of a packet that will be recognised by content. */
static __always_inline bool content_keep(ctx_t *ctx, const struct endpoint *ep,
					 const struct ws_proxy *p,
					 __u32 outer_len)
{
	struct header_ref k = header_ref_of(ep, outer_len);
	struct cache_query query;
	__u32 entry;
	bool ok;

	entry = content_reserve(ctx, ep, p, outer_len, &query);
	if (!entry)
		return false;
	ok = content_fill(ctx, &k, &query, entry);
	cache_give(entry, ok ? tag_of(&query) : TAG_FREE);
	return ok;
}

/* Keeps the outer header of a packet that will be recognised by *index, for skb->tc_index. */
static __always_inline bool metadata_keep(ctx_t *ctx, const struct endpoint *ep,
					  const struct ws_proxy *p,
					  __u32 outer_len, __u32 *index)
{
	struct header_ref k = header_ref_of(ep, outer_len);
	__u64 now = bpf_ktime_get_coarse_ns();
	struct ws_cached *c = slot_take(p, k.proxy, now, index);
	bool ok;

	if (!c)
		return false;
	ok = cached_fill(ctx, c, &k);
	slot_give(c, ok ? now + p->lifetime_ns : SLOT_FREE);
	return ok;
}

static __always_inline bool proxy_keep(ctx_t *ctx, const struct endpoint *ep,
				       const struct ws_proxy *p,
				       __u32 outer_len, __u32 *index)
{
	if (p->recognise == WS_RECOGNISE_METADATA)
		return metadata_keep(ctx, ep, p, outer_len, index);
	return content_keep(ctx, ep, p, outer_len);
}

/* Makes the bytes linear that may contain the ports; false: they are
 * linear already. For when the kernel cannot, see endpoint_visit. Moves the
 * packet. A function of its own: otherwise clang merges its reads of
 * skb->data with the caller's, as 32-bit numbers.
 */
static __noinline bool bypass_pull(struct __sk_buff *skb, __u32 outer)
{
	__u32 need = sizeof(struct eth_hdr) + outer + TUPLE_LEN;
	__u32 linear = skb->data_end - skb->data;

	if (linear >= need || linear >= skb->len)
		return false;
	pull(skb, need);
	return true;
}

/* True, with *verdict: the packet bypasses its function, or a
 * further step decides that. The inner packet is in bounds.
 */
static __always_inline bool
bypass_tc(struct __sk_buff *skb, struct endpoint *ep, const struct ws_proxy *p,
	  const struct ip *inner, const struct outer_next *next, bool first,
	  struct step *s, int *verdict)
{
	__u32 outer = outer_len(&ep->outer);

	switch (bypass_ask(ep, p, inner)) {
	case BYPASS_PULL:
		if (!bypass_pull(skb, outer))
			return false;
		*verdict = step_on(s, STEP_PULLED, 0);
		return true;
	case BYPASS_ASK:
		*verdict = step_on(s, STEP_BYPASS, bypass_at(ep));
		return true;
	case BYPASS_YES:
		if (!endpoint_bind(ep))
			return false;
		proxy_count(p, bypassed);
		*verdict = end_go(skb, ep, next, first, s);
		return true;
	default:
		return false;
	}
}

static __always_inline int ad_tc(struct __sk_buff *skb, struct endpoint *ep,
				 bool first, struct step *s)
{
	__u32 outer = outer_len(&ep->outer), index = 0, mtu = 0, frames = 0;
	__u32 id = ep->hop->proxy;
	const struct ws_proxy *p;
	struct outer_next next;
	struct ip inner;
	reason_t r;
	bool is_ip4, fragment;
	int verdict;
	long rc;

	r = end_check(ep, first, &next);
	if (!r)
		r = inner_find(ep, endpoint_has_ip4(ep), &inner);
	/* The packet is not verified yet, and the function may be this node's kernel,
	 * which would process neighbour discovery as if it came from the link.
	 */
	if (!r && inner_is_strange(&inner))
		r = REASON(INNER_ADDRESS);
	if (!r && !outer_argument_is_planned(&ep->outer, ep->hop))
		r = REASON(ARGUMENT);
	if (r)
		return endpoint_refuse(skb, ep, r);
	p = proxy_find(id);
	if (!p)
		return ws_refuse(skb, REASON(PROXY_MISSING_BUG), 0);
	if (p->gone)
		return ws_refuse(skb, REASON(FUNCTION_GONE), 0);
	if (!EXT_LEN_MAX && p->bypass) {
		if (!BYPASS_HERE)
			return step_on(s, STEP_BYPASS, BYPASS_NO_FLOW);
		if (bypass_tc(skb, ep, p, &inner, &next, first, s, &verdict))
			return verdict;
	}
	if (OUTER_IS_IP && skb->gso_size && p->cut) {
		proxy_count(p, rx_cut);
		frames = p->cuts ? gso_keep_begin(skb, ep, p, outer) : 0;
		if (!frames)
			return segment_in(skb, ep->eth);
	}
	/* Otherwise the compiler computes it again, and the verifier loses its bound. */
	barrier_var(outer);
	if (outer > WS_CACHED_MAX)
		return ws_refuse(skb,
				 EXT_LEN_MAX ? REASON(HEADER_TOO_LONG) :
					       REASON(BOUNDS_BUG),
				 0);
	/* The strip makes the packet shorter by outer. For frames of a super-packet
	 * the kernel ignores this difference, and accepts every length.
	 */
	rc = p->to ? bpf_check_mtu(skb, p->to, &mtu, -(__s32)outer, 0) : 0;
	if (rc < 0)
		return ws_refuse(skb, REASON(FUNCTION_GONE), rc);
	if (rc || (p->to && gso_packet_len(skb, outer_inner(&ep->outer),
					   skb->len - sizeof(struct eth_hdr) -
						   outer) > mtu))
		return ws_refuse(skb, REASON(FUNCTION_MTU), mtu);

	is_ip4 = inner.is_ip4;
	fragment = ip_may_be_fragment(&inner);
	outer_advance(skb, &ep->outer, &next, first);
	if (frames ? !ws_gso_keep(skb) :
		     !proxy_keep(skb, ep, p, outer, &index)) {
		proxy_count(p, rx_ignored);
		return ws_refuse(skb, REASON(CACHE_FULL), 0);
	}
	if (fragment && index &&
	    ws_fragment_read(skb, sizeof(struct eth_hdr) + outer, is_ip4, id))
		ws_fragment_keep(index);
	/* Moves the packet: every pointer taken before is gone. */
	rc = strip(skb, outer, is_ip4);
	if (rc)
		return ws_refuse(skb, REASON(STRIP_FAILED), rc);
	skb->tc_index = index;
	if (p->mark)
		skb->mark = ep->hop->argument;
	return hand_over(skb, p, id, frames ? frames : 1);
}
