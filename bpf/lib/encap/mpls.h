/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Labels (RFC 3032): a stack of entries, behind its bottom a word that says what is
 * inside, and then the proof. Programs that define WS_MPLS know this outer header and
 * no other; what is asked of it are the functions that srv6*.h have, too.
 *
 * For each visit the stack has a pair: the label of a node, and the service label, which
 * names a SID of the block. Behind the first node label is an entropy indicator with its
 * label (RFC 6790). A hop writes the next pair over its own, and an entropy pair over
 * the next one, so that the packet keeps its length.
 */
#pragma once

#include "lib/hook.h"
#include "lib/node/maps.h"
#include "lib/reason.h"
#include "lib/wire/cursor.h"
#include "lib/wire/flow.h"
#include "lib/wire/ip.h"
#include "lib/wire/net.h"

/* Labels of RFC 3032 2.1 and RFC 6790 3. */
#define LABEL_IP4_NULL 0
#define LABEL_ROUTER_ALERT 1
#define LABEL_IP6_NULL 2
#define LABEL_ENTROPY 7
#define LABEL_LEAST 16 /* those below are special */

/* An entry: label 20 bits, traffic class 3, bottom of the stack 1, TTL 8. */
#define ENTRY_LABEL_SHIFT 12
#define ENTRY_LABEL_MASK 0xfffff000U
#define ENTRY_CLASS_SHIFT 9
#define ENTRY_BOTTOM 0x100U
#define ENTRY_TTL 0xffU

/* Entries that are looked at for the bottom. */
#define LABELS_MAX 40

/* Where our own headends put the service label of the first visit, and hops that of the
 * next one: behind the node label and the entropy pair.
 */
#define SERVICE_AT 3

/* Between stack and proof; see docs/protocol/mpls.md. */
struct word {
	__u8 version; /* 0; its upper half keeps routers from taking it for IP (RFC 4385 3) */
	__u8 flags;
	__u8 reserved;
	__u8 nexthdr; /* of what is behind the proof */
};
_Static_assert(sizeof(struct word) == 4, "word");

#define OUTER_IS_IP false /* programs write the link-layer addresses */
#define OUTER_PROTO ETH_P_MPLS_UC

static __always_inline bool form_is_outer(__u32 form)
{
	return form == WS_FORM_LABELS;
}

/* The outer header of a packet with labels, for a SID of this node. Numbers of entries
 * count from 0.
 */
struct outer {
	void *end; /* of the packet */
	__be32 *top; /* five entries are in bounds */
	struct word *word;
	__be64 sid; /* of the service label, upper 64 bits */
	__u32 shape; /* see shape_bottom */
	__u32 len; /* bytes from top to the end of the frame */
};

/* The beginning of an outer header, wherever it lies. Each has that much. */
struct outer_head {
	__be32 entry[5];
};

/* Bytes of the shortest outer header: one visit. */
#define OUTER_LEN_MIN (4 * 4 + sizeof(struct word) + sizeof(struct proof_tlv))

static __always_inline __u32 entry_label(__be32 entry)
{
	return bpf_ntohl(entry) >> ENTRY_LABEL_SHIFT;
}

static __always_inline __u32 entry_ttl(__be32 entry)
{
	return bpf_ntohl(entry) & ENTRY_TTL;
}

/* The entry with another label and TTL, which is not the bottom. */
static __always_inline __be32 entry_of(__be32 entry, __u32 label, __u32 ttl)
{
	__u32 class = bpf_ntohl(entry) & 7 << ENTRY_CLASS_SHIFT;

	return bpf_htonl(label << ENTRY_LABEL_SHIFT | class | ttl);
}

/* Not 0, which no SID is: 0 where the label is none of the domain's services. */
static __always_inline __be64 label_sid(__u32 label)
{
	__u32 place = label - cfg.services;

	return place <= 0xffff ? cfg.block | bpf_cpu_to_be64((__u64)place) : 0;
}

/* What a stack says, in one number: the entry of the bottom, of the service label that
 * is this node's turn, and of the node label of the next visit, 0: there is none.
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

/* Why a label ends a stack that is before the service label, and not this node's. */
static __always_inline int label_bad(__u32 label)
{
	if (label == LABEL_IP4_NULL || label == LABEL_IP6_NULL)
		return -(int)REASON(LABEL_NULL);
	if (label == LABEL_ROUTER_ALERT)
		return -(int)REASON(LABEL_ALERT);
	return -(int)REASON(LABEL_UNKNOWN);
}

/* The entry of the first service label, or a negative reason. Before it may be
 * this node's own label, more than once, or not, as the last router takes it off; and
 * entropy pairs. A function of its own as the next two, so that the verifier looks at the
 * loop once.
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
 * Behind the service label are entropy pairs where others were.
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

/* The shape of a stack as our own headends and hops write it, or -1: of any other, and of
 * those that have no shape. One walk from pair to pair, in place of three from entry to entry.
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

/* What is inside, as a Next Header value. */
static __always_inline __u32 outer_inner_is(const struct outer *o)
{
	return o->word->nexthdr;
}

/* Bytes from the outer header on: labels say none but the frame's. */
static __always_inline __u32 outer_says_len(const struct outer *o)
{
	return o->len;
}

/* Where the packet goes now: the upper 64 bits of a SID. */
static __always_inline __be64 outer_sid(const struct outer *o)
{
	return o->sid;
}

/* RFC 5129, congestion marks in labels, is not spoken. */
static __always_inline __u32 outer_ecn(const struct outer *o)
{
	(void)o;
	return ECN_NOT_ECT;
}

/* Of the proof, in bytes from the outer header. */
static __always_inline __u32 outer_offset(const struct outer *o,
					  const struct proof_tlv *tlv)
{
	return (void *)tlv - (void *)o->top;
}

/* Labels name no source. So no path over labels has one, and none comes over SRv6. */
static __always_inline bool outer_is_from_headend(const struct outer *o,
						  const struct ws_hop *hop,
						  __be32 path)
{
	(void)o;
	(void)path;
	return form_is_outer(hop->form);
}

/* There is no room for an argument: the plan's counts alone. */
static __always_inline bool outer_argument_is_planned(const struct outer *o,
						      const struct ws_hop *hop)
{
	(void)o;
	(void)hop;
	return true;
}

/* From the stack, where c stands, to the proof. len: bytes from there to the end of the frame.
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
		barrier_var(
			bad); /* else the verifier has to know that it is not 0 */
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

/* Is the stack as our own headends and hops write it? */
static __always_inline bool outer_is_plain(const struct outer *o)
{
	return shape_service(o->shape) == SERVICE_AT &&
	       entry_label(o->top[0]) == cfg.label &&
	       entry_label(o->top[1]) == LABEL_ENTROPY;
}

/* Where a packet goes next. */
struct outer_next {
	struct sid sid;
	__be32 *pair; /* that of the next visit, in bounds */
	__u32 ttl; /* that it leaves with */
};

/* Has the packet a next visit, and may it go on? Changes nothing. first: false where
 * its TTL has been counted. It leaves with the least TTL of what is consumed, less one.
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

/* The n-th entry, if a stack of this shape begins with that of the next visit, which is
 * node and service. In one that came without its node label, and cannot become shorter
 * here, the next node's is there twice. bottom: of the entry that was there.
 */
static __always_inline __be32 entry_written(__u32 n, __u32 all, __be32 node,
					    __be32 service, __be32 entropy)
{
	__u32 nodes = all & 1 ? 2 : 1, pairs = all > 3 ? 2 : 0;

	if (n < nodes)
		return node;
	if (n == nodes + pairs)
		return service;
	/* In front of the service label and behind it are entropy pairs. */
	if (n > nodes + pairs)
		n--;
	return (n - nodes) & 1 ? entropy :
				 entry_of(node, LABEL_ENTROPY, entry_ttl(node));
}

/* The entropy label of a stack that begins so; there may be none. */
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

/* Writes the entries up to the next visit's pair anew, which begins at entry next:
 * of a stack that is not as our own headends and hops write it. node and service: of
 * the next visit. A function of its own, as those above.
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

/* Does not change the packet's length. */
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

/* Where an advanced packet goes: the upper 64 bits of a SID. */
static __always_inline __be64 outer_advanced_sid(const struct outer *o,
						 const struct outer_next *next)
{
	(void)o;
	return next->sid.hi;
}

/* At an egress: is there a visit behind it? */
static __always_inline bool outer_segments_remain(const struct outer *o,
						  const struct ws_hop *hop)
{
	(void)hop;
	return shape_next(o->shape);
}

/* What was consumed is gone: the stamps alone say who was visited. */
static __always_inline bool outer_list_is_planned(const struct outer *o,
						  const struct ws_egress *e)
{
	(void)o;
	(void)e;
	return true;
}

/* What a map holds of an outer header, from its beginning. */
static __always_inline const struct outer_head *outer_head_of(const __u8 *outer)
{
	return (const struct outer_head *)outer;
}

/* Where a packet with this header goes next: the upper 64 bits of a SID. The shapes are
 * those of entry_written.
 */
static __always_inline __be64 outer_head_sid(const struct outer_head *h)
{
	if (entry_label(h->entry[1]) == LABEL_ENTROPY)
		return label_sid(entry_label(h->entry[SERVICE_AT]));
	if (entry_label(h->entry[2]) == LABEL_ENTROPY)
		return label_sid(entry_label(h->entry[SERVICE_AT + 1]));
	return label_sid(entry_label(h->entry[2]));
}

/* And to which node, by its label. */
static __always_inline __u32 outer_head_node(const struct outer_head *h)
{
	return entry_label(h->entry[0]);
}

/* The same as what a way is remembered by: all packets to there take it. */
static __always_inline __be64 outer_head_to(const struct outer_head *h)
{
	return outer_head_node(h);
}

static __always_inline __be64 outer_next_to(const struct outer_next *next)
{
	return entry_label(next->pair[0]);
}

/* What an outer header says of its packet: class, and flow as entropy label. */
struct outer_marks {
	__u32 class; /* three bits */
	__u32 entropy;
};

/* Those of a packet that gets its outer header. c stands behind its IP header. The class
 * is the class selector of its DSCP (RFC 2474 4.2.2, RFC 5462).
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

/* The flow of a packet that has, or will have, its outer header: the entropy label. */
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

/* Labels say no length. */
static __always_inline bool outer_can_hold(__u32 outer_len, __u32 inner_len)
{
	(void)outer_len;
	(void)inner_len;
	return true;
}
