/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The packets in which a headend sets the O-flag: the next ones
 * of its path, or of a flow on it. Both hooks.
 */
#pragma once

#include <waystamp/abi.h>
#include "lib/hook.h"
#include "lib/node/maps.h"
#include "lib/wire/cursor.h"
#include "lib/wire/tuple.h"

static __always_inline bool
trace_prefix_has(const __be64 *is, const __be64 *mask, const __be64 *addr)
{
	return !((addr[0] ^ is[0]) & mask[0]) && !((addr[1] ^ is[1]) & mask[1]);
}

/* Is a packet of the trace's flow? Fields that cannot be read are 0 in the
 * tuple, as the ports of a fragment are: a flow that names them has others.
 */
static __always_inline bool trace_fits(const struct ws_trace *t,
				       const struct tuple *p)
{
	return trace_prefix_has(t->src, t->src_mask, p->src) &&
	       trace_prefix_has(t->dst, t->dst_mask, p->dst) &&
	       (!t->protocol || t->protocol == p->protocol) &&
	       (!t->sport || t->sport == p->sport) &&
	       (!t->dport || t->dport == p->dport);
}

/* Counts a packet of the trace with this number, from 1, if it is of its flow. off: of the
 * inner IP header, from the start of the frame. False: it is not, or the trace has had its
 * packets. May move the packet. A global function: older verifiers look at it once.
 */
__noinline int ws_trace_takes(ctx_t *ctx, __u32 trace, __u32 off, int is_ip4)
{
	__u32 index = trace - 1;
	struct ws_trace *t = bpf_map_lookup_elem(&ws_traces, &index);
	struct scratch *s = scratch();
	struct cursor c;

	/* The last test keeps it from falling for ever. */
	if (!t || !s || t->left <= 0)
		return false;
	if (t->flow) {
		off &= 1023;
		ctx_pull(ctx, off + TUPLE_LEN);
		c = ctx_cursor(ctx);
		c.pos += off;
		if (is_ip4 & 1)
			tuple_read(c, true, &s->tuple);
		else
			tuple_read(c, false, &s->tuple);
		if (!trace_fits(t, &s->tuple))
			return false;
	}
	/* Other CPUs count too. */
	return __sync_fetch_and_add(&t->left, -1) > 0;
}

/* Is the packet one that a trace asks for? Its outer header, of
 * outer_len bytes, has been written. May move the packet.
 */
static __always_inline bool trace_takes(ctx_t *ctx, const struct ws_headend *h,
					__u32 outer_len, bool is_ip4)
{
	__u32 trace = h->trace;

	return trace &&
	       ws_trace_takes(ctx, trace, sizeof(struct eth_hdr) + outer_len,
			      is_ip4);
}
