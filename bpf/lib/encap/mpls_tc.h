/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Parses from the label stack of a packet for a SID to its proof, on TC. */
#pragma once

#include "lib/encap/ext_tc.h"
#include "lib/encap/mpls.h"
#include "lib/hook.h"
#include "lib/match/rules_tc.h"
#include "lib/node/maps.h"
#include "lib/reason.h"
#include "lib/wire/cursor.h"
#include "lib/wire/net.h"

/* The most bytes before an inner packet. */
#define LABELS_LEN                                                             \
	(sizeof(struct eth_hdr) + 4 * LABELS_MAX + sizeof(struct word) +       \
	 sizeof(struct proof_tlv))

/* Makes all headers linear that are read, up to the inner one. */
static __always_inline long outer_pull(struct __sk_buff *skb,
				       struct ext_found *found)
{
	(void)found;
	return rules_pull(skb, LABELS_LEN, LABELS_LEN + sizeof(struct ip6_hdr));
}

/* Parses from the stack, at c, to the proof. */
static __always_inline reason_t outer_parse(struct __sk_buff *skb,
					    struct cursor c, struct outer *o,
					    struct proof_tlv **proof,
					    const struct ext_found *found)
{
	(void)found;
	return labels_parse(skb, c, o, proof,
			    skb->len - sizeof(struct eth_hdr));
}

/* Is this the label of another node of the domain? */
static __always_inline bool label_is_others(__be32 top)
{
	__u32 label = entry_label(top);

	return label != cfg.label && bpf_map_lookup_elem(&ws_labels, &label);
}

/* Decrements the TTL. False: the TTL is used up. */
static __always_inline bool label_count_ttl(__be32 *top)
{
	if (entry_ttl(*top) <= 1)
		return false;
	*top -= bpf_htonl(1);
	return true;
}
