/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Packets that take a path over labels as they leave: the node's own, and those that
 * somebody on it has marked. core_out_tc.bpf.c hands them over; a super-packet comes once
 * more, in frames out of the segmenter, from edge_tc.bpf.c. And packets from functions in
 * the node's own kernel whose kept header is one of labels, from the programs of both
 * egresses. The sources of those programs, compiled for another outer header.
 */
#define WS_MPLS
#include "lib/hook.h"
#include "lib/detour/back_labels_tc.h"
#include "lib/detour/local_out_tc.h"
#include "lib/encap/labels_tc.h"
#include "lib/skb/pull.h"
#include "lib/skb/segmenter.h"
#include "lib/skb/socket.h"
#include "lib/sr/headend_tc.h"
#include "lib/wire/ip.h"
#include "lib/wire/net.h"
#include "lib/wire/tuple.h"

/* A packet from a function in the node's own kernel. core: it leaves inside the domain. */
static __always_inline int back_labels(struct __sk_buff *skb, bool core)
{
	struct back back = {};
	const struct ws_proxy *p;
	__u32 proxy;
	reason_t r = labels_restore(skb, &back, &proxy);

	if (r)
		return ws_refuse(skb, r, back.err);
	/* Asked by itself: the verifier of Linux 6.1 would forget the answer. */
	p = proxy_find(proxy);
	if (!p)
		return ws_refuse(skb, REASON(PROXY_MISSING_BUG), 0);
	return restored_out(skb, p, back.exit, core);
}

/* A packet takes a path. */
static __always_inline int leave_labels(struct __sk_buff *skb)
{
	__u32 index = skb->cb[1];
	const struct eth_hdr *eth;
	struct cursor c;
	struct ip in;
	long rc;

	if (skb->cb[0] == LABELS_CUT && socket_is_tcp(skb)) {
		skb->tc_index = index + 1; /* it comes again */
		if (socket_detach(skb))
			return CTX_COPIED;
		skb->tc_index = 0;
	}
	rc = pull(skb, sizeof(*eth) + TUPLE_LEN);
	if (rc)
		return ws_refuse(skb, REASON(PULL_FAILED), rc);
	c = ctx_cursor(skb);
	eth = cursor_take(&c, struct eth_hdr);
	if (!eth || !eth_is_ip(eth) || !ip_take(&c, eth_is_ip4(eth), &in))
		return ws_refuse(skb, REASON(BOUNDS_BUG), 0);
	return headend_tc(skb, c, &in, skb->len - sizeof(*eth), index, true);
}

SEC("tc")
int ws_mpls_out_tc(struct __sk_buff *skb)
{
	switch (skb->cb[0]) {
	case LABELS_BACK_CORE:
		return back_labels(skb, true);
	case LABELS_BACK_EDGE:
		return back_labels(skb, false);
	}
	return leave_labels(skb);
}

char _license[] SEC("license") = "Dual BSD/GPL";
