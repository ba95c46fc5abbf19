/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The path of a packet by rules with protocol, ports, DSCP and
 * mark, in the order of their priorities. Headend and guard
 * have the same rules, except for marks, which other nodes
 * cannot see. The cost depends little on the number of rules.
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

/* Is exactly one rule in f? f is not empty. */
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

/* Index: the lowest bit times a de Bruijn number (B(2, 6), 0x03f79d71b4cb0a89). */
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

/* Steps of a binary search in 512 values; value 513 is compared separately. */
#define CUT_STEPS 9
#define CUT_LAST (1U << CUT_STEPS)
_Static_assert(CUT_LAST == WS_RULE_CUTS - 1, "a step is missing");

static __always_inline bool addr_is_from(const struct ws_rule_addrs *a, __u32 i,
					 __u64 hi, __u64 lo)
{
	return hi > a->from[i][0] ||
	       (hi == a->from[i][0] && lo >= a->from[i][1]);
}

/* The range of an address. start is 0, but unknown to the verifier:
 * otherwise it would check each path through the steps separately.
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

/* A packet with the proof of a path by mark had the mark; without
 * a proof, the mark is unknown. A function of its own, so that
 * its prototype carries the set's type into the object's BTF.
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

/* Reads the fields that rules compare from the packet at off, into s. False:
 * no rule can match the packet. TC has pulled the bytes that tuple_read reads.
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

/* The result of the ordered rules for a packet. */
enum rules_answer {
	RULES_NONE, /* no rule matches: prefixes decide */
	RULES_TAKE, /* take the packet; target in the scratch memory */
	RULES_TAKE_UNLESS_PREFIX, /* as RULES_TAKE, if no prefix takes the packet as well */
	RULES_UNREAD, /* no rule matches; with all fields readable one might */
	/* An earlier rule could match the unreadable fields. XDP leaves the packet to TC. */
	RULES_UNKNOWN,
	RULES_MISSING, /* the set of rules is missing */
};

static __noinline bool rules_read(ctx_t *ctx, struct scratch *s, __u32 off,
				  int is_ip4)
{
	struct cursor c = ctx_cursor(ctx);

	barrier_var(off);
	c.pos += off & 1023;
	/* One test: a verifier may forget the result of an earlier one. */
	return is_ip4 & 1 ? rules_read_as(c, s, true) :
			    rules_read_as(c, s, false);
}

/* s->fit has the rules that match by addresses and DSCP. Keeps the rules
 * there that match by the packet's upper layer, and puts into s->could the
 * rules that could match what the receiver may find there. A function of
 * its own, like rules_unread: ws_rules_find and its callers have 512 bytes
 * of stack together, and Linux 6.1 rounds each stack frame up to 32 bytes.
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
	/* The first fragment may have another protocol: add the rules without ports of every
	 * protocol. A first fragment that a rule by ports could take is refused itself.
	 */
	if (known == TUPLE_LATER)
		fit_or(&s->could, s->fit.word);
	fit_and(&s->fit, named);
}

/* Leaves in s->fit the rules that a packet matches by all fields except
 * its mark. If some of their fields are unreadable, s->could has the
 * rules that could match. Returns RULES_NONE if none matches, RULES_TAKE,
 * or, on XDP, RULES_UNKNOWN. off: of the IP header, from the start of the
 * frame. proven: with WS_RULE_REQUIRE the path of the proof, else unused.
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
		s->tuple.known = TUPLE_PORTS; /* no rule needs more fields */
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

/* The result for a packet with unreadable fields that a rule may need: otherwise a
 * sender could choose the chain by hiding them. A rule takes the packet if no
 * earlier rule could. A later fragment may belong to any datagram: a rule takes it
 * only if no later rule could either. fits: a rule matches the readable fields.
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

/* Leaves the target of the first matching rule in the scratch memory;
 * see rules_fit. RULES_TAKE_UNLESS_PREFIX, RULES_UNREAD and, on TC,
 * RULES_UNKNOWN only if rules_steer(use). Not for WS_RULE_LEAVE.
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

/* The path by prefixes that the inner packet at off requires,
 * with the results of rules_find. Like inner_guard, with the
 * addresses in the scratch memory, since the stack is full.
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

/* As rules_find. With WS_RULE_REQUIRE, if no rule matches, the path
 * by prefixes: the stack has no room for one more function call.
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

/* The target of the rule that took the packet; 0: none did. */
static __always_inline __u32 rule_target(void)
{
	const struct scratch *s = scratch();

	return s ? s->rule_target : 0;
}

/* The path that the inner packet at off requires, by the chains that end
 * here. On XDP WS_MATCH_MISSING also if too little of the packet is readable.
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
