/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Packets with labels from an interface inside the domain, and
 * packets that take a path over labels, handed over by the
 * program of any TC hook (lib/encap/labels_tc.h). Compiled
 * from the sources of that program, for another outer header.
 */
#define WS_MPLS
#include "lib/hook.h"
#include "lib/detour/cache.h"
#include "lib/detour/detour.h"
#include "lib/detour/out_tc.h"
#include "lib/encap/labels_tc.h"
#include "lib/node/boundary.h"
#include "lib/sr/endpoint_tc.h"
#include "lib/sr/headend_tc.h"

static __always_inline int arrive(struct __sk_buff *skb)
{
	struct cursor c;
	__be32 *top;
	long rc;

	if (!node_is_armed())
		return unarmed(skb, true);
	if (skb->gso_size)
		return ws_refuse(skb, REASON(LABEL_TRAIN), 0);
	rc = pull(skb, sizeof(struct eth_hdr) + sizeof(struct outer_head));
	if (rc)
		return ws_refuse(skb, REASON(PULL_FAILED), rc);
	c = ctx_cursor(skb);
	cursor_take(&c, struct eth_hdr);
	top = cursor_take(&c, __be32);
	if (top && label_is_others(*top))
		return label_count_ttl(top) ?
			       ws_forward(skb, EXIT_NONE, WAY_UNKNOWN) :
			       ws_refuse(skb, REASON(HOP_LIMIT), 0);
	return endpoint_tc(skb, skb->cb[0] != LABELS_AGAIN);
}

/* The packet's header has been checked, and is linear. */
static __always_inline int enter_labels(struct __sk_buff *skb)
{
	__u32 index = skb->cb[1];
	bool whole;
	struct cursor c;
	struct ip in;

	/* Constants in two branches: older verifiers would forget the version. */
	if (skb_is_ip4(skb))
		whole = forward_ip(skb, true, &c, &in);
	else
		whole = forward_ip(skb, false, &c, &in);
	if (!whole)
		return ws_refuse(skb, REASON(BOUNDS_BUG), 0);
	return headend_tc(skb, c, &in, ip_len(&in), index, false);
}

/* A packet comes back from a function, with the labels that were kept.
 * A function of its own, to bound the stack. back is never NULL.
 */
__noinline int ws_labels_restore(struct __sk_buff *skb, __u32 entry,
				 struct back *back)
{
	struct ws_cached *c = cache_entry(entry);
	const struct ws_proxy *p;
	__u64 now, expires;
	long err = 0;

	if (!c || !back)
		return 0;
	now = bpf_ktime_get_coarse_ns();
	expires = c->expires;
	p = proxy_find(c->proxy);
	back->found = true;
	back->bad = skb->gso_size ? REASON(LABEL_TRAIN) :
				    restore(skb, c, &back->exit, &err);
	back->err = err;
	cache_give(entry, TAG_FREE);
	if (!back->bad && p)
		proxy_waited(p, now, expires);
	return 0;
}

static __always_inline int back_labels(struct __sk_buff *skb)
{
	struct back back = {};

	ws_labels_restore(skb, skb->cb[1], &back);
	if (!back.found)
		return ws_refuse(skb, REASON(BOUNDS_BUG), 0);
	if (back.bad)
		return ws_refuse(skb, back.bad, back.err);
	return restored_next(skb, back.exit);
}

SEC("tc")
int ws_mpls_tc(struct __sk_buff *skb)
{
	switch (skb->cb[0]) {
	case LABELS_ENTER:
		return enter_labels(skb);
	case LABELS_BACK:
		return back_labels(skb);
	}
	return arrive(skb);
}

char _license[] SEC("license") = "Dual BSD/GPL";
