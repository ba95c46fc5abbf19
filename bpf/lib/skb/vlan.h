/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The frames that TC processes. The kernel forwards no
 * other frame from this interface.
 */
#pragma once

#include "lib/hook.h"
#include "lib/node/maps.h"
#include "lib/node/refuse.h"
#include "lib/reason.h"
#include "lib/wire/net.h"

#define PACKET_HOST 0 /* of the kernel: the frame has our MAC address */
#define VLAN_VID_MASK 0x0fff

/* Does the frame belong to a VLAN? A priority tag (IEEE 802.1Q 9.6) is no VLAN. */
static __always_inline bool frame_is_tagged(const struct __sk_buff *skb)
{
	return skb->vlan_present && skb->vlan_tci & VLAN_VID_MASK;
}

/* The entry in ws_port.vlans of the tag in skb->vlan_tci; 0:
 * there is no tag, or its VLAN has no interface in the plan.
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

/* Is a tag still in the frame? The kernel or the device
 * moves the first tag into skb->vlan_tci.
 */
static __always_inline bool eth_has_tag(const struct eth_hdr *eth)
{
	return eth->proto == bpf_htons(ETH_P_8021Q) ||
	       eth->proto == bpf_htons(ETH_P_8021AD) ||
	       eth->proto == bpf_htons(ETH_P_QINQ1) ||
	       eth->proto == bpf_htons(ETH_P_QINQ2) ||
	       eth->proto == bpf_htons(ETH_P_QINQ3);
}

/* Is the frame for this interface's program? False: *verdict is the result. */
static __always_inline bool frame_is_ours(struct __sk_buff *skb, int *verdict)
{
	long rc;

	*verdict = CTX_PASS;
	if (skb->pkt_type != PACKET_HOST)
		return false;
	if (!skb->vlan_present)
		return true;
	/* Frames of a VLAN are processed at the VLAN's own interface.
	 * Frames of VLAN 0 have only a priority (IEEE 802.1Q 9.6):
	 * the kernel treats them as untagged, and so must a guard.
	 */
	if (frame_is_tagged(skb))
		return false;
	rc = bpf_skb_vlan_pop(skb);
	/* The kernel would remove any number of such tags, and the program
	 * could not read the packet below them; no sender needs a second one.
	 */
	if (rc || skb->vlan_present) {
		*verdict = ws_refuse(skb, REASON(VLAN_TAGS), rc);
		return false;
	}
	return true;
}
