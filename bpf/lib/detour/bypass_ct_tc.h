/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Reads the kernel's connection tracking for a flow that may bypass its function. Programs
 * with it do not load on kernels that do not offer connection tracking to programs.
 */
#pragma once

#include "lib/detour/bypass.h"
#include "lib/detour/detour.h"
#include "lib/hook.h"
#include "lib/node/maps.h"
#include "lib/sr/endpoint_tc.h"

/* The members of the kernel's structs that are read here; the loader relocates them (CO-RE). */
#define KERNELS __attribute__((preserve_access_index))

struct nf_ct_ext {
	__u8 offset[1];
} KERNELS;

struct ip_ct_tcp {
	__u8 state;
} KERNELS;

union nf_conntrack_proto {
	struct ip_ct_tcp tcp;
} KERNELS;

struct nf_conn {
	unsigned long status;
	__u32 mark;
	struct nf_ct_ext *ext;
	union nf_conntrack_proto proto;
} KERNELS;

/* enum ip_conntrack_status, of linux/netfilter/nf_conntrack_common.h */
#define IPS_SEEN_REPLY (1 << 1)
#define IPS_CONFIRMED (1 << 3)
#define IPS_SRC_NAT (1 << 4)
#define IPS_DST_NAT (1 << 5)
#define IPS_SEQ_ADJUST (1 << 6)
#define IPS_DYING (1 << 9)
#define IPS_TEMPLATE (1 << 11)
#define IPS_HELPER (1 << 13)

#define DONE_HAS (IPS_SEEN_REPLY | IPS_CONFIRMED)
/* With one of these bits netfilter would change, follow or delete the flow. */
#define DONE_LACKS                                                             \
	(IPS_SRC_NAT | IPS_DST_NAT | IPS_SEQ_ADJUST | IPS_DYING |              \
	 IPS_TEMPLATE | IPS_HELPER)

/* NF_CT_EXT_HELPER: an entry has a helper if this offset is not 0. */
#define EXT_HELPER 0
#define TCP_STATE_ESTABLISHED 3 /* TCP_CONNTRACK_ESTABLISHED */

/* struct bpf_ct_opts in its shortest version, which every kernel accepts by its length. */
struct bpf_ct_opts {
	__s32 netns_id;
	__s32 error;
	__u8 l4proto;
	__u8 dir;
	__u8 reserved[2];
};

extern struct nf_conn *bpf_skb_ct_lookup(struct __sk_buff *skb,
					 struct bpf_sock_tuple *tuple,
					 __u32 tuple_len,
					 struct bpf_ct_opts *opts,
					 __u32 opts_len) __ksym;
extern void bpf_ct_release(struct nf_conn *ct) __ksym;

static __always_inline bool ct_is_done(const struct nf_conn *ct,
				       const struct bypass_flow *f)
{
	if (ct->mark != f->mark || (ct->status & DONE_HAS) != DONE_HAS ||
	    ct->status & DONE_LACKS)
		return false;
	if (ct->ext && ct->ext->offset[EXT_HELPER])
		return false;
	return f->protocol != NEXTHDR_TCP ||
	       ct->proto.tcp.state == TCP_STATE_ESTABLISHED;
}

/* A function of its own, to bound the stack. */
static __noinline bool flow_is_done(struct __sk_buff *skb,
				    const struct bypass_flow *f, __s32 netns)
{
	struct bpf_ct_opts opts = { .netns_id = netns, .l4proto = f->protocol };
	struct bpf_sock_tuple t = {};
	struct nf_conn *ct;
	bool done;

	if (ip6_is_mapped(f->addr)) {
		t.ipv4.saddr = (__be32)(f->addr[1] >> 32);
		t.ipv4.daddr = (__be32)(f->addr[3] >> 32);
		t.ipv4.sport = (__be16)f->ports;
		t.ipv4.dport = (__be16)(f->ports >> 16);
		ct = bpf_skb_ct_lookup(skb, &t, sizeof(t.ipv4), &opts,
				       sizeof(opts));
	} else {
		__builtin_memcpy(t.ipv6.saddr, f->addr, sizeof(t.ipv6.saddr));
		__builtin_memcpy(t.ipv6.daddr, f->addr + 2,
				 sizeof(t.ipv6.daddr));
		t.ipv6.sport = (__be16)f->ports;
		t.ipv6.dport = (__be16)(f->ports >> 16);
		ct = bpf_skb_ct_lookup(skb, &t, sizeof(t.ipv6), &opts,
				       sizeof(opts));
	}
	if (!ct)
		return false;
	done = ct_is_done(ct, f);
	bpf_ct_release(ct);
	return done;
}

/* Notes the answer in the flow's entry. Without an entry at that index, does nothing. */
static __always_inline void bypass_look_up(struct __sk_buff *skb, __u32 at)
{
	struct bypass_flow *f = bpf_map_lookup_elem(&ws_bypass_flows, &at);
	const struct ws_proxy *p = f ? proxy_find(f->proxy) : NULL;
	__u64 now = bpf_ktime_get_coarse_ns();
	bool done;

	if (!p)
		return;
	done = flow_is_done(skb, f, p->netns);
	f->done = done;
	f->until = now + BYPASS_KNOWN_NS;
}

/* A packet that a program hands over: cb[0] is endpoint_tc's first, cb[1] the index of its flow's entry. */
static __always_inline int bypass_program(struct __sk_buff *skb)
{
	bool first = skb->cb[0];

	bypass_look_up(skb, skb->cb[1]);
	return endpoint_tc(skb, first);
}
