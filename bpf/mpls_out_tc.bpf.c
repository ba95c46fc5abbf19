/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Packets that take a path over labels as they leave: the node's own, and those that
 * somebody on it has marked. core_out_tc.bpf.c hands them over; a super-packet comes once
 * more, in frames out of the segmenter, from edge_tc.bpf.c. The sources of
 * core_out_tc.bpf.c's headend, compiled for another outer header.
 */
#define WS_MPLS
#include "lib/hook.h"
#include "lib/encap/labels_tc.h"
#include "lib/skb/pull.h"
#include "lib/skb/segmenter.h"
#include "lib/skb/socket.h"
#include "lib/sr/headend_tc.h"
#include "lib/wire/ip.h"
#include "lib/wire/net.h"
#include "lib/wire/tuple.h"

SEC("tc")
int ws_mpls_out_tc(struct __sk_buff *skb)
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

char _license[] SEC("license") = "Dual BSD/GPL";
