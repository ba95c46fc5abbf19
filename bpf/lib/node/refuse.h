/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The only place that refuses packets: it counts them by reason,
 * and samples them to user space with their headers at this moment.
 */
#pragma once

#include "lib/hook.h"
#include "lib/reason.h"
#include "lib/node/maps.h"

#define SECOND_NS 1000000000ULL

/* The verdict on a packet that ws_refuse has refused
 * already, for code that then tries to send an ICMP error.
 */
#define CTX_REFUSED CTX_DROP

/* A function of its own, so that its prototype carries struct ws_event
 * into the object's BTF, from which user space's type is generated.
 */
static __noinline void event_fill(struct ws_event *e, ctx_t *ctx)
{
	__u32 len = ctx_len(ctx);

	e->ifindex = ctx_ifindex(ctx);
	e->len = len;
	e->hook = WS_HOOK;
	if (len > WS_EVENT_DATA)
		len = WS_EVENT_DATA;
	/* An Ethernet frame has 14 bytes; the test also shows the verifier that
	 * len is not 0.
	 */
	if (len < 14 || ctx_load_bytes(ctx, 0, e->data, len))
		len = 0;
	e->caplen = len;
}

static __always_inline void event_send(ctx_t *ctx, struct ws_refusal *r,
				       reason_t why, __s32 err, bool reported)
{
	__u64 now = bpf_ktime_get_ns();
	struct ws_event *e;

	if (now - r->window_ns >= SECOND_NS) {
		r->window_ns = now;
		r->sent = 0;
	}
	if (r->sent >= WS_EVENTS_PER_SECOND) {
		r->suppressed++;
		return;
	}
	e = bpf_ringbuf_reserve(&ws_events, sizeof(*e), 0);
	if (!e) {
		r->suppressed++;
		return;
	}
	r->sent++;
	e->time_ns = now;
	e->suppressed = r->suppressed;
	e->err = err;
	e->reason = reason_of(why);
	e->file = reason_file(why);
	e->line = reason_line(why);
	e->reported = reported;
	r->suppressed = 0;
	event_fill(e, ctx);
	bpf_ringbuf_submit(e, 0);
}

/* Counts a packet, and samples it. Returns the verdict that drops. err: of a helper, or 0. */
__noinline int ws_refuse(ctx_t *ctx, reason_t why, int err)
{
	__u32 reason = reason_of(why);
	struct ws_refusal *r = bpf_map_lookup_elem(&ws_refusals, &reason);

	if (r) {
		r->dropped++;
		event_send(ctx, r, why, err, false);
	}
	return CTX_DROP;
}

/* Counts a packet that the plan lets pass. */
__noinline int ws_report(ctx_t *ctx, reason_t why)
{
	__u32 reason = reason_of(why);
	struct ws_refusal *r = bpf_map_lookup_elem(&ws_refusals, &reason);

	if (r) {
		r->reported++;
		event_send(ctx, r, why, 0, true);
	}
	return 0;
}
