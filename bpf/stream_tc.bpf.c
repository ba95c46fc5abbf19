/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Packets from a function on byte streams, and those that go by it. The connection of a packet determines
 * which part of its chain the packet takes, and this node is that part's headend.
 * function_tc.bpf.c hands over all packets of such functions, and all others are refused.
 * lib/sr/endpoint_tc.h hands over verified packets that go by: they take the next part in their direction.
 * A gateway's packets come by way of gateway_tc.bpf.c, which passes on those to origins.
 */
#include "lib/hook.h"
#include "lib/detour/detour.h"
#include "lib/node/maps.h"
#include "lib/sr/edge_tc.h"
#include "lib/sr/enter_tc.h"
#include "lib/stream/conn_tc.h"

/* An ICMP error that tells a client that its server cannot be reached, in the server's name:
 * what the function hears of its own SYN it passes on. Nothing else but TCP goes out. Returns a
 * reason_t; *key: of the connection. It is never NULL; the verifier wants it asked.
 */
__noinline int ws_stream_error(struct __sk_buff *skb, struct ws_conn_key *key)
{
	__be64 from[2] = {};
	__be32 from4 = 0;
	bool other;
	int what;

	if (!key)
		return REASON(STREAM_NOT_TCP);
	what = ws_error_read(skb, key);
	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		other = what >> 8 != ICMP4_UNREACHABLE ||
			what == ERROR_OF(ICMP4_UNREACHABLE,
					 ICMP4_FRAGMENTATION_NEEDED) ||
			bpf_skb_load_bytes(
				skb,
				sizeof(struct eth_hdr) +
					offsetof(struct ip4_hdr, src),
				&from4, sizeof(from4));
		from[1] = ip4_mapped(from4);
	} else {
		other = what >> 8 != ICMP6_UNREACHABLE ||
			bpf_skb_load_bytes(
				skb,
				sizeof(struct eth_hdr) +
					offsetof(struct ip6_hdr, src),
				from, sizeof(from));
	}
	if (other)
		return REASON(STREAM_NOT_TCP);
	return from[0] == key->server[0] && from[1] == key->server[1] ?
		       WS_REASON_NONE :
		       REASON(STREAM_UNKNOWN);
}

/* The path back to the client of an error's connection, into *path. Returns a reason_t. */
static __always_inline reason_t stream_error_path(struct __sk_buff *skb,
						  struct ws_conn_key *key,
						  __be32 *path)
{
	reason_t r = ws_stream_error(skb, key);
	const struct ws_stream *t;
	struct ws_conn *c;
	bool is_new;

	if (r)
		return r;
	c = conn_find(key, &is_new);
	if (!c)
		return REASON(STREAM_UNKNOWN);
	*path = c->part;
	t = bpf_map_lookup_elem(&ws_streams, path);
	if (!t)
		return REASON(STREAM_UNKNOWN);
	*path = t->back;
	return WS_REASON_NONE;
}

/* The headend of the path that the packet's connection takes, into
 * skb->cb[0]. A function of its own, to bound the stack. Returns a reason_t.
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
	if (!segment_read(skb, &s)) {
		if (p->stream == WS_BYTES_GATEWAY)
			return REASON(STREAM_NOT_TCP);
		r = stream_error_path(skb, &s.key, &path);
		if (r)
			return r;
		goto found;
	}
	c = conn_find(&s.key, &is_new);
	if (!c) {
		/* A gateway's clients are not behind a path. */
		if (p->stream == WS_BYTES_GATEWAY)
			return REASON(STREAM_UNKNOWN);
		onward = false;
		conn_swap(&s.key);
		c = conn_find(&s.key, &is_new);
	}
	if (!c)
		return REASON(STREAM_UNKNOWN);
	/* User space admits each connection of a gateway once. Another SYN is a
	 * retransmission until the gateway has acknowledged the origin's SYN.
	 */
	if (p->stream == WS_BYTES_GATEWAY && segment_opens(&s) &&
	    c->seen & WS_CONN_ANSWERED)
		return REASON(STREAM_UNKNOWN);
	path = c->part;
	/* For other functions the client's own FIN counts. */
	conn_note(c, s.flags,
		  p->stream == WS_BYTES_GATEWAY ? WS_CONN_CLIENT_FIN : 0,
		  onward ? WS_CONN_ANSWERED : 0);
	if (onward && is_new) {
		r = conn_promote(&s.key, c, p);
		if (r)
			return r;
	} else if (onward && segment_opens(&s) && c->seen) {
		/* Ports are reused: the flags of the last connection no
		 * longer hold, since the function opens a new connection.
		 */
		c->seen = 0;
	}
	t = bpf_map_lookup_elem(&ws_streams, &path);
	/* The plan has removed the chain since then. */
	if (!t)
		return REASON(STREAM_UNKNOWN);
	path = onward ? t->onward : t->back;
found:
	index = bpf_map_lookup_elem(&ws_paths, &path);
	if (!index)
		return REASON(HEADEND_MISSING_BUG);
	skb->cb[0] = *index;
	proxy_count(p, tx_success);
	return WS_REASON_NONE;
}

/* The headend of the path that follows the one by which a verified packet came, which goes by
 * the function. skb->cb[0]: that path, and then the headend. Returns a reason_t.
 */
static __always_inline reason_t stream_by(struct __sk_buff *skb)
{
	__be32 path = skb->cb[0];
	const struct ws_stream *t = bpf_map_lookup_elem(&ws_streams, &path);
	const __u32 *index;

	if (!t)
		return REASON(STREAM_UNKNOWN);
	path = t->onward;
	index = bpf_map_lookup_elem(&ws_paths, &path);
	if (!index)
		return REASON(HEADEND_MISSING_BUG);
	skb->cb[0] = *index;
	return WS_REASON_NONE;
}

/* A held SYN that the function's TCP receives now: it goes back to the
 * interface where it came from, with its own type. The interface, into
 * skb->cb[0]. A function of its own, to bound the stack. Returns a reason_t.
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
	if (skb->cb[1] != STREAM_GOES_BY &&
	    skb->protocol == bpf_htons(WS_ETH_P_HELD)) {
		r = ws_stream_let_in(skb);
		return r ? ws_refuse(skb, r, 0) : bpf_redirect(skb->cb[0], 0);
	}
	r = skb->cb[1] == STREAM_GOES_BY ? stream_by(skb) : ws_stream_path(skb);
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
