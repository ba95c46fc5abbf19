/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* A headend's stack of labels: a map has all of it except
 * the fields that differ by packet. Both hooks.
 */
#pragma once

#include "lib/encap/mpls.h"
#include "lib/wire/cursor.h"
#include "lib/wire/net.h"

/* At a headend: fills in the fields that are zero in the prebuilt header, which has
 * been written at c, the frame's start. The class is in every entry that may be on
 * top at a core router. Returns the proof, which is not stamped; NULL: a bug.
 */
static __always_inline struct proof_tlv *
outer_finish(struct cursor c, __u32 outer_len, __u32 inner_len, bool is_ip4,
	     struct outer_marks marks, bool traced)
{
	__be32 class = bpf_htonl(marks.class << ENTRY_CLASS_SHIFT);
	struct eth_hdr *eth = cursor_take(&c, struct eth_hdr);
	__u32 off = outer_len - sizeof(struct proof_tlv) - sizeof(struct word);
	struct proof_tlv *tlv;
	struct word *word;
	__be32 *entry = c.pos;

	(void)inner_len;
	if (!eth || (void *)(entry + SERVICE_AT + 1) > c.end)
		return NULL;
	barrier_var(off);
	word = c.pos + (off & 255);
	tlv = (void *)(word + 1);
	if ((void *)(tlv + 1) > c.end)
		return NULL;
	eth->proto = bpf_htons(ETH_P_MPLS_UC);
	entry[0] |= class;
	entry[1] |= class;
	entry[2] |= class | bpf_htonl(marks.entropy << ENTRY_LABEL_SHIFT);
	entry[SERVICE_AT] |= class;
	if (is_ip4)
		word->nexthdr = NEXTHDR_IPV4;
	if (traced)
		word->flags = WORD_FLAG_TRACE;
	return tlv;
}
