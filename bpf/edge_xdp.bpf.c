/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* XDP on an interface to the outside: the headend, for packets that it can
 * finish. All others go on, unchanged, to edge_tc.bpf.c, the boundary among
 * them.
 */
#define WS_XDP
#include "lib/hook.h"
#include "lib/boundary.h"
#include "lib/headend.h"
#include "lib/icmp.h"
#include "lib/nexthop_xdp.h"
#include "lib/stats.h"

/* A segment at a time, where a helper would take as long as a look-up. False: a
 * bug. len: in the bounds of ws_headend.outer, and 8 more than a multiple of 16.
 */
static __always_inline bool outer_write(ctx_t *ctx, const struct ws_headend *h,
					__u32 len)
{
	struct cursor c = ctx_cursor(ctx);
	const struct sid *from = (const void *)(h->outer + 8);
	struct sid *to;

	if (!cursor_take(&c, struct eth_hdr))
		return false;
	to = c.pos;
	if ((void *)to + 8 > c.end)
		return false;
	*(__u64 *)to = *(const __u64 *)h->outer;
	to = (void *)to + 8;
	for (__u32 i = 0; i < (WS_OUTER_MAX - 8) / sizeof(*to); i++) {
		if (i * sizeof(*to) >= len - 8)
			break;
		if ((void *)(to + 1) > c.end)
			return false;
		*to++ = from[i];
	}
	return true;
}

static __always_inline int headend_xdp(ctx_t *ctx, struct cursor c,
				       struct ip6_hdr *ip6, __u32 index,
				       const struct ws_node *node)
{
	const struct ws_headend *h = headend_find(index);
	__u32 len = xdp_packet_len(ctx, ip6, c.end);
	struct headend_packet pkt;
	const struct ws_nexthop *n;
	struct eth_hdr *eth;

	if (!h || headend_first_is_local(h))
		return CTX_PASS;
	n = exit_of(h->stats, bpf_ntohl(flow_label(flow_hash(c, ip6))));
	if (!nexthop_takes(n, headend_first(h), len + h->outer_len, node) ||
	    !binding_find((struct cursor){ ip6, c.end }, NEXTHDR_IPV6,
			  &h->share, h->scheme, &pkt.binding))
		return CTX_PASS;
	/* A number is taken even if the next step fails: numbers may have gaps. */
	if (headend_check(h, c, ip6, len, len, &pkt) ||
	    rnd_take(h, 1, &pkt.rnd))
		return CTX_PASS;
	/* Moves the packet: every pointer into it is gone. */
	if (bpf_xdp_adjust_head(ctx, -(__s32)pkt.outer_len))
		return CTX_PASS;

	if (!outer_write(ctx, h, pkt.outer_len) ||
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
	const struct ws_node *node;
	struct ip6_hdr *ip6;
	struct ws_match m;

	if (!eth || !eth_is_ip6_unicast(eth))
		return CTX_PASS;
	ip6 = cursor_take(&c, struct ip6_hdr);
	if (!ip6 || !ip6_is_ip6(ip6) || ip6_is_unsteered(ip6->dst) ||
	    ip6_is_unsteered(ip6->src) || in_block(ip6->dst[0]) ||
	    in_block(ip6->src[0]) || ip6_has_extension(ip6))
		return CTX_PASS;
	/* ICMPv6 errors may be about the domain's own packets. */
	if (ip6->nexthdr == NEXTHDR_ICMP6 && !icmp6_informs(c))
		return CTX_PASS;
	node = node_armed();
	if (!node)
		return CTX_PASS;
	m = classify(ip6);
	if (m.local || m.action != WS_MATCH_PATH)
		return CTX_PASS;
	return headend_xdp(ctx, c, ip6, m.target, node);
}

char _license[] SEC("license") = "Dual BSD/GPL";
