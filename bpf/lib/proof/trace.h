/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Traced packets: a headend sets the O-flag (RFC 9259 2.1) in some packets of a
 * path (lib/sr/headend_trace.h), and each position that stamps or verifies such a packet sends an event.
 * The flag changes nothing else: no proof covers it.
 */
#pragma once

#include <waystamp/abi.h>
#include "lib/hook.h"
#include "lib/node/maps.h"
#include "lib/proof/stamp.h"
#include "lib/wire/net.h"

#define TRACE_SECOND_NS 1000000000ULL

/* A function of its own, so that its prototype carries struct ws_traced
 * into the object's BTF, from which user space's type is generated.
 */
static __noinline void traced_fill(struct ws_traced *e, ctx_t *ctx)
{
	e->ifindex = ctx_ifindex(ctx);
	e->len = ctx_len(ctx);
	e->hook = WS_HOOK;
}

/* In the argument at of ws_traced_send: the position in the path, or for
 * an egress that has verified the packet its position with this bit.
 */
#define TRACED_VERIFIED 0x100

/* Sends the event of a traced packet. Whoever can send packets inside of the domain can
 * set the flag, so events are limited by CPU and second. number: of the packet, unmasked;
 * before: its CML as it came. tlv is never NULL; the verifier requires the test.
 */
__noinline int ws_traced_send(ctx_t *ctx, const struct proof_tlv *tlv,
			      __u64 number, __u64 before, __u32 at)
{
	__u32 zero = 0;
	struct ws_tracing *limit = bpf_map_lookup_elem(&ws_tracing, &zero);
	__u64 now = bpf_ktime_get_ns();
	struct ws_traced *e;

	if (!tlv || !limit)
		return 0;
	if (now - limit->window_ns >= TRACE_SECOND_NS) {
		limit->window_ns = now;
		limit->sent = 0;
	}
	if (limit->sent >= WS_TRACED_PER_SECOND) {
		limit->suppressed++;
		return 0;
	}
	e = bpf_ringbuf_reserve(&ws_traced, sizeof(*e), 0);
	if (!e) {
		limit->suppressed++;
		return 0;
	}
	limit->sent++;
	e->time_ns = now;
	e->number = number;
	e->before = before;
	e->after = at & TRACED_VERIFIED ? 0 : tlv->cml;
	e->path = tlv->path;
	e->suppressed = limit->suppressed;
	e->epoch = tlv->epoch;
	e->scheme = tlv->scheme;
	e->position = at;
	e->verified = at & TRACED_VERIFIED ? 1 : 0;
	e->pad[0] = e->pad[1] = e->pad[2] = 0;
	limit->suppressed = 0;
	traced_fill(e, ctx);
	bpf_ringbuf_submit(e, 0);
	return 0;
}

/* Stamps at a position behind the headend. */
static __always_inline void stamp_traced(ctx_t *ctx, struct proof_tlv *tlv,
					 const struct ws_hop *hop,
					 __u64 binding, bool traced)
{
	__u64 before = tlv->cml;

	stamp(tlv, &hop->share, hop->scheme, hop->position, binding);
	if (traced)
		ws_traced_send(ctx, tlv,
			       bpf_be64_to_cpu(tlv->rnd) ^ hop->share.down_rnd,
			       before, hop->position);
}
