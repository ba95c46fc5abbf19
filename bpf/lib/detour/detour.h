/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The entry and the counters of a function of kind unaware.
 * cache.h and slots.h keep its headers. Both hooks.
 */
#pragma once

#include "lib/hook.h"
#include "lib/node/maps.h"

static __always_inline const struct ws_proxy *proxy_find(__u32 id)
{
	return id ? bpf_map_lookup_elem(&ws_proxies, &id) : NULL;
}

static __always_inline struct ws_proxy_stats *
proxy_stats(const struct ws_proxy *p)
{
	__u32 index = p->stats;

	return bpf_map_lookup_elem(&ws_proxy_stats, &index);
}

#define proxy_count(p, field)                                                  \
	do {                                                                   \
		struct ws_proxy_stats *stats_ = proxy_stats(p);                \
                                                                               \
		if (stats_)                                                    \
			stats_->field++;                                       \
	} while (0)

#define proxy_uncount(p, field)                                                \
	do {                                                                   \
		struct ws_proxy_stats *stats_ = proxy_stats(p);                \
                                                                               \
		if (stats_)                                                    \
			stats_->field--;                                       \
	} while (0)

static __always_inline void proxy_received(const struct ws_proxy *p,
					   __u32 frames)
{
	struct ws_proxy_stats *s = proxy_stats(p);

	if (s)
		s->rx_success += frames;
}

/* Counts a packet that has come back, and its time in the function. */
static __always_inline void proxy_waited(const struct ws_proxy *p, __u64 now,
					 __u64 expires)
{
	__u64 waited = now + p->lifetime_ns - expires;
	struct ws_proxy_stats *s = proxy_stats(p);

	if (!s)
		return;
	s->tx_success++;
	/* It is greater if a new plan has changed the life of headers. */
	if (waited <= p->lifetime_ns)
		s->waited_ns += waited;
}
