/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Which path a packet belongs to, by an ordered list of rules with protocol,
 * ports, DSCP and mark. The same at the headend and at the guard, but for marks,
 * which nobody sees at another node. TC only: XDP leaves packets to TC while there
 * are such rules.
 */
#pragma once

#include "classify.h"
#include "hook.h"
#include "inner.h"
#include "maps.h"
#include "net.h"
#include "pull.h"
#include "tuple.h"

enum rule_use {
	RULE_STEER, /* which headend takes the packet */
	RULE_REQUIRE, /* which path a packet must have a proof of */
	/* Whether a packet without proof may be one that needs it. Of a fragment,
	 * or of what cannot be read, nobody knows the ports: all count.
	 */
	RULE_SUSPECT,
	RULE_LEAVE, /* which headend takes a packet that leaves, with its mark */
};

/* What ws_rules_find says of a rule by RULE_LEAVE, beside ws_rule.steer. */
#define RULE_BY_MARK (1U << 31)
#define RULE_BY_DSCP (1U << 30)
#define RULE_TARGET (RULE_BY_DSCP - 1)

struct rule_walk {
	const struct ws_ruleset *set;
	struct tuple t;
	__u32 use; /* enum rule_use */
	__u32 found;
	__u32 mark; /* RULE_LEAVE: the packet's */
	__be32 proven; /* RULE_REQUIRE: the path of the proof that it has */
	__u8 dscp;
	__u8 partial; /* 1: t has nothing but the addresses */
	__u8 is_ip4;
};

static __always_inline bool addr_matches(const __be64 *a, const __be64 *prefix,
					 const __be64 *mask)
{
	return !(((a[0] ^ prefix[0]) & mask[0]) |
		 ((a[1] ^ prefix[1]) & mask[1]));
}

static __always_inline bool port_matches(__be16 port, const __u16 *range)
{
	__u16 p = bpf_ntohs(port);

	return p >= range[0] && p <= range[1];
}

static __always_inline bool rule_matches(const struct ws_rule *r,
					 const struct rule_walk *w)
{
	bool suspect = w->use == RULE_SUSPECT;

	if (r->is_ip4 != w->is_ip4)
		return false;
	if (!addr_matches(w->t.dst, r->dst, r->dst_mask) ||
	    !addr_matches(w->t.src, r->src, r->src_mask))
		return false;
	if (r->dscp != WS_DSCP_ANY && r->dscp != w->dscp)
		return false;
	if (w->partial)
		return suspect || !r->protocol;
	if (r->protocol && r->protocol != w->t.protocol)
		return false;
	if (w->t.fragment && suspect)
		return true;
	return port_matches(w->t.sport, r->sport) &&
	       port_matches(w->t.dport, r->dport);
}

/* A mark counts at the headend, for what leaves. What came with the proof of a
 * path by mark had it; of what came without, nobody knows.
 */
static __always_inline bool mark_matches(const struct ws_rule *r,
					 const struct rule_walk *w)
{
	if (!r->mark_mask)
		return true;
	if (w->use == RULE_LEAVE)
		return (w->mark & r->mark_mask) == r->mark;
	return w->use == RULE_REQUIRE && r->require == w->proven;
}

/* One rule. Returns 1 to end the walk. */
static long rule_step(__u64 i, struct rule_walk *w)
{
	const struct ws_rule *r = &w->set->rule[i & (WS_RULES_MAX - 1)];
	bool leaves = w->use == RULE_LEAVE;
	__u32 target = leaves || w->use == RULE_STEER ? r->steer : r->require;

	if (!target || !mark_matches(r, w) || !rule_matches(r, w))
		return 0;
	w->found = target;
	if (leaves && r->mark_mask)
		w->found |= RULE_BY_MARK;
	if (leaves && r->dscp != WS_DSCP_ANY)
		w->found |= RULE_BY_DSCP;
	return 1;
}

/* All that can be told of a packet that is not whole. */
static __always_inline void tuple_addrs(struct tuple *t, const struct inner *in)
{
	const struct ip4_hdr *ip4 = in->hdr;
	const struct ip6_hdr *ip6 = in->hdr;

	if (in->is_ip4) {
		t->src[1] = ip4_mapped(ip4->src);
		t->dst[1] = ip4_mapped(ip4->dst);
		return;
	}
	t->src[0] = ip6->src[0];
	t->src[1] = ip6->src[1];
	t->dst[0] = ip6->dst[0];
	t->dst[1] = ip6->dst[1];
}

/* ws_rule.steer or .require of the first rule that matches, or 0. off: of the IP
 * header, from the start of the frame; what tuple_read reads has been pulled.
 * proven: by RULE_REQUIRE the path of the proof, else nothing.
 */
__noinline __u32 ws_rules_find(struct __sk_buff *skb, __u32 off, __u32 use,
			       int is_ip4, __u32 proven)
{
	struct rule_walk w = { .use = use, .proven = proven };
	struct cursor c = ctx_cursor(skb), at;
	struct inner in;
	__u32 zero = 0;

	w.set = bpf_map_lookup_elem(&ws_rules, &zero);
	if (!w.set)
		return 0;
	w.mark = skb->mark;
	/* So that the verifier knows it for the same after it was spilled. */
	is_ip4 &= 1;
	barrier_var(is_ip4);
	w.is_ip4 = is_ip4;
	barrier_var(off);
	c.pos += off & 1023;
	at = c;
	if (!inner_take(&at, is_ip4, &in))
		return 0; /* nothing that a rule could match */
	w.dscp = bpf_ntohl(inner_vtc(&in)) >> 22 & 63;
	w.partial = !tuple_read(c, is_ip4, &w.t);
	if (w.partial)
		tuple_addrs(&w.t, &in);
	bpf_loop(w.set->count, rule_step, &w, 0);
	return w.found;
}

/* Pulls what rules look at, if there are any, and at least len bytes. */
static __always_inline long rules_pull(struct __sk_buff *skb, __u32 off,
				       __u32 len)
{
	return pull(skb, rules_are_there() ? off + TUPLE_LEN : len);
}

/* m, unless a rule knows better. */
static __always_inline struct ws_match ruled(struct __sk_buff *skb, __u32 off,
					     bool is_ip4, __u32 use,
					     struct ws_match m)
{
	__u32 target;

	if (!rules_are_there())
		return m;
	target = ws_rules_find(skb, off, use, is_ip4, 0);
	if (!target)
		return m;
	m.action = WS_MATCH_PATH;
	m.target = use == RULE_STEER ? target - 1 : target;
	return m;
}

/* The path that an inner packet with the proof of a path requires: path, unless a
 * rule knows better.
 */
static __always_inline __be32 ruled_path(struct __sk_buff *skb, __u32 off,
					 bool is_ip4, __be32 path, __u32 proven)
{
	__be32 better = 0;

	if (rules_are_there())
		better = ws_rules_find(skb, off, RULE_REQUIRE, is_ip4, proven);
	return better ? better : path;
}
