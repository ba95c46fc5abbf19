/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* A headend's outer header: a map has all of it except the
 * fields that differ by packet. Both hooks.
 */
#pragma once

#include "lib/encap/srv6.h"
#include "lib/wire/cursor.h"
#include "lib/wire/net.h"

/* At a headend: fills in the fields that are zero in the prebuilt header,
 * which has been written at c, the frame's start, before a packet of
 * inner_len bytes. traced: sets the O-flag (RFC 9259 2.1). Returns the
 * proof, which is not stamped; NULL: a bug.
 */
static __always_inline struct proof_tlv *
outer_finish(struct cursor c, __u32 outer_len, __u32 inner_len, bool is_ip4,
	     struct outer_marks marks, bool traced)
{
	struct outer_written w;

	if (!outer_find_written(c, outer_len - sizeof(struct proof_tlv), &w))
		return NULL;
	if (is_ip4) {
		w.eth->proto = bpf_htons(ETH_P_IPV6);
		w.srh->nexthdr = NEXTHDR_IPV4;
	}
	if (traced)
		w.srh->flags = SRH_FLAG_OAM;
	w.ip6->vtc_flow = marks.vtc_flow;
	w.ip6->payload_len = bpf_htons(outer_len - sizeof(*w.ip6) + inner_len);
	return w.tlv;
}
