/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* A headend is told that a packet of its own was too long. TC only: nobody but a
 * node inside the domain says so.
 */
#pragma once

#include "lib/encap/ext.h"
#include "lib/encap/srh.h"
#include "lib/hook.h"
#include "lib/node/boundary.h"
#include "lib/node/maps.h"
#include "lib/proof/rnd.h"
#include "lib/wire/icmp.h"
#include "lib/wire/net.h"

/* RFC 8201 4: a larger size is tried again after ten minutes. */
#define PATH_MTU_LIFE_NS (600 * 1000000000ULL)

/* A packet that is told of was sent this many numbers ago at most: some seconds. */
#define PATH_MTU_WINDOW (1ULL << 24)

/* An ICMPv6 error as it begins, about a packet of a headend. */
struct quoted_packet {
	struct icmp6_hdr icmp;
	struct ip6_hdr ip6;
	struct srh srh;
};
_Static_assert(sizeof(struct quoted_packet) == 56, "no gaps");

#define QUOTED_SRH (sizeof(struct icmp6_hdr) + sizeof(struct ip6_hdr))

#define QUOTED_OFF (sizeof(struct eth_hdr) + sizeof(struct ip6_hdr))

/* Has this headend given out the number a moment ago? Who has not seen a packet
 * does not know one. The masks of opot hide it.
 */
static __always_inline bool rnd_is_recent(const struct ws_headend *h, __u64 rnd)
{
	__u64 counter = rnd & WS_RND_COUNTER_MAX;
	__u32 lane = rnd >> WS_RND_LANE_SHIFT;
	const struct ws_number *n;

	if (h->scheme == WS_SCHEME_OPOT)
		return true;
	if (lane < h->lane || lane >= h->lane + h->lanes)
		return false;
	n = number_of(h, lane - h->lane);
	return n && counter <= n->last && counter + PATH_MTU_WINDOW > n->last;
}

/* The entry of the headend that made the packet which t and tlv are of; NULL: none
 * of this node did.
 */
static __always_inline const struct ws_headend *
path_mtu_headend(const struct quoted_packet *t, const struct proof_tlv *tlv)
{
	__be32 path = tlv->path;
	const struct ws_headend *h;
	const __u32 *index;

	index = bpf_map_lookup_elem(&ws_paths, &path);
	if (!index)
		return NULL;
	h = bpf_map_lookup_elem(&ws_headends, index);
	if (!h || h->path != path || h->epoch != tlv->epoch ||
	    h->scheme != tlv->scheme ||
	    h->outer_len != sizeof(t->ip6) + (t->srh.hdrlen + 1) * 8)
		return NULL;
	return rnd_is_recent(h, bpf_be64_to_cpu(tlv->rnd)) ? h : NULL;
}

/* Remembers what a Packet Too Big for this node says of a path. Such a message
 * then goes up the stack as any other, which has no use for it.
 */
__noinline int ws_path_mtu_learn(struct __sk_buff *skb)
{
	const struct ws_headend *h;
	struct ws_path_mtu *m;
	struct proof_tlv tlv;
	__u32 mtu, n, index;
	struct quoted_packet t;
	__u64 now;
	int ext;

	if (bpf_skb_load_bytes(skb, QUOTED_OFF, &t, sizeof(t)) ||
	    t.icmp.type != ICMP6_TOO_BIG || !ip6_is_ip6(&t.ip6) ||
	    t.ip6.src[0] != cfg.address[0] || t.ip6.src[1] != cfg.address[1] ||
	    !in_block(t.ip6.dst[0]))
		return 0;
	/* Somebody on the way may have put options before the SRH. */
	ext = ws_ext_skip(skb, QUOTED_OFF + sizeof(t.icmp), t.ip6.nexthdr);
	if (ext < 0 ||
	    (ext && bpf_skb_load_bytes(skb, QUOTED_OFF + QUOTED_SRH + ext,
				       &t.srh, sizeof(t.srh))) ||
	    t.srh.type != ROUTING_TYPE_SRH)
		return 0;
	n = t.srh.last_entry + 1;
	if (bpf_skb_load_bytes(skb, QUOTED_OFF + sizeof(t) + ext + 16 * n, &tlv,
			       sizeof(tlv)) ||
	    !tlv_at_once(&t.srh, n, &tlv))
		return 0;
	h = path_mtu_headend(&t, &tlv);
	if (!h)
		return 0;
	index = h->stats;
	m = bpf_map_lookup_elem(&ws_path_mtus, &index);
	if (!m)
		return 0;
	mtu = bpf_ntohl(t.icmp.data);
	/* RFC 8201 4: less than every link takes is not believed. */
	if (mtu < IP6_MIN_MTU)
		mtu = IP6_MIN_MTU;
	mtu -= h->outer_len + ext;
	now = bpf_ktime_get_coarse_ns();
	/* Nor more than was told before. */
	if (m->path == h->path && m->expires > now && m->mtu < mtu)
		return 0;
	m->path = h->path;
	m->mtu = mtu;
	m->expires = now + PATH_MTU_LIFE_NS;
	return 0;
}
