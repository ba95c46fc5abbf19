/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Which path a packet belongs to, by rules with protocol, ports, DSCP and mark, in
 * the order of their priorities. The same at the headend and at the guard, but for
 * marks, which nobody sees at another node. What it costs depends little on how
 * many rules there are.
 */
#pragma once

#include "lib/hook.h"
#include "lib/match/classify.h"
#include "lib/node/maps.h"
#include "lib/wire/ip.h"
#include "lib/wire/net.h"
#include "lib/wire/tuple.h"

static __always_inline void fit_and(struct rules_fit *f, const __u64 *with)
{
	for (__u32 i = 0; i < WS_RULE_WORDS; i++)
		f->word[i] &= with[i];
}

static __always_inline void fit_or(struct rules_fit *f, const __u64 *with)
{
	for (__u32 i = 0; i < WS_RULE_WORDS; i++)
		f->word[i] |= with[i];
}

static __always_inline bool fit_is_empty(const struct rules_fit *f)
{
	__u64 any = 0;

	for (__u32 i = 0; i < WS_RULE_WORDS; i++)
		any |= f->word[i];
	return !any;
}

static __always_inline bool fit_meets(const struct rules_fit *f,
				      const __u64 *with)
{
	__u64 any = 0;

	for (__u32 i = 0; i < WS_RULE_WORDS; i++)
		any |= f->word[i] & with[i];
	return any;
}

/* Is one rule in f, which is not empty, and no more? */
static __always_inline bool fit_is_one(const struct rules_fit *f)
{
	__u64 more = 0, any = 0;

	for (__u32 i = 0; i < WS_RULE_WORDS; i++) {
		more |= f->word[i] & (f->word[i] - 1);
		if (f->word[i])
			more |= any;
		any |= f->word[i];
	}
	return !more;
}

/* By the lowest bit times a de Bruijn number (B(2, 6), 0x03f79d71b4cb0a89). */
static const __u8 lowest_bit[64] = {
	0,  1,	48, 2,	57, 49, 28, 3,	61, 58, 50, 42, 38, 29, 17, 4,
	62, 55, 59, 36, 53, 51, 43, 22, 45, 39, 33, 30, 24, 18, 12, 5,
	63, 47, 56, 27, 60, 41, 37, 16, 54, 35, 52, 21, 44, 32, 23, 11,
	46, 26, 40, 15, 34, 20, 31, 10, 25, 14, 19, 9,	13, 8,	7,  6,
};

/* The first rule in f, which is not empty. */
static __always_inline __u32 fit_first(const struct rules_fit *f)
{
	__u64 word = f->word[WS_RULE_WORDS - 1];
	__u32 base = 64 * (WS_RULE_WORDS - 1);

	for (__u32 i = WS_RULE_WORDS - 1; i > 0; i--) {
		if (f->word[i - 1]) {
			word = f->word[i - 1];
			base = 64 * (i - 1);
		}
	}
	word &= -word;
	return base + (lowest_bit[word * 0x03f79d71b4cb0a89ULL >> 58] & 63);
}

/* Steps that find one of 512; the 513th is looked at by itself. */
#define CUT_STEPS 9
#define CUT_LAST (1U << CUT_STEPS)
_Static_assert(CUT_LAST == WS_RULE_CUTS - 1, "a step is missing");

static __always_inline bool addr_is_from(const struct ws_rule_addrs *a, __u32 i,
					 __u64 hi, __u64 lo)
{
	return hi > a->from[i][0] ||
	       (hi == a->from[i][0] && lo >= a->from[i][1]);
}

/* Which range an address is in. start is 0, which the verifier does not know:
 * else it would follow each way through the steps by itself.
 */
static __noinline __u32 rule_addr_cut(const struct ws_rule_addrs *a, __u64 hi,
				      __u64 lo)
{
	__u32 i = a->start & (CUT_LAST - 1), first = a->step;

	for (__u32 step = CUT_LAST / 2; step; step /= 2) {
		__u32 next = (i + step) & (CUT_LAST - 1);

		if (step <= first && addr_is_from(a, next, hi, lo))
			i = next;
	}
	if (i == CUT_LAST - 1 && addr_is_from(a, CUT_LAST, hi, lo))
		i = CUT_LAST;
	return i;
}

static __noinline __u32 rule_number_cut(const struct ws_rule_numbers *a,
					__u32 number)
{
	__u32 i = a->start & (CUT_LAST - 1), first = a->step;

	for (__u32 step = CUT_LAST / 2; step; step /= 2) {
		__u32 next = (i + step) & (CUT_LAST - 1);

		if (step <= first && number >= a->from[next])
			i = next;
	}
	if (i == CUT_LAST - 1 && number >= a->from[CUT_LAST])
		i = CUT_LAST;
	return i;
}

static __always_inline void
fit_addr(struct rules_fit *f, const struct ws_rule_addrs *a, const __be64 *addr)
{
	__u32 i = rule_addr_cut(a, bpf_be64_to_cpu(addr[0]),
				bpf_be64_to_cpu(addr[1]));

	if (i < WS_RULE_CUTS)
		fit_and(f, a->fit[i]);
}

static __always_inline void
fit_port(struct rules_fit *f, const struct ws_rule_numbers *a, __be16 port)
{
	__u32 i = rule_number_cut(a, bpf_ntohs(port));

	if (i < WS_RULE_CUTS)
		fit_and(f, a->fit[i]);
}

static __always_inline const struct ws_ruleset *rules_set(void)
{
	__u32 zero = 0;
	void *rules = bpf_map_lookup_elem(&ws_rules, &zero);

	return rules ? bpf_map_lookup_elem(rules, &zero) : NULL;
}

/* What came with the proof of a path by mark had the mark; of what came without,
 * nobody knows. A function of its own, so that its prototype carries the set's
 * type into the object's BTF.
 */
static __noinline void fit_proven(struct rules_fit *f,
				  const struct ws_ruleset *set, __u32 proven)
{
	__u32 i = rule_number_cut(&set->proven, proven);

	if (i >= WS_RULE_CUTS)
		return;
	for (__u32 w = 0; w < WS_RULE_WORDS; w++)
		f->word[w] &= set->any_mark[w] | set->proven.fit[i][w];
}

static __always_inline void tuple_addrs(struct tuple *t, const struct ip *in)
{
	struct addrs a = ip_addrs(in);

	t->src[0] = a.src[0];
	t->src[1] = a.src[1];
	t->dst[0] = a.dst[0];
	t->dst[1] = a.dst[1];
}

/* What rules look at of the packet at off, in s. False: there is nothing that a
 * rule could fit. TC has pulled what tuple_read reads.
 */
static __always_inline bool rules_read_as(struct cursor c, struct scratch *s,
					  const bool is_ip4)
{
	struct cursor at = c;
	struct ip in;

	if (!ip_take(&at, is_ip4, &in))
		return false;
	s->dscp = bpf_ntohl(ip_vtc(&in)) >> 22 & 63;
	tuple_read(c, is_ip4, &s->tuple);
	return true;
}

/* What ordered rules say of a packet. */
enum rules_answer {
	RULES_NONE, /* nothing: prefixes decide */
	RULES_TAKE, /* the target in the scratch memory */
	RULES_TAKE_UNLESS_PREFIX, /* the same, unless a prefix takes it as well */
	RULES_UNREAD, /* none takes it; if more of it could be read, one might */
	/* An earlier rule could fit what cannot be read. XDP leaves it to TC. */
	RULES_UNKNOWN,
	RULES_MISSING, /* there should be rules, and are none */
};

static __noinline bool rules_read(ctx_t *ctx, struct scratch *s, __u32 off,
				  int is_ip4)
{
	struct cursor c = ctx_cursor(ctx);

	barrier_var(off);
	c.pos += off & 1023;
	/* Asked once: a verifier may forget the answer. */
	return is_ip4 & 1 ? rules_read_as(c, s, true) :
			    rules_read_as(c, s, false);
}

/* From the rules that fit the packet by addresses and DSCP, in s->fit, those that
 * fit it by what it says of its upper layer, and in s->could those that would fit
 * what its receiver may find there. A function of its own, as rules_unread is:
 * ws_rules_find and all that lead to it have 512 bytes of stack together, and Linux
 * 6.1 counts those of each in steps of 32.
 */
static __noinline void fit_upper_layer(struct scratch *s,
				       const struct ws_ruleset *set)
{
	const __u64 *named = set->protocol[s->tuple.protocol];
	__u32 known = s->tuple.known;

	if (known != TUPLE_PORTS) {
		__builtin_memcpy(&s->could, &s->fit, sizeof(s->could));
		if (known >= TUPLE_LATER)
			fit_and(&s->could, named);
	}
	fit_port(&s->fit, &set->sport, s->tuple.sport);
	fit_port(&s->fit, &set->dport, s->tuple.dport);
	/* A datagram whose first fragment a rule by ports could take is refused with
	 * that one. All others may be what this is a part of.
	 */
	if (known == TUPLE_LATER)
		fit_or(&s->could, s->fit.word);
	fit_and(&s->fit, named);
}

/* The rules that a packet fits by all but its mark are left in s->fit; if not all
 * that they ask for can be read, in s->could those that it could fit. Returns
 * RULES_NONE where it fits none, RULES_TAKE, or, on XDP, RULES_UNKNOWN. off: of the IP
 * header, from the start of the frame. proven: by WS_RULE_REQUIRE the path of the
 * proof, else nothing.
 */
static __always_inline enum rules_answer
rules_fit(ctx_t *ctx, struct scratch *s, const struct ws_ruleset *set,
	  __u32 off, __u32 use, int is_ip4, __u32 proven)
{
	s->tuple.known = TUPLE_PORTS;
	if (!rules_read(ctx, s, off, is_ip4))
		return RULES_NONE;
	if (s->tuple.known < TUPLE_PROTOCOL && WS_HOOK == WS_HOOK_XDP)
		return RULES_UNKNOWN;
	__builtin_memcpy(&s->fit, set->use[use][is_ip4 & 1], sizeof(s->fit));
	fit_and(&s->fit, set->dscp[s->dscp & 63]);
	fit_addr(&s->fit, &set->dst, s->tuple.dst);
	if (fit_is_empty(&s->fit)) {
		s->tuple.known = TUPLE_PORTS; /* nobody asks for more */
		return RULES_NONE;
	}
	fit_addr(&s->fit, &set->src, s->tuple.src);
	fit_upper_layer(s, set);
	if (use == WS_RULE_SUSPECT && s->tuple.known != TUPLE_PORTS)
		__builtin_memcpy(&s->fit, &s->could, sizeof(s->fit));
	if (use == WS_RULE_REQUIRE)
		fit_proven(&s->fit, set, proven);
	return fit_is_empty(&s->fit) ? RULES_NONE : RULES_TAKE;
}

/* What rules say of a packet of which a rule may ask for more than can be read:
 * else who hides that would choose the chain. A rule takes the packet if no rule
 * before it could; of a later fragment, which may be anything, if none behind it
 * could, either. fits: some rule fits it as it is.
 */
static __noinline enum rules_answer
rules_unread(struct scratch *s, const struct ws_ruleset *set, bool fits)
{
	__u32 first;

	if (fit_is_empty(&s->could))
		return RULES_NONE;
	first = fit_first(&s->could);
	if (!fits || fit_first(&s->fit) != first)
		return fits ? RULES_UNKNOWN : RULES_UNREAD;
	first &= WS_RULES_MAX - 1;
	s->rule_target = set->steer[first] & WS_RULE_TARGET;
	if (s->tuple.known != TUPLE_LATER ||
	    set->any_protocol[first / 64] >> (first & 63) & 1)
		return RULES_TAKE;
	return fit_is_one(&s->could) ? RULES_TAKE_UNLESS_PREFIX : RULES_UNKNOWN;
}

/* Do rules of this use name a headend? */
static __always_inline bool rules_steer(__u32 use)
{
	return use == WS_RULE_STEER || use >= WS_RULE_ORIGIN;
}

/* The target of the first rule that fits a packet is left in the scratch memory; see
 * rules_fit. Only where rules_steer RULES_TAKE_UNLESS_PREFIX, RULES_UNREAD and, on TC,
 * RULES_UNKNOWN. Not for WS_RULE_LEAVE.
 */
static __always_inline enum rules_answer
rules_find(ctx_t *ctx, __u32 off, __u32 use, int is_ip4, __u32 proven)
{
	const struct ws_ruleset *set = rules_set();
	struct scratch *s = scratch();
	enum rules_answer fits;
	__u32 first;

	if (!set || !s)
		return rules_are_missed() ? RULES_MISSING : RULES_NONE;
	fits = rules_fit(ctx, s, set, off, use, is_ip4, proven);
	if (fits == RULES_UNKNOWN)
		return fits;
	if (rules_steer(use) && s->tuple.known != TUPLE_PORTS)
		return rules_unread(s, set, fits == RULES_TAKE);
	if (fits == RULES_NONE)
		return fits;
	first = fit_first(&s->fit) & (WS_RULES_MAX - 1);
	s->rule_target = rules_steer(use) ? set->steer[first] & WS_RULE_TARGET :
					    set->require[first];
	return s->rule_target ? RULES_TAKE : RULES_NONE;
}

/* What chains that end here require of the inner packet at off, as rules_find says
 * it. What inner_guard says, with the addresses in the scratch memory: the stack is
 * full.
 */
static __always_inline enum rules_answer
required_by_prefixes(ctx_t *ctx, __u32 off, int is_ip4)
{
	struct cursor c = ctx_cursor(ctx);
	struct scratch *s = scratch();
	struct ws_match m;
	struct ip in;

	barrier_var(off);
	c.pos += off & 1023;
	if (!s || !ip_take(&c, is_ip4, &in))
		return RULES_NONE;
	tuple_addrs(&s->tuple, &in);
	m = prefix_find(WS_MATCH_REQUIRE, s->tuple.dst, s->tuple.src);
	if (m.action == WS_MATCH_MISSING)
		return RULES_MISSING;
	if (m.action != WS_MATCH_PATH)
		return RULES_NONE;
	s->rule_target = m.target;
	return RULES_TAKE;
}

/* As rules_find. By WS_RULE_REQUIRE, where no rule fits, the path by prefixes: one
 * function less to call has room on the stack.
 */
__noinline enum rules_answer ws_rules_find(ctx_t *ctx, __u32 off, __u32 use,
					   int is_ip4, __u32 proven)
{
	enum rules_answer found = RULES_NONE;

	use &= WS_RULE_USES - 1;
	if (rules_are_there())
		found = rules_find(ctx, off, use, is_ip4, proven);
	if (found != RULES_NONE || use != WS_RULE_REQUIRE)
		return found;
	return required_by_prefixes(ctx, off, is_ip4);
}

/* What the rule says that took the packet; 0: none did. */
static __always_inline __u32 rule_target(void)
{
	const struct scratch *s = scratch();

	return s ? s->rule_target : 0;
}

/* The path that chains that end here require of the inner packet at off. On XDP
 * WS_MATCH_MISSING also where too little of the packet can be read.
 */
static __always_inline struct ws_match required_find(ctx_t *ctx, __u32 off,
						     int is_ip4, __u32 proven)
{
	struct ws_match m = {};

	switch (ws_rules_find(ctx, off, WS_RULE_REQUIRE, is_ip4, proven)) {
	case RULES_NONE:
		return m;
	case RULES_TAKE:
		m.action = WS_MATCH_PATH;
		m.target = rule_target();
		return m;
	default:
		m.action = WS_MATCH_MISSING;
		return m;
	}
}
