/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The walk over an IPv6 packet's extension headers, anywhere in the
 * frame. wire/tuple.h reads a packet's flow instead, in linear data.
 */
#pragma once

#include "lib/hook.h"
#include "lib/wire/net.h"

/* Routing Type of an SRH (RFC 8754 2). */
#define ROUTING_TYPE_SRH 4

/* Before a walk: offset and type of the first header. After it: those
 * of the header at which it ended, and which headers it has passed.
 */
struct ip6_walk {
	__u32 off; /* from the start of the frame */
	__u8 next; /* Next Header value */
	__u8 passed; /* headers */
	bool srh; /* it has passed an SRH */
	/* The last header was the Fragment header of a fragment that is not the
	 * first: the bytes at off are payload, although next names a header.
	 */
	bool later;
	bool cut; /* the header at off should be skipped, but the packet ends before its end */
};

/* Skips headers of the kinds in over, at most so many; both are
 * constants. end: from the start of the frame; no byte behind it is read.
 * Lengths are not checked: off may end up behind the end of the packet.
 */
static __always_inline void ip6_walk(ctx_t *ctx, struct ip6_walk *w,
				     const __u32 over, const __u32 most,
				     __u32 end)
{
	__u8 head
		[4]; /* Next Header, Hdr Ext Len; Routing Type, or Fragment Offset */

	for (__u32 i = 0; i < most; i++) {
		__u32 kind = nexthdr_kind(w->next);

		if (!(kind & over))
			return;
		if (w->off + sizeof(head) > end ||
		    ctx_load_bytes(ctx, w->off, head, sizeof(head))) {
			w->cut = true;
			return;
		}
		w->passed++;
		w->next = head[0];
		if (kind == EXT_ROUTING && head[2] == ROUTING_TYPE_SRH)
			w->srh = true;
		/* RFC 4302 2.2: AH counts in units of 4 and not the first two.
		 * RFC 8200 4.5: the Fragment header has 8 bytes.
		 */
		if (kind == EXT_AUTH)
			w->off += (head[1] + 2) * 4;
		else if (kind == EXT_FRAGMENT)
			w->off += 8;
		else
			w->off += (head[1] + 1) * 8;
		if (kind == EXT_FRAGMENT && (head[2] || head[3] & 0xf8)) {
			w->later = true;
			return;
		}
	}
}

/* The end of a walk that ends with the frame. */
#define IP6_WALK_FRAME (~0U)
