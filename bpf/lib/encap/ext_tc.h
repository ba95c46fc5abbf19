/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The check of the extension headers before an SRH. TC only, and only
 * in the program for packets with options.
 *
 * Hop-by-hop options are skipped: a node processes them only if it is
 * configured to (RFC 8200 4.3), and waystamp nodes are not. Destination
 * options before a routing header are for each node in that header (RFC
 * 8200 4.1); the only options that we support are padding.
 */
#pragma once

#include <waystamp/abi.h>
#include "lib/encap/ext.h"
#include "lib/encap/srh.h"
#include "lib/hook.h"
#include "lib/node/maps.h"
#include "lib/node/refuse.h"
#include "lib/reason.h"
#include "lib/verifier.h"
#include "lib/wire/net.h"

/* In skb->cb[0]: the remaining work for a packet that is handed over. */
#define EXT_ARRIVES 0 /* all processing at a SID */
#define EXT_AGAIN 1 /* as EXT_ARRIVES; the hop limit is decremented */
#define EXT_LEAVES 2 /* to be sent to another node; cb[1] is the exit */
#define EXT_LEAVES_OUT 3 /* as EXT_LEAVES, at a TC egress */

/* Not a refusal: the headers before the SRH decide. */
#define EXT_DECIDES (~0U)

/* Hands a packet over by a tail call. Returns the verdict if that fails. */
static __always_inline int ext_program(struct __sk_buff *skb, __u32 todo,
				       __u32 exit)
{
	skb->cb[0] = todo;
	skb->cb[1] = exit;
	bpf_tail_call(skb, &ws_programs, WS_PROGRAM_EXT);
	return ws_refuse(skb, REASON(EXTENSION_PROGRAM_BUG), 0);
}

/* Options in one header, including padding. */
#define OPTIONS_MAX 32

#define OPTION_PAD1 0
#define OPTION_PADN 1

/* RFC 8200 4.2: the action for an unrecognized option, in the two highest bits
 * of its type. 3 differs from 2 only for multicast, and no SID is multicast.
 */
#define OPTION_ACTION_SHIFT 6
#define OPTION_SKIP 0
#define OPTION_DISCARD 1

/* The extension headers of a packet before its SRH. */
struct ext_found {
	__u32 len; /* bytes, EXT_LEN_MAX at most; 0: none, or bad headers */
	reason_t bad; /* why the packet is refused */
	/* For bad: the pointer of the ICMP error, in bytes
	 * from the IPv6 header; 0: no error is sent.
	 */
	__u32 pointer;
};

static __always_inline void ext_bad(struct ext_found *f, reason_t why,
				    __u32 pointer)
{
	f->bad = why;
	f->pointer = pointer;
}

struct options {
	struct __sk_buff *skb;
	__u32 off; /* of the next option, from the start of the frame */
	__u32 end; /* of the header */
	struct ext_found *found;
};

/* Checks one option. Returns 1 to end the walk. */
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
		ext_bad(o->found, REASON(OPTION_LENGTH), 0);
		return 1;
	}
	o->off = off + 2 + len;
	action = type >> OPTION_ACTION_SHIFT;
	if (action == OPTION_SKIP) /* PadN included */
		return 0;
	if (action == OPTION_DISCARD)
		pointer = 0;
	ext_bad(o->found, REASON(OPTION_UNKNOWN), pointer);
	return 1;
}

/* Checks a header of destination options, which is in bounds. off: from
 * the start of the frame; field: offset from the IPv6 header of the Next
 * Header field with its type. A function of its own, to bound the stack.
 */
static __noinline void options_check(struct __sk_buff *skb, __u32 off,
				     __u32 len, __u32 field,
				     struct ext_found *f)
{
	struct options o = {
		.skb = skb,
		.off = off + 2 + unknown_zero(skb),
		.end = off + len,
		.found = f,
	};

	bpf_loop(OPTIONS_MAX, option_step, &o, 0);
	if (!f->bad && o.off < o.end)
		ext_bad(f, REASON(EXTENSION_FIRST), field);
}

/* Checks the headers between the IPv6 header, which is in bounds, and a routing
 * header. f is zero. A function of its own, to bound the stack; f is never NULL.
 */
__noinline int ws_ext_find(struct __sk_buff *skb, struct ext_found *f)
{
	__u32 off = sizeof(struct ip6_hdr), field = IP6_NEXTHDR_OFF, len;
	__u8 next = NEXTHDR_ROUTING, head[2] = {};

	if (!f)
		return 0;
	bpf_skb_load_bytes(skb, sizeof(struct eth_hdr) + field, &next,
			   sizeof(next));
	for (__u32 i = 0; i <= EXT_HEADERS_MAX && !f->bad; i++) {
		if (!nexthdr_is(next, EXT_OPTIONS))
			break;
		/* RFC 8200 4: hop-by-hop options come first, or are unrecognized. */
		if (i == EXT_HEADERS_MAX || (i && next == NEXTHDR_HOP)) {
			ext_bad(f, REASON(EXTENSION_FIRST), field);
			break;
		}
		if (bpf_skb_load_bytes(skb, sizeof(struct eth_hdr) + off, head,
				       sizeof(head))) {
			ext_bad(f, REASON(EXTENSION_TRUNCATED), 0);
			break;
		}
		len = (head[1] + 1) * 8;
		if (off + len > sizeof(struct ip6_hdr) + EXT_LEN_MAX) {
			ext_bad(f, REASON(EXTENSION_FIRST), field);
			break;
		}
		if (sizeof(struct eth_hdr) + off + len > skb->len) {
			ext_bad(f, REASON(EXTENSION_TRUNCATED), 0);
			break;
		}
		if (next != NEXTHDR_HOP)
			options_check(skb, sizeof(struct eth_hdr) + off, len,
				      field, f);
		field = off;
		next = head[0];
		off += len;
	}
	if (f->bad)
		return 0;
	if (next == NEXTHDR_FRAGMENT)
		ext_bad(f, REASON(OUTER_FRAGMENT), 0);
	else if (next != NEXTHDR_ROUTING)
		ext_bad(f, REASON(NO_SRH), off);
	else
		f->len = off - sizeof(struct ip6_hdr);
	return 0;
}

/* Looks for the headers in the program for packets with options; 0 elsewhere. Returns f->len. */
static __always_inline __u32 ext_find(struct __sk_buff *skb,
				      struct ext_found *f)
{
	if (!EXT_LEN_MAX)
		return 0;
	ws_ext_find(skb, f);
	return f->len <= EXT_LEN_MAX ? f->len : 0;
}

/* Bytes between the outer IPv6 header and its SRH, or 0. */
static __always_inline __u32 ext_len(struct __sk_buff *skb)
{
	struct ext_found f = {};

	return ext_find(skb, &f);
}
