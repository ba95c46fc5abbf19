/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Packets from clients to a gateway, which edge_tc.bpf.c hands over, and packets from the
 * gateway, which function_tc.bpf.c hands over. A gateway's packets to clients leave as they are;
 * its packets to origins go on to stream_tc.bpf.c. A program of its own, to bound the stack.
 */
#include "lib/hook.h"
#include "lib/detour/detour.h"
#include "lib/node/maps.h"
#include "lib/out/forward_tc.h"
#include "lib/stream/conn_tc.h"
#include "lib/stream/service_tc.h"

/* A client's packet to a gateway: a SYN creates a connection, and a packet without a
 * connection is refused. A function of its own, to bound the stack. Returns the verdict.
 */
__noinline int ws_client_in(struct __sk_buff *skb)
{
	__u32 id = ws_service_of(skb, skb_is_ip4(skb));
	const struct ws_proxy *p = proxy_find(id);
	struct ws_conn fresh = {};
	struct segment s = {};
	struct ws_conn *c;
	bool is_new;

	if (!p)
		return ws_refuse(skb, REASON(PROXY_MISSING_BUG), 0);
	if (p->gone)
		return ws_refuse(skb, REASON(STREAM_DOWN), 0);
	if (!segment_read(skb, &s))
		return ws_refuse(skb, REASON(STREAM_NOT_TCP), 0);
	s.key.proxy = id | WS_CONN_ACCEPTED;
	c = conn_find(&s.key, &is_new);
	if (!c) {
		if (!segment_opens(&s))
			return ws_refuse(skb, REASON(STREAM_UNKNOWN), 0);
		fresh.used = bpf_ktime_get_coarse_ns();
		bpf_map_update_elem(&ws_conns_new, &s.key, &fresh, BPF_NOEXIST);
		c = bpf_map_lookup_elem(&ws_conns_new, &s.key);
		if (!c)
			return ws_refuse(skb, REASON(STREAMS_FULL), 0);
	} else if (c->seen & WS_CONN_RST && !(s.flags & (TCP_SYN | TCP_RST))) {
		/* The client goes on, so the RST before was invalid: TCP ignores
		 * one with a wrong sequence number (RFC 5961 3.2). If it was
		 * valid, the gateway answers this packet with another RST.
		 */
		c->seen &= ~WS_CONN_RST;
	}
	conn_note(c, s.flags, WS_CONN_CLIENT_FIN, 0);
	proxy_received(p, 1);
	return bpf_redirect_peer(p->to, 0);
}

/* In skb->cb[0], for packets from a gateway. */
#define TO_CLIENT 0
#define TO_ORIGIN 1

/* Where a packet from the gateway goes, into skb->cb[0]. A gateway opens no connection to a
 * client. A client with a forged address cannot keep an entry in ws_conns: an entry moves
 * there with the gateway's first payload, and the gateway sends payload only after TCP's
 * handshake is complete. A function of its own, to bound the stack. Returns a reason_t.
 */
__noinline int ws_gateway_to(struct __sk_buff *skb)
{
	__u32 ifindex = skb->ifindex;
	const struct ws_port *port = bpf_map_lookup_elem(&ws_ports, &ifindex);
	const struct ws_proxy *p = port ? proxy_find(port->proxy) : NULL;
	struct segment s = {};
	bool is_new, says;
	struct ws_conn *c;

	if (!p)
		return REASON(PROXY_MISSING_BUG);
	if (!segment_read(skb, &s))
		return REASON(STREAM_NOT_TCP);
	s.key.proxy = port->proxy;
	skb->cb[0] = TO_ORIGIN;
	if (bpf_map_lookup_elem(&ws_conns, &s.key))
		return WS_REASON_NONE;
	skb->cb[0] = TO_CLIENT;
	conn_swap(&s.key);
	s.key.proxy |= WS_CONN_ACCEPTED;
	c = conn_find(&s.key, &is_new);
	if (!c || segment_opens(&s))
		return REASON(STREAM_UNKNOWN);
	/* Ports are reused: the gateway's SYN/ACK begins a new connection. No SYN, from any
	 * sender, makes the gateway's TCP send one while it still has the last connection.
	 */
	if (s.flags & TCP_SYN && c->seen)
		c->seen = 0;
	says = s.has_payload && !(s.flags & (TCP_SYN | TCP_RST));
	conn_note(c, s.flags, WS_CONN_SERVER_FIN, says ? WS_CONN_ANSWERED : 0);
	proxy_count(p, tx_success);
	return is_new && says ? conn_promote(&s.key, c, p) : WS_REASON_NONE;
}

SEC("tc")
int ws_gateway_tc(struct __sk_buff *skb)
{
	__u32 ifindex = skb->ifindex;
	const struct ws_port *port = bpf_map_lookup_elem(&ws_ports, &ifindex);
	reason_t r;

	skb->tc_index = 0;
	skb->mark = 0;
	if (port && port->edge)
		return ws_client_in(skb);
	r = ws_gateway_to(skb);
	if (r)
		return ws_refuse(skb, r, 0);
	if (skb->cb[0] == TO_ORIGIN) {
		skb->cb[1] = 0; /* it is the gateway's */
		bpf_tail_call(skb, &ws_programs, WS_PROGRAM_STREAM);
		return ws_refuse(skb, REASON(PROXY_MISSING_BUG), 0);
	}
	/* The connection was admitted already: the guard need not check its packets. */
	skb->tc_index = WS_INDEX_PROVEN;
	return ws_deliver(skb, EXIT_NONE, skb_is_ip4(skb));
}

char _license[] SEC("license") = "Dual BSD/GPL";
