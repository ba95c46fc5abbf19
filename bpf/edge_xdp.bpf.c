/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* XDP on an interface to the outside: the headend, for packets that it can
 * finish. All others go on, unchanged, to edge_tc.bpf.c, the boundary among
 * them.
 */
#define WS_XDP
#include "lib/hook.h"
#include "lib/boundary.h"
#include "lib/headend.h"
#include "lib/nexthop_xdp.h"
#include "lib/stats.h"

static __always_inline int headend_xdp(ctx_t *ctx, struct cursor c,
				       struct ip6_hdr *ip6, __u32 index)
{
	const struct ws_headend *h = bpf_map_lookup_elem(&ws_headends, &index);
	__u32 len = ctx_len(ctx) - sizeof(struct eth_hdr);
	struct headend_packet pkt;
	const struct ws_nexthop *n;
	struct ws_nexthop_key key;
	struct eth_hdr *eth;

	if (!h || headend_first_is_local(h))
		return CTX_PASS;
	key = nexthop_key_of(headend_first(h), 0,
			     bpf_ntohl(flow_label(flow_hash(c, ip6))));
	n = nexthop_find(&key, len + h->outer_len);
	if (!n)
		return CTX_PASS;
	/* A number is taken even if the next step fails: numbers may have gaps. */
	if (headend_prepare(h, c, ip6, len, len, 1, &pkt))
		return CTX_PASS;
	/* Moves the packet: every pointer into it is gone. */
	if (bpf_xdp_adjust_head(ctx, -(__s32)pkt.outer_len))
		return CTX_PASS;

	if (bpf_xdp_store_bytes(ctx, sizeof(struct eth_hdr), (void *)h->outer,
				pkt.outer_len) ||
	    !headend_finish(h, ctx_cursor(ctx), &pkt))
		return ws_refuse(ctx, headend_write_failed(), 0);
	c = ctx_cursor(ctx);
	eth = cursor_take(&c, struct eth_hdr);
	c.pos += pkt.outer_len;
	ip6 = cursor_take(&c, struct ip6_hdr);
	if (!eth || !ip6)
		return ws_refuse(ctx, headend_write_failed(), 0);
	ip6->hop_limit--;
	stats_add(h->stats, 1, pkt.inner_len);
	return nexthop_take(eth, n);
}

SEC("xdp.frags")
int ws_edge_xdp(struct xdp_md *ctx)
{
	struct cursor c = ctx_cursor(ctx);
	const struct eth_hdr *eth = cursor_take(&c, struct eth_hdr);
	struct ip6_hdr *ip6;
	struct ws_match m;

	if (!eth || !eth_is_ip6_unicast(eth))
		return CTX_PASS;
	ip6 = cursor_take(&c, struct ip6_hdr);
	if (!ip6 || !ip6_is_ip6(ip6) || ip6_is_unsteered(ip6->dst) ||
	    ip6_is_unsteered(ip6->src) || in_block(ip6->dst[0]) ||
	    ip6_has_extension(ip6) || !node_is_armed())
		return CTX_PASS;
	m = classify(ip6);
	if (m.local || m.action != WS_MATCH_PATH)
		return CTX_PASS;
	return headend_xdp(ctx, c, ip6, m.target);
}

char _license[] SEC("license") = "Dual BSD/GPL";
