/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The headend of paths over labels, on XDP; edge_xdp.bpf.c has found the
 * path that takes the packet. Packets that XDP cannot finish go on to TC.
 */
#define WS_XDP
#define WS_MPLS
#include "lib/hook.h"
#include "lib/node/boundary.h"
#include "lib/sr/headend_xdp.h"
#include "lib/wire/ip.h"

/* c: behind the Ethernet header. is_ip4 is a constant at compile time. */
static __always_inline int enter_labels(ctx_t *ctx, struct cursor c,
					bool is_ip4)
{
	const struct ws_node *node = node_armed();
	const struct scratch *s = scratch();
	struct ip in;

	if (!node || !s || !ip_take(&c, is_ip4, &in))
		return CTX_PASS;
	return headend_xdp(ctx, c, &in, s->headend, node);
}

SEC("xdp.frags")
int ws_mpls_edge_xdp(struct xdp_md *ctx)
{
	struct cursor c = ctx_cursor(ctx);
	const struct eth_hdr *eth = cursor_take(&c, struct eth_hdr);

	if (!eth)
		return CTX_PASS;
	return eth_is_ip4(eth) ? enter_labels(ctx, c, true) :
				 enter_labels(ctx, c, false);
}

char _license[] SEC("license") = "Dual BSD/GPL";
