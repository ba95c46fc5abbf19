/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* XDP on an interface that a function sends to, for functions whose
 * packets are recognised by content. A packet gets its header back
 * here only if it can also be sent on here; any other packet goes on,
 * unchanged, to function_tc.bpf.c, and its header stays in the table.
 */
#define WS_XDP
#include "lib/hook.h"
#include "lib/detour/back_xdp.h"
#include "lib/detour/detour.h"
#include "lib/match/classify.h"
#include "lib/node/boundary.h"

/* Is the frame for this interface? The function's side of
 * the link may send frames to any address.
 */
static __always_inline bool is_for(const struct eth_hdr *eth,
				   const struct ws_proxy *p)
{
	__u32 diff = 0;

	for (__u32 i = 0; i < sizeof(eth->dst); i++)
		diff |= eth->dst[i] ^ p->dmac[i];
	return !diff;
}

SEC("xdp.frags")
int ws_function_xdp(struct xdp_md *ctx)
{
	struct cursor c = ctx_cursor(ctx);
	__u32 ifindex = ctx->ingress_ifindex;
	const struct ws_node *node;
	const struct ws_proxy *p;
	const struct ws_port *port;
	struct eth_hdr *eth;
	struct ip in;
	struct addrs a;

	eth = cursor_take(&c, struct eth_hdr);
	if (!eth || eth->proto != bpf_htons(ETH_P_IPV6))
		return CTX_PASS;
	if (!ip_take(&c, false, &in) || !ip_is_its_version(&in) ||
	    ip_to_is_never_forwarded(&in))
		return CTX_PASS;
	a = ip_addrs(&in);
	if (ip6_is_mapped(a.dst) || ip6_is_mapped(a.src))
		return CTX_PASS;
	node = node_armed();
	port = bpf_map_lookup_elem(&ws_ports, &ifindex);
	if (!node || !port || port->cutter)
		return CTX_PASS;
	p = proxy_find(port->proxy);
	if (!p || p->recognise != WS_RECOGNISE_CONTENT || !is_for(eth, p))
		return CTX_PASS;
	/* TC checks own addresses again. */
	if (guard(&a).local)
		return CTX_PASS;
	return back_xdp(ctx, p, port->proxy, in.hdr, node);
}

char _license[] SEC("license") = "Dual BSD/GPL";
