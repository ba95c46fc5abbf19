/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* TC ingress of the interfaces that a function is behind: what went to it comes
 * back and gets its outer header. What the function made itself, or nobody sent
 * it, has none, by whichever of them it comes.
 */
#include "lib/hook.h"
#include "lib/skb/vlan.h"
#include "lib/sr/guard_tc.h"
#include "lib/detour/out_tc.h"
#include "lib/skb/segmenter.h"
#include "lib/detour/detour.h"
#include "lib/skb/pull.h"

/* A packet without a header kept for it. */
static __always_inline int unknown(struct __sk_buff *skb,
				   const struct ws_proxy *p)
{
	struct cursor c = ctx_cursor(skb);
	const struct eth_hdr *eth;
	struct ip in;

	proxy_count(p, tx_not_cached);
	if (p->on_unknown != WS_ON_UNKNOWN_PLAIN)
		return ws_refuse(skb, REASON(NOT_CACHED), 0);
	proxy_count(p, tx_plain);
	eth = cursor_take(&c, struct eth_hdr);
	if (!eth || !ip_take(&c, eth_is_ip4(eth), &in))
		return ws_refuse(skb, REASON(BOUNDS_BUG), 0);
	return guard_plain(skb, &in);
}

/* What became of a packet that has come back. */
struct back {
	bool found; /* a header was kept for it */
	reason_t bad; /* why the packet cannot have it */
	__s32 err; /* of a helper */
	__u32 exit; /* where its way is remembered */
};

static __always_inline void by_metadata(struct __sk_buff *skb,
					const struct ws_proxy *p, __u32 id,
					__u32 slot, struct back *back)
{
	__u64 now = bpf_ktime_get_coarse_ns(), expires = 0;
	struct ws_cached *c = slot_claim(slot, id, now, &expires);
	long err = 0;

	if (!c)
		return;
	back->found = true;
	back->bad = restore(skb, c, &back->exit, &err);
	back->err = err;
	slot_give(c, SLOT_FREE);
	if (!back->bad)
		proxy_waited(p, now, expires);
}

static __always_inline void by_content(struct __sk_buff *skb,
				       const struct ws_proxy *p, __u32 id,
				       struct back *back)
{
	struct cache_query query;
	__u64 now, expires, fp;
	struct ws_cached *c;
	__u32 entry;
	long err = 0;

	fp = ws_fingerprint(skb, sizeof(struct eth_hdr), skb_is_ip4(skb));
	if (!fp)
		return;
	now = bpf_ktime_get_coarse_ns();
	query = cache_query(p, id, fp, now);
	entry = ws_cache_take(&query);
	c = cache_entry(entry);
	if (!c)
		return;
	expires = c->expires;
	back->found = true;
	back->bad = restore(skb, c, &back->exit, &err);
	back->err = err;
	cache_give(entry, TAG_FREE);
	if (!back->bad)
		proxy_waited(p, now, expires);
}

/* back is zero. A function of its own, for its stack, which is gone when the next
 * segment on this node is looked at. Neither p nor back is ever NULL.
 */
__noinline int ws_back(struct __sk_buff *skb, const struct ws_proxy *p,
		       __u32 id, __u32 slot, struct back *back)
{
	if (!p || !back)
		return 0;
	if (p->recognise == WS_RECOGNISE_METADATA)
		by_metadata(skb, p, id, slot, back);
	else
		by_content(skb, p, id, back);
	return 0;
}

static __always_inline int from_function(struct __sk_buff *skb,
					 const struct ws_proxy *p, __u32 id)
{
	__u32 slot = skb->tc_index;
	struct back back = {};

	skb->tc_index = 0;
	ws_back(skb, p, id, slot, &back);
	if (!back.found)
		return unknown(skb, p);
	if (back.bad)
		return ws_refuse(skb, back.bad, back.err);
	return restored_next(skb, back.exit);
}

SEC("tc")
int ws_function_tc(struct __sk_buff *skb)
{
	__u32 ifindex = skb->ifindex, index = skb->tc_index, id;
	const struct ws_port *port;
	const struct ws_proxy *p;
	struct eth_hdr *eth;
	struct ip in;
	struct addrs a;
	struct ws_match m;
	struct cursor c;
	int verdict;
	long rc;

	/* The function's namespace can write there what it likes. */
	if (index == WS_INDEX_PROVEN)
		skb->tc_index = index = 0;
	if (!frame_is_ours(skb, &verdict))
		return verdict;
	port = bpf_map_lookup_elem(&ws_ports, &ifindex);
	id = port ? port->proxy : 0;
	barrier_var(index); /* else the compiler computes on the context */
	if (port && port->cutter)
		id = index;
	p = proxy_find(id);
	rc = rules_pull(skb, sizeof(struct eth_hdr),
			sizeof(struct eth_hdr) + sizeof(struct ip6_hdr));
	c = ctx_cursor(skb);
	eth = cursor_take(&c, struct eth_hdr);
	if (!eth || !eth_is_ip(eth))
		return CTX_PASS;
	if (!ip_take(&c, eth_is_ip4(eth), &in))
		return ws_refuse(skb, REASON(FUNCTION_TRUNCATED), rc);
	if (!in.is_ip4 && is_mapped(in.hdr))
		return refuse_mapped(skb);
	a = ip_addrs(&in);
	m = guard(&a);
	if (!ip_is_its_version(&in) || ip_to_is_never_forwarded(&in) ||
	    is_local(skb, &m, in.is_ip4)) {
		if (p)
			proxy_count(p, tx_ignored);
		return CTX_PASS;
	}
	if (!p)
		return ws_refuse(skb, REASON(PROXY_MISSING_BUG), 0);
	/* The function has put frames together: each has a header of its own. */
	if (skb->gso_size && p->cut && !port->cutter) {
		/* One index for all of them, and that of one. */
		if (p->recognise == WS_RECOGNISE_METADATA) {
			proxy_count(p, tx_not_cached);
			return ws_refuse(skb, REASON(NOT_CACHED), 0);
		}
		proxy_count(p, tx_cut);
		return segment_back(skb, eth, id);
	}
	return from_function(skb, p, id);
}

char _license[] SEC("license") = "Dual BSD/GPL";
