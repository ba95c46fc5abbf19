/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* H.Encaps (RFC 8986 5.1) with the first stamp, on TC. */
#pragma once

#include "lib/encap/labels_tc.h"
#include "lib/encap/outer_push_tc.h"
#include "lib/encap/outer.h"
#include "lib/encap/outer_way_tc.h"
#include "lib/hook.h"
#include "lib/node/maps.h"
#include "lib/node/refuse.h"
#include "lib/node/stats.h"
#include "lib/out/forward_tc.h"
#include "lib/out/icmp_tc.h"
#include "lib/out/route_tc.h"
#include "lib/proof/binding_tc.h"
#include "lib/proof/rnd.h"
#include "lib/reason.h"
#include "lib/skb/gso.h"
#include "lib/skb/segmenter.h"
#include "lib/sr/endpoint_tc.h"
#include "lib/sr/headend.h"
#include "lib/sr/mss_tc.h"
#include "lib/wire/ip.h"
#include "lib/wire/net.h"

/* Sends the ICMP error for a packet that a headend refused with reason r. */
static __always_inline int headend_refuse(struct __sk_buff *skb,
					  const struct ws_headend *h,
					  reason_t r, __u32 packet_len,
					  bool is_ip4)
{
	int verdict = ws_refuse(skb, r, 0);

	if (reason_of(r) == WS_REASON_EDGE_HOP_LIMIT)
		return icmp_time_exceeded(skb, is_ip4);
	if (reason_of(r) == WS_REASON_CHAIN_MTU)
		return icmp_too_big(skb, sizeof(struct eth_hdr), h->mtu, 0,
				    is_ip4);
	if (reason_of(r) == WS_REASON_PATH_MTU)
		return icmp_too_big(skb, sizeof(struct eth_hdr),
				    path_mtu_exceeded(h, packet_len, is_ip4), 0,
				    is_ip4);
	return verdict;
}

/* The route to the first segment, looked up before the outer header is added:
 * if the packet is too long for it, it is still unchanged. packet_len: of the
 * longest frame. Returns the result of route_find, or WAY_KNOWN.
 */
static __always_inline long headend_way(struct __sk_buff *skb,
					const struct ws_headend *h,
					const struct headend_packet *pkt,
					__u32 packet_len,
					struct bpf_fib_lookup *p)
{
	if (ws_exit_is_known(h->stats, headend_to(h),
			     outer_marks_flow(pkt->marks),
			     packet_len + pkt->outer_len))
		return WAY_KNOWN;
	return outer_route_ask(skb, outer_head_of(h->outer), pkt->marks,
			       packet_len + pkt->outer_len, p);
}

/* A packet that would leave, for a SID of this node: it comes in again on
 * the interface by which it would have left, from that interface's address.
 */
static __always_inline int headend_in(struct __sk_buff *skb)
{
	struct cursor c = ctx_cursor(skb);
	struct eth_hdr *eth = cursor_take(&c, struct eth_hdr);
	__u32 mtu = 0;

	/* It has come out of the segmenter, and so is in already. */
	if (!OUTER_IS_IP && port_is_segmenter(skb))
		return labels_program(skb, LABELS_AGAIN, 0);
	/* The kernel would drop it without an error. */
	if (!skb->gso_size && bpf_check_mtu(skb, 0, &mtu, 0, 0))
		return OUTER_IS_IP ? ws_too_big(skb, mtu) :
				     ws_refuse(skb, REASON(TOO_BIG), mtu);
	if (!eth)
		return ws_refuse(skb, REASON(BOUNDS_BUG), 0);
	__builtin_memcpy(eth->dst, eth->src, sizeof(eth->dst));
	return bpf_redirect(skb->ifindex, BPF_F_INGRESS);
}

/* c: behind the packet's header; len: of the packet, in bytes;
 * leaves: it is at TC egress; a constant at compile time.
 */
static __always_inline int headend_tc(struct __sk_buff *skb, struct cursor c,
				      struct ip *in, __u32 len, __u32 index,
				      bool leaves)
{
	const struct ws_headend *h = headend_find(index);
	struct headend_packet pkt;
	struct scratch *s = scratch();
	__u32 frames, packet_len;
	struct cursor inner;
	reason_t r;
	long rc, found = 0;

	if (!h || !s)
		return ws_refuse(skb, REASON(HEADEND_MISSING_BUG), 0);
	if (!form_is_outer(h->form))
		return OUTER_IS_IP ?
			       labels_program(skb,
					      leaves ? LABELS_LEAVE :
						       LABELS_ENTER,
					      index) :
			       ws_refuse(skb, REASON(HEADEND_MISSING_BUG), 0);
	pkt.binding = 0;
	pkt.routed = leaves;
	if (h->scheme == WS_SCHEME_KEYED_FLOW) {
		if (!binding_pull_plain(skb, &h->share, &pkt.binding))
			return ws_refuse(skb, REASON(FLOW), 0);
		if (!forward_ip(skb, in->is_ip4, &c, in))
			return ws_refuse(skb, REASON(FLOW), 0);
	}
	inner = c;
	inner.pos = in->hdr;
	frames = gso_frames(skb, inner, sizeof(struct eth_hdr));
	packet_len = gso_packet_len(skb, inner, len);
	pkt.marks = outer_marks_of(c, in);
	r = headend_check(h, in, len, packet_len, &pkt);
	if (r)
		return headend_refuse(skb, h, r, packet_len, in->is_ip4);
	if (!headend_first_is_local(h)) {
		found = headend_way(skb, h, &pkt, packet_len, &s->way);
		if (found == BPF_FIB_LKUP_RET_FRAG_NEEDED) {
			ws_refuse(skb, REASON(TOO_BIG), s->way.mtu_result);
			return icmp_too_big(skb, sizeof(struct eth_hdr),
					    s->way.mtu_result, pkt.outer_len,
					    in->is_ip4);
		}
		if (found != WAY_KNOWN && !route_is_way(found)) {
			ws_refuse(skb, REASON(NO_ROUTE), found);
			return icmp_no_tunnel(skb, sizeof(struct eth_hdr),
					      found, in->is_ip4);
		}
	}
	/* The kernel segments no packet with labels. */
	if (!OUTER_IS_IP && skb->gso_size && (leaves || !port_is_edge(skb))) {
		if (!leaves) /* its frames go on as those that leave */
			ip_decrement(in);
		/* Read again: the stack has no room to keep index. */
		return segment_leave(skb, skb->cb[1]);
	}
	if (!OUTER_IS_IP && skb->gso_size)
		return segment_enter(skb);
	r = rnd_take(h, frames, &pkt.rnd);
	if (r)
		return ws_refuse(skb, r, 0);

	if (!leaves)
		ip_decrement(in);
	/* Removes Ethernet's padding; if that fails, the
	 * padding ends up behind the outer packet.
	 */
	if (len < skb->len - sizeof(struct eth_hdr))
		bpf_skb_change_tail(skb, sizeof(struct eth_hdr) + len, 0);
	if (h->mss) {
		rc = ws_mss_clamp(skb, h->mss, pkt.is_ip4);
		if (rc)
			return ws_refuse(skb, REASON(WRITE_FAILED), rc);
	}
	rc = push(skb, pkt.outer_len, pkt.is_ip4);
	if (rc)
		return ws_refuse(skb, REASON(PUSH_FAILED), rc);
	rc = bpf_skb_store_bytes(skb, sizeof(struct eth_hdr), h->outer,
				 pkt.outer_len, 0);
	if (rc || !headend_finish(skb, h, &pkt))
		return ws_refuse(skb, REASON(WRITE_FAILED), rc);
	stats_add(h->stats, frames, pkt.inner_len);
	if (headend_first_is_local(h)) {
		if (leaves)
			return headend_in(skb);
		return OUTER_IS_IP ? endpoint_tc(skb, false) :
				     labels_program(skb, LABELS_AGAIN, 0);
	}
	return ws_forward(skb, h->stats, found);
}
