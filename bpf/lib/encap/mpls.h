/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Labels (RFC 3032): a stack of entries, then a word with the type of the inner
 * packet, then the proof. Programs that define WS_MPLS process only this outer
 * header; it has the same functions as srv6*.h.
 *
 * For each visit the stack has a pair of labels: the label of a node, and the service
 * label of a SID of the block. Behind the first node label there are an entropy
 * indicator and its label (RFC 6790). A hop overwrites its own pair with the next
 * pair, and the next pair with an entropy pair, so that the packet keeps its length.
 */
#pragma once

#include "lib/hook.h"
#include "lib/node/maps.h"
#include "lib/reason.h"
#include "lib/wire/cursor.h"
#include "lib/wire/flow.h"
#include "lib/wire/ip.h"
#include "lib/wire/net.h"

/* Special-purpose labels of RFC 3032 2.1 and RFC 6790 3. */
#define LABEL_IP4_NULL 0
#define LABEL_ROUTER_ALERT 1
#define LABEL_IP6_NULL 2
#define LABEL_ENTROPY 7
#define LABEL_LEAST 16 /* lower labels are special-purpose */

/* An entry: label 20 bits, traffic class 3, bottom of the stack 1, TTL 8. */
#define ENTRY_LABEL_SHIFT 12
#define ENTRY_LABEL_MASK 0xfffff000U
#define ENTRY_CLASS_SHIFT 9
#define ENTRY_BOTTOM 0x100U
#define ENTRY_TTL 0xffU

/* Entries in which the bottom of the stack is searched. */
#define LABELS_MAX 40

/* The entry in which our headends and hops write the service label
 * of the next visit: behind the node label and the entropy pair.
 */
#define SERVICE_AT 3

/* Between the stack and the proof; see docs/protocol/mpls.md. */
struct word {
	__u8 version; /* 0; a router takes no packet with an upper half of 0 for IP (RFC 4385 3) */
	__u8 flags;
	__u8 reserved;
	__u8 nexthdr; /* of the inner packet */
};
_Static_assert(sizeof(struct word) == 4, "word");

/* A flag of the word, in place of the O-flag of an SRH (RFC 9259 2.1). */
#define WORD_FLAG_TRACE 0x01

#define OUTER_IS_IP false /* programs write the link-layer addresses */
#define OUTER_PROTO ETH_P_MPLS_UC

static __always_inline bool form_is_outer(__u32 form)
{
	return form == WS_FORM_LABELS;
}

/* The outer header of a packet with labels for a SID of
 * this node. Entries are numbered from 0.
 */
struct outer {
	void *end; /* of the packet */
	__be32 *top; /* five entries are in bounds */
	struct word *word;
	__be64 sid; /* of the service label, upper 64 bits */
	__u32 shape; /* see shape_bottom */
	__u32 len; /* bytes from top to the end of the frame */
};

/* The beginning of an outer header, in a packet or in a map. Every outer header is this long. */
struct outer_head {
	__be32 entry[5];
};

/* Bytes of the shortest outer header, with one visit. */
#define OUTER_LEN_MIN (4 * 4 + sizeof(struct word) + sizeof(struct proof_tlv))

static __always_inline __u32 entry_label(__be32 entry)
{
	return bpf_ntohl(entry) >> ENTRY_LABEL_SHIFT;
}

static __always_inline __u32 entry_ttl(__be32 entry)
{
	return bpf_ntohl(entry) & ENTRY_TTL;
}

/* The entry with another label and TTL, and without the bottom bit. */
static __always_inline __be32 entry_of(__be32 entry, __u32 label, __u32 ttl)
{
	__u32 class = bpf_ntohl(entry) & 7 << ENTRY_CLASS_SHIFT;

	return bpf_htonl(label << ENTRY_LABEL_SHIFT | class | ttl);
}

/* The SID of a service label, upper 64 bits; 0: the label is none of the domain's. */
static __always_inline __be64 label_sid(__u32 label)
{
	__u32 place = label - cfg.services;

	return place <= 0xffff ? cfg.block | bpf_cpu_to_be64((__u64)place) : 0;
}

/* The shape of a stack is three entry numbers in one number: the bottom, the service
 * label of this visit, and the node label of the next visit, 0: there is none.
 */
static __always_inline __u32 shape_bottom(__u32 shape)
{
	return shape & 63;
}

static __always_inline __u32 shape_service(__u32 shape)
{
	return shape >> 8 & 63;
}

static __always_inline __u32 shape_next(__u32 shape)
{
	return shape >> 16 & 63;
}

/* The reason to refuse a stack for a label before the service label that is not this node's. */
static __always_inline int label_bad(__u32 label)
{
	if (label == LABEL_IP4_NULL || label == LABEL_IP6_NULL)
		return -(int)REASON(LABEL_NULL);
	if (label == LABEL_ROUTER_ALERT)
		return -(int)REASON(LABEL_ALERT);
	return -(int)REASON(LABEL_UNKNOWN);
}

/* The entry of the first service label, or a negative reason. This
 * node's own label may come before it, also several times, or not at all
 * if the last router has removed it; so may entropy pairs. A function of
 * its own, like the next two, so that the verifier checks the loop once.
 */
__noinline int ws_labels_service(ctx_t *ctx)
{
	struct cursor c = ctx_cursor(ctx);
	bool entropy = false;
	__u32 entry, label;
	const __be32 *at;
	void *top;

	cursor_take(&c, struct eth_hdr);
	top = c.pos;
	for (__u32 i = 0; i < LABELS_MAX; i++) {
		at = cursor_take(&c, __be32);
		if (!at)
			return -(int)REASON(LABELS_TRUNCATED);
		entry = bpf_ntohl(*at);
		label = entry >> ENTRY_LABEL_SHIFT;
		if (entropy)
			entropy = false;
		else if (label == LABEL_ENTROPY)
			entropy = true;
		else if (label - cfg.services <= 0xffff)
			return ((void *)at - top) / sizeof(*at);
		else if (label != cfg.label)
			return label_bad(label);
		if (entry & ENTRY_BOTTOM)
			return -(int)REASON(LABELS_BOTTOM);
	}
	return -(int)REASON(LABELS_TOO_MANY);
}

/* The entry of the bottom, or a negative reason. */
__noinline int ws_labels_bottom(ctx_t *ctx)
{
	struct cursor c = ctx_cursor(ctx);
	const __be32 *at;
	void *top;

	cursor_take(&c, struct eth_hdr);
	top = c.pos;
	for (__u32 i = 0; i < LABELS_MAX; i++) {
		at = cursor_take(&c, __be32);
		if (!at)
			return -(int)REASON(LABELS_TRUNCATED);
		if (*at & bpf_htonl(ENTRY_BOTTOM))
			return ((void *)at - top) / sizeof(*at);
	}
	return -(int)REASON(LABELS_TOO_MANY);
}

/* The entry of the next visit's node label, 0: there is none, or a negative reason.
 * Behind the service label, entropy pairs have replaced the pairs of earlier visits.
 */
__noinline int ws_labels_next(ctx_t *ctx, __u32 service, __u32 bottom)
{
	struct cursor c = ctx_cursor(ctx);
	__u32 n = service + 1;
	const __be32 *at;

	cursor_take(&c, struct eth_hdr);
	for (__u32 i = 0; i < LABELS_MAX / 2; i++) {
		if (n > bottom)
			return 0;
		at = c.pos + 4 * (n & 63);
		if ((void *)(at + 1) > c.end)
			return -(int)REASON(BOUNDS_BUG);
		if (bpf_ntohl(*at) >> ENTRY_LABEL_SHIFT != LABEL_ENTROPY)
			return n & 63;
		if (n == bottom)
			return -(int)REASON(LABELS_BOTTOM);
		n += 2;
	}
	return 0;
}

/* The shape of a stack as our headends and hops write it; -1: any other stack, also
 * one without a shape. One walk from pair to pair replaces three from entry to entry.
 */
__noinline int ws_labels_plain(ctx_t *ctx)
{
	struct cursor c = ctx_cursor(ctx);
	__u32 at = SERVICE_AT + 1, next = 0;
	const __be32 *entry;

	cursor_take(&c, struct eth_hdr);
	entry = cursor_take_bytes(&c, (SERVICE_AT + 1) * sizeof(*entry));
	if (!entry || entry_label(entry[0]) != cfg.label ||
	    entry_label(entry[1]) != LABEL_ENTROPY ||
	    entry_label(entry[SERVICE_AT]) - cfg.services > 0xffff ||
	    (entry[0] | entry[1] | entry[2]) & bpf_htonl(ENTRY_BOTTOM))
		return -1;
	if (entry[SERVICE_AT] & bpf_htonl(ENTRY_BOTTOM))
		return SERVICE_AT | SERVICE_AT << 8;
	for (__u32 i = 1; i < WS_SEGS_MAX; i++, at += 2) {
		entry = cursor_take_bytes(&c, 2 * sizeof(*entry));
		if (!entry || entry[0] & bpf_htonl(ENTRY_BOTTOM))
			return -1;
		if (!next && entry_label(entry[0]) != LABEL_ENTROPY)
			next = at;
		if (entry[1] & bpf_htonl(ENTRY_BOTTOM))
			return (at + 1) | SERVICE_AT << 8 | next << 16;
	}
	return -1;
}

/* The shape of the stack behind the Ethernet header, or a negative reason. */
static __always_inline int labels_read(ctx_t *ctx)
{
	int service, bottom, next, plain = ws_labels_plain(ctx);

	if (plain >= 0)
		return plain;
	service = ws_labels_service(ctx);
	if (service < 0)
		return service;
	bottom = ws_labels_bottom(ctx);
	if (bottom < 0)
		return bottom;
	next = ws_labels_next(ctx, service, bottom);
	if (next < 0)
		return next;
	return (bottom & 63) | (service & 63) << 8 | (next & 63) << 16;
}

/* Bytes from the outer header to the inner packet. */
static __always_inline __u32 outer_len(const struct outer *o)
{
	return 4 * (shape_bottom(o->shape) + 1) + sizeof(struct word) +
	       sizeof(struct proof_tlv);
}

/* Where the inner packet begins. */
static __always_inline struct cursor outer_inner(const struct outer *o)
{
	return (struct cursor){
		.pos = (void *)(o->word + 1) + sizeof(struct proof_tlv),
		.end = o->end,
	};
}

/* The inner packet's type, as a Next Header value. */
static __always_inline __u32 outer_inner_is(const struct outer *o)
{
	return o->word->nexthdr;
}

/* Bytes from the outer header on: labels carry no length, so the frame's length counts. */
static __always_inline __u32 outer_says_len(const struct outer *o)
{
	return o->len;
}

/* The SID that the packet is addressed to, upper 64 bits. */
static __always_inline __be64 outer_sid(const struct outer *o)
{
	return o->sid;
}

/* RFC 5129, congestion marks in labels, is not supported. */
static __always_inline __u32 outer_ecn(const struct outer *o)
{
	(void)o;
	return ECN_NOT_ECT;
}

static __always_inline bool outer_is_traced(const struct outer *o)
{
	return o->word->flags & WORD_FLAG_TRACE;
}

/* Offset of the proof, in bytes from the outer header. */
static __always_inline __u32 outer_offset(const struct outer *o,
					  const struct proof_tlv *tlv)
{
	return (void *)tlv - (void *)o->top;
}

/* Labels name no source. This only checks that the path is one over labels. */
static __always_inline bool outer_is_from_headend(const struct outer *o,
						  const struct ws_hop *hop,
						  __be32 path)
{
	(void)o;
	(void)path;
	return form_is_outer(hop->form);
}

/* Labels have no room for an argument: the plan's argument is used. */
static __always_inline bool outer_argument_is_planned(const struct outer *o,
						      const struct ws_hop *hop)
{
	(void)o;
	(void)hop;
	return true;
}

/* Parses from the stack, at c, to the proof. len: bytes from c to the end of the frame.
 */
static __always_inline reason_t labels_parse(ctx_t *ctx, struct cursor c,
					     struct outer *o,
					     struct proof_tlv **proof,
					     __u32 len)
{
	const __be32 *service;
	int shape = labels_read(ctx);
	reason_t bad;

	if (shape < 0) {
		bad = -shape;
		barrier_var(bad);
		/* The verifier does not know that bad is not 0. */
		return bad ? bad : REASON(BOUNDS_BUG);
	}
	o->end = c.end;
	o->top = c.pos;
	o->shape = shape;
	o->len = len;
	o->word = (void *)(o->top + 1) + 4 * shape_bottom(shape);
	service = o->top + shape_service(shape);
	*proof = (void *)(o->word + 1);
	if ((void *)(o->word + 1) > o->end)
		return REASON(WORD_TRUNCATED);
	if (o->word->version)
		return REASON(WORD_VERSION);
	if (o->word->nexthdr != NEXTHDR_IPV4 &&
	    o->word->nexthdr != NEXTHDR_IPV6)
		return REASON(WORD_NEXT);
	if ((void *)(*proof + 1) > o->end)
		return REASON(PROOF_TRUNCATED);
	if ((*proof)->type != WS_TLV_TYPE)
		return REASON(TLV_MISSING);
	if ((*proof)->len != WS_TLV_LEN)
		return REASON(TLV_LENGTH);
	if ((void *)(service + 1) > o->end || (void *)(o->top + 5) > o->end)
		return REASON(BOUNDS_BUG);
	o->sid = label_sid(entry_label(*service));
	return WS_REASON_NONE;
}

/* Is the stack as our headends and hops write it? */
static __always_inline bool outer_is_plain(const struct outer *o)
{
	return shape_service(o->shape) == SERVICE_AT &&
	       entry_label(o->top[0]) == cfg.label &&
	       entry_label(o->top[1]) == LABEL_ENTROPY;
}

/* The packet's next destination. */
struct outer_next {
	struct sid sid;
	__be32 *pair; /* the pair of the next visit, in bounds */
	__u32 ttl; /* of the packet when it leaves */
};

/* Finds the next visit, and checks the TTL. Changes nothing. first: false if the TTL
 * has been decremented. The new TTL is the least of the consumed labels' TTLs, less 1.
 */
static __always_inline reason_t outer_find_next(const struct outer *o,
						const struct ws_hop *hop,
						bool first,
						struct outer_next *next)
{
	__u32 at = shape_next(o->shape), ttl, other;
	const __be32 *service = o->top + shape_service(o->shape);

	(void)hop;
	if (!at)
		return REASON(UPPER_LAYER);
	if (at >= shape_bottom(o->shape))
		return REASON(LABELS_BOTTOM);
	next->pair = o->top + at;
	if ((void *)(next->pair + 2) > o->end || (void *)(service + 1) > o->end)
		return REASON(BOUNDS_BUG);
	ttl = entry_ttl(o->top[0]);
	other = entry_ttl(*service);
	if (other < ttl)
		ttl = other;
	if (first && ttl <= 1)
		return REASON(HOP_LIMIT);
	next->ttl = first ? ttl - 1 : ttl;
	next->sid.hi = label_sid(entry_label(next->pair[1]));
	next->sid.lo = 0;
	return WS_REASON_NONE;
}

/* The n-th of all entries up to the next visit's pair, in a stack that begins
 * with that visit: node and service. A stack that came without its node label
 * cannot become shorter here, so it gets the next node's label twice.
 */
static __always_inline __be32 entry_written(__u32 n, __u32 all, __be32 node,
					    __be32 service, __be32 entropy)
{
	__u32 nodes = all & 1 ? 2 : 1, pairs = all > 3 ? 2 : 0;

	if (n < nodes)
		return node;
	if (n == nodes + pairs)
		return service;
	/* Entropy pairs are before and behind the service label. */
	if (n > nodes + pairs)
		n--;
	return (n - nodes) & 1 ? entropy :
				 entry_of(node, LABEL_ENTROPY, entry_ttl(node));
}

/* The entropy label at the beginning of a stack, or LABEL_LEAST if there is none. */
static __always_inline __u32 entropy_of(const __be32 *top)
{
	if (entry_label(top[0]) == LABEL_ENTROPY)
		return entry_label(top[1]);
	if (entry_label(top[1]) == LABEL_ENTROPY)
		return entry_label(top[2]);
	if (entry_label(top[2]) == LABEL_ENTROPY)
		return entry_label(top[3]);
	return LABEL_LEAST;
}

/* Writes all entries up to the next visit's pair, which begins at entry next, in
 * a stack that is not as our headends and hops write it. node and service: of the
 * next visit. A function of its own, so that the verifier checks the loop once.
 */
__noinline int ws_labels_write(ctx_t *ctx, __u32 next, __be32 node,
			       __be32 service)
{
	struct cursor c = ctx_cursor(ctx);
	__be32 entropy;

	cursor_take(&c, struct eth_hdr);
	if (c.pos + sizeof(struct outer_head) > c.end)
		return 0;
	entropy = bpf_htonl(entropy_of(c.pos) << ENTRY_LABEL_SHIFT);
	for (__u32 i = 0; i < LABELS_MAX; i++) {
		__be32 *at = cursor_take(&c, __be32);

		if (i > next + 1 || !at)
			break;
		*at = (*at & bpf_htonl(ENTRY_BOTTOM)) |
		      entry_written(i, next + 2, node, service, entropy);
	}
	return 0;
}

/* Moves on to the next visit. The packet keeps its length. */
static __always_inline void outer_advance(ctx_t *ctx, const struct outer *o,
					  const struct outer_next *next,
					  bool first)
{
	__be32 *top = o->top, *pair = next->pair;
	__be32 bottom = pair[1] & bpf_htonl(ENTRY_BOTTOM);
	__be32 node = entry_of(top[0], entry_label(pair[0]), next->ttl);
	__be32 service = entry_of(top[SERVICE_AT], entry_label(pair[1]),
				  next->ttl);

	(void)first;
	if (!outer_is_plain(o)) {
		ws_labels_write(ctx, shape_next(o->shape), node, service);
		return;
	}
	top[0] = node;
	top[SERVICE_AT] = service;
	pair[0] = top[1];
	pair[1] = top[2] | bottom;
}

/* The next SID of an advanced packet, upper 64 bits. */
static __always_inline __be64 outer_advanced_sid(const struct outer *o,
						 const struct outer_next *next)
{
	(void)o;
	return next->sid.hi;
}

/* At an egress: does the stack have another visit? */
static __always_inline bool outer_segments_remain(const struct outer *o,
						  const struct ws_hop *hop)
{
	(void)hop;
	return shape_next(o->shape);
}

/* The stack no longer has the labels of earlier visits: only the stamps prove them. */
static __always_inline bool outer_list_is_planned(const struct outer *o,
						  const struct ws_egress *e)
{
	(void)o;
	(void)e;
	return true;
}

/* The beginning of an outer header in a map. */
static __always_inline const struct outer_head *outer_head_of(const __u8 *outer)
{
	return (const struct outer_head *)outer;
}

/* The next SID of a packet with this header, upper 64 bits.
 * The stack is one of those that entry_written makes.
 */
static __always_inline __be64 outer_head_sid(const struct outer_head *h)
{
	if (entry_label(h->entry[1]) == LABEL_ENTROPY)
		return label_sid(entry_label(h->entry[SERVICE_AT]));
	if (entry_label(h->entry[2]) == LABEL_ENTROPY)
		return label_sid(entry_label(h->entry[SERVICE_AT + 1]));
	return label_sid(entry_label(h->entry[2]));
}

/* The label of the next node of a packet with this header. */
static __always_inline __u32 outer_head_node(const struct outer_head *h)
{
	return entry_label(h->entry[0]);
}

/* The key of the remembered next hop: the label of the next node, which all SIDs there share. */
static __always_inline __be64 outer_head_to(const struct outer_head *h)
{
	return outer_head_node(h);
}

static __always_inline __be64 outer_next_to(const struct outer_next *next)
{
	return entry_label(next->pair[0]);
}

/* The fields of an outer header that depend on the packet: class, and flow as entropy label. */
struct outer_marks {
	__u32 class; /* three bits */
	__u32 entropy;
};

/* The fields for a packet that gets its outer header. c: behind its IP header.
 * The class is the class selector of its DSCP (RFC 2474 4.2.2, RFC 5462).
 */
static __always_inline struct outer_marks outer_marks_of(struct cursor c,
							 const struct ip *in)
{
	__u32 label = flow_hash(c, in) & 0xfffff;

	return (struct outer_marks){
		.class = bpf_ntohl(ip_vtc(in)) >> 25 & 7,
		.entropy = label < LABEL_LEAST ? label + LABEL_LEAST : label,
	};
}

/* The flow of a packet with an outer header, or before it: the entropy label. */
static __always_inline __u32 outer_marks_flow(struct outer_marks m)
{
	return m.entropy;
}

static __always_inline __u32 outer_head_flow(const struct outer_head *h)
{
	return entropy_of(h->entry);
}

static __always_inline __u32 outer_flow(const struct outer *o)
{
	return entropy_of(o->top);
}

/* Labels have no length field. */
static __always_inline bool outer_can_hold(__u32 outer_len, __u32 inner_len)
{
	(void)outer_len;
	(void)inner_len;
	return true;
}
