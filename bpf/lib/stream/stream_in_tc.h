/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Verified packets go to a function on byte streams. TC ingress only. */
#pragma once

#include "lib/detour/detour.h"
#include "lib/hook.h"
#include "lib/node/maps.h"
#include "lib/node/refuse.h"
#include "lib/reason.h"
#include "lib/stream/conn_tc.h"

/* The connection of a packet that came by t; a SYN creates one. */
static __always_inline reason_t stream_admit(struct segment *s,
					     const struct ws_stream *t)
{
	struct ws_conn fresh = { .part = t->part };
	struct ws_conn *c;
	bool is_new;

	if (!t->opens)
		conn_swap(&s->key);
	c = conn_find(&s->key, &is_new);
	if (!c) {
		if (!t->opens || !segment_opens(s))
			return REASON(STREAM_UNKNOWN);
		/* Refused if there is a connection between the same ends in the
		 * other direction: packets from the function would be ambiguous.
		 */
		conn_swap(&s->key);
		c = conn_find(&s->key, &is_new);
		conn_swap(&s->key);
		if (c)
			return REASON(STREAM_UNKNOWN);
		fresh.used = bpf_ktime_get_coarse_ns();
		/* If two CPUs process two SYNs, one is first. */
		bpf_map_update_elem(&ws_conns_new, &s->key, &fresh,
				    BPF_NOEXIST);
		c = bpf_map_lookup_elem(&ws_conns_new, &s->key);
		if (!c)
			return REASON(STREAMS_FULL);
	}
	if (c->part != (t->opens ? t->part : t->other))
		return REASON(WRONG_CHAIN);
	conn_note(c, s->flags,
		  t->opens ? WS_CONN_CLIENT_FIN : WS_CONN_SERVER_FIN, 0);
	return WS_REASON_NONE;
}

/* Which connection an ICMP error is about that came by t: the function's TCP goes by it, and
 * by the sequence number in it.
 */
static __always_inline reason_t stream_admit_error(struct __sk_buff *skb,
						   struct segment *s,
						   const struct ws_stream *t)
{
	struct ws_conn *c;
	bool is_new;

	if (!ws_error_read(skb, &s->key))
		return REASON(STREAM_NOT_TCP);
	/* Of the two sides the client's is told of what went to the client. */
	if (t->opens)
		conn_swap(&s->key);
	c = conn_find(&s->key, &is_new);
	if (!c)
		return REASON(STREAM_UNKNOWN);
	return c->part == (t->opens ? t->part : t->other) ? WS_REASON_NONE :
							    REASON(WRONG_CHAIN);
}

/* Is the function's interface there? It ends with the agent. */
static __always_inline bool stream_is_up(struct __sk_buff *skb,
					 const struct ws_proxy *p)
{
	__u32 mtu = 0;

	return !p->gone && bpf_check_mtu(skb, p->to, &mtu, 0, 0) >= 0;
}

/* Gives a SYN to the worker, not to the kernel, until the server has answered. */
static __always_inline int stream_hold(struct __sk_buff *skb,
				       const struct ws_proxy *p)
{
	if (eth_set_proto(skb, bpf_htons(WS_ETH_P_HELD)))
		return ws_refuse(skb, REASON(BOUNDS_BUG), 0);
	return bpf_redirect(p->to, 0);
}

/* In place of a verdict: the packet goes by the function. */
#define STREAM_GOES_BY 0x100

/* A verified packet without its outer header; skb->cb[0]:
 * the path that it came by. Returns the verdict, or STREAM_GOES_BY.
 */
__noinline int ws_stream_in(struct __sk_buff *skb)
{
	__be32 path = skb->cb[0];
	const struct ws_stream *t = bpf_map_lookup_elem(&ws_streams, &path);
	const struct ws_proxy *p = t ? proxy_find(t->proxy) : NULL;
	struct segment s = {};
	reason_t r;
	bool tcp;

	if (!p)
		return ws_refuse(skb, REASON(PROXY_MISSING_BUG), 0);
	s.key.proxy = t->proxy;
	tcp = segment_read(skb, &s);
	/* Also while there is no function. */
	if (!tcp && ws_goes_by(skb, t->by))
		return STREAM_GOES_BY;
	if (!stream_is_up(skb, p))
		return ws_refuse(skb, REASON(STREAM_DOWN), 0);
	if (!tcp) {
		r = stream_admit_error(skb, &s, t);
		if (r)
			return ws_refuse(skb, r, 0);
		proxy_received(p, 1);
		return bpf_redirect_peer(p->to, 0);
	}
	r = stream_admit(&s, t);
	if (r)
		return ws_refuse(skb, r, 0);
	proxy_received(p, 1);
	if (t->first && t->opens && segment_opens(&s))
		return stream_hold(skb, p);
	return bpf_redirect_peer(p->to, 0);
}
