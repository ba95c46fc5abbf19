/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* End.AD, towards the function: the outer header is kept, the inner packet goes
 * to a function that knows nothing of it. TC only.
 */
#pragma once

#include "boundary.h"
#include "cache.h"
#include "endpoint.h"
#include "endpoint_refuse.h"
#include "fingerprint.h"
#include "forward.h"
#include "hook.h"
#include "maps.h"
#include "net.h"
#include "proxy.h"
#include "refuse.h"
#include "slots.h"
#include "strip.h"
#include "train.h"

/* To the function. A local one is in this node's own kernel, which takes the
 * packet as if it had come plain.
 */
static __always_inline int hand_over(struct __sk_buff *skb,
				     const struct ws_proxy *p)
{
	struct bpf_redir_neigh nh = { .nh_family = AF_INET6 };

	if (!p->to)
		return CTX_PASS;
	if (p->has_via) {
		__builtin_memcpy(nh.ipv6_nh, p->via, sizeof(nh.ipv6_nh));
		return bpf_redirect_neigh(p->to, &nh, sizeof(nh), 0);
	}
	if (bpf_skb_store_bytes(skb, 0, p->dmac, sizeof(p->dmac), 0))
		return CTX_DROP;
	return bpf_redirect(p->to, 0);
}

/* What the table of headers is asked for a packet of a proxy. */
static __always_inline struct cache_ask
cache_ask(const struct ws_proxy *p, __u32 id, __u64 print, __u64 now)
{
	/* The same packet may be in another function of this node. */
	print ^= id * 0x9e3779b97f4a7c15ULL;
	return (struct cache_ask){
		.print = (print | PRINT_SET) & ~PRINT_COPY,
		.now = now,
		.lifetime = p->lifetime_ns,
		.first = p->slot,
		.buckets = p->slots,
		.stats = p->stats,
	};
}

/* Writes down the outer header, which has been advanced. */
static __always_inline bool cached_fill(ctx_t *ctx, struct ws_cached *c,
					const struct endpoint *ep,
					__u32 outer_len)
{
	c->hop = (struct ws_hop_key){
		.sid = ep->sid,
		.path = ep->tlv->path,
		.epoch = ep->tlv->epoch,
	};
	c->proxy = ep->hop->proxy;
	c->outer_len = outer_len;
	c->tlv_off = (void *)ep->tlv - (void *)ep->ip6;
	return !ctx_load_bytes(ctx, sizeof(struct eth_hdr), c->outer,
			       outer_len);
}

/* Keeps the outer header for a packet that will be known by its content. */
static __always_inline bool content_keep(ctx_t *ctx, const struct endpoint *ep,
					 const struct ws_proxy *p,
					 __u32 outer_len)
{
	struct cache_ask ask;
	struct ws_cached *c;
	__u64 print, now;
	__u32 entry;
	bool ok;

	print = ws_fingerprint(ctx, sizeof(struct eth_hdr) + outer_len,
			       endpoint_has_ip4(ep));
	if (!print)
		return false;
	now = bpf_ktime_get_coarse_ns();
	ask = cache_ask(p, ep->hop->proxy, print, now);
	entry = ws_cache_reserve(&ask);
	c = cache_entry(entry);
	if (!c)
		return false;
	c->fingerprint = ask.print;
	c->expires = now + p->lifetime_ns;
	ok = cached_fill(ctx, c, ep, outer_len);
	cache_give(entry, ok ? tag_of(&ask) : TAG_FREE);
	return ok;
}

/* And for one that will be known by *index, which goes into skb->tc_index. */
static __always_inline bool metadata_keep(ctx_t *ctx, const struct endpoint *ep,
					  const struct ws_proxy *p,
					  __u32 outer_len, __u32 *index)
{
	__u64 now = bpf_ktime_get_coarse_ns();
	struct ws_cached *c = slot_take(p, now, index);
	bool ok;

	if (!c)
		return false;
	ok = cached_fill(ctx, c, ep, outer_len);
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

static __always_inline enum ws_reason function_gone(void)
{
	return WS_REASON_FUNCTION_GONE;
}

static __always_inline int ad_tc(struct __sk_buff *skb, struct endpoint *ep,
				 bool first)
{
	__u32 outer = endpoint_outer_len(ep), index = 0, mtu = 0;
	const struct ws_proxy *p;
	struct end_next next;
	struct inner inner;
	enum ws_reason r;
	bool is_ip4;
	long rc;

	r = end_check(ep, first, &next);
	if (!r)
		r = inner_find(ep, endpoint_has_ip4(ep), &inner);
	if (r)
		return endpoint_refuse(skb, ep, r);
	p = proxy_find(ep->hop->proxy);
	if (!p)
		return ws_refuse(skb, proxy_missing(), 0);
	if (p->gone)
		return ws_refuse(skb, function_gone(), 0);
	if (skb->gso_size && p->cut) {
		proxy_count(p, rx_cut);
		return cut_in(skb, ep->eth);
	}
	/* Else the compiler computes it anew, and the verifier sees no bound. */
	barrier_var(outer);
	if (outer > WS_CACHED_MAX)
		return ws_refuse(skb, bounds_bug(), 0);
	/* The strip makes it that much smaller. The kernel does not say so of the
	 * frames of a super-packet, and lets any of those pass.
	 */
	rc = p->to ? bpf_check_mtu(skb, p->to, &mtu, -(__s32)outer, 0) : 0;
	if (rc < 0)
		return ws_refuse(skb, function_gone(), rc);
	if (rc || (p->to && train_packet_len(skb, inner_cursor(ep),
					     skb->len - sizeof(struct eth_hdr) -
						     outer) > mtu))
		return ws_refuse(skb, WS_REASON_FUNCTION_MTU, mtu);

	is_ip4 = inner.is_ip4;
	end_advance(ep, &next, first);
	if (!proxy_keep(skb, ep, p, outer, &index)) {
		proxy_count(p, rx_ignored);
		return ws_refuse(skb, WS_REASON_CACHE_FULL, 0);
	}
	/* Moves the packet: every pointer taken before is gone. */
	rc = strip(skb, outer, is_ip4);
	if (rc)
		return ws_refuse(skb, strip_failed(), rc);
	skb->tc_index = index;
	proxy_count(p, rx_success);
	return hand_over(skb, p);
}
