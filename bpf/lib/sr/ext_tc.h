/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* What is looked at in the extension headers before an SRH. TC only, and of its
 * programs one.
 *
 * Hop-by-hop options are passed over: a node looks at them if it is told to (RFC
 * 8200 4.3), and nobody tells ours to. Destination options before a routing header
 * are for each node that it names (RFC 8200 4.1); of those we know none but
 * padding.
 */
#pragma once

#include <waystamp/abi.h>
#include "lib/hook.h"
#include "lib/node/maps.h"
#include "lib/node/refuse.h"
#include "lib/wire/ext.h"
#include "lib/wire/net.h"
#include "lib/wire/srh.h"

/* What is left to be done to a packet that is handed over, in skb->cb[0]. */
#define EXT_ARRIVES 0 /* all that is done at a SID */
#define EXT_AGAIN 1 /* the same; its hop limit has been counted */
#define EXT_LEAVES 2 /* on to another node; cb[1] is the exit */
#define EXT_LEAVES_OUT 3 /* the same, at a TC egress */

/* Hands a packet over, for good. Returns the verdict where that fails. */
static __always_inline int ext_program(struct __sk_buff *skb, __u32 todo,
				       __u32 exit)
{
	skb->cb[0] = todo;
	skb->cb[1] = exit;
	bpf_tail_call(skb, &ws_programs, WS_PROGRAM_EXT);
	return ws_refuse(skb, WS_REASON_EXTENSION_PROGRAM_BUG, 0);
}

/* Options in one header, padding among them. */
#define OPTIONS_MAX 32

#define OPTION_PAD1 0
#define OPTION_PADN 1

/* RFC 8200 4.2: what a node does that does not know an option, in the highest bits
 * of its type. 3 differs from 2 for multicast alone, which no SID is.
 */
#define OPTION_ACTION_SHIFT 6
#define OPTION_SKIP 0
#define OPTION_DISCARD 1

/* What ws_ext_find returns for a refusal. pointer: of the field that its source is
 * told of, in bytes from the IPv6 header; 0: it is told nothing.
 */
#define EXT_BAD(reason, pointer) (-(int)((reason) | (pointer) << 8))
#define EXT_BAD_REASON(bad) (-(bad) & 0xff)
#define EXT_BAD_POINTER(bad) (-(bad) >> 8 & 0xffff)
_Static_assert(WS_REASON_COUNT <= 256, "reasons fit a byte");

static __always_inline enum ws_reason extension_first(void)
{
	return WS_REASON_EXTENSION_FIRST;
}

static __always_inline enum ws_reason extension_truncated(void)
{
	return WS_REASON_EXTENSION_TRUNCATED;
}

static __always_inline enum ws_reason option_length(void)
{
	return WS_REASON_OPTION_LENGTH;
}

struct options {
	struct __sk_buff *skb;
	__u32 off; /* of the next option, from the start of the frame */
	__u32 end; /* of the header */
	int bad; /* as ws_ext_find returns; 0: nothing yet */
};

/* One option. Returns 1 to end the walk. */
static long option_step(__attribute__((unused)) __u64 i, struct options *o)
{
	__u32 off = o->off, pointer = off - sizeof(struct eth_hdr), action;
	__u8 type = OPTION_PAD1, len = 0;

	if (off >= o->end)
		return 1;
	bpf_skb_load_bytes(o->skb, off, &type, sizeof(type));
	if (type == OPTION_PAD1) {
		o->off = off + 1;
		return 0;
	}
	if (off + 2 <= o->end)
		bpf_skb_load_bytes(o->skb, off + 1, &len, sizeof(len));
	if (off + 2 + len > o->end) {
		o->bad = EXT_BAD(option_length(), 0);
		return 1;
	}
	o->off = off + 2 + len;
	action = type >> OPTION_ACTION_SHIFT;
	if (action == OPTION_SKIP) /* PadN among them */
		return 0;
	if (action == OPTION_DISCARD)
		pointer = 0;
	o->bad = EXT_BAD(WS_REASON_OPTION_UNKNOWN, pointer);
	return 1;
}

/* A header of destination options, which is in bounds. off: from the start of the
 * frame; field: where its type is told, from the IPv6 header. Returns 0 or what is
 * bad. A function of its own, for its stack.
 */
static __noinline int options_check(struct __sk_buff *skb, __u32 off, __u32 len,
				    __u32 field)
{
	struct options o = { .skb = skb, .off = off + 2, .end = off + len };

	bpf_loop(OPTIONS_MAX, option_step, &o, 0);
	if (o.bad)
		return o.bad;
	return o.off < o.end ? EXT_BAD(extension_first(), field) : 0;
}

/* Bytes of all headers between the IPv6 header, which is in bounds, and a routing
 * header, EXT_LEN_MAX at most; or EXT_BAD.
 */
__noinline int ws_ext_find(struct __sk_buff *skb)
{
	__u32 off = sizeof(struct ip6_hdr), field = IP6_NEXTHDR_OFF, len;
	__u8 next = NEXTHDR_ROUTING, head[2] = {};
	int bad;

	bpf_skb_load_bytes(skb, sizeof(struct eth_hdr) + field, &next,
			   sizeof(next));
	for (__u32 i = 0; i <= EXT_HEADERS_MAX; i++) {
		if (!nexthdr_is_options(next))
			break;
		/* RFC 8200 4: this one is the first, or unknown where it is. */
		if (i == EXT_HEADERS_MAX || (i && next == NEXTHDR_HOP))
			return EXT_BAD(extension_first(), field);
		if (bpf_skb_load_bytes(skb, sizeof(struct eth_hdr) + off, head,
				       sizeof(head)))
			return EXT_BAD(extension_truncated(), 0);
		len = (head[1] + 1) * 8;
		if (off + len > sizeof(struct ip6_hdr) + EXT_LEN_MAX)
			return EXT_BAD(extension_first(), field);
		if (sizeof(struct eth_hdr) + off + len > skb->len)
			return EXT_BAD(extension_truncated(), 0);
		bad = next == NEXTHDR_HOP ?
			      0 :
			      options_check(skb, sizeof(struct eth_hdr) + off,
					    len, field);
		if (bad)
			return bad;
		field = off;
		next = head[0];
		off += len;
	}
	if (next == NEXTHDR_FRAGMENT)
		return EXT_BAD(outer_fragment(), 0);
	if (next != NEXTHDR_ROUTING)
		return EXT_BAD(no_srh(), off);
	return off - sizeof(struct ip6_hdr);
}

/* Bytes between the outer IPv6 header and its SRH, or 0. *found: what ws_ext_find
 * has said.
 */
static __always_inline __u32 ext_len(struct __sk_buff *skb, int *found)
{
	*found = EXT_LEN_MAX ? ws_ext_find(skb) : 0;
	return (__u32)*found <= EXT_LEN_MAX ? *found : 0;
}
