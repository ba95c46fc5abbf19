/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* End.AD by content: keeps the outer header of a packet
 * under the packet's fingerprint. Both hooks.
 */
#pragma once

#include "lib/detour/cache.h"
#include "lib/detour/detour.h"
#include "lib/detour/fingerprint.h"
#include "lib/hook.h"
#include "lib/node/maps.h"
#include "lib/sr/endpoint.h"
#include "lib/wire/net.h"

/* Makes fingerprints of different functions differ: a packet may be in several. */
static __always_inline __u64 fp_of_proxy(__u64 fp, __u32 id)
{
	fp ^= id * 0x9e3779b97f4a7c15ULL;
	return (fp | FP_SET) & ~FP_COPY;
}

/* The query for a packet of a proxy in the table of headers. */
static __always_inline struct cache_query
cache_query(const struct ws_proxy *p, __u32 id, __u64 fp, __u64 now)
{
	return (struct cache_query){
		.fp = fp_of_proxy(fp, id),
		.now = now,
		.lifetime = p->lifetime_ns,
		.first = p->slot,
		.buckets = p->slots,
		.stats = p->stats,
	};
}

static __always_inline struct header_ref
header_ref_of(const struct endpoint *ep, __u32 outer_len)
{
	return (struct header_ref){
		.hop = {
			.sid = ep->sid,
			.path = ep->tlv->path,
			.epoch = ep->tlv->epoch,
		},
		.proxy = ep->hop->proxy,
		.outer_len = outer_len,
		.tlv_off = outer_offset(&ep->outer, ep->tlv),
	};
}

/* Stores the outer header, which has been advanced. */
static __always_inline bool cached_fill(ctx_t *ctx, struct ws_cached *c,
					const struct header_ref *k)
{
	__u64 outer_len = k->outer_len;

	c->hop = k->hop;
	c->proxy = k->proxy;
	c->outer_len = outer_len;
	c->tlv_off = k->tlv_off;
	barrier_var(outer_len);
	if (outer_len < sizeof(struct outer_head))
		return false;
	barrier_var(outer_len); /* clang would merge the comparisons */
	return outer_len <= WS_CACHED_MAX &&
	       !ctx_load_bytes(ctx, sizeof(struct eth_hdr), c->outer,
			       outer_len);
}

/* Reserves an entry for the header of a packet, which stays
 * unchanged. Returns the entry's number plus 1; 0: there is none.
 */
static __always_inline __u32 content_reserve(ctx_t *ctx,
					     const struct endpoint *ep,
					     const struct ws_proxy *p,
					     __u32 outer_len,
					     struct cache_query *query)
{
	__u64 fp = ws_fingerprint(ctx, sizeof(struct eth_hdr) + outer_len,
				  endpoint_has_ip4(ep));

	if (!fp)
		return 0;
	*query = cache_query(p, ep->hop->proxy, fp, bpf_ktime_get_coarse_ns());
	return ws_cache_reserve(query);
}

/* Writes the header into the entry. The caller then publishes or frees the entry. */
static __always_inline bool content_fill(ctx_t *ctx, const struct header_ref *k,
					 const struct cache_query *query,
					 __u32 entry)
{
	struct ws_cached *c = cache_entry(entry);

	if (!c)
		return false;
	c->fingerprint = query->fp;
	c->expires = query->now + query->lifetime;
	return cached_fill(ctx, c, k);
}
