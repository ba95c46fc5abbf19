/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Which frames TC looks at. Whatever it leaves alone the kernel does not forward
 * from this interface.
 */
#pragma once

#include "lib/hook.h"
#include "lib/node/maps.h"
#include "lib/node/refuse.h"
#include "lib/reason.h"
#include "lib/wire/net.h"

#define PACKET_HOST 0 /* the kernel's: the frame has our MAC address */
#define VLAN_VID_MASK 0x0fff

/* Of a VLAN; priority tags (IEEE 802.1Q 9.6) are none. */
static __always_inline bool frame_is_tagged(const struct __sk_buff *skb)
{
	return skb->vlan_present && skb->vlan_tci & VLAN_VID_MASK;
}

/* The entry in ws_port.vlans of the tag beside the frame; 0: there is no such tag,
 * or its VLAN has no interface in the plan.
 */
static __always_inline __u32 vlan_planned(const struct __sk_buff *skb)
{
	__u32 ifindex = skb->ifindex, id = skb->vlan_tci & VLAN_VID_MASK;
	const struct ws_port *port;

	if (!frame_is_tagged(skb))
		return 0;
	port = bpf_map_lookup_elem(&ws_ports, &ifindex);
	if (!port)
		return 0;
	if (skb->vlan_proto == bpf_htons(ETH_P_8021AD))
		id |= WS_VLAN_AD;
	for (__u32 i = 0; i < WS_PORT_VLANS; i++) {
		if ((port->vlans[i] & ~WS_VLAN_STACKED) == id)
			return port->vlans[i];
	}
	return 0;
}

/* The kernel or the device moves the first tag into skb->vlan_tci. This is about
 * tags that are still in the frame.
 */
static __always_inline bool eth_has_tag(const struct eth_hdr *eth)
{
	return eth->proto == bpf_htons(ETH_P_8021Q) ||
	       eth->proto == bpf_htons(ETH_P_8021AD) ||
	       eth->proto == bpf_htons(ETH_P_QINQ1) ||
	       eth->proto == bpf_htons(ETH_P_QINQ2) ||
	       eth->proto == bpf_htons(ETH_P_QINQ3);
}

/* False: *verdict is the answer. */
static __always_inline bool frame_is_ours(struct __sk_buff *skb, int *verdict)
{
	long rc;

	*verdict = CTX_PASS;
	if (skb->pkt_type != PACKET_HOST)
		return false;
	if (!skb->vlan_present)
		return true;
	/* A VLAN's frames are its own interface's matter. Those of VLAN 0 have
	 * a priority only (IEEE 802.1Q 9.6): the kernel takes them as untagged,
	 * and so must a guard.
	 */
	if (frame_is_tagged(skb))
		return false;
	rc = bpf_skb_vlan_pop(skb);
	/* The kernel would take off any number of such tags, and we would not
	 * see what is below; nobody needs a second one.
	 */
	if (rc || skb->vlan_present) {
		*verdict = ws_refuse(skb, REASON(VLAN_TAGS), rc);
		return false;
	}
	return true;
}
