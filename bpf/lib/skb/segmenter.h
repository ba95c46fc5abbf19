/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Segmenters: veth pairs of the agent that segment super-packets which a
 * function cannot take, has merged, or which take a path over labels. TC only.
 */
#pragma once

#include "lib/hook.h"
#include "lib/node/maps.h"
#include "lib/node/refuse.h"
#include "lib/reason.h"
#include "lib/wire/net.h"

/* Sends a super-packet into a segmenter. It comes back as frames, on an
 * interface with the MAC address dmac, otherwise unchanged. Returns the verdict.
 */
static __always_inline int segment(struct __sk_buff *skb, struct eth_hdr *eth,
				   __u32 ifindex, const __u8 *dmac)
{
	if (!ifindex)
		return ws_refuse(skb, REASON(CANNOT_CUT), 0);
	__builtin_memcpy(eth->dst, dmac, sizeof(eth->dst));
	return bpf_redirect(ifindex, 0);
}

static __always_inline const struct ws_node *node_find(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&ws_node, &zero);
}

/* The frames come back on an ingress with the core program. */
static __always_inline int segment_in(struct __sk_buff *skb,
				      struct eth_hdr *eth)
{
	const struct ws_node *n = node_find();

	if (!n)
		return ws_refuse(skb, REASON(BOUNDS_BUG), 0);
	return segment(skb, eth, n->cut_ifindex, n->cut_dmac);
}

/* The frames come back on an ingress with the function program; tc_index is the proxy. */
static __always_inline int segment_back(struct __sk_buff *skb,
					struct eth_hdr *eth, __u32 proxy)
{
	const struct ws_node *n = node_find();

	if (!n)
		return ws_refuse(skb, REASON(BOUNDS_BUG), 0);
	skb->tc_index = proxy;
	return segment(skb, eth, n->cut_back_ifindex, n->cut_back_dmac);
}

/* Has the packet come out of a segmenter before edges? */
static __always_inline bool port_is_segmenter(const struct __sk_buff *skb)
{
	__u32 ifindex = skb->ifindex;
	const struct ws_port *port = bpf_map_lookup_elem(&ws_ports, &ifindex);

	return port && port->cutter;
}

/* Did the packet come in from outside? Else a function sent it. */
static __always_inline bool port_is_edge(const struct __sk_buff *skb)
{
	__u32 ifindex = skb->ifindex;
	const struct ws_port *port = bpf_map_lookup_elem(&ws_ports, &ifindex);

	return port && port->edge;
}

/* To an ingress with the edge program. What comes from there already is refused: its
 * frames would go round. can: else it is refused, as where there is no segmenter.
 */
static __always_inline int segment_once(struct __sk_buff *skb, bool can)
{
	const struct ws_node *n = node_find();
	struct cursor c = ctx_cursor(skb);
	struct eth_hdr *eth = cursor_take(&c, struct eth_hdr);

	if (!n || !eth)
		return ws_refuse(skb, REASON(BOUNDS_BUG), 0);
	if (port_is_segmenter(skb))
		return ws_refuse(skb, REASON(LABEL_TRAIN), 0);
	return segment(skb, eth, can ? n->cut_enter_ifindex : 0,
		       n->cut_enter_dmac);
}

/* The same, where the frames are classified as those from outside are. */
static __always_inline int segment_enter(struct __sk_buff *skb)
{
	skb->tc_index = 0;
	return segment_once(skb, true);
}

/* The same, where the index of a headend goes along with the frames: they take it as they
 * leave. What tc_index cannot say is not cut.
 */
static __always_inline int segment_leave(struct __sk_buff *skb, __u32 headend)
{
	skb->tc_index = headend + 1;
	return segment_once(skb, headend < 0xffff);
}
