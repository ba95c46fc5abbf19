/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The differences between the two hooks: a file that defines WS_XDP before its includes
 * is an XDP program, else TC. Besides lib/encap/outer*.h this is the only file with an
 * #ifdef. Those choose the outer header: labels if WS_MPLS is defined, else SRv6.
 */
#pragma once

#include <linux/bpf.h>
#include <linux/types.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>
#include <waystamp/abi.h>
#include "lib/wire/cursor.h"

#ifdef WS_XDP

#define WS_HOOK WS_HOOK_XDP
typedef struct xdp_md ctx_t;

#define EXT_LEN_MAX 0 /* TC handles them */

#define CTX_DROP XDP_DROP
#define CTX_PASS XDP_PASS

static __always_inline __u32 ctx_len(ctx_t *ctx)
{
	return bpf_xdp_get_buff_len(ctx);
}

static __always_inline __u32 ctx_ifindex(const ctx_t *ctx)
{
	return ctx->ingress_ifindex;
}

static __always_inline long ctx_load_bytes(ctx_t *ctx, __u32 off, void *to,
					   __u32 len)
{
	return bpf_xdp_load_bytes(ctx, off, to, len);
}

/* XDP reads what is linear. */
static __always_inline void ctx_pull(ctx_t *ctx, __u32 len)
{
	(void)ctx;
	(void)len;
}

#else

#define TC_ACT_UNSPEC (-1)
#define TC_ACT_SHOT 2
#define TC_ACT_REDIRECT 7

#define WS_HOOK WS_HOOK_TC
typedef struct __sk_buff ctx_t;

/* Bytes of extension headers that a packet may have between its outer
 * IPv6 header and its SRH. Only the program for such packets has any;
 * it defines WS_EXT. All others are compiled without that code.
 */
#ifdef WS_EXT
#define EXT_LEN_MAX WS_EXT_MAX
#else
#define EXT_LEN_MAX 0
#endif

#define CTX_DROP TC_ACT_SHOT
/* Not a drop: a copy of the descriptor has the packet, and this descriptor ends. */
#define CTX_COPIED TC_ACT_SHOT
/* Not TC_ACT_OK: that zeroes skb->tc_index. */
#define CTX_PASS TC_ACT_UNSPEC

static __always_inline __u32 ctx_len(const ctx_t *ctx)
{
	return ctx->len;
}

static __always_inline __u32 ctx_ifindex(const ctx_t *ctx)
{
	return ctx->ifindex;
}

static __always_inline long ctx_load_bytes(ctx_t *ctx, __u32 off, void *to,
					   __u32 len)
{
	return bpf_skb_load_bytes(ctx, off, to, len);
}

/* Makes the first len bytes linear, if there is memory, and of a shorter packet
 * all bytes. May move the packet: every pointer taken before is gone.
 */
static __always_inline void ctx_pull(ctx_t *ctx, __u32 len)
{
	bpf_skb_pull_data(ctx, len < ctx->len ? len : ctx->len);
}

#endif

static __always_inline struct cursor ctx_cursor(const ctx_t *ctx)
{
	return (struct cursor){
		.pos = (void *)(long)ctx->data,
		.end = (void *)(long)ctx->data_end,
	};
}
