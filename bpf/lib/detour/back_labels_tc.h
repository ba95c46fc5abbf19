/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* End.AD with labels, from a function: the program that has found the kept header hands
 * the packet over (lib/encap/labels_tc.h), and here it gets its labels back. TC only.
 */
#pragma once

#include "lib/detour/cache.h"
#include "lib/detour/detour.h"
#include "lib/detour/out_tc.h"
#include "lib/detour/slots.h"
#include "lib/encap/labels_tc.h"
#include "lib/hook.h"
#include "lib/reason.h"

/* Frees what cb[1] names: an entry of ws_cache, or a slot. */
static __always_inline void labels_kept_free(const struct __sk_buff *skb,
					     struct ws_cached *c)
{
	if (skb->cb[0] == LABELS_BACK)
		cache_give(skb->cb[1], TAG_FREE);
	else
		slot_give(c, SLOT_FREE);
}

/* A function of its own, to bound the stack. back is zero and never
 * NULL. Returns the key in ws_proxies of the packet's function.
 */
__noinline __u32 ws_labels_restore(struct __sk_buff *skb, struct back *back)
{
	bool by_content = skb->cb[0] == LABELS_BACK;
	__u32 at = skb->cb[1], id;
	struct ws_cached *c = by_content ? cache_entry(at) : slot_find(at);
	const struct ws_proxy *p;
	__u64 now, expires;
	long err = 0;

	if (!c || !back)
		return 0;
	now = bpf_ktime_get_coarse_ns();
	expires = by_content ? c->expires : labels_expires(skb);
	id = c->proxy;
	p = proxy_find(id);
	back->found = true;
	back->bad = skb->gso_size ? REASON(LABEL_TRAIN) :
				    restore(skb, c, &back->exit, &err);
	back->err = err;
	labels_kept_free(skb, c);
	if (!back->bad && p)
		proxy_waited(p, now, expires);
	return id;
}

/* Returns a reason; back is zero. */
static __always_inline reason_t labels_restore(struct __sk_buff *skb,
					       struct back *back, __u32 *proxy)
{
	*proxy = ws_labels_restore(skb, back);
	return back->found ? back->bad : REASON(BOUNDS_BUG);
}
