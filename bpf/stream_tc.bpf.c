/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* What comes from a function on byte streams: the connection that a packet is of says which
 * part of its chain it takes, and this node is that part's headend. function_tc.bpf.c
 * hands all of it over; nothing else goes on. Of a gateway
 * gateway_tc.bpf.c does so, and what it lets by is on its way to an origin.
 */
#include "lib/hook.h"
#include "lib/detour/detour.h"
#include "lib/node/maps.h"
#include "lib/sr/edge_tc.h"
#include "lib/sr/enter_tc.h"
#include "lib/stream/conn_tc.h"

/* Where a packet goes: the headend of the path that its connection takes, into skb->cb[0].
 * A function of its own, for its stack. Returns a reason_t.
 */
__noinline int ws_stream_path(struct __sk_buff *skb)
{
	__u32 ifindex = skb->ifindex;
	const struct ws_port *port = bpf_map_lookup_elem(&ws_ports, &ifindex);
	const struct ws_proxy *p = port ? proxy_find(port->proxy) : NULL;
	const struct ws_stream *t;
	struct segment s = {};
	bool is_new, onward = true;
	const __u32 *index;
	struct ws_conn *c;
	__be32 path;
	reason_t r;

	if (!p)
		return REASON(PROXY_MISSING_BUG);
	s.key.proxy = port->proxy;
	if (!segment_read(skb, &s))
		return REASON(STREAM_NOT_TCP);
	c = conn_find(&s.key, &is_new);
	if (!c) {
		/* Its clients are not behind a path. */
		if (p->stream == WS_BYTES_GATEWAY)
			return REASON(STREAM_UNKNOWN);
		onward = false;
		conn_swap(&s.key);
		c = conn_find(&s.key, &is_new);
	}
	if (!c)
		return REASON(STREAM_UNKNOWN);
	/* A gateway is let open one connection at a time. Until it has acknowledged the
	 * origin's SYN there was none.
	 */
	if (p->stream == WS_BYTES_GATEWAY && segment_opens(&s) &&
	    c->seen & WS_CONN_ANSWERED)
		return REASON(STREAM_UNKNOWN);
	path = c->part;
	/* Of others the client itself says that it ends. */
	conn_note(c, s.flags,
		  p->stream == WS_BYTES_GATEWAY ? WS_CONN_CLIENT_FIN : 0,
		  onward ? WS_CONN_ANSWERED : 0);
	if (onward && is_new) {
		r = conn_promote(&s.key, c);
		if (r)
			return r;
	} else if (onward && segment_opens(&s) && c->seen) {
		/* Ports are used again: what the last connection had seen is
		 * over, now that the function goes on with another.
		 */
		c->seen = 0;
	}
	t = bpf_map_lookup_elem(&ws_streams, &path);
	/* The plan has dropped the chain meanwhile. */
	if (!t)
		return REASON(STREAM_UNKNOWN);
	path = onward ? t->onward : t->back;
	index = bpf_map_lookup_elem(&ws_paths, &path);
	if (!index)
		return REASON(HEADEND_MISSING_BUG);
	skb->cb[0] = *index;
	proxy_count(p, tx_success);
	return WS_REASON_NONE;
}

/* A SYN that has waited, and that the function's TCP shall have now: it goes back to where it
 * came from, as what it is. The interface, into skb->cb[0]. A function of its own, for its
 * stack. Returns a reason_t.
 */
__noinline int ws_stream_let_in(struct __sk_buff *skb)
{
	__u32 ifindex = skb->ifindex;
	const struct ws_port *port = bpf_map_lookup_elem(&ws_ports, &ifindex);
	const struct ws_proxy *p = port ? proxy_find(port->proxy) : NULL;
	struct segment s = {};
	struct eth_hdr eth;
	bool is_new;
	__u8 first;

	if (!p)
		return REASON(PROXY_MISSING_BUG);
	s.key.proxy = port->proxy;
	if (bpf_skb_load_bytes(skb, 0, &eth, sizeof(eth)) ||
	    bpf_skb_load_bytes(skb, sizeof(eth), &first, 1))
		return REASON(STREAM_NOT_TCP);
	if (eth_set_proto(skb,
			  bpf_htons(first >> 4 == 4 ? ETH_P_IP : ETH_P_IPV6)) ||
	    bpf_skb_store_bytes(skb, offsetof(struct eth_hdr, dst), eth.src,
				sizeof(eth.src), 0) ||
	    bpf_skb_store_bytes(skb, offsetof(struct eth_hdr, src), eth.dst,
				sizeof(eth.dst), 0))
		return REASON(BOUNDS_BUG);
	if (!segment_read(skb, &s))
		return REASON(STREAM_NOT_TCP);
	if (!segment_opens(&s) || !conn_find(&s.key, &is_new))
		return REASON(STREAM_UNKNOWN);
	skb->cb[0] = p->to;
	return WS_REASON_NONE;
}

SEC("tc")
int ws_stream_tc(struct __sk_buff *skb)
{
	const struct eth_hdr *eth;
	struct cursor c;
	struct ip in;
	int verdict;
	reason_t r;

	skb->tc_index = 0;
	skb->mark = 0;
	if (skb->protocol == bpf_htons(WS_ETH_P_HELD)) {
		r = ws_stream_let_in(skb);
		return r ? ws_refuse(skb, r, 0) : bpf_redirect(skb->cb[0], 0);
	}
	r = ws_stream_path(skb);
	if (r)
		return ws_refuse(skb, r, 0);
	c = ctx_cursor(skb);
	eth = cursor_take(&c, struct eth_hdr);
	if (!eth || !ip_take(&c, eth_is_ip4(eth), &in))
		return ws_refuse(skb, REASON(BOUNDS_BUG), 0);
	verdict = edge_boundary(skb, &in);
	if (verdict != CTX_PASS)
		return verdict;
	if (ip_is_unsteered(&in))
		return ws_refuse(skb, REASON(STREAM_UNKNOWN), 0);
	return enter(skb, c, &in, skb->cb[0]);
}

char _license[] SEC("license") = "Dual BSD/GPL";
