/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Packets with labels from an interface inside the domain, and
 * packets that take a path over labels, handed over by the
 * program of any TC hook (lib/encap/labels_tc.h). Compiled
 * from the sources of that program, for another outer header.
 */
#define WS_MPLS
#include "lib/hook.h"
#include "lib/detour/back_labels_tc.h"
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

/* A packet comes back from a function. */
static __always_inline int back_labels(struct __sk_buff *skb)
{
	struct back back = {};
	__u32 proxy;
	reason_t r = labels_restore(skb, &back, &proxy);

	if (r)
		return ws_refuse(skb, r, back.err);
	return restored_next(skb, back.exit);
}

SEC("tc")
int ws_mpls_tc(struct __sk_buff *skb)
{
	switch (skb->cb[0]) {
	case LABELS_ENTER:
		return enter_labels(skb);
	case LABELS_BACK:
	case LABELS_BACK_SLOT:
		return back_labels(skb);
	}
	return arrive(skb);
}

char _license[] SEC("license") = "Dual BSD/GPL";
