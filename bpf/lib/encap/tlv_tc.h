/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Finding the proof among other TLVs (RFC 8754 2.1). TC only. */
#pragma once

#include <waystamp/abi.h>
#include "lib/hook.h"
#include "lib/reason.h"
#include "lib/verifier.h"
#include "lib/wire/net.h"

#define TLV_PAD1 0

struct tlv_walk {
	__u8 tlvs[WS_TLVS_LEN_MAX];
	__u32 len; /* bytes of TLVs in tlvs */
	__u32 off; /* of the next TLV */
	__s32 found; /* offset of the proof, or a negative reason */
};

static __always_inline __u32 tlv_byte(const struct tlv_walk *w, __u32 off)
{
	return w->tlvs[off & (WS_TLVS_LEN_MAX - 1)];
}

/* Checks one TLV. Returns 1 to end the walk. */
static long tlv_step(__attribute__((unused)) __u64 i, struct tlv_walk *w)
{
	__u32 off = w->off, type, len;

	if (off >= w->len)
		return 1;
	type = tlv_byte(w, off);
	if (type == TLV_PAD1) {
		w->off = off + 1;
		return 0;
	}
	len = tlv_byte(w, off + 1);
	if (off + 2 > w->len || off + 2 + len > w->len) {
		w->found = -REASON(TLV_OVERRUN);
		return 1;
	}
	w->off = off + 2 + len;
	if (type != WS_TLV_TYPE)
		return 0;
	/* The list ends on an 8-byte boundary of the header. */
	if (len != WS_TLV_LEN)
		w->found = -REASON(TLV_LENGTH);
	else if (off % 8)
		w->found = -REASON(TLV_ALIGNMENT);
	else if (w->found >= 0)
		w->found = -REASON(TLV_DUPLICATE);
	else {
		w->found = off;
		return 0;
	}
	return 1;
}

/* The proof TLV's offset from start, the beginning of the TLVs, or a
 * negative reason. start: bytes from the start of the frame; len: bytes of
 * TLVs, WS_TLVS_LEN_MAX at most, and in bounds. Unknown TLVs are skipped.
 */
__noinline int ws_tlv_find(struct __sk_buff *ctx, __u32 start, __u32 len)
{
	__u32 zero = unknown_zero(ctx);
	struct tlv_walk w = {
		.off = zero,
		.found = -REASON(TLV_MISSING) + zero,
	};

	/* The caller has checked it; this is for the verifier. */
	if (len > WS_TLVS_LEN_MAX)
		len = WS_TLVS_LEN_MAX;
	w.len = len;
	barrier_var(len);
	if (!len || bpf_skb_load_bytes(ctx, start, w.tlvs, not_zero(len)))
		return w.found;
	bpf_loop(WS_TLVS_LEN_MAX, tlv_step, &w, 0);
	return w.found;
}
